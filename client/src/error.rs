//! Why a call failed.

use portcullis_protocol::rpc::RpcError;

/// Why a call failed.
#[derive(Debug, Clone, thiserror::Error)]
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
    /// The link ended with the call on its way: whether it was carried out is not known.
    #[error("exec-server transport disconnected: {0}")]
    Disconnected(String),
    /// The server answered what this client does not understand.
    #[error("the server's answer to {method} is not understood: {reason}")]
    Answer {
        /// The call.
        method: String,
        /// What is wrong with it.
        reason: String,
    },
}
