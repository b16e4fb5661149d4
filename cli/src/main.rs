//! The `portcullis` program.

mod args;
mod credential;
mod doctor;
mod exec;
mod explain;
mod policy;
mod terminal;

use args::{Arguments, Command};
use clap::Parser as _;
use portcullis::{Config, EgressRule, ExecServerRuntimePaths};
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    // Before anything else: this start may be a hidden role, which must stay small and single-threaded.
    if let Some(code) = portcullis::dispatch() {
        return code;
    }
    let arguments = Arguments::parse();
    log_to_stderr();
    // A command's own status must not be taken for ours.
    let failure = if matches!(arguments.command, Command::Exec(_)) { ExitCode::from(FAILED_EXEC) } else { ExitCode::FAILURE };
    match run(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            let _stderr_closed = writeln!(io::stderr(), "portcullis: {error}");
            failure
        }
    }
}

/// Status of `exec` when the command did not run to its end, as `env`, `timeout` and others have it.
const FAILED_EXEC: u8 = 125;

type Failure = Box<dyn std::error::Error>;

fn run(command: Command) -> Result<ExitCode, Failure> {
    if let Command::Explain(options) = &command {
        explain::print(options, &mut io::stdout())?;
        return Ok(ExitCode::SUCCESS);
    }
    // One thread: two of them on few cores cost more in hand-overs than they gain.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = match command {
        Command::Serve(options) => {
            let mut paths = ExecServerRuntimePaths::of_this_process()?;
            if let Some(folder) = &options.spool_dir {
                paths.spool.clone_from(folder);
            }
            let mut config = Config::new(paths);
            config.spool_bytes = options.spool_bytes;
            config.session_spool_bytes = options.spool_bytes.saturating_mul(4);
            config.credential = credential::from_flags(&options.auth)?;
            config.allowed_hosts.clone_from(&options.allow_host);
            config.connections = options.max_connections;
            config.concurrent_requests = options.concurrent_requests;
            config.allow_unprotected_metadata = options.allow_unprotected_metadata;
            if let Some(name) = &options.policy {
                config.ceiling = policy::ceiling(name, &options.workspace)?;
            }
            if !options.allow_egress.is_empty() {
                config.egress = Some(EgressRule::parse(options.allow_egress.iter().map(String::as_str))?);
            }
            config.retention = Duration::from_secs(options.detached_retention);
            config.idle_exit = options.idle_exit.map(Duration::from_secs);
            config.max_retention = Duration::from_secs(options.max_retention);
            runtime
                .block_on(portcullis::serve(options.listen.parse()?, config))
                .map(|()| ExitCode::SUCCESS)
                .map_err(Failure::from)
        }
        Command::Exec(options) => runtime.block_on(exec::run(&options)),
        Command::Doctor(options) => runtime.block_on(doctor::run(options.json)),
        Command::Explain(_) => Ok(ExitCode::SUCCESS),
    };
    // A read of standard input may still block a thread of the runtime; nothing waits for it.
    runtime.shutdown_background();
    done
}

fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
}
