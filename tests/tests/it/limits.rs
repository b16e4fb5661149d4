//! Limits of processes: each is held by what this machine gives, and what cannot be held is refused. Root has cgroups where they
//! may be written to, which an ordinary user seldom may: what holds a limit is asked of the server, and then tried.

use portcullis_tests::{Client, Events, Place, Server};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Starts children that wait until no more can be had, or there are sixty, says how many there were, and ends all of them.
const FORKS: &str = "import os, signal
made = 0
try:
    while made < 60:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError:
    pass
print(made, flush=True)
os.killpg(0, signal.SIGKILL)";

/// Has 200 MiB, and says so.
const HOG: &str = "memory = b'x' * (200 << 20); print('has', len(memory))";

/// Takes the processor for more than a second and a half.
const BUSY: &str = "import time
while time.process_time() < 1.6: pass
print('done')";

/// Opens files until no more can be had, or there are fifty.
const OPENS: &str = "import os
files = []
try:
    while len(files) < 50: files.append(os.open('/dev/null', os.O_RDONLY))
except OSError:
    pass
print(len(files), flush=True)
os._exit(0)";

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

/// Runs a script of Python, once it is started under these limits; answers who holds them too.
async fn run(client: &mut Client, place: &Place, script: &str, limits: Value, more: Value) -> (Value, Events) {
    let mut more = more;
    if limits != json!({}) {
        more["limits"] = limits;
    }
    let id = format!("p{}", fs::read_dir(place.path("")).unwrap().count());
    place.put(&id, "");
    let started = client.start(place, &id, &["python3", "-c", script], more).await;
    (started["limits"].clone(), client.events(&id).await)
}

/// What its end says that was reached.
fn reached(events: &Events) -> Value {
    let exited = events.notices.iter().find(|notice| notice["method"] == "process/exited").unwrap();
    exited["params"]["limits"].clone()
}

#[tokio::test]
async fn the_processes_of_a_tree_are_bounded() {
    let place = Place::new();
    let mut held_by = Vec::new();
    for things in [&[][..], &["cgroups"], &["cgroups", "namespaces"]] {
        let server = Server::without(things, &["--allow-unprotected-metadata"]).await;
        let mut client = Client::connect(&server).await;
        for more in [json!({}), json!({"sandbox": {"type": "read-only"}})] {
            let limits = json!({"processes": 20});
            let (none, control) = run(&mut client, &place, FORKS, json!({}), more.clone()).await;
            assert_eq!((none, control.output(None).trim()), (Value::Null, "60"), "without a limit nothing holds it");
            assert_eq!(reached(&control), Value::Null);

            let id = format!("tried{}", more.as_object().unwrap().len());
            let mut params = Client::start_params(&place, &id, &["true"]);
            params["limits"] = limits.clone();
            params["sandbox"] = more.get("sandbox").cloned().unwrap_or(Value::Null);
            let refusal = client.call("process/start", params).await.err();
            if let Some(refusal) = refusal {
                // Root, whom no rlimit binds, where there is nothing else.
                assert!(is_root() && things.contains(&"cgroups"), "{refusal:?}");
                assert!(refusal.message.contains("cgroup layer") && refusal.message.contains("Delegate=yes"), "{refusal:?}");
                held_by.push("nothing".to_owned());
                continue;
            }
            client.events(&id).await;
            let (limits, events) = run(&mut client, &place, FORKS, limits, more).await;
            let by = limits[0]["by"].as_str().unwrap().to_owned();
            assert_eq!(limits, json!([{"limit": "processes", "value": 20, "by": by}]));
            let made: u64 = events.output(None).trim().parse().unwrap();
            match by.as_str() {
                "cgroup" => {
                    assert_eq!(made, 19, "the first is one of them");
                    let told = json!([{"limit": "processes", "value": 20, "used": 20, "scope": "process"}]);
                    assert_eq!(reached(&events), told);
                }
                "pidNamespace" => assert_eq!(made, 19, "the first is one of them"),
                // Others of the user come and go meanwhile.
                "rlimit" => assert!(made < 60, "{made}"),
                other => panic!("{other}"),
            }
            held_by.push(by);
        }
    }
    // Both kinds of machine were tried, or this test says nothing.
    let expect = if is_root() { ["pidNamespace", "nothing"] } else { ["pidNamespace", "rlimit"] };
    assert!(expect.iter().all(|by| held_by.iter().any(|it| it == by)), "{held_by:?}");
}

