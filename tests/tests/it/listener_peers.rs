//! Who may not connect: what the gateway itself has started, once something confined among it has the network.

use portcullis_tests::{Client, PATIENCE, Place, Server, executable, without};
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
pub(crate) fn networked(place: &Place) -> Value {
    json!({"cwd": place.uri(""), "windowsSandboxLevel": "disabled", "permissions": {"type": "managed", "network": "enabled",
        "file_system": {"type": "restricted", "entries": [
            {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}]}}})
}

pub(crate) fn port(server: &Server) -> String {
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

/// Reads the token that its first argument names, and dials the port at this machine's addresses, from each of them, with it.
const DIAL_WITH_TOKEN: &str = r#"
import socket, sys
token, port = open(sys.argv[1]).read(), int(sys.argv[2])
addresses = ["127.0.0.1", "127.0.0.2"]
try:
    # An address that others reach, if this machine has one: nothing is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))
        addresses.append(s.getsockname()[0])
except OSError:
    pass
answers = set()
for to in addresses:
    for source in addresses:
        s = socket.create_connection((to, port), 60, (source, 0))
        s.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                  b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
                  b"Authorization: Bearer " + token.encode() + b"\r\n\r\n")
        got = b""
        while b"\r\n" not in got:
            got += s.recv(4096) or b"cut\r\n"
        answers.add(got.split(b"\r\n")[0].decode())
print(*answers, sep="\n", flush=True)
"#;

#[tokio::test]
async fn who_listens_on_all_addresses_refuses_what_it_started_also_with_the_token() {
    for (listen, found) in [("ws://0.0.0.0:0", "127.0.0.1"), ("ws://[::]:0", "[::1]")] {
        let place = Place::new();
        let arguments = ["serve", "--allow-unprotected-metadata", "--listen", listen];
        // Without namespaces a confined process can read the token.
        let mut command = without(&["namespaces"], &executable("portcullis"), &arguments);
        command.env("XDG_RUNTIME_DIR", place.path(""));
        let server = Server::with(command).await;
        let port = port(&server);
        let file = place.path(&format!("portcullis/{found}:{port}.token")).display().to_string();
        let token = std::fs::read_to_string(&file).unwrap();
        let mut client = Client::connect_with_token(&format!("ws://127.0.0.1:{port}"), &token).await;
        let argv = ["python3", "-c", DIAL_WITH_TOKEN, &file, &port];
        let workspace = json!({"sandbox": {"type": "workspace-write", "cwd": place.uri(""), "network_access": true}});
        assert_eq!(client.run(&place, "p", &argv, workspace).await.output(None), REFUSED, "{listen}");
        // The control: the same words from a process that the test started.
        let mut outside = Command::new("/usr/bin/python3");
        let output = timeout(PATIENCE, outside.args(&argv[1..]).output()).await.unwrap().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), SERVED, "{listen}: {output:?}");
    }
}
