//! A listener on a unix socket: whose connections are served.

use portcullis_tests::{Client, PATIENCE, Place, Program, Server, executable, portcullis, without};
use serde_json::{Value, json};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use tokio::process::Command;
use tokio::time::timeout;

/// Asks for an upgrade, and prints the status of the answer, or how connecting failed, or all of the answer.
const DIAL: &str = r#"
import errno, os, socket, sys
path, what = sys.argv[1], sys.argv[2]
try:
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
except OSError as error:
    print(errno.errorcode[error.errno])
    sys.exit()
s.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
          b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
got = b""
while b"\r\n" not in got or what == "all":
    more = s.recv(4096)
    if not more:
        break
    got += more
print(got.decode() if what == "all" else got.split(b"\r\n")[0].decode())
"#;

const SERVED: &str = "HTTP/1.1 101 Switching Protocols\n";
const REFUSED: &str = "HTTP/1.1 403 Forbidden\n";

fn url(place: &Place) -> String {
    format!("unix:{}", place.path("s").display())
}

async fn serve(place: &Place, arguments: &[&str]) -> Server {
    let url = url(place);
    let server = Server::with(portcullis(&[&["serve", "--listen", &url], arguments].concat())).await;
    assert_eq!(server.url, url);
    server
}

/// What a process of another user, or of this one, gets that the test started.
async fn outside(place: &Place, what: &str, uid: Option<u32>) -> String {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", DIAL, place.path("s").to_str().unwrap(), what]).current_dir("/").kill_on_drop(true);
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What a process gets that the server started.
async fn inside(client: &mut Client, place: &Place, id: &str, more: Value) -> String {
    let path = place.path("s").display().to_string();
    client.run(place, id, &["python3", "-c", DIAL, &path, "status"], more).await.output(None)
}

#[tokio::test]
async fn the_servers_own_user_is_served_without_a_token() {
    let place = Place::new();
    let mut server = serve(&place, &[]).await;
    let there = std::fs::symlink_metadata(place.path("s")).unwrap();
    assert!(there.file_type().is_socket());
    assert_eq!(there.permissions().mode() & 0o777, 0o600);
    let mut client = Client::connect(&server).await;
    place.put("file", "content");
    client.ok("fs/readFile", json!({"path": place.uri("file")})).await;
    // The same through the library and the program.
    let workspace = place.path("").display().to_string();
    let exec =
        portcullis(&["exec", "--url", &server.url, "--workspace", &workspace, "--policy", "read-only", "--", "cat", "file"]);
    let output = timeout(PATIENCE, { exec }.output()).await.unwrap().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"content"[..]), "{output:?}");
    server.program.signal(rustix::process::Signal::TERM);
    assert_eq!(server.program.wait().await, 0);
    assert!(!place.has("s"), "the socket goes with its server");
}

#[tokio::test]
async fn another_user_is_refused() {
    if !rustix::process::getuid().is_root() {
        // Only root can be somebody else; as an ordinary user the words of the refusal are checked where they are made.
        return;
    }
    let place = Place::new();
    place.mode("", 0o755);
    let _server = serve(&place, &[]).await;
    assert_eq!(outside(&place, "status", None).await, SERVED);
    assert_eq!(outside(&place, "status", Some(65_534)).await, "EACCES\n");
    // Also where somebody opened the socket to all.
    place.mode("s", 0o666);
    let answer = outside(&place, "all", Some(65_534)).await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("comes from user 65534"), "{answer}");
    assert_eq!(outside(&place, "status", None).await, SERVED);
}

