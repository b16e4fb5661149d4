//! `portcullis exec`: one command through a gateway, the same way as any client's.

use crate::Failure;
use crate::args::Exec;
use crate::credential;
use crate::environment;
use crate::plain;
use crate::policy;
use crate::remote;
use crate::terminal::{self, RawMode};
use portcullis::client::{
    ExecServerClient, ExecServerClientConnectOptions, ExecServerError, Process, ProcessEvent, ProcessInput,
};
use portcullis::protocol::denial::{Denial, Denials, Wanted};
use portcullis::protocol::event::Stream;
use portcullis::protocol::path::WirePath;
use portcullis::protocol::process::{EnvPolicy, Inherit, ReadResult, StartParams, WriteStatus};
use portcullis::protocol::rpc::code;
use portcullis::{Config, ExecServerRuntimePaths, Gateway};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{self, Write as _};
use std::pin::pin;
use std::process::ExitCode;
use tokio::io::AsyncReadExt as _;
use tokio::signal::unix::{self, SignalKind, signal};

/// Denials that are told of; the others are counted.
const MOST_TOLD: usize = 10;

/// Bytes of standard input in one write.
const INPUT: usize = 64 * 1024;

/// What ends the input of a terminal: Ctrl-D.
const END_OF_INPUT: u8 = 4;

/// Runs the command and returns its exit status.
pub(crate) async fn run(options: &Exec) -> Result<ExitCode, Failure> {
    let params = start_params(options)?;
    if let Some(id) = options.environment.as_deref().filter(|id| *id != "local") {
        let reached = environment::reach(&environment::named(id, options)?, options).await?;
        let done = start_and_follow(&reached.client, &params).await;
        reached.end().await?;
        return done;
    }
    if let Some(url) = &options.remote {
        let connect = remote::connect(url, options)?;
        let (client, task) = ExecServerClient::connect(&connect).await?;
        let done = start_and_follow(&client, &params).await;
        drop(client);
        task.await?;
        return done;
    }
    if options.url.is_none() && (options.token_file.is_some() || options.tls.tls_ca.is_some()) {
        return Err("--token-file and --tls-ca are for --url and --remote, and do nothing without them".into());
    }
    if let Some(url) = &options.url {
        let (url, token) = credential::of_server(url, options.token_file.as_deref())?;
        let mut connect = ExecServerClientConnectOptions::new(&url, "portcullis exec");
        connect.token = token;
        connect.tls = credential::client_tls(&options.tls, &url)?;
        let (client, task) = ExecServerClient::connect(&connect).await?;
        let done = start_and_follow(&client, &params).await;
        drop(client);
        task.await?;
        return done;
    }
    let mut config = Config::new(ExecServerRuntimePaths::of_this_process()?);
    config.allow_unprotected_metadata = options.allow_unprotected_metadata;
    let gateway = Gateway::start(config).await?;
    match portcullis::connect(&gateway, "portcullis exec").await {
        Ok((client, task)) => {
            let done = start_and_follow(&client, &params).await;
            drop(client);
            gateway.shutdown().await;
            task.await?;
            done
        }
        Err(error) => {
            gateway.shutdown().await;
            Err(error.into())
        }
    }
}

async fn start_and_follow(client: &ExecServerClient, params: &StartParams) -> Result<ExitCode, Failure> {
    let mut process = client.start(params).await.inspect_err(|error| {
        if let ExecServerError::Server(error) = error {
            tell(&Denials { list: error.denials(), more: 0 });
        }
    })?;
    let followed = match params.tty.then(RawMode::begin).transpose() {
        Ok(_until_it_ended) => follow(&mut process, params.tty).await,
        Err(error) => Err(error),
    };
    let (code, denials) = match followed {
        Ok(ended) => ended,
        Err(error) => {
            // If the link is gone, so is whoever could say that this failed.
            let _link_gone = process.terminate().await;
            return Err(error);
        }
    };
    if code != 0 {
        tell(&denials);
        // A sandbox that had to end says why; if the link is gone by now, nobody can.
        let asked = serde_json::json!({"processId": process.id(), "maxBytes": 1});
        if let Ok(ReadResult { failure: Some(reason), .. }) = client.call("process/read", &asked).await {
            let _stderr_closed = writeln!(io::stderr(), "portcullis: {}", plain(&reason));
        }
    }
    Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(u8::MAX)))
}

