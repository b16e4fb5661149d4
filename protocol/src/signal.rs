//! Signals by name.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A signal that can be sent to a process: one of the 31 that are not queued. Serialized by its word, or as `SIGxxx`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(i32);

impl Signal {
    /// SIGINT.
    pub const INTERRUPT: Self = Self(2);
    /// SIGKILL.
    pub const KILL: Self = Self(9);
    /// SIGTERM.
    pub const TERMINATE: Self = Self(15);
    /// SIGCONT.
    pub const CONTINUE: Self = Self(18);
    /// SIGSTOP.
    pub const STOP: Self = Self(19);

    /// Finds one by its word or as `SIGxxx`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let by_word = WORDS.iter().find(|(word, _)| *word == name).map(|(_, signal)| *signal);
        by_word.or_else(|| (1..).zip(SIGNALS).find(|(_, signal)| *signal == name).map(|(number, _)| Self(number)))
    }

    /// Its number on this machine.
    #[must_use]
    pub fn number(self) -> i32 {
        self.0
    }

    /// Every name that is understood: the words first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        WORDS.iter().map(|(word, _)| *word).chain(SIGNALS)
    }

    fn name(self) -> &'static str {
        let word = WORDS.iter().find(|(_, signal)| *signal == self).map(|(word, _)| *word);
        word.or_else(|| SIGNALS.get(usize::try_from(self.0 - 1).ok()?).copied()).unwrap_or_default()
    }
}

/// The signals that clients have a word for. The word `kill` is refused on this wire, where `process/terminate` does that; its
/// name `SIGKILL` is not.
const WORDS: [(&str, Signal); 9] = [
    ("interrupt", Signal::INTERRUPT),
    ("terminate", Signal::TERMINATE),
    ("hangup", Signal(1)),
    ("quit", Signal(3)),
    ("user1", Signal(10)),
    ("user2", Signal(12)),
    ("stop", Signal::STOP),
    ("continue", Signal::CONTINUE),
    ("winch", Signal(28)),
];

/// In the order of their numbers, from 1, which are the same on x86_64 and aarch64.
const SIGNALS: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

impl Serialize for Signal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Signal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::named(&name).ok_or_else(|| {
            let known: Vec<String> = Self::names().map(|name| format!("`{name}`")).collect();
            D::Error::custom(format!("unknown variant `{name}`, expected one of {}", known.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_names_mean_the_same_numbers() {
        for (word, name, number) in [
            ("interrupt", "SIGINT", 2),
            ("terminate", "SIGTERM", 15),
            ("hangup", "SIGHUP", 1),
            ("quit", "SIGQUIT", 3),
            ("user1", "SIGUSR1", 10),
            ("user2", "SIGUSR2", 12),
            ("stop", "SIGSTOP", 19),
            ("continue", "SIGCONT", 18),
            ("winch", "SIGWINCH", 28),
        ] {
            assert_eq!((Signal::named(word), Signal::named(name)), (Some(Signal(number)), Some(Signal(number))), "{word}");
            assert_eq!(serde_json::to_value(Signal(number)).unwrap(), word);
        }
        assert_eq!(Signal::named("SIGSYS"), Some(Signal(31)));
        assert_eq!(serde_json::to_value(Signal(31)).unwrap(), "SIGSYS");
        assert_eq!(Signal::names().count(), 40);
    }

    #[test]
    fn what_is_unknown_is_refused_with_the_list() {
        for wrong in ["", "INT", "kill", "sigint", "SIGRTMIN", "9"] {
            let error = serde_json::from_value::<Signal>(wrong.into()).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("unknown variant `{wrong}`, expected one of `interrupt`, `terminate`")),
                "{error}"
            );
            assert!(error.ends_with("`SIGSYS`"), "{error}");
        }
        assert!(serde_json::from_str::<Signal>("9").unwrap_err().to_string().contains("expected a string"));
    }
}
