//! File calls while another program has used up the user's descriptors in flight.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use portcullis_tests::{Client, Place, Server, executable};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
};
use rustix::process::getuid;
use serde_json::{Value, json};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use tokio::process::Command;

/// Descriptors that the server and its helpers may have, and so the sum of the user's in flight above which they may send none.
const LIMIT: usize = 256;

/// Sends descriptors that are never received; they are in flight until this value is dropped.
fn hold(count: usize) -> Vec<[OwnedFd; 2]> {
    const AT_ONCE: usize = 250;
    (0..count.div_ceil(AT_ONCE))
        .map(|_| {
            let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = [here.as_fd(); AT_ONCE];
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(&here, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
            [here, there]
        })
        .collect()
}

#[tokio::test]
async fn used_up_descriptors_in_flight_fail_large_calls_alone() {
    let place = Place::new();
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={LIMIT}:{LIMIT}")).arg(executable("portcullis")).args(["serve", "--insecure-no-auth"]);
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command.kill_on_drop(true);
    let server = Server::with(command).await;
    let mut client = Client::connect(&server).await;
    let sandbox = json!({"type": "workspace-write", "cwd": place.uri("")});
    let (middle, large) = (vec![b'm'; 500_000], vec![b'l'; 3_000_000]);
    let [middle_uri, large_uri] = [place.put("middle", &middle), place.put("large", &large)];
    let made = place.uri("made");
    let read = |uri: &str| json!({"path": uri, "sandbox": sandbox});
    let write = |content: &[u8]| json!({"path": made, "dataBase64": STANDARD.encode(content), "sandbox": sandbox});
    let open = json!({"handleId": "h", "path": middle_uri, "sandbox": sandbox});
    // The worker is there, and so is the control.
    assert_eq!(client.ok("fs/readFile", read(&large_uri)).await["dataBase64"], json!(STANDARD.encode(&large)));
    let held = hold(4 * LIMIT);
    for _again in 0..3 {
        assert_eq!(client.ok("fs/readFile", read(&middle_uri)).await["dataBase64"], json!(STANDARD.encode(&middle)));
        for (method, params) in [("fs/readFile", read(&large_uri)), ("fs/open", open.clone())] {
            let refusal = client.refused(method, params).await;
            assert!(refusal.message.contains("ETOOMANYREFS") && refusal.message.contains("at most 1048576 bytes"), "{refusal:?}");
        }
        client.ok("fs/writeFile", write(&middle)).await;
        let written = client.call("fs/writeFile", write(&large)).await;
        if getuid().is_root() {
            eprintln!("the gateway of root may pass descriptors always (CAP_SYS_RESOURCE), so that its half is not tried");
            assert!(written.is_ok(), "{written:?}");
        } else {
            let refusal = written.unwrap_err();
            assert!(refusal.message.contains("ETOOMANYREFS"), "{refusal:?}");
            assert_eq!(place.content("made").len(), middle.len(), "nothing was done");
        }
    }
    drop(held);
    // Descriptors that were never received are closed with their sockets.
    let all: [(&str, Value); 3] = [("fs/readFile", read(&large_uri)), ("fs/open", open), ("fs/writeFile", write(&large))];
    for (method, params) in all {
        client.ok(method, params).await;
    }
}