/// Passes output, input and signals on as they come, side by side: output that nobody takes may hold up all answers. Answers how
/// the command ended.
async fn follow(process: &mut Process, tty: bool) -> Result<(i32, Denials), Failure> {
    let mut events = process.take_events().ok_or("the command is followed already")?;
    let mut input = pin!(pass_input(process.take_input(), tty));
    let mut signals = pin!(pass_signals(process, tty));
    let (mut ended, mut has_input) = (None, true);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            passed = &mut input, if has_input => {
                passed?;
                has_input = false;
                continue;
            }
            failed = &mut signals => {
                failed?;
                continue;
            }
        };
        match event {
            Some(ProcessEvent::Output { stream: Stream::Stderr, chunk, .. }) => {
                let mut stderr = io::stderr().lock();
                stderr.write_all(&chunk)?;
            }
            Some(ProcessEvent::Output { chunk, .. }) => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(&chunk)?;
                stdout.flush()?;
            }
            Some(ProcessEvent::Exited { code, denials, .. }) => ended = Some((code, denials)),
            Some(ProcessEvent::Gap { from, to, .. }) => {
                let mut stderr = io::stderr().lock();
                writeln!(stderr, "portcullis: output is missing here: the gateway did not keep events {from} to {to}")?;
            }
            Some(ProcessEvent::Closed { .. }) => break,
            Some(ProcessEvent::Failed { message }) => {
                return Err(format!("{message}; whether the command still runs is not known").into());
            }
            None => return Err("the link to the gateway ended before the command did; whether it still runs is not known".into()),
        }
    }
    ended.ok_or_else(|| "the command closed without an exit status".into())
}

/// Passes signals on until that fails: an interrupt once, the second kills; and of a terminal its size.
async fn pass_signals(process: &Process, tty: bool) -> Result<Infallible, Failure> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminations = signal(SignalKind::terminate())?;
    // Without a terminal to restore these do what they do to any program.
    let mut hangups = tty.then(|| signal(SignalKind::hangup())).transpose()?;
    let mut quits = tty.then(|| signal(SignalKind::quit())).transpose()?;
    let mut resizes = tty.then(|| signal(SignalKind::window_change())).transpose()?;
    let mut interrupted = false;
    loop {
        tokio::select! {
            _signal = interrupts.recv() => {
                if interrupted {
                    process.terminate().await?;
                } else {
                    process.interrupt().await?;
                }
                interrupted = true;
            }
            _signal = terminations.recv() => drop(process.terminate().await?),
            () = next(&mut hangups) => drop(process.terminate().await?),
            () = next(&mut quits) => drop(process.terminate().await?),
            () = next(&mut resizes) => {
                if let Some(size) = terminal::size() {
                    process.resize(size).await?;
                }
            }
        }
    }
}

/// The next signal of a kind, if it is watched.
async fn next(signals: &mut Option<unix::Signal>) {
    match signals {
        Some(signals) => drop(signals.recv().await),
        None => std::future::pending().await,
    }
}

/// Passes standard input on until it ends, or the command takes no more.
async fn pass_input(input: Option<ProcessInput>, tty: bool) -> Result<(), Failure> {
    let Some(mut input) = input else { return Ok(()) };
    let (mut stdin, mut buffer) = (tokio::io::stdin(), vec![0; INPUT]);
    loop {
        let length = stdin.read(&mut buffer).await.map_err(|error| {
            format!("read standard input: {error}; the command was killed; if it needs no input, give it </dev/null")
        })?;
        if length == 0 {
            break;
        }
        if input.write(buffer[..length].to_vec()).await? != WriteStatus::Accepted {
            return Ok(());
        }
    }
    if tty {
        input.write(vec![END_OF_INPUT]).await?;
        return Ok(());
    }
    match input.close().await {
        // Servers of others cannot end the input: a command that does not wait for that end runs on all the same.
        Err(ExecServerError::Server(error)) if error.code == code::METHOD_NOT_FOUND => {
            let note = "portcullis: this server cannot end a command's input; what waits for its end waits on";
            let _stderr_closed = writeln!(io::stderr(), "{note}");
            Ok(())
        }
        ended => Ok(ended?),
    }
}

