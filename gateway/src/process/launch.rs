//! From the parameters of a start to what the spawner is asked for.

use super::env::environment;
use super::pty::Terminal;
use crate::fs_call::check_operation;
use crate::helper::spawner::{Launch, LaunchError, Stdio};
use portcullis_protocol::event::Stream;
use portcullis_protocol::helper::{Command, Enforced, Step, StepFailed};
use portcullis_protocol::path::{AbsolutePath, Bytes};
use portcullis_protocol::process::{Size, StartParams};
use portcullis_protocol::rpc::{RpcError, code};
use portcullis_sandbox::mounts::named_device;
use portcullis_sandbox::policy::{Files, Network, Policy};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::{PipeFlags, pipe_with};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Our ends of a child's descriptors. None of them blocks.
#[derive(Debug)]
pub(crate) struct Ends {
    /// Where output comes from: standard output and error, or the terminal.
    pub(crate) sources: Vec<(Stream, OwnedFd)>,
    /// Where input goes, if the child takes any.
    pub(crate) sink: Option<OwnedFd>,
}

/// Bytes of a process's id: it is kept for as long as the process is known.
const LONGEST_ID: usize = 4096;

/// The working directory of a start.
pub(crate) fn working_directory(params: &StartParams) -> Result<&AbsolutePath, RpcError> {
    params.cwd.local().map_err(|error| {
        let text = format!("cwd URI `{}` is not valid on this exec-server host: {error}", params.cwd);
        RpcError::new(code::INVALID_PARAMS, text)
    })
}

/// What is wrong with the parameters themselves, whatever the session and the machine say.
pub(crate) fn check(params: &StartParams, is_confined: bool) -> Result<(), RpcError> {
    let wrong = |text: &str| Err(RpcError::new(code::INVALID_PARAMS, format!("process/start: {text}")));
    if params.argv.is_empty() {
        return wrong("argv must not be empty");
    }
    if params.process_id.len() > LONGEST_ID {
        return wrong(&format!("processId of {} bytes: at most {LONGEST_ID} are allowed", params.process_id.len()));
    }
    working_directory(params)?;
    if params.size.is_some() && !params.tty {
        return wrong("size is for a process with a terminal: set tty");
    }
    check_operation("process/start", params.operation_id.as_deref())?;
    if params.network_proxy.is_some() {
        return wrong("networkProxy is not supported: managed networking is not built, so nothing was started");
    }
    if params.enforce_managed_network && is_confined {
        return wrong("enforceManagedNetwork is not supported: managed networking is not built, so nothing was started");
    }
    Ok(())
}

/// The launch of checked parameters, and our ends of its descriptors. `allow_unprotected` is the operator's word.
pub(crate) fn prepare(
    session: Arc<str>,
    params: &StartParams,
    policy: Option<&Policy>,
    allow_unprotected: bool,
    server_env: &[(OsString, OsString)],
    shell: &str,
) -> Result<(Launch, Ends), RpcError> {
    let command = command(params, server_env, shell)?;
    let attempt = if params.tty { "open a terminal" } else { "make the pipes of the process" };
    let (stdio, ends) = if params.tty { terminal(params.size) } else { pipes(params.pipe_stdin) }.map_err(|errno| {
        let error = StepFailed { step: Step::Machine, attempt: attempt.to_owned(), errno: errno.raw_os_error(), denial: None };
        failed(&LaunchError::Failed(error))
    })?;
    let own_view = policy.is_some_and(|policy| policy.files != Files::Unrestricted);
    let may_dial = policy.is_some_and(|policy| policy.network == Network::Enabled);
    let own_uid = policy.is_none_or(|policy| named_device(policy).is_none());
    let policy = policy.map(|policy| Bytes(policy.encode()));
    let limits = params.limits.unwrap_or_default();
    Ok((Launch { session, policy, own_view, allow_unprotected, limits, may_dial, own_uid, command, stdio }, ends))
}

/// The error of a start that failed.
pub(crate) fn failed(error: &LaunchError) -> RpcError {
    let LaunchError::Failed(step) = error else {
        return RpcError::new(code::INTERNAL, error.to_string());
    };
    // Without an error of the system, it is we who refuse to enforce less than was asked, in words.
    let number = match (step.step, step.errno) {
        (Step::Enforce, 0) => code::INVALID_PARAMS,
        (Step::Enforce | Step::Execute | Step::Machine | Step::Frame, _) => code::INTERNAL,
    };
    let text = if step.errno == 0 { step.attempt.clone() } else { step.to_string() };
    let error = RpcError::new(number, text);
    match &step.denial {
        Some(denial) => error.with_denials(std::slice::from_ref(denial)),
        None => error,
    }
}

