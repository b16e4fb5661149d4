//! How a whole tree of processes is ended, and that nothing is left of one.

use portcullis_tests::{Client, Place, Server, executable};
use serde_json::{Value, json};
use std::fs;

/// The processes of the machine whose command line holds a word.
fn processes_with(word: &str) -> usize {
    let pids =
        fs::read_dir("/proc").unwrap().flatten().filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
    pids.filter(|entry| String::from_utf8_lossy(&fs::read(entry.path().join("cmdline")).unwrap_or_default()).contains(word))
        .count()
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waited = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(portcullis_tests::PATIENCE, waited).await.unwrap_or_else(|_late| panic!("{what}"));
}

#[tokio::test]
async fn a_client_may_ask_how_a_tree_is_ended() {
    let (place, whole, bare) = (Place::new(), Server::start().await, Server::without(&["namespaces", "cgroups"], &[]).await);
    let sandbox = json!({"sandbox": {"type": "read-only"}});
    for (server, more, expect) in
        [(&whole, &sandbox, "pidNamespace"), (&bare, &sandbox, "descendants"), (&whole, &json!({}), "descendants")]
    {
        let mut client = Client::connect(server).await;
        client.start(&place, "p", &["sleep", "600"], more.clone()).await;
        let answer = client.ok("process/terminate", json!({"processId": "p", "report": true})).await;
        assert_eq!(answer, json!({"running": true, "ended": expect}));
        client.events("p").await;
        let unknown = client.ok("process/terminate", json!({"processId": "nobody", "report": true})).await;
        assert_eq!(unknown, json!({"running": false}));
    }
}

/// Each makes two of itself, in a group of its own, and ends: whoever looks for them by group or by parent finds nobody. It stops
/// when there are many and ends by itself after ten minutes, so that a test that fails does no harm.
const BOMB: &str = "import os, signal, sys
print('on', flush=True)
for generation in range(12):
    if os.fork() and os.fork():
        os._exit(0)
    os.setsid()
signal.alarm(600)
signal.pause()";

#[tokio::test]
async fn a_fork_bomb_that_is_terminated_is_gone() {
    let (place, whole, bare) = (Place::new(), Server::start().await, Server::without(&["namespaces"], &[]).await);
    for (nth, (server, more)) in [(&whole, json!({})), (&bare, json!({"sandbox": {"type": "read-only"}}))].into_iter().enumerate()
    {
        let mut client = Client::connect(server).await;
        let word = format!("bomb-{}-{nth}", place.path("").file_name().unwrap().to_string_lossy());
        client.start(&place, "p", &["python3", "-c", BOMB, &word], more).await;
        client.output("p", "on\n").await;
        until("it goes off", || processes_with(&word) > 50).await;
        client.ok("process/terminate", json!({"processId": "p"})).await;
        client.wait(|message| message["method"] == "process/closed").await;
        until("some of it are left", || processes_with(&word) == 0).await;
        // The server is as it was.
        client.run_bounded(&place, "q", "exit 3", json!({}), 3).await;
    }
}

#[tokio::test]
async fn whoever_kills_its_keeper_frees_nobody() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    let word = format!("freed-{}", place.path("").file_name().unwrap().to_string_lossy());
    let script = format!(
        "setsid -f sh -c 'sleep 600; : {word}'; setsid -f setsid -f sh -c 'sleep 600; : {word}'; echo on; read go; kill -KILL $PPID; sleep 600"
    );
    client.start(&place, "p", &["sh", "-c", &script], json!({"pipeStdin": true})).await;
    client.output("p", "on\n").await;
    until("the daemons run", || processes_with(&word) >= 3).await;
    client.ok("process/write", json!({"processId": "p", "chunk": "Cg==", "writeId": "1"})).await;
    assert_eq!(client.events("p").await.code(), 137);
    until("some of them are left", || processes_with(&word) == 0).await;
    let listed = client.ok("process/list", Value::Null).await;
    assert_eq!(listed["processes"][0]["state"], "closed");
    client.run_bounded(&place, "q", "exit 3", json!({}), 3).await;
}

/// A child of another user, as sudo makes them, is out of the reach of a server that is nobody special. The end of the program is
/// told all the same.
#[tokio::test]
async fn who_cannot_be_killed_does_not_hold_back_the_end_of_the_program() {
    if !rustix::process::geteuid().is_root() {
        // Only root can make a program that gains rights.
        return;
    }
    let place = Place::new();
    let gains = place.path("gains");
    fs::copy("/usr/bin/setpriv", &gains).unwrap();
    fs::set_permissions(&gains, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
    place.mode("", 0o755);
    // Where that user may look.
    let program = place.path("portcullis");
    fs::copy(executable("portcullis"), &program).unwrap();
    let mut command = tokio::process::Command::new("/usr/bin/setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(program).args(["serve", "--insecure-no-auth"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).kill_on_drop(true);
    let server = Server::with(command).await;
    let mut client = Client::connect(&server).await;
    let script = "./gains --reuid=0 --clear-groups sleep 600 >/dev/null 2>&1 & echo $!; exec sleep 600";
    client.start(&place, "p", &["sh", "-c", script], json!({})).await;
    let pid = client.process_id("p").await;
    let users = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    until("the child is root's", || users().contains("Uid:\t0\t0\t0\t0")).await;

    client.ok("process/terminate", json!({"processId": "p"})).await;
    assert_eq!(client.events("p").await.code(), 137);
    assert!(users().contains("Uid:\t0\t0\t0\t0"), "control: it lives on");
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