/// Says on standard error what was denied, and what would allow it.
fn tell(denials: &Denials) {
    let mut stderr = io::stderr().lock();
    for line in told(denials) {
        // A program chooses the names that it is denied, and they are no orders to this terminal.
        let _stderr_closed = writeln!(stderr, "portcullis: {}", plain(&line));
    }
}

fn told(denials: &Denials) -> Vec<String> {
    let word = |access: Wanted| if access == Wanted::Write { "write" } else { "read" };
    let mut lines: Vec<String> = denials
        .list
        .iter()
        .take(MOST_TOLD)
        .map(|Denial { path, access, rule, grant, .. }| {
            let remedy = grant.as_ref().map_or_else(
                || "no entry would allow it".to_owned(),
                |entry| format!("to allow it: an entry with path `{}` and access `{}`", entry.path.path, word(entry.access)),
            );
            format!("denied: {} {path} ({rule}); {remedy}", word(*access))
        })
        .collect();
    let more = denials.more + denials.list.len().saturating_sub(MOST_TOLD) as u64;
    if more > 0 {
        lines.push(format!("denied: {more} more"));
    }
    lines
}

fn start_params(options: &Exec) -> Result<StartParams, Failure> {
    let workspace = policy::workspace(&options.workspace)?;
    let sandbox = policy::load(&options.policy)?.in_workspaces(std::slice::from_ref(&workspace), policy::home());
    let workspace = WirePath::Local(workspace);
    let environment = EnvPolicy {
        inherit: Inherit::All,
        ignore_default_excludes: false,
        // They would name the directory of this program, not the command's.
        exclude: vec!["PWD".to_owned(), "OLDPWD".to_owned()],
        set: BTreeMap::new(),
        include_only: Vec::new(),
    };
    let mut params = StartParams::new("exec", options.command.clone(), workspace);
    params.env = options.env.iter().map(|variable| assignment(variable)).collect::<Result<_, _>>()?;
    if options.tty {
        terminal::require()?;
        (params.tty, params.size) = (true, terminal::size());
        // What is drawn is for this terminal, wherever the server was started.
        if let Ok(term) = std::env::var("TERM") {
            params.env.entry("TERM".to_owned()).or_insert(term);
        }
    } else {
        params.pipe_stdin = true;
    }
    params.env_policy = Some(environment);
    params.sandbox = Some(serde_json::value::to_raw_value(&sandbox.to_json())?);
    Ok(params)
}

fn assignment(variable: &str) -> Result<(String, String), Failure> {
    if let Some((name, value)) = variable.split_once('=') {
        if name.is_empty() {
            return Err(format!("--env {variable}: a name must stand before the `=`").into());
        }
        return Ok((name.to_owned(), value.to_owned()));
    }
    match std::env::var(variable) {
        Ok(value) => Ok((variable.to_owned(), value)),
        Err(error) => Err(format!("--env {variable}: {error}; write {variable}=VALUE").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis::protocol::denial::{Layer, SuggestedEntry, SuggestedPath};

    fn denial(nth: usize) -> Denial {
        let (path, rule) = (format!("/etc/{nth}"), "entry read `/`".to_owned());
        Denial { path, access: Wanted::Write, layer: Layer::Mounts, rule, grant: None }
    }

    #[test]
    fn a_denial_is_told_with_its_rule_and_remedy() {
        let path = SuggestedPath { r#type: "path".to_owned(), path: "file:///etc".to_owned() };
        let grant = Some(SuggestedEntry { path, access: Wanted::Write });
        let denials = Denials { list: vec![denial(1), Denial { grant, ..denial(2) }], more: 0 };
        let expect = [
            "denied: write /etc/1 (entry read `/`); no entry would allow it",
            "denied: write /etc/2 (entry read `/`); to allow it: an entry with path `file:///etc` and access `write`",
        ];
        assert_eq!(told(&denials), expect);
    }

    #[test]
    fn the_first_are_told_and_the_rest_counted() {
        let lines = told(&Denials { list: (0..12).map(denial).collect(), more: 5 });
        assert_eq!((lines.len(), lines[10].as_str()), (11, "denied: 7 more"));
    }
}
