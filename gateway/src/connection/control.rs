//! Which calls are control.

use portcullis_protocol::method::Call;

/// Calls that never wait for a slot, so that what runs can always be ended.
pub(super) fn is_control(call: &Call) -> bool {
    matches!(
        call,
        Call::Initialize(_)
            | Call::EnvironmentInfo(_)
            | Call::EnvironmentStatus
            | Call::ProcessAcknowledge(_)
            | Call::ProcessResize(_)
            | Call::ProcessSignal(_)
            | Call::ProcessTerminate(_)
            | Call::FsClose(_)
            | Call::NotBuilt { .. }
    )
}
