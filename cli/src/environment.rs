//! Environments by their names, for `exec --environment`.

use crate::Failure;
use crate::args::Exec;
use crate::credential;
use portcullis::client::{
    Environment, EnvironmentWay, Environments, ExecServerClient, ExecServerClientConnectOptions, RemoteExecServerConnectArgs,
    Token, Transport,
};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Bytes of a file with environments.
const LONGEST: u64 = 1 << 20;
/// Bytes of one message of a program: a file of 512 MiB in base64.
const MESSAGE: u64 = 768 << 20;
/// Messages in line in one direction.
const QUEUE: usize = 16;
/// Who calls.
const NAME: &str = "portcullis exec";

/// An environment that is reached, and what carries its messages.
pub(crate) struct Reached {
    pub(crate) client: ExecServerClient,
    task: tokio::task::JoinHandle<()>,
    program: Option<Served>,
}

/// A program that serves on its standard input and output.
struct Served {
    child: Child,
    carriers: JoinSet<()>,
}

impl Reached {
    /// Ends what was begun, once the client was dropped.
    pub(crate) async fn end(self) -> Result<(), Failure> {
        drop(self.client);
        self.task.await?;
        let Some(Served { mut child, mut carriers }) = self.program else { return Ok(()) };
        // Its input has ended, and a server ends with it.
        if timeout(std::time::Duration::from_secs(10), child.wait()).await.is_err() {
            child.kill().await?;
        }
        carriers.shutdown().await;
        Ok(())
    }
}

/// The environment of a name: `remote` is that of the variables if they give one, every other is in the file.
pub(crate) fn named(id: &str, options: &Exec) -> Result<Environment, Failure> {
    let of_variables = Environment::of_variables(|name| std::env::var(name).ok())?;
    if let Some(environment) = of_variables.filter(|environment| environment.id == id) {
        return Ok(environment);
    }
    let usual = || std::env::var_os("CODEX_HOME").map(|home| Path::new(&home).join("environments.toml"));
    let file: PathBuf = options.environments.clone().or_else(usual).ok_or_else(|| {
        format!("--environment {id}: no file says what it is; give --environments FILE, or set CODEX_HOME to its directory")
    })?;
    let failed = |reason: &dyn std::fmt::Display| Failure::from(format!("environments in {}: {reason}", file.display()));
    let length = std::fs::metadata(&file).map_err(|error| failed(&error))?.len();
    if length > LONGEST {
        return Err(failed(&format!("{length} bytes: at most {LONGEST} are read")));
    }
    let text = std::fs::read_to_string(&file).map_err(|error| failed(&error))?;
    let environments = Environments::parse(&text).map_err(|error| failed(&error))?;
    let known: Vec<&str> = environments.list.iter().map(|environment| environment.id.as_str()).collect();
    let unknown = || failed(&format!("there is none of the name `{id}`; there are: {}", known.join(", ")));
    environments.list.iter().find(|environment| environment.id == id).cloned().ok_or_else(unknown)
}

/// Connects to an environment.
pub(crate) async fn reach(environment: &Environment, options: &Exec) -> Result<Reached, Failure> {
    let mut connect = match &environment.way {
        EnvironmentWay::Program { program, args, env, cwd } => {
            let mut command = Command::new(program);
            command.args(args).envs(env).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
            if let Some(cwd) = cwd {
                command.current_dir(cwd);
            }
            let started = command.spawn();
            let child = started.map_err(|error| format!("start {program} of environment `{}`: {error}", environment.id))?;
            let (served, transport) = carry(child);
            let connecting = ExecServerClient::over(transport, NAME);
            let late = |_elapsed| format!("environment `{}`: {program} did not answer `initialize` in time", environment.id);
            let (client, task) = timeout(environment.initialize_timeout, connecting).await.map_err(late)??;
            return Ok(Reached { client, task, program: Some(served) });
        }
        EnvironmentWay::Url(url) => {
            let (url, token) = credential::of_server(url, options.token_file.as_deref())?;
            let mut connect = ExecServerClientConnectOptions::new(&url, NAME);
            connect.token = token;
            connect
        }
        EnvironmentWay::Remote { base_url, environment_id, token, account } => {
            let (base_url, environment_id) = (base_url.clone(), environment_id.clone());
            let remote = RemoteExecServerConnectArgs { base_url, environment_id, token: Token::new(token.clone()) };
            let mut connect = ExecServerClientConnectOptions::remote(remote, NAME);
            connect.account.clone_from(account);
            connect
        }
    };
    connect.tls = credential::client_tls(&options.tls, &connect.url)?;
    connect.connect_timeout = environment.connect_timeout;
    connect.initialize_timeout = environment.initialize_timeout;
    let (client, task) = ExecServerClient::connect(&connect).await?;
    Ok(Reached { client, task, program: None })
}

/// Carries messages to and from a program, one a line.
fn carry(mut child: Child) -> (Served, Transport) {
    let (to_program, mut messages) = mpsc::channel::<String>(QUEUE);
    let (answers, from_program) = mpsc::channel(QUEUE);
    let mut carriers = JoinSet::new();
    if let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) {
        carriers.spawn(async move {
            while let Some(message) = messages.recv().await {
                if input.write_all(format!("{message}\n").as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        carriers.spawn(async move {
            let mut output = BufReader::new(output);
            loop {
                let mut line = String::new();
                let read = (&mut output).take(MESSAGE).read_line(&mut line).await;
                if !matches!(read, Ok(1..)) || !line.ends_with('\n') || answers.send(line).await.is_err() {
                    return;
                }
            }
        });
    }
    (Served { child, carriers }, Transport { outgoing: to_program, incoming: from_program })
}