#[tokio::test]
async fn nothing_that_the_server_started_gets_in_by_the_socket() {
    let managed = |place: &Place, network: &str, files: Value| {
        let permissions = json!({"type": "managed", "network": network, "file_system": files});
        json!({"cwd": place.uri(""), "windowsSandboxLevel": "disabled", "permissions": permissions})
    };
    let everything =
        json!({"type": "restricted", "entries": [{"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}]});
    for things in [&[][..], &["namespaces"]] {
        let place = Place::new();
        let arguments = ["serve", "--listen", &url(&place), "--allow-unprotected-metadata"];
        let server = Server::with(without(things, &executable("portcullis"), &arguments)).await;
        let mut client = Client::connect(&server).await;
        for (id, sandbox) in [
            ("off", managed(&place, "restricted", everything.clone())),
            ("on", managed(&place, "enabled", everything.clone())),
            ("off, all files", managed(&place, "restricted", json!({"type": "unrestricted"}))),
            ("on, writes", json!({"type": "workspace-write", "cwd": place.uri(""), "network_access": true})),
        ] {
            let got = inside(&mut client, &place, id, json!({"sandbox": sandbox})).await;
            // The family itself is refused.
            assert_eq!(got, "EPERM\n", "{things:?} {id}");
        }
        // Who is not confined reaches it and is told apart.
        assert_eq!(inside(&mut client, &place, "plain", json!({})).await, REFUSED, "{things:?}");
        assert_eq!(outside(&place, "status", None).await, SERVED, "{things:?}");
    }
}

#[tokio::test]
async fn no_sandbox_has_the_socket_in_its_view() {
    let place = Place::new();
    let server = serve(&place, &[]).await;
    let mut client = Client::connect(&server).await;
    let script = "test -S s && echo there; rm -f s; mv s moved; test -S s && echo still; true";
    let writes = json!({"sandbox": {"type": "workspace-write", "cwd": place.uri("")}});
    let events = client.run(&place, "confined", &["sh", "-c", script], writes).await;
    assert_eq!(events.output(Some("stdout")), "", "{}", events.output(None));
    assert_eq!(outside(&place, "status", None).await, SERVED);
    let refusal = client.refused("fs/getMetadata", json!({"path": place.uri("s"), "sandbox": {"type": "read-only"}})).await;
    assert!(refusal.message.contains("os error 13"), "{refusal:?}");
    client.ok("fs/getMetadata", json!({"path": place.uri("s")})).await;
    let events = client.run(&place, "plain", &["sh", "-c", script], json!({})).await;
    assert_eq!(events.output(Some("stdout")), "there\n");
}

#[tokio::test]
async fn a_refusal_over_the_socket_says_why() {
    let place = Place::new();
    let server = serve(&place, &[]).await;
    let mut client = Client::connect(&server).await;
    let path = place.path("s").display().to_string();
    let answer = client.run(&place, "p", &["python3", "-c", DIAL, &path, "all"], json!({})).await.output(None);
    assert!(answer.contains("which this gateway started itself"), "{answer}");
}

#[tokio::test]
async fn a_socket_left_behind_is_replaced_and_one_that_is_served_is_not() {
    let place = Place::new();
    let mut first = serve(&place, &[]).await;
    let mut second = Program::start(portcullis(&["serve", "--listen", &url(&place)]));
    assert_eq!(second.wait().await, 1);
    let stderr = second.stderr().await;
    let pid = first.program.child.id().unwrap();
    assert!(stderr.contains(&format!("process {pid} listens there already")), "{stderr}");
    assert_eq!(outside(&place, "status", None).await, SERVED);
    first.program.signal(rustix::process::Signal::KILL);
    first.program.wait().await;
    assert!(place.has("s"), "a killed server leaves it");
    assert_eq!(outside(&place, "status", None).await, "ECONNREFUSED\n");
    let _third = serve(&place, &[]).await;
    assert_eq!(outside(&place, "status", None).await, SERVED);
}

#[tokio::test]
async fn a_token_may_be_asked_for_in_addition() {
    let place = Place::new();
    let token = place.path("token");
    let server = serve(&place, &["--token-file", token.to_str().unwrap()]).await;
    let answer = outside(&place, "all", None).await;
    assert!(answer.starts_with("HTTP/1.1 401") && answer.contains(token.to_str().unwrap()), "{answer}");
    Client::connect_with_token(&server.url, &std::fs::read_to_string(&token).unwrap()).await.cut();
    for (arguments, words) in [
        (&["serve", "--insecure-no-auth", "--listen", &url(&place)][..], "would open nothing"),
        (&["serve", "--listen", "unix:s"], "with an absolute path"),
        (&["serve", "--listen", "unix:/no/such/directory/s"], "/no/such/directory"),
        (&["serve", "--listen", &format!("unix:/{}", "long/".repeat(30))], "listen on unix:/long"),
    ] {
        let mut refused = Program::start(portcullis(arguments));
        assert_eq!(refused.wait().await, 1, "{arguments:?}");
        let stderr = refused.stderr().await;
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    }
}
