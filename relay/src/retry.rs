//! When an executor registers again. A request whose outcome is not known may have replaced a newer registration, so it is not
//! simply sent again.

use crate::registry::RegistryError;
use std::time::Duration;
use uuid::Uuid;

/// The first wait, which doubles four times, and the longest, before up to half as much is added, so that many do not come at once.
const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(5);
/// How long a registered executor waits that does not know what became of its last request: by now another one may be registered.
const UNKNOWN: Duration = Duration::from_secs(30);

/// What to do after a registration failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Ask again after so long.
    After(Duration),
    /// Asking again changes nothing, or may do harm.
    Never,
}

/// The waits of one run of a program. Runs differ, so that executors that lost one registry do not come back in step.
#[derive(Debug)]
pub struct Retries {
    run: Uuid,
    attempt: u32,
}

impl Retries {
    /// Of a new run.
    #[must_use]
    pub fn new() -> Self {
        Self { run: Uuid::new_v4(), attempt: 0 }
    }

    /// After a first registration: only where the registry says that another time it may say yes.
    pub fn first(&mut self, error: &RegistryError) -> Retry {
        if is_temporary(error) { Retry::After(self.next()) } else { Retry::Never }
    }

    /// After one that was to replace another.
    pub fn renewal(&mut self, error: &RegistryError) -> Retry {
        match error {
            error if error.is_authentication() => Retry::Never,
            // Nothing was sent.
            RegistryError::Unreachable(_) => Retry::After(self.next()),
            error if is_temporary(error) => Retry::After(self.next()),
            _unknown => Retry::After(UNKNOWN),
        }
    }

    /// It was registered.
    pub fn reset(&mut self) {
        self.attempt = 0;
    }

    fn next(&mut self) -> Duration {
        let wait = (FIRST * (1 << self.attempt.min(4))).min(LONGEST);
        let bytes = self.run.as_bytes();
        let jitter = usize::try_from(self.attempt).ok().and_then(|attempt| bytes.get(attempt % bytes.len()));
        self.attempt = self.attempt.saturating_add(1);
        wait + wait / 2 * jitter.map_or(0, |byte| u32::from(*byte)) / 255
    }
}

impl Default for Retries {
    fn default() -> Self {
        Self::new()
    }
}

fn is_temporary(error: &RegistryError) -> bool {
    let RegistryError::Refused { status, code: Some(code), .. } = error else { return false };
    matches!((status, code.as_str()), (503, "registration_conflict") | (502, "authentication_service_unavailable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, code: Option<&str>) -> RegistryError {
        RegistryError::Refused { status, code: code.map(str::to_owned), message: String::new() }
    }

    #[test]
    fn a_first_registration_is_tried_again_only_where_the_registry_says_so() {
        let conflict = || refused(503, Some("registration_conflict"));
        for (error, first, renewal) in [
            (conflict(), true, true),
            (refused(502, Some("authentication_service_unavailable")), true, true),
            (refused(502, Some("registration_conflict")), false, true),
            (refused(503, Some("authentication_service_unavailable")), false, true),
            (refused(503, None), false, true),
            (refused(500, None), false, true),
            (refused(409, Some("registration_conflict")), false, true),
            (refused(401, None), false, false),
            (refused(403, Some("registration_conflict")), false, false),
            (RegistryError::Unusable(String::new()), false, false),
            (RegistryError::Unreachable(String::new()), false, true),
            (RegistryError::Unanswered(String::new()), false, true),
            (RegistryError::Answer(String::new()), false, true),
        ] {
            assert_eq!(Retries::new().first(&error) != Retry::Never, first, "{error:?}");
            assert_eq!(Retries::new().renewal(&error) != Retry::Never, renewal, "{error:?}");
        }
        // What may have been done already is not asked for again at once, however often.
        let mut retries = Retries::new();
        for error in [RegistryError::Unanswered(String::new()), refused(500, None), RegistryError::Answer(String::new())] {
            assert_eq!(retries.renewal(&error), Retry::After(UNKNOWN));
        }
    }

    #[test]
    fn waits_grow_to_a_bound_and_differ_from_run_to_run() {
        let conflict = refused(503, Some("registration_conflict"));
        let waits = |byte: u8| {
            let mut retries = Retries { run: Uuid::from_bytes([byte; 16]), attempt: 0 };
            let mut waits = (0..40).map(|_| match retries.first(&conflict) {
                Retry::After(wait) => u64::try_from(wait.as_millis()).unwrap(),
                Retry::Never => panic!("it is tried for ever"),
            });
            let seen: Vec<_> = waits.by_ref().take(6).collect();
            assert!(waits.all(|wait| Some(&wait) == seen.last()), "the bound");
            seen
        };
        assert_eq!(waits(0), [500, 1000, 2000, 4000, 5000, 5000]);
        assert_eq!(waits(255), [750, 1500, 3000, 6000, 7500, 7500]);
        let mut retries = Retries { run: Uuid::from_bytes([0; 16]), attempt: 9 };
        retries.reset();
        assert_eq!(retries.first(&conflict), Retry::After(FIRST));
    }
}
