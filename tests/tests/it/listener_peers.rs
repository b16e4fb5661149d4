//! Who may not connect: what the gateway itself has started, once something confined among it has the network.

use portcullis_tests::{Client, PATIENCE, Place, Server};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

/// Dials the gateway in one of several ways and prints the status of its answer.
const DIAL: &str = r#"
import array, os, socket, subprocess, sys
way, port = sys.argv[1], int(sys.argv[2])

def dial(source=None):
    s = socket.create_connection(("127.0.0.1", port), 60, source)
    s.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
              b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
    return s

def status(s):
    got = b""
    while b"\r\n" not in got:
        got += s.recv(4096) or b"cut\r\n"
    print(got.split(b"\r\n")[0].decode(), flush=True)

if way == "itself":
    status(dial())
elif way == "other-address":
    status(dial(("127.0.0.2", 0)))
elif way == "grandchild":
    subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])",
                    sys.executable, "-c", sys.argv[3], "itself", str(port), ""], check=True)
elif way == "daemon":
    # Its input ends after the gateway has heard of the end of its parent.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.read(0, 1)
            status(dial())
    os._exit(0)
elif way == "between":
    # Nobody has the socket while it lies in the queue of the pair.
    s = socket.create_connection(("127.0.0.1", port), 60)
    one, other = socket.socketpair()
    other.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [s.fileno()]))])
    dup = s.detach()
    pid = os.fork()
    if pid == 0:
        os.write(dup, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                      b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
        os._exit(0)
    os.close(dup)
    os.waitpid(pid, 0)
    data, rights, _, _ = one.recvmsg(1, socket.CMSG_SPACE(4))
    back = socket.socket(fileno=array.array("i", rights[0][2])[0])
    back.settimeout(60)
    status(back)
"#;

const WAYS: [&str; 5] = ["itself", "other-address", "grandchild", "daemon", "between"];

/// Files can be read, and the network is on.
fn networked(place: &Place) -> Value {
    json!({"cwd": place.uri(""), "windowsSandboxLevel": "disabled", "permissions": {"type": "managed", "network": "enabled",
        "file_system": {"type": "restricted", "entries": [
            {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}]}}})
}

fn port(server: &Server) -> String {
    server.url.rsplit_once(':').unwrap().1.to_owned()
}

/// What a process of the gateway's gets that dials it.
async fn inside(client: &mut Client, server: &Server, place: &Place, way: &str, more: Value) -> String {
    let id = format!("{way}-{}", more.get("sandbox").is_some());
    let port = port(server);
    let mut with_input = more;
    // Only then does its input end with its first process and not at once.
    with_input["pipeStdin"] = json!(true);
    client.run(place, &id, &["python3", "-c", DIAL, way, &port, DIAL], with_input).await.output(None)
}

/// What a process gets that the test started.
async fn outside(server: &Server, way: &str, uid: Option<u32>) -> String {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", DIAL, way, &port(server), DIAL]).current_dir("/").stdin(std::process::Stdio::null()).kill_on_drop(true);
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    let output = timeout(PATIENCE, command.output()).await.unwrap().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

const SERVED: &str = "HTTP/1.1 101 Switching Protocols\n";
const REFUSED: &str = "HTTP/1.1 403 Forbidden\n";

#[tokio::test]
async fn what_the_gateway_started_is_refused_once_the_network_is_on() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    for way in WAYS {
        // The controls: from inside while nothing confined has the network, and from outside.
        assert_eq!(inside(&mut client, &server, &place, way, json!({})).await, SERVED, "{way}");
        assert_eq!(outside(&server, way, None).await, SERVED, "{way}");
    }
    for way in WAYS {
        let confined = json!({"sandbox": networked(&place)});
        assert_eq!(inside(&mut client, &server, &place, way, confined).await, REFUSED, "{way}");
        // What is not the gateway's is served as before; a socket that nobody has may be anybody's, if it is so when it is asked about.
        if way != "between" {
            assert_eq!(outside(&server, way, None).await, SERVED, "{way}");
        }
    }
    let mut second = Client::connect(&server).await;
    second.ok("fs/getMetadata", json!({"path": place.uri("")})).await;
    if rustix::process::getuid().is_root() {
        assert_eq!(outside(&server, "between", Some(65_534)).await, SERVED, "no process of ours is of another user");
    }
}

#[tokio::test]
async fn a_refusal_says_why_and_an_unconfined_process_gets_it_too() {
    let server = Server::start().await;
    let place = Place::new();
    let mut client = Client::connect(&server).await;
    client.start(&place, "p", &["sleep", "600"], json!({"sandbox": networked(&place)})).await;
    let script = DIAL
        .replace("b\"\\r\\n\" not in got", "b\"without\" not in got and b\"must not\" not in got")
        .replace("print(got.split(b\"\\r\\n\")[0].decode(), flush=True)", "print(got.decode(), flush=True)");
    let port = port(&server);
    let answer = client.run(&place, "q", &["python3", "-c", &script, "itself", &port], json!({})).await.output(None);
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    for words in ["which this gateway started itself", "connect from a process that the gateway did not start"] {
        assert!(answer.contains(words), "{answer}");
    }
    assert_eq!(outside(&server, "itself", None).await, SERVED);
}
