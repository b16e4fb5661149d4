//! Which environments there are, as a file and variables say: text in, a list out. Nothing is read or dialled here.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;
use thiserror::Error;
use toml::Spanned;

/// Longest name of an environment in a file.
const LONGEST: usize = 64;
/// How long the connection, and the answer to `initialize`, may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The environment that variables give.
const OF_VARIABLES: &str = "remote";
const URL: &str = "CODEX_EXEC_SERVER_URL";
const NOISE: [&str; 3] =
    ["CODEX_EXEC_SERVER_NOISE_REGISTRY_URL", "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID", "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN"];
const ACCOUNT: &str = "CODEX_EXEC_SERVER_NOISE_CHATGPT_ACCOUNT_ID";

/// What a file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environments {
    /// In the order of the file.
    pub list: Vec<Environment>,
    /// The one that is used unless another one is named.
    pub default: Option<String>,
    /// Whether this very machine is one too, by the name `local`; true.
    pub include_local: bool,
}

/// One environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Its name.
    pub id: String,
    /// How it is reached.
    pub way: EnvironmentWay,
    /// How long it may take to accept one connection; 10 s.
    pub connect_timeout: Duration,
    /// How long it may take to answer `initialize`; 10 s.
    pub initialize_timeout: Duration,
}

/// How an environment is reached.
#[derive(Clone, PartialEq, Eq)]
pub enum EnvironmentWay {
    /// A server at `ws://` or `wss://`.
    Url(String),
    /// A program that serves on its standard input and output.
    Program {
        /// Which.
        program: String,
        /// Its arguments.
        args: Vec<String>,
        /// Variables beside those that it inherits.
        env: BTreeMap<String, String>,
        /// Where it is started; none: here.
        cwd: Option<String>,
    },
    /// An executor behind a rendezvous.
    Remote {
        /// The registry.
        base_url: String,
        /// The environment's name there.
        environment_id: String,
        /// What the registry asks of harnesses. A secret.
        token: String,
        /// The account that the token is for.
        account: Option<String>,
    },
}

