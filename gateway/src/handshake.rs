//! The handshake, sans-IO: `initialize` once, then `initialized`, then everything else.

use portcullis_protocol::method::Call;
use portcullis_protocol::rpc::{RpcError, code};

/// How far a connection has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Handshake {
    /// Nothing succeeded yet; a failed `initialize` leaves it here.
    #[default]
    New,
    /// `initialize` succeeded.
    Attached,
    /// `initialized` came.
    Ready,
}

impl Handshake {
    /// Whether a call may be carried out now.
    pub(crate) fn admit(self, call: &Call) -> Result<(), RpcError> {
        let Some(family) = call.family() else {
            return match self {
                Self::New => Ok(()),
                Self::Attached | Self::Ready => Err(refused("initialize may only be sent once per connection".to_owned())),
            };
        };
        match self {
            Self::Ready => Ok(()),
            Self::New => Err(refused(format!("client must call initialize before using {} methods", family.name()))),
            Self::Attached => Err(refused(format!("client must send initialized before using {} methods", family.name()))),
        }
    }

    /// Whether `initialized` came.
    pub(crate) fn is_done(self) -> bool {
        self == Self::Ready
    }

    /// `initialize` succeeded.
    pub(crate) fn attached(&mut self) {
        *self = Self::Attached;
    }

    /// `initialized` came; it may be repeated.
    pub(crate) fn initialized(&mut self) -> Result<(), RpcError> {
        match self {
            Self::New => Err(refused("initialized came before a successful initialize".to_owned())),
            Self::Attached | Self::Ready => {
                *self = Self::Ready;
                Ok(())
            }
        }
    }
}

fn refused(text: String) -> RpcError {
    RpcError::new(code::INVALID_REQUEST, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::init::InitializeParams;

    fn initialize() -> Call {
        Call::Initialize(InitializeParams::default())
    }

    #[test]
    fn only_the_order_of_the_wire_is_admitted() {
        let mut handshake = Handshake::default();
        let status = Call::EnvironmentStatus;
        let text = |result: Result<(), RpcError>| result.unwrap_err().message;
        assert_eq!(text(handshake.admit(&status)), "client must call initialize before using environment status methods");
        assert!(handshake.initialized().is_err());
        assert_eq!(handshake, Handshake::New);
        handshake.admit(&initialize()).unwrap();
        handshake.attached();
        assert_eq!(text(handshake.admit(&status)), "client must send initialized before using environment status methods");
        assert_eq!(text(handshake.admit(&initialize())), "initialize may only be sent once per connection");
        handshake.initialized().unwrap();
        handshake.initialized().unwrap();
        handshake.admit(&status).unwrap();
        assert!(handshake.admit(&initialize()).is_err());
    }
}