/// What `process/start` answers as its sandbox.
pub(crate) fn sandbox_type(enforced: &Enforced) -> &'static str {
    if enforced.landlock_abi > 0 || !enforced.seccomp.is_empty() { "linuxSeccomp" } else { "none" }
}

fn command(params: &StartParams, server_env: &[(OsString, OsString)], shell: &str) -> Result<Command, RpcError> {
    let failed = |text: String| Err(RpcError::new(code::INTERNAL, text));
    if params.argv.first().is_some_and(String::is_empty) {
        return failed("missing program for pipe spawn".to_owned());
    }
    let texts = params.argv.iter().chain(&params.arg0);
    if let Some(nth) = texts.into_iter().position(|text| text.contains('\0')) {
        let which = if nth < params.argv.len() { format!("argv[{nth}]") } else { "arg0".to_owned() };
        return failed(format!("nul byte found in provided data: {which}"));
    }
    let env = environment(server_env, params.env_policy.as_ref(), &params.env, params.tty.then_some(shell))?;
    if let Some((name, _)) = env.iter().find(|(name, value)| name.0.contains(&0) || value.0.contains(&0)) {
        return failed(format!("data provided contains a nul byte: environment variable {:?}", String::from_utf8_lossy(&name.0)));
    }
    let bytes = |text: &String| Bytes(text.clone().into_bytes());
    Ok(Command {
        argv: params.argv.iter().map(bytes).collect(),
        arg0: params.arg0.as_ref().map(bytes),
        env,
        cwd: working_directory(params)?.clone(),
    })
}

fn pipes(with_stdin: bool) -> rustix::io::Result<(Stdio, Ends)> {
    // The child's end blocks, as programs expect.
    let pipe = || pipe_with(PipeFlags::CLOEXEC);
    let ((stdin, sink), (out, stdout), (err, stderr)) = (pipe()?, pipe()?, pipe()?);
    for source in [&out, &err] {
        fcntl_setfl(source, OFlags::NONBLOCK)?;
    }
    fcntl_setfl(&sink, OFlags::NONBLOCK)?;
    // A pipe that nobody writes to is at its end at once, which is what an absent input shall look like.
    let sink = with_stdin.then_some(sink);
    let sources = vec![(Stream::Stdout, out), (Stream::Stderr, err)];
    Ok((Stdio::Pipes { stdin, stdout, stderr }, Ends { sources, sink }))
}

