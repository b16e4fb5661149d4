//! The `portcullis` program.

mod args;
mod audit;
mod credential;
mod doctor;
mod environment;
mod exec;
mod explain;
mod forward;
mod limits;
mod policy;
mod remote;
mod rendezvous;
mod sources;
mod terminal;
mod token;

use args::{Command, LogFormat};
use portcullis::{AuditFile, Config, EgressRule, ExecServerRuntimePaths};
use sources::Refused;
use std::io::{self, Write as _};
use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything else: this start may be a hidden role, which must stay small and single-threaded.
    if let Some(code) = portcullis::dispatch() {
        return code;
    }
    let arguments = match sources::arguments(std::env::args_os().collect(), |name| std::env::var_os(name)) {
        Ok(arguments) => arguments,
        Err(Refused::Usage(error)) => {
            let _output_closed = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE));
        }
        Err(Refused::Other(error)) => {
            let _stderr_closed = writeln!(io::stderr(), "portcullis: {}", plain_lines(&error.to_string()));
            return ExitCode::from(USAGE);
        }
    };
    log_to_stderr(match &arguments.command {
        Command::Serve(options) => options.log_format,
        _ => LogFormat::Text,
    });
    // A command's own status must not be taken for ours.
    let failure = if matches!(arguments.command, Command::Exec(_)) { ExitCode::from(FAILED_EXEC) } else { ExitCode::FAILURE };
    match run(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            let _stderr_closed = writeln!(io::stderr(), "portcullis: {}", plain_lines(&error.to_string()));
            failure
        }
    }
}

/// A line without control characters: a program, a file name or another server chose a part of it, which must not steer this terminal.
fn plain(line: &str) -> String {
    line.replace(char::is_control, "\u{fffd}")
}

/// The same of a text that may have lines: parsers show them of files.
fn plain_lines(text: &str) -> String {
    text.replace(|letter: char| letter.is_control() && letter != '\n', "\u{fffd}")
}

/// Status of `exec` when the command did not run to its end, as `env`, `timeout` and others have it.
const FAILED_EXEC: u8 = 125;

/// Status of a command line that means nothing.
const USAGE: u8 = 2;

type Failure = Box<dyn std::error::Error>;

fn run(command: Command) -> Result<ExitCode, Failure> {
    if let Command::Explain(options) = &command {
        explain::print(options, &mut io::stdout())?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::Audit(args::Audit::Verify(options)) = &command {
        return audit::verify(options, &mut io::stdout());
    }
    if let Command::Token(options) = &command {
        token::print(options, &mut io::stdout())?;
        return Ok(ExitCode::SUCCESS);
    }
    // One thread: two of them on few cores cost more in hand-overs than they gain.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = match command {
        Command::Serve(options) => {
            keep_room_for_messages();
            let mut paths = ExecServerRuntimePaths::of_this_process()?;
            if let Some(folder) = &options.spool_dir {
                paths.spool.clone_from(folder);
            }
            for name in sources::unknown_variables(std::env::vars_os().map(|(name, _)| name)) {
                tracing::warn!("the environment has {name}, which is no option of serve");
            }
            if let Some(handler) = portcullis::sandbox::core_handler::reached() {
                tracing::warn!("{}; {}", handler.reason, handler.remedy);
            }
            let mut config = Config::new(paths);
            options.limits.apply(&mut config)?;
            config.credential = credential::from_flags(&options.auth)?;
            config.hidden = credential::files(&options.auth);
            config.hidden.extend(remote::files(&options.registration));
            config.kept = sources::files(&options);
            config.tls = credential::tls(&options.auth)?;
            config.allowed_hosts.clone_from(&options.allow_host);
            config.allow_unprotected_metadata = options.allow_unprotected_metadata;
            config.sandbox_uids = options.sandbox_uids.0;
            if let Some(name) = &options.policy {
                config.ceiling = policy::ceiling(name, &options.workspace)?;
            }
            config.audit = options.audit.clone().map(|path| AuditFile { path, sync: options.audit_sync });
            if !options.allow_egress.is_empty() {
                config.egress = Some(EgressRule::parse(options.allow_egress.iter().map(String::as_str))?);
            }
            if let Some(url) = &options.remote {
                let remote = remote::environment(url, &options)?;
                let served = runtime.block_on(portcullis::run_remote_environment(remote, config));
                runtime.shutdown_background();
                return served.map(|()| ExitCode::SUCCESS).map_err(Failure::from);
            }
            runtime
                .block_on(portcullis::serve(options.listen.parse()?, config))
                .map(|()| ExitCode::SUCCESS)
                .map_err(Failure::from)
        }
        Command::Rendezvous(options) => runtime.block_on(rendezvous::run(&options)).map(|()| ExitCode::SUCCESS),
        Command::Forward(options) => runtime.block_on(forward::run(&options)).map(|()| ExitCode::SUCCESS),
        Command::Exec(options) => runtime.block_on(exec::run(&options)),
        Command::Doctor(options) => runtime.block_on(doctor::run(options.json)),
        Command::Explain(_) | Command::Token(_) | Command::Audit(_) => Ok(ExitCode::SUCCESS),
    };
    // A read of standard input may still block a thread of the runtime; nothing waits for it.
    runtime.shutdown_background();
    done
}

/// A write of 1 MiB, in base64 and with room to spare, in bytes.
const MESSAGE: usize = 2 << 20;

/// Has glibc keep what a message took for the next. Else it gives 64 KiB back to the system at once and asks for them again,
/// which costs two system calls and a fault for each page. It learns from the largest block that it got back how much to keep: twice
/// as much (mallopt(3), `M_MMAP_THRESHOLD`). This block is never written to, so it takes no memory.
fn keep_room_for_messages() {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(MESSAGE)));
}

/// What `RUST_LOG` asks for; without it, what needs somebody's attention.
fn log_to_stderr(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).with_current_span(false).with_span_list(false).init(),
    }
}
