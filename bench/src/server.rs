//! A server that is measured: one that runs already, or one that is started for it and ended after it.

use crate::Failure;
use crate::wire::Address;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// How to come to a server: `NAME=URL`, or `NAME=COMMAND` which prints its URL.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub(crate) name: String,
    place: Place,
}

#[derive(Debug, Clone)]
enum Place {
    Url(String),
    Command(Vec<String>),
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, place) = text.split_once('=').ok_or("NAME=URL or NAME=COMMAND is needed")?;
        let words: Vec<String> = place.split_whitespace().map(str::to_owned).collect();
        let place = match words.first() {
            Some(first) if first.starts_with("ws://") => Place::Url(first.clone()),
            Some(_) => Place::Command(words),
            None => return Err(format!("no URL and no command behind `{name}=`")),
        };
        Ok(Self { name: name.to_owned(), place })
    }
}

/// A server that listens.
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) address: Address,
    /// Its process id, if it was started here.
    pub(crate) pid: Option<u32>,
    child: Option<Child>,
}

impl Source {
    /// Whether it can be started here.
    pub(crate) fn is_command(&self) -> bool {
        matches!(self.place, Place::Command(_))
    }

    /// Bytes of the program on disk.
    pub(crate) fn program_bytes(&self) -> Option<u64> {
        let Place::Command(words) = &self.place else { return None };
        words.first().and_then(|program| Path::new(program).metadata().ok()).map(|metadata| metadata.len())
    }

    /// Comes to the server, and says how long it took to listen.
    pub(crate) fn open(&self, token: Option<String>) -> Result<(Server, Duration), Failure> {
        let name = self.name.clone();
        let words = match &self.place {
            Place::Url(url) => {
                let address = Address { url: url.clone(), token };
                return Ok((Server { name, address, pid: None, child: None }, Duration::ZERO));
            }
            Place::Command(words) => words,
        };
        let (program, arguments) = words.split_first().ok_or("no command")?;
        let begun = Instant::now();
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| format!("start {program}: {error}"))?;
        let pid = Some(child.id());
        let output = child.stdout.take().ok_or("no standard output")?;
        // From here on a failure ends it.
        let mut server = Server { name, address: Address { url: String::new(), token }, pid, child: Some(child) };
        for line in BufReader::new(output).lines() {
            if let Some(at) = line.as_ref().ok().and_then(|line| line.find("ws://")) {
                let line = line?;
                server.address.url = line[at..].split_whitespace().next().unwrap_or_default().to_owned();
                return Ok((server, begun.elapsed()));
            }
        }
        Err(format!("{program} ended, or closed its standard output, before it said a URL").into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Its helpers end with it.
            let _ended = child.kill();
            let _status = child.wait();
        }
    }
}
