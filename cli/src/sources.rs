//! Where the options of `serve` come from: its flags, the environment, and a configuration file, in this order. What is not a
//! flag becomes one, so that there is one parser for all, which refuses a value by the name of its option and its source.

use clap::error::{ContextKind, ContextValue};
use clap::{ArgAction, CommandFactory as _, Error, FromArgMatches as _};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

use crate::Failure;
use crate::args::{Arguments, Auth, Serve};

/// The environment has the option `--max-sessions` as `PORTCULLIS_MAX_SESSIONS`.
const PREFIX: &str = "PORTCULLIS_";
/// Variables that are no options, since a token on a command line is everybody's.
const TOKENS: [&str; 2] = [crate::remote::EXECUTOR_TOKEN, crate::remote::HARNESS_TOKEN];
/// The option that names the file.
const FILE: &str = "config";
/// Bytes of a configuration file.
const LONGEST: u64 = 1 << 20;

/// Why there are no arguments.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The parser of the command line says so; or it was asked for help.
    Usage(Error),
    /// In words.
    Other(Failure),
}

/// The arguments of this start. `variable` looks into the environment.
pub(crate) fn arguments(given: Vec<OsString>, variable: impl Fn(&str) -> Option<OsString>) -> Result<Arguments, Refused> {
    if given.get(1).is_none_or(|command| command != "serve") {
        return parse(given).map_err(Refused::Usage);
    }
    let file = match flag_value(&given, FILE).or_else(|| variable(&variable_of(FILE))) {
        Some(path) => read(Path::new(&path)).map_err(Refused::Other)?,
        None => Table::new(),
    };
    let mut sources = HashMap::new();
    let mut all: Vec<OsString> = given[..2].to_vec();
    let command = Arguments::command();
    let options: Vec<_> = command.find_subcommand("serve").into_iter().flat_map(clap::Command::get_arguments).collect();
    if let Some(key) = file.keys().find(|key| **key == FILE || !options.iter().any(|option| option.get_long() == Some(key))) {
        let known: Vec<&str> = options.iter().filter_map(|option| option.get_long()).filter(|name| *name != FILE).collect();
        return Err(Refused::Other(
            format!("the configuration file has `{key}`, which is no option: known are {}", known.join(", ")).into(),
        ));
    }
    for option in options {
        let Some(name) = option.get_long() else { continue };
        if flag_value(&given, name).is_some() || name == FILE {
            continue;
        }
        let is_switch = matches!(option.get_action(), ArgAction::SetTrue);
        let is_list = matches!(option.get_action(), ArgAction::Append);
        let (values, source) = if let Some(value) = variable(&variable_of(name)) {
            let separator = if is_of_paths(option) { ':' } else { ',' };
            (of_variable(value, is_list.then_some(separator)), format!("the environment ({})", variable_of(name)))
        } else if let Some(value) = file.get(name) {
            let values = of_file(value, is_list).ok_or_else(|| Refused::Other(wrong_type(name, is_list)))?;
            (values, "the configuration file".to_owned())
        } else {
            continue;
        };
        if is_list && values.is_empty() {
            // Taken for a list that is not there, it would lift what the list was to narrow.
            return Err(Refused::Other(
                format!("{name} from {source} is an empty list: leave it out, or say what it is to hold").into(),
            ));
        }
        if is_switch {
            match values.first().and_then(|value| value.to_str()) {
                Some("true") => all.push(format!("--{name}").into()),
                Some("false") => {}
                _other => return Err(Refused::Other(format!("{name} from {source} is neither true nor false").into())),
            }
        } else {
            for value in values {
                let mut flag = OsString::from(format!("--{name}="));
                flag.push(value);
                all.push(flag);
            }
        }
        sources.insert(name.to_owned(), source);
    }
    all.extend_from_slice(&given[2..]);
    parse(all).map_err(|error| named(error, &sources))
}

/// The files that say what the next server does, by the options of this one.
pub(crate) fn files(options: &Serve) -> Vec<PathBuf> {
    let policy = options.policy.as_ref().filter(|name| name.ends_with(".toml")).map(PathBuf::from);
    let config = options.config.clone().or_else(|| std::env::var_os(variable_of(FILE)).map(PathBuf::from));
    let Auth { tls_cert, tls_client_ca, .. } = &options.auth;
    [policy, config, tls_cert.clone(), tls_client_ca.clone()].into_iter().flatten().collect()
}

fn parse(arguments: Vec<OsString>) -> Result<Arguments, Error> {
    let matches = Arguments::command().try_get_matches_from(arguments)?;
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut Arguments::command()))
}

/// Says where the value came from, if it is not on the command line.
fn named(error: Error, sources: &HashMap<String, String>) -> Refused {
    let option = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(text)) => text.trim_start_matches('-').split([' ', '=']).next(),
        _other => None,
    };
    match option.and_then(|name| Some((name, sources.get(name)?))) {
        Some((name, source)) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            Refused::Other(format!("{} (`{name}` comes from {source})", first.trim_start_matches("error: ")).into())
        }
        None => Refused::Usage(error),
    }
}

