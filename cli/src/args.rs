//! The command line.

use crate::limits::Limits;
use clap::{Args, Parser, Subcommand, ValueEnum};
use portcullis::DEFAULT_LISTEN_URL;
use portcullis::protocol::uids::{UidRange, WrongRange};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The gateway that agent workspaces run on: files and commands over JSON-RPC, each request confined by the kernel.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve clients until SIGINT or SIGTERM. Standard output carries one line, the URL; with stdio, messages and nothing else.
    Serve(Box<Serve>),
    /// Be the place where executors (`serve --remote`) and their clients (`exec --remote`) meet, until SIGINT or SIGTERM. Standard
    /// output carries one line, the URL for both. What passes is encrypted from end to end.
    Rendezvous(Rendezvous),
    /// Register at a registry as the executor of an environment, and pass each of its clients on to a WebSocket server that this machine
    /// reaches, until SIGINT or SIGTERM. No credential is added on the way.
    Forward(Box<Forward>),
    /// Run one command, confined, and return its exit status; 125 if it could not be run. Standard input goes to it.
    Exec(Exec),
    /// Say what a policy allows of paths, why, and what would allow more. Nothing is confined, opened or changed.
    Explain(Explain),
    /// Print a token for `serve --ws-auth signed-bearer-token` that is valid for a while. With --policy or --method it opens less than
    /// everything.
    Token(Token),
    /// Say what can be enforced here, what not and why, and what each named policy would get. Its status is 0 if processes can
    /// be confined and given something to write to, otherwise 1.
    Doctor(Doctor),
    /// Look after the file that `serve --audit` writes.
    #[command(subcommand)]
    Audit(Audit),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Audit {
    /// Check that no line of an audit log was changed, removed or moved, and say how many there are and the digest of the last.
    /// Its status is 0 if so, otherwise 1. Keep the digest elsewhere: that the end of a file is missing nothing in it shows.
    Verify(Verify),
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// The audit log.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// A digest that was said earlier: fail unless the line that had it is still there.
    #[arg(long, value_name = "SHA256")]
    pub(crate) head: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Where to listen: ws://IP:PORT (port 0 lets the system choose), wss://IP:PORT, unix:PATH (for the server's own user and root), or stdio.
    #[arg(long, value_name = "URL", default_value = DEFAULT_LISTEN_URL)]
    pub(crate) listen: String,
    /// Listen nowhere: register at this registry, https://HOST or http:// on loopback, and serve whoever it lets in. Its token is in
    /// PORTCULLIS_EXECUTOR_TOKEN or CODEX_API_KEY, or comes with one of the next options.
    #[arg(long, value_name = "URL", requires = "environment_id", conflicts_with = "listen")]
    pub(crate) remote: Option<String>,
    /// With --remote: the environment to serve.
    #[arg(long, value_name = "ID", requires = "remote")]
    pub(crate) environment_id: Option<String>,
    /// With --remote: a name for people. It stays here.
    #[arg(long, value_name = "TEXT", requires = "remote")]
    pub(crate) name: Option<String>,
    /// With --remote: serve /livez, /readyz and /metrics at IP:PORT, a loopback address. /readyz is 200 while the rendezvous is reached.
    #[arg(long, value_name = "IP:PORT", requires = "remote")]
    pub(crate) health_listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) registration: Registration,
    #[command(flatten)]
    pub(crate) auth: Auth,
    /// A name that the Host of a request may have, beside addresses and localhost; may be repeated.
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
    /// The directory for output that finds no room in memory while its client is away [default: TMPDIR, else /var/tmp].
    #[arg(long, value_name = "DIR")]
    pub(crate) spool_dir: Option<PathBuf>,
    /// Where there are no namespaces, start processes under policies with writable roots all the same, although they are then not kept from .git and other
    /// protected names there, nor from chmod, chown, utime and xattr outside.
    #[arg(long)]
    pub(crate) allow_unprotected_metadata: bool,
    /// For a server that is root: the user ids of this machine of which each sandbox has one while it lives, so that it takes nothing of
    /// root's kernel budgets. No user and no service may have one of them. `none`: sandboxes have root's.
    #[arg(long, value_name = "FIRST-LAST", default_value_t = SandboxUids(Some(UidRange::DEFAULT)))]
    pub(crate) sandbox_uids: SandboxUids,
    /// What no request may exceed, and what a request without a sandbox gets: read-only, workspace-write,
    /// workspace-write-network, full-access, or a policy file (*.toml). Without it clients decide.
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// A directory that is the workspace of --policy; may be repeated.
    #[arg(long, value_name = "DIR", requires = "policy")]
    pub(crate) workspace: Vec<PathBuf>,
    /// Record everything that is asked for in this file, which is made with mode 0600 or appended to, each line chained to the one
    /// before. What cannot be recorded is refused. `portcullis audit verify` checks it.
    #[arg(long, value_name = "FILE")]
    pub(crate) audit: Option<PathBuf>,
    /// Let no answer leave before its line has reached the disk, so that a power cut takes none along.
    #[arg(long, requires = "audit")]
    pub(crate) audit_sync: bool,
    /// How the log on standard error is written. What is in it RUST_LOG says [default: warn]: info adds connections, sessions
    /// and processes as they come and go, and no level names what is a secret.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    /// A place that `http/request` may reach: a name, *.NAME or * (at public addresses only), an IPv4 address or an [IPv6 address];
    /// may be repeated. With it every other place is refused. Without it all are, if --policy gives no network.
    #[arg(long, value_name = "HOST[:PORT]")]
    pub(crate) allow_egress: Vec<String>,
    /// A file (TOML) with any of these options, by their names: `max-sessions = 100`. What is not given as a flag is looked up in the
    /// environment as PORTCULLIS_MAX_SESSIONS, and then there.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) limits: Limits,
}

