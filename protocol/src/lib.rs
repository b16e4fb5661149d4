//! Every byte that crosses a process boundary.
//!
//! # How it works
//! Clients speak JSON-RPC ([`rpc`], [`method`] and one module a family of methods); the gateway and its helpers speak
//! frames ([`helper`]). This crate turns bytes into typed values and back. It opens nothing, asks the system nothing and
//! knows none of its callers.
#![forbid(unsafe_code)]

pub mod base64;
pub mod binary;
pub mod denial;
pub mod environment;
pub mod event;
pub mod fs;
pub mod helper;
pub mod http;
pub mod init;
pub mod limit;
pub mod logged;
pub mod method;
pub mod path;
pub mod process;
pub mod rpc;
pub mod sandbox;
mod scan;
pub mod signal;
pub mod uids;
