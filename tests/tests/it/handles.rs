//! File handles.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use portcullis_tests::{Client, Place, Server};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;

async fn set_up() -> (Server, Client, Place) {
    let server = Server::start().await;
    let client = Client::connect(&server).await;
    (server, client, Place::new())
}

async fn block(client: &mut Client, offset: u64, length: u64) -> (Vec<u8>, bool) {
    let got = client.ok("fs/readBlock", json!({"handleId": "h", "offset": offset, "len": length})).await;
    (STANDARD.decode(got["chunk"].as_str().unwrap()).unwrap(), got["eof"].as_bool().unwrap())
}

#[tokio::test]
async fn blocks_are_read_anywhere_even_after_the_file_is_gone() {
    let (_server, mut client, place) = set_up().await;
    let uri = place.put("f", "0123456789");
    assert_eq!(client.ok("fs/open", json!({"handleId": "h", "path": uri})).await, json!({"handleId": "h"}));
    for (offset, length, bytes, eof) in
        [(0, 4, &b"0123"[..], false), (8, 4, b"89", true), (10, 4, b"", true), (0, 10, b"0123456789", false), (99, 1, b"", true)]
    {
        assert_eq!(block(&mut client, offset, length).await, (bytes.to_vec(), eof), "{offset} {length}");
    }
    std::fs::remove_file(place.path("f")).unwrap();
    assert_eq!(block(&mut client, 0, 2).await.0, b"01");
    client.ok("fs/close", json!({"handleId": "h"})).await;
    client.ok("fs/close", json!({"handleId": "h"})).await;
    let refusal = client.refused("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 1})).await;
    assert_eq!((refusal.code, refusal.message.as_str()), (-32004, "unknown file handle `h`"));
}

#[tokio::test]
async fn a_block_may_be_asked_for_before_its_open_is_answered() {
    let (_server, mut client, place) = set_up().await;
    let uri = place.put("f", "content");
    let open = client.begin("fs/open", json!({"handleId": "h", "path": uri})).await;
    let read = client.begin("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 7})).await;
    let missing = client.begin("fs/open", json!({"handleId": "m", "path": place.uri("nope")})).await;
    let lost = client.begin("fs/readBlock", json!({"handleId": "m", "offset": 0, "len": 7})).await;
    client.answer(open).await.unwrap();
    assert_eq!(client.answer(read).await.unwrap()["chunk"], json!(STANDARD.encode("content")));
    assert_eq!(client.answer(missing).await.unwrap_err().code, -32004);
    assert_eq!(client.answer(lost).await.unwrap_err().code, -32004);
}

#[tokio::test]
async fn blocks_are_written_in_place_through_links() {
    let (_server, mut client, place) = set_up().await;
    place.put("f", "old content");
    let uri = place.link("link", "f");
    client.ok("fs/open", json!({"handleId": "h", "path": uri, "mode": "replace"})).await;
    assert_eq!(place.content("f"), "", "truncated at open");
    client.ok("fs/writeBlock", json!({"handleId": "h", "offset": 2, "chunk": STANDARD.encode("N")})).await;
    assert_eq!(place.content("f"), "\0\0N");
    let refusal = client.refused("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 1})).await;
    assert!(refusal.code == -32603 && refusal.message.contains("Bad file descriptor"), "{refusal:?}");
}

#[tokio::test]
async fn bounds_and_errors() {
    let (_server, mut client, place) = set_up().await;
    let uri = place.put("f", "x");
    let params = |more: Value| {
        let mut params = json!({"handleId": "h", "offset": 0});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    };
    client.ok("fs/open", json!({"handleId": "h", "path": uri})).await;
    assert_eq!(
        client.refused("fs/open", json!({"handleId": "h", "path": "file:///no/such"})).await.message,
        "file handle `h` already exists"
    );
    for length in [0_u64, (1 << 20) + 1] {
        assert_eq!(client.refused("fs/readBlock", params(json!({"len": length}))).await.code, -32600);
    }
    assert_eq!(client.refused("fs/writeBlock", params(json!({"chunk": ""}))).await.code, -32600);
    assert_eq!(client.refused("fs/writeBlock", params(json!({"chunk": "!"}))).await.code, -32602);
    let beyond = json!({"handleId": "h", "offset": u64::MAX / 2 + 1, "len": 4});
    assert_eq!(client.refused("fs/readBlock", beyond).await.code, -32600, "EINVAL");
    assert_eq!(client.refused("fs/readBlock", params(json!({"len": 1}))).await.code, -32004, "an error drops the handle");
    for (path, code) in [(place.uri(""), -32600), (place.uri("nope"), -32004)] {
        assert_eq!(client.refused("fs/open", json!({"handleId": "x", "path": path})).await.code, code);
    }
    assert_eq!(client.refused("fs/open", json!({"handleId": "x", "path": place.uri(""), "mode": "replace"})).await.code, -32603);
    assert_eq!(client.refused("fs/open", json!({"handleId": "x".repeat(33), "path": place.uri("f")})).await.code, -32602);
}

#[tokio::test]
async fn handles_belong_to_their_connection() {
    let (server, mut client, place) = set_up().await;
    let uri = place.put("f", "x");
    client.ok("fs/open", json!({"handleId": "h", "path": uri})).await;
    let read = json!({"handleId": "h", "offset": 0, "len": 1});
    let mut other = Client::connect(&server).await;
    assert_eq!(other.refused("fs/readBlock", read.clone()).await.code, -32004);
    let session = client.session.clone();
    client.cut();
    let mut resumed = Client::resume(&server, &session).await;
    assert_eq!(resumed.refused("fs/readBlock", read).await.code, -32004);
}

#[tokio::test]
async fn a_written_block_takes_set_id_bits_away() {
    let (_server, mut client, place) = set_up().await;
    let uri = place.put("f", "");
    let sandbox = json!({"type": "workspace-write", "cwd": place.uri("")});
    client.ok("fs/open", json!({"handleId": "h", "path": uri, "mode": "replace", "sandbox": sandbox})).await;
    place.mode("f", 0o6755);
    // The control: the bits stay until something is written.
    client.ok("environment/status", json!({})).await;
    assert_eq!(mode(&place), 0o6755);
    client.ok("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": STANDARD.encode("#!/bin/sh")})).await;
    assert_eq!(mode(&place), 0o755);
}

fn mode(place: &Place) -> u32 {
    std::fs::metadata(place.path("f")).unwrap().permissions().mode() & 0o7777
}
