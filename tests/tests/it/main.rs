//! Integration tests: the real program over real sockets on the real kernel, one module a situation.

#![expect(clippy::unwrap_used, reason = "what fails in a test shall end it")]

mod audit;
mod bounds;
mod ceiling;
mod client;
mod credential;
mod degraded;
mod denials;
mod embed;
mod exec;
mod extras;
mod files;
mod fuzz;
mod handles;
mod handshake;
mod held_up;
mod helpers_die;
mod http;
mod jobs;
mod limits;
mod listener;
mod listener_peers;
mod logs;
mod messages;
mod metrics;
mod nested;
mod operations;
mod order;
mod output;
mod policies;
mod processes;
mod races;
mod remote;
mod sandboxed_files;
mod sandboxed_processes;
mod scopes;
mod sessions;
mod shared_sessions;
mod stdio;
mod threats;
mod tidy;
mod tls;
mod trees;
mod unix_socket;
mod watch;