/// Why there is no list. No text repeats a value.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EnvironmentsError {
    /// The file.
    #[error("line {line}: {reason}")]
    File {
        /// Beginning with 1.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
    /// The variables.
    #[error("{0}")]
    Variables(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    default: Option<Spanned<String>>,
    #[serde(default = "yes")]
    include_local: bool,
    #[serde(default)]
    environments: Vec<Spanned<Entry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    id: String,
    url: Option<String>,
    program: Option<String>,
    args: Option<Vec<String>>,
    env: Option<BTreeMap<String, String>>,
    cwd: Option<String>,
    connect_timeout_sec: Option<u64>,
    initialize_timeout_sec: Option<u64>,
}

fn yes() -> bool {
    true
}

impl Environments {
    /// From the text of an `environments.toml`.
    ///
    /// # Errors
    /// What is wrong, and in which line.
    pub fn parse(text: &str) -> Result<Self, EnvironmentsError> {
        let line = |at: usize| text.get(..at).unwrap_or(text).matches('\n').count() + 1;
        let wrong = |at: usize, reason: String| EnvironmentsError::File { line: line(at), reason };
        let file: File =
            toml::from_str(text).map_err(|error| wrong(error.span().map_or(0, |span| span.start), error.message().to_owned()))?;
        let mut list: Vec<Environment> = Vec::new();
        for entry in file.environments {
            let at = entry.span().start;
            let environment = entry.into_inner().check().map_err(|reason| wrong(at, reason))?;
            if list.iter().any(|there| there.id == environment.id) {
                return Err(wrong(at, format!("environment `{}`: there is one of this name above", environment.id)));
            }
            list.push(environment);
        }
        if let Some(default) = &file.default {
            let name = default.get_ref();
            let is_known = list.iter().any(|there| there.id == *name) || (name == "local" && file.include_local);
            if !is_known {
                return Err(wrong(default.span().start, format!("default `{name}`: there is no such environment")));
            }
        }
        Ok(Self { list, default: file.default.map(Spanned::into_inner), include_local: file.include_local })
    }
}

impl Environment {
    /// The environment `remote`, if the variables give one: `CODEX_EXEC_SERVER_NOISE_REGISTRY_URL`, `…_NOISE_ENVIRONMENT_ID` and
    /// `…_NOISE_AUTH_TOKEN`, or `CODEX_EXEC_SERVER_URL`, in which `none` is none. An empty one is as none.
    ///
    /// # Errors
    /// Some of those that belong together are missing, or both ways are given.
    pub fn of_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, EnvironmentsError> {
        let get = |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let wrong = |text: String| Err(EnvironmentsError::Variables(text));
        let url = get(URL);
        let way = match (NOISE.map(get), url) {
            ([None, None, None], None) => return Ok(None),
            ([None, None, None], Some(url)) if url == "none" => return Ok(None),
            ([None, None, None], Some(url)) if is_websocket(&url) => EnvironmentWay::Url(url),
            ([None, None, None], Some(_)) => return wrong(format!("{URL} must begin with ws:// or wss://, or be none")),
            ([Some(_), Some(_), Some(_)], Some(url)) if url != "none" => {
                return wrong(format!("{URL} and {} are both set: unset one", NOISE[0]));
            }
            ([Some(base_url), Some(environment_id), Some(token)], _) => {
                EnvironmentWay::Remote { base_url, environment_id, token, account: get(ACCOUNT) }
            }
            (some, _) => {
                let missing: Vec<&str> =
                    NOISE.iter().zip(some).filter(|(_, value)| value.is_none()).map(|(name, _)| *name).collect();
                return wrong(format!("{} must be set too, or none of {}", missing.join(" and "), NOISE.join(", ")));
            }
        };
        let id = OF_VARIABLES.to_owned();
        Ok(Some(Self { id, way, connect_timeout: TIMEOUT, initialize_timeout: TIMEOUT }))
    }
}

impl Entry {
    fn check(self) -> Result<Environment, String> {
        let id = self.id;
        let is_known = |letter: u8| letter.is_ascii_alphanumeric() || matches!(letter, b'-' | b'_');
        if !(1..=LONGEST).contains(&id.len()) || !id.bytes().all(is_known) {
            return Err(format!("environment {id:?}: a name has 1 to {LONGEST} letters, digits, `-` and `_`"));
        }
        if matches!(id.as_str(), "local" | "none") {
            return Err(format!("environment `{id}`: this name means something else"));
        }
        let wrong = |reason: &str| Err(format!("environment `{id}`: {reason}"));
        let is_program = self.args.is_some() || self.env.is_some() || self.cwd.is_some();
        let way = match (self.url, self.program) {
            (Some(_), None) if is_program => return wrong("`args`, `env` and `cwd` are for `program`"),
            (Some(url), None) if is_websocket(&url) => EnvironmentWay::Url(url),
            (Some(_), None) => return wrong("`url` must begin with ws:// or wss://"),
            (None, Some(program)) if program.is_empty() => return wrong("`program` is empty"),
            (None, Some(program)) => EnvironmentWay::Program {
                program,
                args: self.args.unwrap_or_default(),
                env: self.env.unwrap_or_default(),
                cwd: self.cwd,
            },
            _both_or_none => return wrong("exactly one of `url` and `program` is needed"),
        };
        let seconds = |given: Option<u64>| match given {
            Some(0) => Err(format!("environment `{id}`: a time of 0 s is none")),
            given => Ok(given.map_or(TIMEOUT, Duration::from_secs)),
        };
        let (connect_timeout, initialize_timeout) = (seconds(self.connect_timeout_sec)?, seconds(self.initialize_timeout_sec)?);
        Ok(Environment { id, way, connect_timeout, initialize_timeout })
    }
}

fn is_websocket(url: &str) -> bool {
    url.starts_with("ws://") || url.starts_with("wss://")
}

/// Without what may be secret: a URL may carry a token, and so may variables and arguments.
impl fmt::Debug for EnvironmentWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(_) => f.write_str("Url(..)"),
            Self::Program { program, .. } => write!(f, "Program({program}, ..)"),
            Self::Remote { base_url, environment_id, .. } => write!(f, "Remote({base_url}, {environment_id}, ..)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_a_list_with_its_defaults() {
        let text = r#"
            default = "near"
            include_local = false
            [[environments]]
            id = "near"
            url = "ws://127.0.0.1:7"
            connect_timeout_sec = 3
            [[environments]]
            id = "child"
            program = "portcullis"
            args = ["serve", "--listen", "stdio"]
            env = { A = "b" }
            cwd = "/tmp"
        "#;
        let environments = Environments::parse(text).unwrap();
        assert_eq!((environments.default.as_deref(), environments.include_local), (Some("near"), false));
        let [near, child] = &environments.list[..] else { panic!("{environments:?}") };
        assert_eq!((&near.way, near.connect_timeout.as_secs()), (&EnvironmentWay::Url("ws://127.0.0.1:7".to_owned()), 3));
        assert_eq!(near.initialize_timeout, TIMEOUT);
        let EnvironmentWay::Program { program, args, env, cwd } = &child.way else { panic!("{child:?}") };
        assert_eq!((program.as_str(), args.len(), env["A"].as_str(), cwd.as_deref()), ("portcullis", 3, "b", Some("/tmp")));
        let empty = Environments::parse("").unwrap();
        assert_eq!((empty.list.len(), empty.default, empty.include_local), (0, None, true));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let entry = |lines: &str| format!("\n[[environments]]\n{lines}\n");
        for (text, line, expect) in [
            ("x = 1".to_owned(), 1, "unknown field"),
            ("\ndefault = \"a\"".to_owned(), 2, "default `a`: there is no such environment"),
            ("include_local = false\ndefault = \"local\"".to_owned(), 2, "there is no such environment"),
            (entry("id = \"a\""), 2, "exactly one of"),
            (entry("id = \"a\"\nurl = \"ws://x\"\nprogram = \"y\""), 2, "exactly one of"),
            (entry("id = \"a\"\nurl = \"http://x\""), 2, "ws:// or wss://"),
            (entry("id = \"a\"\nurl = \"ws://x\"\nargs = []"), 2, "are for `program`"),
            (entry("id = \"a\"\nprogram = \"\""), 2, "is empty"),
            (entry("id = \"local\"\nprogram = \"y\""), 2, "something else"),
            (entry("id = \"none\"\nprogram = \"y\""), 2, "something else"),
            (entry("id = \"a b\"\nprogram = \"y\""), 2, "a name has"),
            (entry("id = \"\"\nprogram = \"y\""), 2, "a name has"),
            (entry(&format!("id = \"{}\"\nprogram = \"y\"", "a".repeat(65))), 2, "a name has"),
            (entry("id = \"a\"\nprogram = \"y\"\nconnect_timeout_sec = 0"), 2, "none"),
            (entry("id = \"a\"\nprogram = \"y\"\nconnect_timeout_sec = -1"), 5, ""),
            (entry("id = \"a\"\nprogram = \"y\"\n[[environments]]\nid = \"a\"\nprogram = \"y\""), 5, "one of this name above"),
        ] {
            let error = Environments::parse(&text).unwrap_err();
            let EnvironmentsError::File { line: at, reason } = &error else { panic!("{error}") };
            assert!(*at == line && reason.contains(expect), "{text}: {error}");
        }
    }

    #[test]
    fn variables_belong_together() {
        let [url, id, token] = NOISE;
        let of = |given: &[(&str, &str)]| {
            Environment::of_variables(|name| given.iter().find(|(there, _)| *there == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&[(URL, "none")]), Ok(None));
        assert_eq!(of(&[(URL, ""), (url, " ")]), Ok(None));
        let plain = of(&[(URL, "ws://x")]).unwrap().unwrap();
        assert_eq!((plain.id.as_str(), plain.way), ("remote", EnvironmentWay::Url("ws://x".to_owned())));
        let all = [(url, "https://r"), (id, "box"), (token, "hush"), (ACCOUNT, "me")];
        let remote = of(&all).unwrap().unwrap();
        assert!(!format!("{remote:?}").contains("hush"), "{remote:?}");
        let EnvironmentWay::Remote { environment_id, token: held, account, .. } = remote.way else { panic!() };
        assert_eq!((environment_id.as_str(), held.as_str(), account.as_deref()), ("box", "hush", Some("me")));
        for given in [&all[..1], &all[..2], &all[1..3], &all[2..], &[all[0], all[1], all[2], (URL, "ws://x")], &[(URL, "x")]] {
            let error = of(given).unwrap_err().to_string();
            assert!(error.contains("CODEX_EXEC_SERVER_") && !error.contains("hush"), "{error}");
        }
        assert!(of(&[all[0], all[1], all[2], (URL, "none")]).unwrap().is_some());
    }
}
