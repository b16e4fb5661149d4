//! What a policy means, and how the kernel is told.
//!
//! # How it works
//! [`resolve`] turns a client's sandbox object, or a [`mod@file`], and this machine into a [`policy::Policy`]: absolute paths with
//! what they give, patterns that are denied, and whether there is a network. Its bytes go to a helper. The helper opens the
//! policy's paths ([`roots`]), then [`enforce`] gives up what the process must not have, in one fixed order: for processes,
//! where they can be had, namespaces and a view ([`mounts`]) first; limits, capabilities, no_new_privs, Landlock, seccomp. What the policy asks and these layers cannot give is a [`report::Gap`] and a refusal. A
//! worker that carries out file requests also decides each of them by [`compiled::Compiled`], since Landlock can grant but not
//! take away; the kernel stands behind that decision, but for what lies below a writable root.
#![deny(unsafe_code)]

pub mod casefold;
pub mod compiled;
pub mod core_handler;
pub mod enforce;
pub mod explain;
pub mod file;
pub mod first;
pub mod gitfile;
mod glob;
pub mod kernel_files;
mod landlock;
mod limits;
pub mod mounts;
pub mod namespaces;
pub mod observe;
pub mod policy;
mod remedy;
pub mod report;
pub mod resolve;
pub mod roots;
mod seccomp;
pub mod survey;
mod sys;
mod tree;