/// A range, or `none`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SandboxUids(pub(crate) Option<UidRange>);

impl FromStr for SandboxUids {
    type Err = WrongRange;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        UidRange::parse(text).map(Self)
    }
}

impl fmt::Display for SandboxUids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(range) => range.fmt(f),
            None => f.write_str("none"),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Forward {
    /// Where clients are passed on to: ws://HOST:PORT or wss://HOST:PORT, with a path if need be.
    #[arg(long, value_name = "URL")]
    pub(crate) connect: String,
    /// The registry, https://HOST or http:// on loopback. Its token is in PORTCULLIS_EXECUTOR_TOKEN or CODEX_API_KEY, or comes with one
    /// of the next options.
    #[arg(long, value_name = "URL")]
    pub(crate) remote: String,
    /// The environment.
    #[arg(long, value_name = "ID")]
    pub(crate) environment_id: String,
    #[command(flatten)]
    pub(crate) registration: Registration,
    #[command(flatten)]
    pub(crate) tls: ClientTls,
}

/// Whom to believe, and what to show there.
#[derive(Debug, Args)]
pub(crate) struct ClientTls {
    /// With wss://: believe servers whose certificate descends from one of these (PEM).
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// With wss://: show this chain of certificates (PEM), where the server asks for one.
    #[arg(long, value_name = "FILE", requires_all = ["tls_ca", "tls_key"])]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The key of --tls-cert (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
}