#[tokio::test]
async fn memory_is_bounded() {
    let place = Place::new();
    for things in [&[][..], &["cgroups"]] {
        let server = Server::without(things, &[]).await;
        let mut client = Client::connect(&server).await;
        for more in [json!({}), json!({"sandbox": {"type": "read-only"}})] {
            let (_, control) = run(&mut client, &place, HOG, json!({}), more.clone()).await;
            assert_eq!((control.code(), control.output(None).trim()), (0, "has 209715200"));
            let (limits, events) = run(&mut client, &place, HOG, json!({"memoryBytes": 100 << 20}), more).await;
            assert_eq!((limits[0]["limit"].as_str(), limits[0]["value"].as_u64()), (Some("memoryBytes"), Some(100 << 20)));
            assert_ne!(events.code(), 0);
            assert!(!events.output(None).contains("has"), "{}", events.output(None));
            match limits[0]["by"].as_str() {
                Some("cgroup") => {
                    let told = reached(&events)[0].clone();
                    assert_eq!((told["limit"].as_str(), told["value"].as_u64()), (Some("memoryBytes"), Some(100 << 20)));
                }
                Some("rlimit") => assert!(events.output(Some("stderr")).contains("MemoryError"), "{}", events.output(None)),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn processor_time_and_descriptors_are_bounded() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    for more in [json!({}), json!({"sandbox": {"type": "read-only"}})] {
        let (_, control) = run(&mut client, &place, BUSY, json!({}), more.clone()).await;
        assert_eq!((control.code(), control.output(None).trim()), (0, "done"));
        let (limits, events) = run(&mut client, &place, BUSY, json!({"cpuMs": 600}), more.clone()).await;
        assert_eq!(limits, json!([{"limit": "cpuMs", "value": 600, "by": "rlimit"}]));
        assert_eq!(events.code(), 128 + 24, "SIGXCPU, after a whole second");
        assert_eq!(reached(&events), json!([{"limit": "cpuMs", "value": 600, "used": 600, "scope": "process"}]));

        let (_, control) = run(&mut client, &place, OPENS, json!({}), more.clone()).await;
        assert_eq!(control.output(None).trim(), "50");
        let (limits, events) = run(&mut client, &place, OPENS, json!({"openFiles": 20}), more).await;
        assert_eq!(limits, json!([{"limit": "openFiles", "value": 20, "by": "rlimit"}]));
        assert_eq!(events.output(None).trim(), "17", "beside the three that it has");
    }
}

#[tokio::test]
async fn output_is_bounded_and_the_rest_is_let_go() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    client.start(&place, "control", &["head", "-c", "200000", "/dev/zero"], json!({})).await;
    let control = client.events("control").await;
    assert_eq!((control.output(None).len(), control.code()), (200_000, 0));
    let exact = json!({"limits": {"outputBytes": 200_000}});
    client.start(&place, "exact", &["head", "-c", "200000", "/dev/zero"], exact).await;
    let events = client.events("exact").await;
    assert_eq!((events.output(None).len(), events.code(), reached(&events)), (200_000, 0, Value::Null), "as much as is allowed");

    // Deaf to the interrupt, it is killed; meanwhile it can write all that it wants, and nobody waits for anybody.
    // So is what a program that obeys leaves behind: jobs in the background of a shell do not hear interrupts.
    let scripts = [("yields", "exec yes", 130), ("deaf", "trap '' INT; yes; exit 7", 137), ("leaves", "yes & wait", 130)];
    for (id, script, code) in scripts {
        let more = json!({"limits": {"outputBytes": 1000}});
        let started = client.start(&place, id, &["sh", "-c", script], more).await;
        assert_eq!(started["limits"], json!([{"limit": "outputBytes", "value": 1000, "by": "gateway"}]));
        let events = client.events(id).await;
        assert_eq!((events.output(None).len(), events.code()), (1000, code));
        let told = reached(&events)[0].clone();
        assert_eq!((told["limit"].as_str(), told["scope"].as_str()), (Some("outputBytes"), Some("process")));
        assert!(told["used"].as_u64() > told["value"].as_u64(), "{told}");
        let read = client.ok("process/read", json!({"processId": id})).await;
        assert!(
            read["failure"].as_str().is_some_and(|text| text.contains("1000 bytes") && text.contains("outputBytes")),
            "{read}"
        );
        assert_eq!(read["limits"][0], told);
    }
}

#[tokio::test]
async fn wrong_limits_are_refused_and_old_clients_see_nothing_new() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    for wrong in [json!({"processes": 0}), json!({"memory": 1}), json!({"cpuMs": "1"})] {
        let mut params = Client::start_params(&place, "p", &["true"]);
        params["limits"] = wrong.clone();
        assert_eq!(client.refused("process/start", params).await.code, -32602, "{wrong}");
    }
    let started = client.start(&place, "p", &["true"], json!({})).await;
    assert!(started.get("limits").is_none(), "{started}");
    let events = client.events("p").await;
    assert_eq!(reached(&events), Value::Null);
    assert_eq!(client.ok("process/terminate", json!({"processId": "p"})).await, json!({"running": false}));
    let info = client.ok("environment/info", json!({"extensions": true})).await;
    assert_eq!(info["extensions"]["processLimits"], true);
}

#[tokio::test]
async fn a_full_session_says_so_in_data() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    for nth in 0..128 {
        place.put("file", "");
        client.ok("fs/open", json!({"handleId": nth.to_string(), "path": place.uri("file")})).await;
    }
    let refusal = client.refused("fs/open", json!({"handleId": "more", "path": place.uri("file")})).await;
    let data = json!({"limit": "file-handles", "value": 128, "used": 128, "scope": "connection"});
    assert_eq!(refusal.data, Some(data), "{}", refusal.message);
}

