//! Is this start a hidden one?

use crate::{sys, warden, worker};
use portcullis_protocol::helper::{BUILD, CONTROL_DESCRIPTOR, EXIT_BY_HAND, HIDDEN_FLAG, Role};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use std::ffi::OsStr;
use std::fmt;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

/// Plays a hidden role if this start asks for one. To be called first thing in `main`, before threads, runtimes and
/// anything that opens descriptors; on `Some` the program ends with that code.
#[must_use]
pub fn dispatch() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != HIDDEN_FLAG {
        return None;
    }
    let role = arguments.next().and_then(|name| Role::from_name(name.to_str()?));
    let build = arguments.next();
    Some(match role {
        None => refuse("this is no role of its helpers"),
        Some(_) if build.as_deref() != Some(OsStr::new(BUILD)) => refuse("this helper is of another build than its starter"),
        Some(Role::Spawner) => match socket(0) {
            Some(socket) => warden::run(socket),
            None => refuse("its standard input is not the socket of a gateway"),
        },
        Some(Role::Worker) => match (socket(0), socket(CONTROL_DESCRIPTOR)) {
            (Some(requests), Some(control)) => worker::run(requests, control),
            _missing => refuse("it lacks the sockets of a gateway"),
        },
    })
}

/// Takes a descriptor that must be a stream socket of this machine; anything else is a start by hand.
fn socket(number: i32) -> Option<OwnedFd> {
    let socket = sys::take(number)?;
    let fits = socket_domain(&socket) == Ok(AddressFamily::UNIX) && socket_type(&socket) == Ok(SocketType::STREAM);
    fits.then_some(socket)
}

fn refuse(reason: &str) -> ExitCode {
    complain(format_args!("a hidden helper role, started by the gateway and never by people: {reason}"));
    ExitCode::from(u8::try_from(EXIT_BY_HAND).unwrap_or(u8::MAX))
}

/// One line on standard error, the only place where a helper may say something that is not an answer. A path in it may have been chosen by
/// any user of the machine: control characters are escaped.
pub(crate) fn complain(text: impl fmt::Display) {
    // Standard error may be closed, and then nothing can be told.
    let _unheard = writeln!(std::io::stderr(), "portcullis helper: {}", one_line(&text.to_string()));
}

fn one_line(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, character| {
        if character.is_control() {
            line.extend(character.escape_default())
        } else {
            line.push(character)
        }
        line
    })
}

/// Moves a control socket away from the standard descriptors and leaves `/dev/null` there, so that nothing that prints by
/// mistake can write into a stream of frames.
pub(crate) fn clear_standard(socket: OwnedFd) -> rustix::io::Result<OwnedFd> {
    let kept = rustix::io::fcntl_dupfd_cloexec(&socket, 3)?;
    let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    // The value still names descriptor 0, which is `/dev/null` now and stays open.
    std::mem::forget(socket);
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_without_control_characters() {
        assert_eq!(one_line("`/a\n\u{1b}]0;b\u{7}\u{9b}`: \u{e4} \\n"), "`/a\\n\\u{1b}]0;b\\u{7}\\u{9b}`: \u{e4} \\n");
    }
}