/// The value of a flag of the command line, empty if it is a switch; none if it is not there.
fn flag_value(given: &[OsString], name: &str) -> Option<OsString> {
    let flag = format!("--{name}");
    let at = given.iter().position(|argument| {
        argument.to_str().is_some_and(|text| text == flag || text.strip_prefix(&flag).is_some_and(|rest| rest.starts_with('=')))
    })?;
    let of_flag = given[at].to_str().and_then(|text| text.split_once('=')).map(|(_, value)| value.into());
    Some(of_flag.or_else(|| given.get(at + 1).cloned()).unwrap_or_default())
}

fn variable_of(name: &str) -> String {
    format!("{PREFIX}{}", name.to_uppercase().replace('-', "_"))
}

/// A variable holds one value, or several with something between them where there may be several.
fn of_variable(value: OsString, separator: Option<char>) -> Vec<OsString> {
    match (value.to_str(), separator) {
        (Some(text), Some(separator)) => text.split(separator).filter(|part| !part.is_empty()).map(OsString::from).collect(),
        _one => vec![value],
    }
}

/// Lists of paths have colons between them, as PATH has: a path may hold a comma.
fn is_of_paths(option: &clap::Arg) -> bool {
    option.get_value_names().is_some_and(|names| names.iter().any(|name| name == "DIR"))
}

fn of_file(value: &Value, is_list: bool) -> Option<Vec<OsString>> {
    let one = |value: &Value| match value {
        Value::String(text) => Some(OsString::from(text)),
        Value::Integer(number) => Some(number.to_string().into()),
        // As it is written: 10.0 is not a whole number.
        Value::Float(number) => Some(format!("{number:?}").into()),
        Value::Boolean(switch) => Some(switch.to_string().into()),
        Value::Datetime(_) | Value::Array(_) | Value::Table(_) => None,
    };
    match value {
        Value::Array(values) if is_list => values.iter().map(one).collect(),
        other => Some(vec![one(other)?]),
    }
}

fn wrong_type(name: &str, is_list: bool) -> Failure {
    let wanted = if is_list { "a text, or a list of texts" } else { "a text, a number, true or false" };
    format!("{name} from the configuration file is not {wanted}").into()
}

fn read(path: &Path) -> Result<Table, Failure> {
    use std::io::Read as _;
    let failed = |error: &dyn std::fmt::Display| format!("read the configuration file {}: {error}", path.display());
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| failed(&error))?;
    // Half a file would be a server with half of its options.
    let length = file.take(LONGEST + 1).read_to_string(&mut text).map_err(|error| failed(&error))?;
    if u64::try_from(length).is_ok_and(|length| length > LONGEST) {
        return Err(failed(&format!("it has more than {LONGEST} bytes")).into());
    }
    Ok(text.parse().map_err(|error: toml::de::Error| failed(&error))?)
}

