//! Why a call failed.

use portcullis_protocol::process::WriteStatus;
use portcullis_protocol::rpc::RpcError;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecServerError {
    /// The server was not reached.
    #[error("connect to {url}: {reason}")]
    Connect {
        /// Where.
        url: String,
        /// Why not.
        reason: String,
    },
    /// The server refused, or the operation failed there. What a policy denied is in its [`RpcError::denials`].
    #[error("{}", .0.message)]
    Server(RpcError),
    /// This client follows a process of that id.
    #[error("start process `{0}`: this client follows a process of that id already")]
    InUse(String),
    /// The link ended with a call on its way that changes nothing: it can be made again.
    #[error("exec-server transport disconnected: {0}")]
    Disconnected(String),
    /// The link ended with a change on its way: whether it was carried out is not known. It was not sent again.
    #[error("{method}: its outcome is not known: {reason}")]
    Lost {
        /// The call.
        method: String,
        /// How the link ended.
        reason: String,
    },
    /// The client came to its end: this is what ended it, the same for all later calls.
    #[error("{0}")]
    Failed(String),
    /// A handle that does not wait was used while the client comes back. Nothing was sent.
    #[error("exec-server environment is recovering")]
    Recovering,
    /// Too many calls wait for their answers. Nothing was sent.
    #[error("exec-server has reached its limit of {0} pending requests")]
    Limit(usize),
    /// The server answered what this client does not understand.
    #[error("the server's answer to {method} is not understood: {reason}")]
    Answer {
        /// The call.
        method: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The parameters cannot be written as JSON. Nothing was sent.
    #[error("{method}: its parameters cannot be written: {reason}")]
    Parameters {
        /// The call.
        method: String,
        /// Why not.
        reason: String,
    },
    /// A file handle ended with its connection. Open the file again; what was read before need not be what it holds then.
    #[error("{path}: its handle ended with the connection that opened it")]
    HandleLost {
        /// The file.
        path: String,
    },
    /// Standard input was not taken.
    #[error("write to process `{process}`: {}", words(*.status))]
    Input {
        /// The process.
        process: String,
        /// What became of the bytes.
        status: WriteStatus,
    },
    /// What happened to a process cannot be told to its end.
    #[error("process `{process}`: {reason}")]
    Process {
        /// The process.
        process: String,
        /// Why not.
        reason: String,
    },
    /// The body of an answer over HTTP broke off.
    #[error("http/request `{request}`: {reason}")]
    Body {
        /// The request's id.
        request: String,
        /// Why.
        reason: String,
    },
}

fn words(status: WriteStatus) -> &'static str {
    match status {
        WriteStatus::Accepted => "it was accepted",
        WriteStatus::UnknownProcess => "no such process",
        WriteStatus::StdinClosed => "it takes no input, or takes none any more",
        WriteStatus::Starting => "it does not run yet",
    }
}
