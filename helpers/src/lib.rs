//! The hidden roles that the one executable plays.
//!
//! # How it works
//! A program that embeds Portcullis calls [`dispatch`] first thing in its `main`. An ordinary start passes through. A
//! hidden start ([`portcullis_protocol::helper::HIDDEN_FLAG`]) becomes one of two roles and never returns to `main`'s
//! other work:
//!
//! * the **spawner**, one single-threaded process, parent and subreaper of everything that is started. Its socket to the
//!   gateway is its lifeline: when it closes, everything below the spawner is killed. Above it is a **warden**, which ends what a
//!   killed spawner leaves. For each process it forks a
//!   **keeper**, which in a sandbox is its init, and that a **launcher**, which confines itself, and only then decodes the
//!   client's command and executes it. The keeper stays until nothing is left of what came of the process;
//! * a **worker**, which carries out `fs/*` requests. It is confined before it reads the first one, and judges every path
//!   by the policy before it touches it; the kernel is the backstop. Where the machine gives namespaces it lives in a view of
//!   mounts of its own, which covers what the policy denies or protects.
#![deny(unsafe_code)]

mod cgroup;
mod children;
mod closing;
mod cover;
mod dispatch;
mod frames;
mod fs;
mod init;
mod keeper;
mod launch;
mod limit;
mod pending;
mod probe;
mod program;
mod removal;
mod remover;
mod spare;
mod spawner;
mod sys;
mod tether;
mod told;
mod tree;
mod uids;
mod walk;
mod warden;
mod worker;

pub use dispatch::dispatch;