/// What a registry is shown.
#[derive(Debug, Args)]
pub(crate) struct Registration {
    /// With --remote: read the registry's token from the first line of standard input.
    #[arg(long, requires = "remote", conflicts_with_all = ["registration_token_file", "auth_file", "use_agent_identity_auth"])]
    pub(crate) registration_bearer_stdin: bool,
    /// With --remote: a file with the registry's token, which is read again for every request, so that it can be replaced. Only its
    /// owner may read it.
    #[arg(long, value_name = "FILE", requires = "remote", conflicts_with_all = ["auth_file", "use_agent_identity_auth"])]
    pub(crate) registration_token_file: Option<PathBuf>,
    /// With --remote: the file of a sign-in, such as $CODEX_HOME/auth.json, likewise.
    #[arg(long, value_name = "FILE", requires = "remote", conflicts_with = "use_agent_identity_auth")]
    pub(crate) auth_file: Option<PathBuf>,
    /// With --remote: refused, and says why. For programs that embed the gateway.
    #[arg(long, requires = "remote")]
    pub(crate) use_agent_identity_auth: bool,
    /// With --remote: end once standard input does, as with SIGTERM. Also with CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE=1.
    #[arg(long, requires = "remote")]
    pub(crate) exit_on_stdin_close: bool,
    /// With --remote: a host that an API key may be shown to, beside openai.com, openai.org and this machine; may be repeated.
    #[arg(long, value_name = "HOST", requires = "remote")]
    pub(crate) remote_allow_host: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Rendezvous {
    /// Where to listen: ws://IP:PORT (port 0 lets the system choose). For other machines give --tls-cert and --tls-key, or put it
    /// behind something that speaks TLS and give --public-url.
    #[arg(long, value_name = "URL", default_value = DEFAULT_LISTEN_URL)]
    pub(crate) listen: String,
    /// A file with the tokens of executors, one a line. Without it one is made and said on standard error.
    #[arg(long, value_name = "FILE")]
    pub(crate) executor_token_file: Option<PathBuf>,
    /// A file with the tokens of clients, one a line. Without it one is made and said on standard error.
    #[arg(long, value_name = "FILE")]
    pub(crate) harness_token_file: Option<PathBuf>,
    /// Where both reach the WebSocket, as wss://HOST; without it at the host that they asked.
    #[arg(long, value_name = "URL")]
    pub(crate) public_url: Option<String>,
    /// Speak TLS, and show this chain of certificates (PEM), the server's own first.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The key of --tls-cert (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The Redis that all nodes of one rendezvous share: redis://[USER:PASSWORD@]HOST[:PORT][/NUMBER] or redis+unix:///PATH. A URL
    /// with a password is better in PORTCULLIS_STORE, where nobody else sees it. Without it this is the only node.
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
    /// With --store: where the other nodes reach this one, ws://IP:PORT.
    #[arg(long, value_name = "URL")]
    pub(crate) node_url: Option<String>,
}

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// A line for people.
    Text,
    /// A line of JSON.
    Json,
}

/// Who may connect. Without any of these a token is made at the start, and said on standard error.
#[derive(Debug, Args)]
pub(crate) struct Auth {
    /// Write the token that is made at the start to this file (mode 0600) instead of saying it on standard error.
    #[arg(long, value_name = "FILE", conflicts_with = "ws_auth")]
    pub(crate) token_file: Option<PathBuf>,
    /// Ask clients for nothing: every program that reaches the port is served. On loopback addresses only.
    #[arg(long, conflicts_with_all = ["token_file", "ws_auth", "tls_client_ca"])]
    pub(crate) insecure_no_auth: bool,
    /// Ask for a token that is known from elsewhere: one token, or any that was signed with a shared secret (JWT, HS256).
    #[arg(long, value_name = "KIND", value_enum)]
    pub(crate) ws_auth: Option<WsAuth>,
    /// With capability-token: a file that holds the token. Its path is absolute.
    #[arg(long, value_name = "FILE", requires = "ws_auth", conflicts_with = "ws_token_sha256")]
    pub(crate) ws_token_file: Option<PathBuf>,
    /// With capability-token: SHA-256 of the token, in hexadecimal.
    #[arg(long, value_name = "HEX", requires = "ws_auth")]
    pub(crate) ws_token_sha256: Option<String>,
    /// With signed-bearer-token: a file that holds the secret, at least 32 bytes. Its path is absolute.
    #[arg(long, value_name = "FILE", requires = "ws_auth")]
    pub(crate) ws_shared_secret_file: Option<PathBuf>,
    /// With signed-bearer-token: what `iss` must be.
    #[arg(long, value_name = "TEXT", requires = "ws_auth")]
    pub(crate) ws_issuer: Option<String>,
    /// With signed-bearer-token: what `aud` must be or hold.
    #[arg(long, value_name = "TEXT", requires = "ws_auth")]
    pub(crate) ws_audience: Option<String>,
    /// With signed-bearer-token: how far the clocks may be apart; 30.
    #[arg(long, value_name = "SECONDS", requires = "ws_auth", value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) ws_max_clock_skew_seconds: Option<u64>,
    /// Speak TLS, and show this chain of certificates (PEM), the server's own first.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The key of --tls-cert (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Serve only clients that show a certificate which descends from one of these (PEM). It is their credential: a token is asked for
    /// in addition only with --token-file or --ws-auth.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_client_ca: Option<PathBuf>,
}