fn terminal(size: Option<Size>) -> rustix::io::Result<(Stdio, Ends)> {
    let Terminal { master, peer } = Terminal::open(size)?;
    let sink = rustix::io::fcntl_dupfd_cloexec(&master, 0)?;
    Ok((Stdio::Terminal(peer), Ends { sources: vec![(Stream::Pty, master)], sink: Some(sink) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_protocol::path::WirePath;
    use rustix::io::{Errno, read, write};
    use std::collections::BTreeMap;

    fn params(argv: &[&str]) -> StartParams {
        StartParams::new("p", argv.iter().map(|text| (*text).to_owned()).collect(), WirePath::parse("/").unwrap())
    }

    #[track_caller]
    fn refused(params: &StartParams, expect_code: i32, expect: &str) {
        let checked = check(params, false);
        let error = checked.and_then(|()| prepare("s".into(), params, None, false, &[], "/bin/sh").map(|_| ())).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (expect_code, expect));
    }

    #[test]
    fn wrong_parameters_are_said_in_known_words() {
        refused(&params(&[]), code::INVALID_PARAMS, "process/start: argv must not be empty");
        refused(&params(&["", "x"]), code::INTERNAL, "missing program for pipe spawn");
        refused(&params(&["a\0b"]), code::INTERNAL, "nul byte found in provided data: argv[0]");
        refused(&params(&["a", "b", "\0"]), code::INTERNAL, "nul byte found in provided data: argv[2]");
        let with_arg0 = StartParams { arg0: Some("\0".to_owned()), ..params(&["a"]) };
        refused(&with_arg0, code::INTERNAL, "nul byte found in provided data: arg0");
        for (name, value) in [("A", "x\0"), ("A\0", "x")] {
            let env = BTreeMap::from([(name.to_owned(), value.to_owned())]);
            let text = format!("data provided contains a nul byte: environment variable {name:?}");
            refused(&StartParams { env, ..params(&["a"]) }, code::INTERNAL, &text);
        }
        let with_operation = |length: usize| StartParams { operation_id: Some("o".repeat(length)), ..params(&["a"]) };
        assert!(check(&with_operation(1), false).is_ok() && check(&with_operation(256), false).is_ok());
        let text = |length: usize| format!("process/start: operationId of {length} bytes: 1 to 256 are allowed");
        refused(&with_operation(0), code::INVALID_PARAMS, &text(0));
        refused(&with_operation(257), code::INVALID_PARAMS, &text(257));
        let size = Some(Size { rows: std::num::NonZeroU16::MIN, cols: std::num::NonZeroU16::MAX });
        assert!(check(&StartParams { size, tty: true, ..params(&["a"]) }, false).is_ok());
        let without = StartParams { size, ..params(&["a"]) };
        refused(&without, code::INVALID_PARAMS, "process/start: size is for a process with a terminal: set tty");
        let cwd = WirePath::parse("file://h/x").unwrap();
        let text = "cwd URI `file://h/x` is not valid on this exec-server host: 'file://h/x' is invalid on 'linux'";
        refused(&StartParams { cwd, ..params(&["a"]) }, code::INVALID_PARAMS, text);
    }

    #[test]
    fn managed_networking_fails_closed_where_it_would_matter() {
        let enforced = StartParams { enforce_managed_network: true, ..params(&["a"]) };
        assert!(check(&enforced, false).is_ok());
        assert_eq!(check(&enforced, true).unwrap_err().code, code::INVALID_PARAMS);
        let proxied = StartParams { network_proxy: Some(serde_json::Map::new()), ..params(&["a"]) };
        assert_eq!(check(&proxied, false).unwrap_err().code, code::INVALID_PARAMS);
    }

    #[test]
    fn an_absent_input_is_at_its_end_and_a_wanted_one_is_not() {
        let input = |params: &StartParams| {
            let (launch, ends) = prepare("s".into(), params, None, false, &[], "/bin/sh").unwrap();
            let Stdio::Pipes { stdin, .. } = launch.stdio else { panic!() };
            (stdin, ends.sink)
        };
        let mut byte = [0];
        let (stdin, sink) = input(&params(&["a"]));
        assert!(sink.is_none());
        assert_eq!(read(&stdin, &mut byte), Ok(0));
        let (stdin, sink) = input(&StartParams { pipe_stdin: true, ..params(&["a"]) });
        write(sink.unwrap(), b"x").unwrap();
        assert_eq!(read(&stdin, &mut byte), Ok(1));
    }

    #[test]
    fn our_ends_never_block_and_a_terminal_is_one_stream() {
        for (tty, streams) in [(false, &[Stream::Stdout, Stream::Stderr][..]), (true, &[Stream::Pty])] {
            let params = StartParams { tty, ..params(&["a"]) };
            let (launch, ends) = prepare("s".into(), &params, None, false, &[], "/bin/bash").unwrap();
            assert_eq!(ends.sources.iter().map(|(stream, _)| *stream).collect::<Vec<_>>(), streams);
            for (_, source) in &ends.sources {
                assert_eq!(read(source, &mut [0]), Err(Errno::AGAIN));
            }
            let shell: Vec<_> = launch.command.env.iter().map(|(name, _)| name.0.as_slice()).collect();
            assert_eq!(shell, if tty { vec![&b"SHELL"[..]] } else { vec![] });
        }
    }

    #[test]
    fn whose_fault_it_is_decides_the_code() {
        let step = |step, errno| LaunchError::Failed(StepFailed { step, attempt: "start `x`".to_owned(), errno, denial: None });
        let missing = failed(&step(Step::Execute, 2));
        assert_eq!(
            (missing.code, missing.message.as_str()),
            (code::INTERNAL, "start `x`: No such file or directory (os error 2)")
        );
        let refused = failed(&step(Step::Enforce, 0));
        assert_eq!((refused.code, refused.message.as_str()), (code::INVALID_PARAMS, "start `x`"));
        assert_eq!(failed(&step(Step::Enforce, 38)).code, code::INTERNAL);
        assert_eq!(failed(&LaunchError::Lost("gone".to_owned())).message, "lost: gone");
    }

    #[test]
    fn the_sandbox_is_named_by_what_is_enforced() {
        assert_eq!(sandbox_type(&Enforced::default()), "none");
        assert_eq!(sandbox_type(&Enforced { landlock_abi: 7, ..Enforced::default() }), "linuxSeccomp");
        assert_eq!(sandbox_type(&Enforced { seccomp: vec!["network".to_owned()], ..Enforced::default() }), "linuxSeccomp");
    }
}
