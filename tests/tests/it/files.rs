//! fs/* without a sandbox: what an operation does, and how it fails.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use portcullis_tests::{Client, Place, Server};
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt as _;

async fn set_up() -> (Server, Client, Place) {
    let server = Server::start().await;
    let client = Client::connect(&server).await;
    (server, client, Place::new())
}

fn base64(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

#[track_caller]
fn check(refusal: &portcullis_tests::Refusal, code: i64, text: &str) {
    assert_eq!(refusal.code, code, "{refusal:?}");
    assert!(refusal.message.contains(text), "{refusal:?}");
}

fn fifo(place: &Place, name: &str) {
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, place.path(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

#[tokio::test]
async fn files_of_every_size_are_read_whole() {
    let (_server, mut client, place) = set_up().await;
    for size in [0, 1, 65_535, 65_536, 65_537, 3_000_000] {
        let bytes: Vec<u8> = (0..size).map(|nth: u32| nth.to_le_bytes()[0]).collect();
        let uri = place.put("f", &bytes);
        assert_eq!(client.ok("fs/readFile", json!({"path": uri})).await, json!({"dataBase64": base64(&bytes)}), "{size}");
    }
    let status = client.ok("fs/readFile", json!({"path": "file:///proc/self/status"})).await;
    assert!(STANDARD.decode(status["dataBase64"].as_str().unwrap()).unwrap().starts_with(b"Name:"), "files without a size");
}

#[tokio::test]
async fn the_gateway_itself_opens_nothing() {
    let (server, mut client, _place) = set_up().await;
    let gateway = format!("Pid:\t{}\n", server.program.child.id().unwrap());
    // Whoever opens this reads of himself.
    let path = "file:///proc/self/status";
    let read = client.ok("fs/readFile", json!({"path": path})).await["dataBase64"].as_str().unwrap().to_owned();
    client.ok("fs/open", json!({"handleId": "h", "path": path})).await;
    let block =
        client.ok("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 4096})).await["chunk"].as_str().unwrap().to_owned();
    for content in [read, block] {
        let content = String::from_utf8(STANDARD.decode(content).unwrap()).unwrap();
        assert!(content.contains("Pid:\t") && !content.contains(&gateway), "{content}");
    }
    // The control: the gateway's own is another file, and says so.
    let own =
        client.ok("fs/readFile", json!({"path": format!("file:///proc/{}/status", server.program.child.id().unwrap())})).await;
    assert!(String::from_utf8(STANDARD.decode(own["dataBase64"].as_str().unwrap()).unwrap()).unwrap().contains(&gateway));
}

#[tokio::test]
async fn only_regular_files_are_read_and_nothing_hangs() {
    let (_server, mut client, place) = set_up().await;
    place.directory("d");
    fifo(&place, "pipe");
    place.link("loop", "loop");
    for path in [place.uri("d"), place.uri("pipe"), "file:///dev/null".to_owned()] {
        check(&client.refused("fs/readFile", json!({"path": path})).await, -32600, "is not a file");
    }
    check(
        &client.refused("fs/readFile", json!({"path": place.uri("nope")})).await,
        -32004,
        "No such file or directory (os error 2)",
    );
    check(&client.refused("fs/readFile", json!({"path": place.uri("loop")})).await, -32603, "(os error 40)");
    check(
        &client.refused("fs/writeFile", json!({"path": place.uri("pipe"), "dataBase64": base64("x")})).await,
        -32600,
        "is not a file",
    );
}

#[tokio::test]
async fn an_error_says_what_was_attempted_on_what() {
    let (_server, mut client, place) = set_up().await;
    let refusal = client.refused("fs/readFile", json!({"path": place.uri("nope")})).await;
    assert_eq!(refusal.message, format!("fs/readFile {}: No such file or directory (os error 2)", place.path("nope").display()));
}

#[tokio::test]
async fn what_was_sent_is_written_whatever_its_size_and_however_it_is_spelt() {
    let (_server, mut client, place) = set_up().await;
    // Around what is read apart from its message, and what goes through the worker's socket.
    for size in [0, 1, 3_071, 3_072, 65_536, 65_537, 1 << 20, (1 << 20) + 1, 3_000_000] {
        let bytes: Vec<u8> = (0..size).map(|nth: u32| (nth / 7).to_le_bytes()[0]).collect();
        client.ok("fs/writeFile", json!({"path": place.uri("f"), "dataBase64": base64(&bytes)})).await;
        assert_eq!(std::fs::read(place.path("f")).unwrap(), bytes, "{size}");
        // The same, in JSON that is not read in one pass.
        let text = base64(&bytes).replace('A', "\\u0041");
        let (id, path) = (i64::from(size), place.uri("g"));
        let message = format!(r#"{{"id":{id},"method":"fs/writeFile","params":{{"path":"{path}","dataBase64":"{text}"}}}}"#);
        client.send_text(&message).await;
        assert_eq!(client.answer(id).await.unwrap(), json!({}));
        assert_eq!(std::fs::read(place.path("g")).unwrap(), bytes, "{size}");
    }
}

#[tokio::test]
async fn writing_keeps_the_inode_and_follows_links() {
    let (_server, mut client, place) = set_up().await;
    place.put("f", "old content");
    place.link("link", "f");
    place.link("dangling", "made");
    let inode = place.path("f").metadata().unwrap().ino();
    assert_eq!(client.ok("fs/writeFile", json!({"path": place.uri("f"), "dataBase64": base64("new")})).await, json!({}));
    client.ok("fs/writeFile", json!({"path": place.uri("link"), "dataBase64": base64("via link")})).await;
    client.ok("fs/writeFile", json!({"path": place.uri("dangling"), "dataBase64": base64("made")})).await;
    assert_eq!((place.content("f").as_str(), place.content("made").as_str()), ("via link", "made"));
    assert_eq!(place.path("f").metadata().unwrap().ino(), inode);
    let large = vec![b'q'; 8 << 20];
    client.ok("fs/writeFile", json!({"path": place.uri("large"), "dataBase64": base64(&large)})).await;
    assert_eq!(std::fs::read(place.path("large")).unwrap(), large);
}

#[tokio::test]
async fn a_refused_write_leaves_nothing_behind() {
    let (_server, mut client, place) = set_up().await;
    place.put("f", "old");
    let bad = client.refused("fs/writeFile", json!({"path": place.uri("f"), "dataBase64": "!!"})).await;
    check(&bad, -32600, "fs/writeFile requires valid base64 dataBase64: Invalid symbol 33, offset 0.");
    check(&client.refused("fs/writeFile", json!({"path": place.uri("no/f"), "dataBase64": ""})).await, -32004, "(os error 2)");
    check(&client.refused("fs/writeFile", json!({"path": place.uri(""), "dataBase64": ""})).await, -32603, "Is a directory");
    place.link("link", "f");
    let no_follow = json!({"path": place.uri("link"), "dataBase64": "", "followSymlinks": false});
    check(&client.refused("fs/writeFile", no_follow).await, -32603, "(os error 40)");
    assert_eq!(place.content("f"), "old");
    assert!(!place.has("no"));
}

#[tokio::test]
async fn directories_are_made_listed_and_removed() {
    let (_server, mut client, place) = set_up().await;
    client.ok("fs/createDirectory", json!({"path": place.uri("a/b")})).await;
    client.ok("fs/createDirectory", json!({"path": place.uri("a/b")})).await;
    check(
        &client.refused("fs/createDirectory", json!({"path": place.uri("a"), "recursive": false})).await,
        -32603,
        "File exists",
    );
    check(
        &client.refused("fs/createDirectory", json!({"path": place.uri("x/y"), "recursive": false})).await,
        -32004,
        "(os error 2)",
    );
    place.put("a/f", "");
    place.link("a/to-b", "b");
    place.link("a/dangling", "nowhere");
    let listed = client.ok("fs/readDirectory", json!({"path": place.uri("a")})).await;
    let mut entries = listed["entries"].as_array().unwrap().clone();
    entries.sort_by_key(|entry| entry["fileName"].to_string());
    let entry = |name: &str, is_directory: bool| json!({"fileName": name, "isDirectory": is_directory, "isFile": !is_directory});
    assert_eq!(entries, [entry("b", true), entry("f", false), entry("to-b", true)]);
    check(&client.refused("fs/remove", json!({"path": place.uri("a"), "recursive": false})).await, -32603, "Directory not empty");
    place.put("kept/x", "x");
    place.link("a/to-kept", place.path("kept"));
    client.ok("fs/remove", json!({"path": place.uri("a")})).await;
    assert!(!place.has("a") && place.has("kept/x"), "the link goes, its target stays");
    client.ok("fs/remove", json!({"path": place.uri("a")})).await;
    check(&client.refused("fs/remove", json!({"path": place.uri("a"), "force": false})).await, -32004, "(os error 2)");
}

#[tokio::test]
async fn copies_keep_modes_and_links_and_never_destroy() {
    let (_server, mut client, place) = set_up().await;
    let copy = |from: &str, to: &str, recursive: bool| json!({"sourcePath": place.uri(from), "destinationPath": place.uri(to), "recursive": recursive});
    place.put("f", "data");
    place.mode("f", 0o751);
    place.put("old", "longer than data");
    client.ok("fs/copy", copy("f", "old", false)).await;
    assert_eq!((place.content("old"), place.path("old").metadata().unwrap().mode() & 0o777), ("data".to_owned(), 0o751));
    client.ok("fs/copy", copy("f", "f", false)).await;
    assert_eq!(place.content("f"), "data", "a file copied onto itself keeps its content");
    place.put("d/sub/x", "x");
    place.link("d/link", "sub/x");
    fifo(&place, "d/pipe");
    check(&client.refused("fs/copy", copy("d", "e", false)).await, -32600, "requires recursive: true");
    client.ok("fs/copy", copy("d", "e", true)).await;
    assert_eq!(std::fs::read_link(place.path("e/link")).unwrap().to_str(), Some("sub/x"));
    assert!(place.has("e/sub/x") && !place.has("e/pipe"));
    for into in ["d", "d/in", "d/sub/deep"] {
        check(
            &client.refused("fs/copy", copy("d", into, true)).await,
            -32600,
            "cannot copy a directory to itself or one of its descendants",
        );
    }
    check(&client.refused("fs/copy", copy("d/pipe", "z", false)).await, -32600, "only supports regular files");
    check(&client.refused("fs/copy", copy("f", "d", false)).await, -32603, "Is a directory");
    check(&client.refused("fs/copy", copy("d", "f", true)).await, -32603, "File exists");
}

#[tokio::test]
async fn metadata_and_names() {
    let (_server, mut client, place) = set_up().await;
    place.put("f", "12345");
    place.link("link", "f");
    let facts = |value: &Value| {
        (value["isFile"].clone(), value["isDirectory"].clone(), value["isSymlink"].clone(), value["size"].clone())
    };
    let found = client.ok("fs/getMetadata", json!({"path": place.uri("link")})).await;
    assert_eq!(facts(&found), (json!(true), json!(false), json!(true), json!(5)));
    assert_eq!(found["createdAtMs"], 0);
    check(
        &client.refused("fs/getMetadata", json!({"path": place.uri("link"), "followSymlinks": false})).await,
        -32600,
        "symbolic link",
    );
    check(&client.refused("fs/getMetadata", json!({"path": format!("{}/x", place.uri("f"))})).await, -32603, "Not a directory");
    assert_eq!(client.ok("fs/canonicalize", json!({"path": place.uri("link")})).await, json!({"path": place.uri("f")}));
    assert_eq!(
        client.ok("fs/canonicalize", json!({"path": place.path("link")})).await,
        json!({"path": place.uri("f")}),
        "native paths"
    );
    for (bad, code) in
        [("a.txt", -32602), ("http://x/y", -32602), ("file:///a?x", -32602), ("file://host/x", -32600), ("file:///C:/x", -32600)]
    {
        assert_eq!(client.refused("fs/getMetadata", json!({"path": bad})).await.code, code, "{bad}");
    }
}

#[tokio::test]
async fn a_walk_is_breadth_first_bounded_and_sorted() {
    let (_server, mut client, place) = set_up().await;
    for file in ["w/a", "w/d/x", "w/d/sub/y", "w/.hid/h"] {
        place.put(file, "");
    }
    place.link("w/link", "d");
    let walk = |more: Value| {
        let mut options = json!({"maxDepth": 5, "maxDirectories": 100, "maxEntries": 100, "followDirectorySymlinks": false});
        options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"path": place.uri("w"), "options": options})
    };
    let names = |result: &Value| -> Vec<String> {
        let root = place.uri("w") + "/";
        result["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["path"].as_str().unwrap()[root.len()..].to_owned())
            .collect()
    };
    let whole = client.ok("fs/walk", walk(json!({}))).await;
    assert_eq!(names(&whole), [".hid", "a", "d", ".hid/h", "d/sub", "d/x", "d/sub/y"]);
    assert_eq!((&whole["errors"], &whole["truncated"]), (&json!([]), &json!(false)));
    assert_eq!(names(&client.ok("fs/walk", walk(json!({"maxDepth": 0}))).await), [".hid", "a", "d"]);
    let pruned = client.ok("fs/walk", walk(json!({"pruneHiddenDirectories": true}))).await;
    assert!(names(&pruned).contains(&".hid".to_owned()) && !names(&pruned).contains(&".hid/h".to_owned()));
    let cut = client.ok("fs/walk", walk(json!({"maxEntries": 2}))).await;
    assert_eq!((names(&cut).len(), &cut["truncated"]), (2, &json!(true)));
    for zero in [json!({"maxEntries": 0}), json!({"maxDirectories": 0}), json!({"maxDepth": 65})] {
        assert_eq!(client.refused("fs/walk", walk(zero)).await.code, -32600);
    }
}