/// Kinds of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WsAuth {
    /// One token.
    CapabilityToken,
    /// Tokens signed with a shared secret.
    SignedBearerToken,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// As `environment/info` answers it under `enforcement`.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// The directory the command runs in, and the workspace that policies speak of.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) workspace: PathBuf,
    /// read-only, workspace-write, workspace-write-network, full-access, or a policy file (*.toml).
    #[arg(long, value_name = "NAME|FILE", default_value = "workspace-write")]
    pub(crate) policy: String,
    /// A running server, ws://HOST:PORT, wss://HOST:PORT or unix:PATH; without it a gateway is started for this one command.
    #[arg(long, value_name = "URL", conflicts_with = "allow_unprotected_metadata")]
    pub(crate) url: Option<String>,
    /// A registry, https://HOST or http:// on loopback, where --environment-id is registered.
    #[arg(long, value_name = "URL", requires = "environment_id", conflicts_with_all = ["url", "allow_unprotected_metadata"])]
    pub(crate) remote: Option<String>,
    /// An environment by its name: one of the file of --environments, `remote` of CODEX_EXEC_SERVER_NOISE_… or CODEX_EXEC_SERVER_URL, or
    /// `local`. Without this those variables change nothing.
    #[arg(long, value_name = "ID", conflicts_with_all = ["url", "remote", "allow_unprotected_metadata"])]
    pub(crate) environment: Option<String>,
    /// The file (TOML) with environments [default: environments.toml in CODEX_HOME].
    #[arg(long, value_name = "FILE", requires = "environment")]
    pub(crate) environments: Option<PathBuf>,
    /// With --remote: the environment.
    #[arg(long, value_name = "ID", requires = "remote")]
    pub(crate) environment_id: Option<String>,
    /// A file with the token that the running server asks for. Without it that of a server of this user on this machine is found.
    /// With --remote it is the registry's, which may be in PORTCULLIS_HARNESS_TOKEN instead.
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) tls: ClientTls,
    /// As of `serve`, for the gateway that is started.
    #[arg(long)]
    pub(crate) allow_unprotected_metadata: bool,
    /// Set a variable for the command; may be repeated. Without a value it is taken from here. The rest of the server's
    /// environment is inherited, but for names that look like secrets (*KEY*, *SECRET*, *TOKEN*).
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Give the command a terminal of its own, of the size of this one. Standard input and output must be a terminal.
    #[arg(long, short)]
    pub(crate) tty: bool,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Token {
    /// The file that holds the secret which the server shares, at least 32 bytes.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: PathBuf,
    /// For how many seconds it is valid. A connection whose token says less than everything ends then.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub(crate) expires: u64,
    /// What no request over its connections may exceed: read-only, workspace-write, workspace-write-network, full-access, or a policy
    /// file (*.toml).
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: Option<String>,
    /// A directory that is the workspace of --policy; may be repeated.
    #[arg(long, value_name = "DIR", requires = "policy")]
    pub(crate) workspace: Vec<PathBuf>,
    /// A method that may be called, as process/start or fs/*; may be repeated. Without it all may.
    #[arg(long, value_name = "METHOD")]
    pub(crate) method: Vec<String>,
    /// What the server asks for with --ws-issuer.
    #[arg(long, value_name = "TEXT")]
    pub(crate) issuer: Option<String>,
    /// What the server asks for with --ws-audience.
    #[arg(long, value_name = "TEXT")]
    pub(crate) audience: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// read-only, workspace-write, workspace-write-network, full-access, or a policy file (*.toml).
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) policy: String,
    /// A directory that is the workspace of --policy; may be repeated.
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Vec<PathBuf>,
    /// Paths to explain; they need not exist.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
}
