//! How to reach a server, and how long to try.

use crate::tls::Tls;
use std::fmt;
use std::time::Duration;

/// How to reach a server, and how long to try. [`Self::new`] has the defaults; the fields can be changed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExecServerClientConnectOptions {
    /// Where: `ws://HOST:PORT`, `wss://HOST:PORT` or `unix:PATH`.
    pub url: String,
    /// An environment that an executor serves through a rendezvous, instead of a URL.
    pub remote: Option<RemoteExecServerConnectArgs>,
    /// With `remote`: the account that its token is for, sent as `ChatGPT-Account-ID`.
    pub account: Option<String>,
    /// Who calls; any text.
    pub client_name: String,
    /// What the server asks of its clients, if it asks: sent as `Authorization: Bearer TOKEN`, also on the way back after a cut.
    pub token: Option<Token>,
    /// Whom to believe at `wss://`, and what to show there. None: nobody, and such a URL is not dialled.
    pub tls: Option<Tls>,
    /// Come back after a cut; true. Without it the end of the link is the end of the client.
    pub reconnect: bool,
    /// How long one recovery may take, from the cut until everything was caught up; 45 s. A server keeps a session for longer.
    pub recovery_deadline: Duration,
    /// How long a server may take to accept one connection; 10 s.
    pub connect_timeout: Duration,
    /// How long a server may take to answer `initialize`, and then each read of what was missed; 10 s.
    pub initialize_timeout: Duration,
    /// After how much silence of the server the link counts as cut; 45 s. It is asked for a sign of life after a third of that.
    /// None waits for ever.
    pub silence_timeout: Option<Duration>,
    /// Ask the server to keep file handles over a cut; false. Without it, or from a server that cannot, they end with their link.
    pub keep_handles: bool,
    /// Take a session in [`crate::ExecServerClient::resume`] although another connection is attached; false. Recoveries always do
    /// where the server can: what they find attached is their own old link.
    pub take_over: bool,
    /// How long the server is to keep the session without a connection, as far as the operator allows. None: its default.
    pub retention: Option<Duration>,
}

/// Where an environment is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteExecServerConnectArgs {
    /// The registry, `https://HOST`, or `http://` on loopback.
    pub base_url: String,
    /// The environment.
    pub environment_id: String,
    /// What the registry asks of harnesses.
    pub token: Token,
}

/// A secret that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// This one.
    #[must_use]
    pub fn new(token: impl Into<String>) -> Self {
        Self(token.into())
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl ExecServerClientConnectOptions {
    /// The defaults, for an environment behind a rendezvous. Each attempt to connect asks its registry anew.
    #[must_use]
    pub fn remote(remote: RemoteExecServerConnectArgs, client_name: impl Into<String>) -> Self {
        let url = remote.base_url.clone();
        Self { remote: Some(remote), ..Self::new(url, client_name) }
    }

    /// The defaults.
    #[must_use]
    pub fn new(url: impl Into<String>, client_name: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            remote: None,
            account: None,
            client_name: client_name.into(),
            token: None,
            tls: None,
            reconnect: true,
            recovery_deadline: Duration::from_secs(45),
            connect_timeout: Duration::from_secs(10),
            initialize_timeout: Duration::from_secs(10),
            silence_timeout: Some(Duration::from_secs(45)),
            keep_handles: false,
            take_over: false,
            retention: None,
        }
    }
}
