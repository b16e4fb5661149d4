//! Machines that offer less: each is made by `portcullis-without`, which really takes things away from the server. What the
//! rest cannot hold is refused by the name of the layer and with what to do about it; nothing runs unconfined instead.

use portcullis_tests::{Client, Place, Server, without};
use serde_json::{Value, json};
use std::path::Path;

/// Without one of these a request cannot be confined at all.
const NEEDED: [(&str, &str, &str); 3] = [
    ("landlock", "Landlock", "boot with lsm=landlock"),
    ("landlock-enabled", "Landlock", "boot with lsm=landlock"),
    ("seccomp", "seccomp", "CONFIG_SECCOMP_FILTER"),
];

/// Without one of these there is no mount layer.
const MOUNTLESS: [&str; 3] = ["namespaces", "mounts", "userns-count"];

/// With these there may or may not be one.
const OTHER: [&str; 2] = ["proc", "capabilities"];

/// `ws` is the workspace with a repository, `out` lies outside.
fn place() -> Place {
    let place = Place::new();
    for file in ["ws/in", "ws/.git/config", "out/o"] {
        place.put(file, "before");
        place.mode(file, 0o600);
    }
    place
}

fn sandbox(place: &Place, kind: &str) -> Value {
    json!({"type": kind, "cwd": place.uri("ws"), "workspaceRoots": [place.uri("ws")]})
}

fn mode(place: &Place, name: &str) -> u32 {
    use std::os::unix::fs::PermissionsExt as _;
    place.path(name).metadata().unwrap().permissions().mode() & 0o777
}

/// Changes a file of the workspace, and tries what a workspace must not allow.
const REACH_OUT: &str = "echo x >>in; echo x >>.git/config; chmod 644 ../out/o; echo x >>../out/o";