/// The spawner of a server: its one child.
fn spawner(server: &Server) -> i32 {
    let gateway = server.program.child.id().unwrap();
    let tasks = fs::read_dir(format!("/proc/{gateway}/task")).unwrap().flatten();
    let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap()).collect::<String>();
    let warden: i32 = children.trim().parse().unwrap_or_else(|_| panic!("one child: {children}"));
    // The first that the warden started, before which nothing has lost its parent.
    let below = fs::read_to_string(format!("/proc/{warden}/task/{warden}/children")).unwrap();
    below.trim().parse().unwrap_or_else(|_| panic!("one child of the warden: {below}"))
}

/// The directories of a spawner's groups, with everything below them.
fn groups_of(spawner: i32) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::from("/sys/fs/cgroup")];
    let ours = format!("portcullis-{spawner}-");
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let path = entry.path();
                if path.components().any(|part| part.as_os_str().to_string_lossy().starts_with(&ours)) {
                    found.push(path.clone());
                }
                open.push(path);
            }
        }
    }
    found
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waited = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(portcullis_tests::PATIENCE, waited).await.unwrap_or_else(|_late| panic!("{what}"));
}

/// Where the machine lets its user make no groups there are none, and then none is left either.
#[tokio::test]
async fn groups_go_with_what_was_in_them() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    let spawner = spawner(&server);
    let info = client.ok("environment/info", json!({"enforcement": true})).await;
    let layers = info["enforcement"]["layers"].as_array().unwrap();
    let has_groups = layers.iter().any(|layer| layer["name"] == "cgroups" && layer["available"] == true);
    let of_processes = || groups_of(spawner).iter().filter(|path| is_of_a_process(path)).count();

    client.start(&place, "free", &["sleep", "600"], json!({})).await;
    assert_eq!(of_processes(), 0, "a start without limits has no group");
    client.start(&place, "held", &["sleep", "600"], json!({"limits": {"memoryBytes": 1 << 30}})).await;
    assert_eq!(of_processes() > 0, has_groups);
    client.ok("process/terminate", json!({"processId": "held"})).await;
    client.events("held").await;
    until("a group outlives its process", || of_processes() == 0).await;
    // A daemon has the group of its process, until it is ended too.
    let daemon = "setsid -f sh -c 'echo on; exec sleep 600 >/dev/null 2>&1'";
    client.start(&place, "left", &["sh", "-c", daemon], json!({"limits": {"memoryBytes": 1 << 30}})).await;
    client.events("left").await;
    assert_eq!(of_processes() > 0, has_groups);
    client.ok("process/terminate", json!({"processId": "left"})).await;
    until("a group outlives its daemon", || of_processes() == 0).await;

    client.start(&place, "last", &["sleep", "600"], json!({"limits": {"memoryBytes": 1 << 30}})).await;
    // The groups of a killed spawner are removed with the last process that it started.
    rustix::process::kill_process(rustix::process::Pid::from_raw(spawner).unwrap(), rustix::process::Signal::KILL).unwrap();
    client.events("last").await;
    until("leftovers stay", || groups_of(spawner).is_empty()).await;
}

fn is_of_a_process(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with('p') && !name.to_string_lossy().starts_with("portcullis-"))
}