/// Variables that look like options and are none.
pub(crate) fn unknown_variables(names: impl Iterator<Item = OsString>) -> Vec<String> {
    let command = Arguments::command();
    let options = command.find_subcommand("serve").into_iter().flat_map(clap::Command::get_arguments);
    let known: Vec<String> = options.filter_map(|option| option.get_long()).map(variable_of).collect();
    let named = names.filter_map(|name| OsStr::to_str(&name).map(str::to_owned));
    named.filter(|name| name.starts_with(PREFIX) && !TOKENS.contains(&name.as_str()) && !known.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use portcullis::{Config, ExecServerRuntimePaths, LIMITS};
    use std::io::Write as _;

    fn from(flags: &[&str], variables: &[(&str, &str)], file: Option<&str>) -> Result<Box<Serve>, String> {
        let mut given: Vec<OsString> = ["portcullis", "serve"].map(OsString::from).to_vec();
        let mut kept = tempfile::NamedTempFile::new().unwrap();
        if let Some(text) = file {
            kept.write_all(text.as_bytes()).unwrap();
            given.extend(["--config".into(), kept.path().into()]);
        }
        given.extend(flags.iter().map(OsString::from));
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        match arguments(given, variable) {
            Ok(Arguments { command: Command::Serve(options) }) => Ok(options),
            Ok(_other) => panic!("another command"),
            Err(Refused::Usage(error)) => Err(error.to_string()),
            Err(Refused::Other(error)) => Err(error.to_string()),
        }
    }

    fn sessions(options: &Serve) -> u64 {
        let paths = ExecServerRuntimePaths { executable: "/x".into(), spool: "/x".into() };
        let mut config = Config::new(paths);
        options.limits.apply(&mut config).unwrap();
        LIMITS.iter().find(|limit| limit.name == "max-sessions").unwrap().value(&config)
    }

    #[test]
    fn a_flag_goes_before_the_environment_and_that_before_the_file() {
        let (flag, variable, file) = (["--max-sessions", "1"], [("PORTCULLIS_MAX_SESSIONS", "2")], Some("max-sessions = 3"));
        assert_eq!(sessions(&from(&flag, &variable, file).unwrap()), 1);
        assert_eq!(sessions(&from(&[], &variable, file).unwrap()), 2);
        assert_eq!(sessions(&from(&[], &[], file).unwrap()), 3);
        assert_eq!(sessions(&from(&[], &[], None).unwrap()), 8192);
    }

    #[test]
    fn every_kind_of_option_may_be_in_the_file_and_the_environment() {
        let file = "listen = \"ws://127.0.0.1:9\"\ninsecure-no-auth = true\nallow-host = [\"a\", \"b\"]";
        let options = from(&[], &[], Some(file)).unwrap();
        assert_eq!((options.listen.as_str(), options.auth.insecure_no_auth), ("ws://127.0.0.1:9", true));
        assert_eq!(options.allow_host, ["a", "b"]);
        let options = from(&["--allow-host", "c"], &[("PORTCULLIS_INSECURE_NO_AUTH", "false")], Some(file)).unwrap();
        assert_eq!((options.auth.insecure_no_auth, options.allow_host.as_slice()), (false, &["c".to_owned()][..]));
        let options = from(&[], &[("PORTCULLIS_ALLOW_HOST", "d,e")], None).unwrap();
        assert_eq!(options.allow_host, ["d", "e"]);
        let variables = [("PORTCULLIS_WORKSPACE", "/a,b:/c"), ("PORTCULLIS_POLICY", "read-only")];
        assert_eq!(from(&[], &variables, None).unwrap().workspace, ["/a,b", "/c"].map(PathBuf::from));
    }

    #[test]
    fn absurd_values_are_refused_by_their_names_and_sources() {
        for (value, expect) in [
            ("nan", "`NaN` is not a whole number"),
            ("-5", "`-5` is not a whole number"),
            ("1.5", "`1.5` is not a whole number"),
            ("0", "0 is not between 1 and 65536"),
            ("70000", "70000 is not between 1 and 65536"),
            ("\"many\"", "`many` is not a whole number"),
        ] {
            let error = from(&[], &[], Some(&format!("max-sessions = {value}"))).unwrap_err();
            assert!(error.contains(expect), "{error}");
            assert!(
                error.contains("--max-sessions") && error.ends_with("(`max-sessions` comes from the configuration file)"),
                "{error}"
            );
            let error = from(&[], &[("PORTCULLIS_MAX_SESSIONS", "-1")], None).unwrap_err();
            assert!(error.ends_with("(`max-sessions` comes from the environment (PORTCULLIS_MAX_SESSIONS))"), "{error}");
        }
        let error = from(&["--max-sessions", "-1"], &[], None).unwrap_err();
        assert!(error.contains("invalid value '-1' for '--max-sessions <N>'"), "{error}");
    }

    #[test]
    fn what_is_no_option_is_refused() {
        let refused = |file: &str| from(&[], &[], Some(file)).unwrap_err();
        assert!(
            refused("max-sesions = 1").starts_with("the configuration file has `max-sesions`, which is no option: known are ")
        );
        assert!(refused("config = \"x\"").starts_with("the configuration file has `config`"));
        assert!(refused("help = true").starts_with("the configuration file has `help`"));
        assert!(refused("max-sessions = [1, 2]").contains("max-sessions from the configuration file is not"));
        assert!(
            refused("insecure-no-auth = 1").contains("insecure-no-auth from the configuration file is neither true nor false")
        );
        assert!(refused("max-sessions = 10.0").contains("`10.0` is not a whole number"));
        assert!(refused("allow-egress = []").contains("allow-egress from the configuration file is an empty list"));
        for empty in ["", ",", ",,"] {
            let error = from(&[], &[("PORTCULLIS_ALLOW_EGRESS", empty)], Some("allow-egress = [\"a.example\"]")).unwrap_err();
            assert!(error.starts_with("allow-egress from the environment (PORTCULLIS_ALLOW_EGRESS) is an empty list"), "{error}");
        }
        assert!(refused("= 1").starts_with("read the configuration file "));
        let long = format!("max-sessions = 1\n{}\nmax-calls = 1", "#".repeat(1 << 20));
        assert!(refused(&long).ends_with("it has more than 1048576 bytes"));
        assert!(from(&["--config", "/nowhere"], &[], None).unwrap_err().starts_with("read the configuration file /nowhere: "));
        let names = ["PORTCULLIS_MAX_SESSIONS", "PORTCULLIS_MAX_SESION", "OTHER"].map(OsString::from);
        assert_eq!(unknown_variables(names.into_iter()), ["PORTCULLIS_MAX_SESION"]);
    }
}