#[tokio::test]
async fn what_was_taken_away_is_gone() {
    let python = "import ctypes, sys; sys.exit(not eval(sys.argv[1])(ctypes.CDLL(None, use_errno=True), ctypes.get_errno))";
    let landlock = "lambda c, e: c.syscall(444, 0, 0, 1) > 0";
    // SECCOMP_MODE_FILTER without a filter: EFAULT where filters are known.
    let seccomp = "lambda c, e: c.prctl(22, 2, 0) == -1 and e() == 14";
    let python3 = |condition: &'static str| vec!["python3", "-c", python, condition];
    for (thing, needs) in [
        ("landlock", python3(landlock)),
        ("landlock-enabled", python3(landlock)),
        ("seccomp", python3(seccomp)),
        ("namespaces", vec!["unshare", "--user", "true"]),
        ("userns-count", vec!["unshare", "--user", "true"]),
        ("users", vec!["unshare", "--user", "true"]),
        ("mounts", vec!["unshare", "--user", "--map-root-user", "--mount", "true"]),
        ("proc", vec!["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]),
        ("sock-diag", vec!["python3", "-c", "import socket; socket.socket(16, 3, 4)"]),
        // An ordinary user has none, so this looks at the set that only dropping empties.
        ("capabilities", vec!["sh", "-c", "test $(id -u) != 0 || ! grep -q 'CapBnd:[[:space:]]*0*$' /proc/self/status"]),
    ] {
        let ended = |things: Vec<&'static str>| {
            let needs = needs.clone();
            async move { without(&things, Path::new("/usr/bin/env"), &needs).output().await.unwrap() }
        };
        let whole = ended(Vec::new()).await;
        assert!(whole.status.success(), "the control: {needs:?} works on the whole machine: {whole:?}");
        if thing != "capabilities" || rustix::process::getuid().is_root() {
            let less = ended(vec![thing]).await;
            assert!(!less.status.success(), "{thing}: {needs:?} still works");
        }
    }
}

#[tokio::test]
async fn without_landlock_or_seccomp_everything_confined_is_refused_by_name() {
    for (thing, layer, remedy) in NEEDED {
        let place = place();
        // Not even the operator's word makes it run.
        let less = Server::without(&[thing], &["--allow-unprotected-metadata"]).await;
        let mut client = Client::connect(&less).await;
        for kind in ["read-only", "workspace-write"] {
            let read = json!({"path": place.uri("ws/in"), "sandbox": sandbox(&place, kind)});
            let write = json!({"path": place.uri("ws/made"), "dataBase64": "", "sandbox": sandbox(&place, kind)});
            let mut start = Client::start_params(&place, kind, &["sh", "-c", &format!("cd ws; {REACH_OUT}")]);
            start["sandbox"] = sandbox(&place, kind);
            for (method, params) in [("fs/readFile", read), ("fs/writeFile", write), ("process/start", start)] {
                let refusal = client.refused(method, params).await;
                for word in [layer, remedy] {
                    assert!(refusal.message.contains(word), "{thing}: {method} under {kind}: {word}: {refusal:?}");
                }
            }
        }
        assert!(!place.has("ws/made"));
        for file in ["ws/in", "ws/.git/config", "out/o"] {
            assert_eq!((place.content(file).as_str(), mode(&place, file)), ("before", 0o600), "{thing}: {file}");
        }
        // What asks for no confinement gets none, here as anywhere.
        client.ok("fs/readFile", json!({"path": place.uri("ws/in")})).await;
        client.run(&place, "free", &["sh", "-c", &format!("cd ws; {REACH_OUT}")], json!({})).await;
        assert_eq!((place.content("out/o").as_str(), mode(&place, "out/o")), ("beforex\n", 0o644));
    }
    // The control: on the whole machine the same requests are carried out.
    let place = place();
    let whole = Server::start().await;
    let mut client = Client::connect(&whole).await;
    let confined = json!({"sandbox": sandbox(&place, "workspace-write"), "cwd": place.uri("ws")});
    client.ok("fs/readFile", json!({"path": place.uri("ws/in"), "sandbox": sandbox(&place, "read-only")})).await;
    let made = json!({"path": place.uri("ws/made"), "dataBase64": "", "sandbox": sandbox(&place, "workspace-write")});
    client.ok("fs/writeFile", made).await;
    client.run(&place, "p", &["sh", "-c", REACH_OUT], confined).await;
    assert_eq!((place.content("ws/in").as_str(), place.content("out/o").as_str()), ("beforex\n", "before"));
}

#[tokio::test]
async fn file_calls_and_read_only_processes_need_neither_namespaces_nor_mounts() {
    for thing in MOUNTLESS.into_iter().chain(OTHER) {
        let place = place();
        let less = Server::without(&[thing], &[]).await;
        let mut client = Client::connect(&less).await;
        let inside = sandbox(&place, "workspace-write");
        let with = |mut params: Value| {
            params["sandbox"] = inside.clone();
            params
        };
        let uri = |name: &str| place.uri(name);
        for (method, params) in [
            ("fs/writeFile", json!({"path": uri("ws/a"), "dataBase64": "YQ=="})),
            ("fs/createDirectory", json!({"path": uri("ws/d")})),
            ("fs/copy", json!({"sourcePath": uri("out/o"), "destinationPath": uri("ws/d/o"), "recursive": false})),
            ("fs/readFile", json!({"path": uri("ws/d/o")})),
            ("fs/readFile", json!({"path": uri("ws/.git/config")})),
            ("fs/readDirectory", json!({"path": uri("ws/d")})),
            ("fs/getMetadata", json!({"path": uri("out/o")})),
            ("fs/canonicalize", json!({"path": uri("ws/d/../a")})),
            (
                "fs/walk",
                json!({"path": uri("ws"), "options": {"maxDepth": 9, "maxDirectories": 9, "maxEntries": 99, "followDirectorySymlinks": false}}),
            ),
            ("fs/remove", json!({"path": uri("ws/d"), "recursive": true})),
        ] {
            client.ok(method, with(params)).await;
        }
        // Each denial as on the whole machine, with the same call without a sandbox as its control.
        for (method, params) in [
            ("fs/writeFile", json!({"path": uri("out/made"), "dataBase64": ""})),
            ("fs/writeFile", json!({"path": uri("ws/.git/hook"), "dataBase64": ""})),
            ("fs/copy", json!({"sourcePath": uri("ws/a"), "destinationPath": uri("out/a"), "recursive": false})),
            ("fs/remove", json!({"path": uri("out/o")})),
        ] {
            let refusal = client.refused(method, with(params.clone())).await;
            assert!(refusal.message.contains("(os error 30)"), "{thing}: {method}: {refusal:?}");
            client.ok(method, params).await;
        }
        let (content, script) = (place.content("ws/in"), "cat in; echo x >>in; chmod 644 in");
        let more = |sandbox: Value| json!({"cwd": uri("ws"), "sandbox": sandbox});
        let confined = client.run(&place, "p", &["sh", "-c", script], more(sandbox(&place, "read-only"))).await;
        assert_eq!(confined.output(Some("stdout")), content, "{thing}: {}", confined.output(None));
        assert_eq!((place.content("ws/in"), mode(&place, "ws/in")), (content.clone(), 0o600), "{thing}");
        client.run(&place, "q", &["sh", "-c", script], more(Value::Null)).await;
        assert_eq!((place.content("ws/in"), mode(&place, "ws/in")), (format!("{content}x\n"), 0o644), "{thing}");
    }
}

#[tokio::test]
async fn without_mounts_a_write_policy_for_a_process_is_refused_by_name() {
    for thing in MOUNTLESS {
        let place = place();
        let less = Server::without(&[thing], &[]).await;
        let mut client = Client::connect(&less).await;
        let mut params = Client::start_params(&place, "p", &["sh", "-c", &format!("cd ws; {REACH_OUT}")]);
        params["sandbox"] = sandbox(&place, "workspace-write");
        let refusal = client.refused("process/start", params.clone()).await;
        assert_eq!(refusal.code, -32602, "{thing}: {refusal:?}");
        for word in ["mount", "--allow-unprotected-metadata"] {
            assert!(refusal.message.contains(word), "{thing}: {word}: {refusal:?}");
        }
        assert_eq!(place.content("ws/in"), "before");
        // The operator's word lets it run, confined by the other layers.
        let accepting = Server::without(&[thing], &["--allow-unprotected-metadata"]).await;
        let mut client = Client::connect(&accepting).await;
        client.ok("process/start", params).await;
        let events = client.events("p").await;
        assert_eq!(place.content("ws/in"), "beforex\n", "{thing}: {}", events.output(None));
        assert_eq!(place.content("out/o"), "before", "{thing}");
    }
}

#[tokio::test]
async fn a_write_policy_that_runs_anywhere_is_held_in_full() {
    for thing in MOUNTLESS.into_iter().chain(OTHER) {
        let place = place();
        let less = Server::without(&[thing], &[]).await;
        let mut client = Client::connect(&less).await;
        let mut params = Client::start_params(&place, "p", &["sh", "-c", &format!("cd ws; {REACH_OUT}")]);
        params["sandbox"] = sandbox(&place, "workspace-write");
        match client.call("process/start", params).await {
            Ok(_) => {
                client.events("p").await;
                assert_eq!(place.content("ws/in"), "beforex\n", "{thing}");
            }
            Err(refusal) => assert!(refusal.message.contains("mount"), "{thing}: {refusal:?}"),
        }
        for file in ["ws/.git/config", "out/o"] {
            assert_eq!((place.content(file).as_str(), mode(&place, file)), ("before", 0o600), "{thing}: {file}");
        }
        client.run(&place, "q", &["sh", "-c", &format!("cd ws; {REACH_OUT}")], json!({})).await;
        assert_eq!((place.content("ws/.git/config").as_str(), mode(&place, "out/o")), ("beforex\n", 0o644), "{thing}");
    }
}

#[tokio::test]
async fn root_without_user_namespaces_is_served_and_told() {
    if !rustix::process::getuid().is_root() {
        println!("skipped: only root can make the other namespaces without one of users");
        return;
    }
    let script = format!("cd ws; readlink /proc/self/ns/user; {REACH_OUT}");
    let machine = std::fs::read_link("/proc/self/ns/user").unwrap().into_os_string().into_string().unwrap();
    for (things, has_own) in [(&["users"][..], false), (&[], true)] {
        let place = place();
        let server = Server::without(things, &[]).await;
        let mut client = Client::connect(&server).await;
        let info = client.ok("environment/info", json!({"enforcement": true})).await;
        let layers = info["enforcement"]["layers"].as_array().unwrap();
        let layer = |name: &str| layers.iter().find(|layer| layer["name"] == name).unwrap();
        let (namespaces, users) = (layer("namespaces"), layer("own users"));
        assert_eq!((&namespaces["available"], &users["available"]), (&json!(true), &json!(has_own)), "{things:?}: {info}");
        let says = |member: &str, word: &str| users[member].as_str().unwrap().contains(word);
        assert_eq!(says("reason", "share the user namespace of the server"), !has_own, "{users}");
        assert_eq!(says("remedy", "allow unshare"), !has_own, "{users}");
        let more = json!({"sandbox": sandbox(&place, "workspace-write"), "enforcement": true});
        let started = client.start(&place, "p", &["sh", "-c", &script], more).await;
        let listed = started["enforcement"]["namespaces"].as_array().unwrap();
        assert_eq!(listed.contains(&json!("user")), has_own, "{started}");
        assert!(listed.contains(&json!("mount")), "{started}");
        let said = client.events("p").await.output(None);
        assert_eq!(!said.starts_with(&format!("{machine}\n")), has_own, "{things:?}: {said}");
        // Everything else is held either way.
        assert_eq!((place.content("ws/in").as_str(), place.content("out/o").as_str()), ("beforex\n", "before"), "{said}");
        assert_eq!(place.content("ws/.git/config"), "before");
    }
}

#[tokio::test]
async fn without_sock_diag_the_server_says_so_and_serves_nobody_new_once_it_matters() {
    let place = place();
    let mut networked = sandbox(&place, "read-only");
    networked["networkAccess"] = json!(true);
    let mut less = Server::without(&["sock-diag"], &[]).await;
    let mut client = Client::connect(&less).await;
    // Nothing that could dial it runs yet, so everybody is served.
    drop(Client::connect(&less).await);
    client.run(&place, "p", &["true"], json!({"sandbox": networked})).await;
    let refused = tokio_tungstenite::connect_async(&less.url).await.unwrap_err();
    assert!(matches!(&refused, tokio_tungstenite::tungstenite::Error::Http(answer) if answer.status() == 403), "{refused}");
    client.ok("fs/readFile", json!({"path": place.uri("ws/in")})).await;
    less.program.signal(rustix::process::Signal::TERM);
    less.program.wait().await;
    let said = less.program.stderr().await;
    assert!(
        said.contains("whose connection is whose cannot be told on this machine") && said.contains("CONFIG_INET_DIAG"),
        "{said}"
    );
    // The control: on the whole machine nothing is said and everybody is served.
    let mut whole = Server::start().await;
    let mut client = Client::connect(&whole).await;
    client.run(&place, "p", &["true"], json!({"sandbox": networked})).await;
    drop(Client::connect(&whole).await);
    whole.program.signal(rustix::process::Signal::TERM);
    whole.program.wait().await;
    assert!(!whole.program.stderr().await.contains("cannot be told"));
}
