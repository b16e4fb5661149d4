//! Programs that use up a kernel budget of their user, and the default bounds.

use portcullis_tests::{Client, Place, Server, executable};
use rustix::process::getuid;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Stdio;
use tokio::process::Command;

/// Sends descriptors over sockets, and never receives them, until the kernel accepts no more. Then it waits to be ended.
const IN_FLIGHT: &str = "import array, errno, os, resource, signal, socket
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
null = os.open('/dev/null', os.O_RDONLY)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [null] * 253))]
pairs, why = [], None
while why is None:
    one, other = socket.socketpair()
    one.setblocking(False)
    pairs.append((one, other))
    while why is None:
        try:
            one.sendmsg([b'x'], rights)
        except BlockingIOError:
            break
        except OSError as error:
            why = error.errno
print(errno.errorcode[why], flush=True)
signal.pause()";

/// Adds epoll watches until the kernel gives this user no more. Then it waits to be ended.
const EPOLL: &str = "import errno, os, resource, select, signal
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
read, write = os.pipe()
copies = [os.dup(read) for _ in range(hard // 2)]
polls, why = [], None
while why is None:
    polls.append(select.epoll())
    for copy in copies:
        try:
            polls[-1].register(copy, 0)
        except OSError as error:
            why = error.errno
            break
print(errno.errorcode[why], flush=True)
signal.pause()";

/// Opens inotify instances until the kernel gives this user no more. Then it waits to be ended.
const INOTIFY: &str = "import ctypes, errno, signal
libc = ctypes.CDLL(None, use_errno=True)
while libc.inotify_init() >= 0: pass
print(errno.errorcode[ctypes.get_errno()], flush=True)
signal.pause()";

/// Has as many signals in line as this process may, and then stays; with an argument it tries one.
const SIGNALS: &str = "import ctypes, errno, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
queued = 0
while libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0 and len(sys.argv) == 1: queued += 1
print(errno.errorcode.get(ctypes.get_errno(), 'queued'), flush=True)
if len(sys.argv) == 1: signal.pause()";

fn read_only() -> Value {
    json!({"sandbox": {"type": "read-only"}})
}

/// Starts a server as a user whose budgets no other test needs, which only root can do, with a directory that belongs to that
/// user.
#[expect(clippy::print_stderr, reason = "a skipped test says so in its output")]
async fn server_of_its_own_user(test: &str, user: u32) -> Option<(Place, Server)> {
    if !getuid().is_root() {
        eprintln!("skipped: {test}: other tests of this user need the same budget; root runs this test as another user");
        return None;
    }
    let place = Place::new();
    let id = user.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(executable("portcullis"));
    command.args(["serve", "--insecure-no-auth"]).env("HOME", place.path("home")).env_remove("XDG_RUNTIME_DIR");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    place.directory("home");
    for own in ["", "home"] {
        chown(place.path(own), Some(user), Some(user)).unwrap();
    }
    Some((place, Server::with(command).await))
}

/// Starts a confined process that takes all it gets, and waits until it has it.
async fn greedy(client: &mut Client, place: &Place, script: &str, expect: &str) {
    client.start(place, "greedy", &["python3", "-c", script], read_only()).await;
    client.output("greedy", &format!("{expect}\n")).await;
}

#[tokio::test]
async fn descriptors_in_flight_of_one_program_stop_no_other() {
    let Some((place, server)) = server_of_its_own_user("descriptors in flight", 64_101).await else { return };
    // Large enough to be handed over as a descriptor.
    let large = place.put("large", vec![b'x'; 1 << 20]);
    let mut client = Client::connect(&server).await;
    greedy(&mut client, &place, IN_FLIGHT, "ETOOMANYREFS").await;
    for round in 0..4 {
        for (id, more) in [("free", json!({})), ("confined", read_only())] {
            assert_eq!(client.run(&place, &format!("{id}{round}"), &["true"], more).await.code(), 0);
        }
        let mut other = Client::connect(&server).await;
        for mut params in [json!({"path": large}), json!({"path": large, "sandbox": {"type": "read-only"}})] {
            let read = other.ok("fs/readFile", params.clone()).await;
            assert_eq!(read["dataBase64"].as_str().unwrap().len(), (1_usize << 20).div_ceil(3) * 4);
            params["dataBase64"] = read["dataBase64"].clone();
        }
        other.ok("fs/writeFile", json!({"path": place.uri("copy"), "dataBase64": "eHg="})).await;
        other.close().await;
    }
}

#[tokio::test]
async fn epoll_watches_of_one_program_end_nothing() {
    let Some((place, server)) = server_of_its_own_user("epoll watches", 64_102).await else { return };
    let file = place.put("f", "content");
    let mut client = Client::connect(&server).await;
    client.ok("fs/readFile", json!({"path": file})).await;
    greedy(&mut client, &place, EPOLL, "ENOSPC").await;
    // The existing worker continues. A start needs more watches, and its error says so.
    client.ok("fs/readFile", json!({"path": file})).await;
    for (id, more) in [("free", json!({})), ("confined", read_only())] {
        let mut params = Client::start_params(&place, id, &["true"]);
        params["sandbox"] = more.get("sandbox").cloned().unwrap_or(Value::Null);
        match client.call("process/start", params).await {
            Ok(_) => drop(client.events(id).await),
            Err(refusal) => assert!(refusal.message.contains("os error 28"), "{refusal:?}"),
        }
    }
    client.ok("process/terminate", json!({"processId": "greedy"})).await;
    client.events("greedy").await;
    for (id, more) in [("free-again", json!({})), ("confined-again", read_only())] {
        assert_eq!(client.run(&place, id, &["true"], more).await.code(), 0);
    }
    let mut other = Client::connect(&server).await;
    other.ok("fs/readFile", json!({"path": file, "sandbox": {"type": "read-only"}})).await;
}

#[tokio::test]
async fn inotify_instances_of_one_program_stop_no_other() {
    let Some((place, server)) = server_of_its_own_user("inotify instances", 64_103).await else { return };
    let file = place.put("f", "content");
    let mut client = Client::connect(&server).await;
    greedy(&mut client, &place, INOTIFY, "EMFILE").await;
    let write = json!({"sandbox": {"type": "workspace-write", "network_access": false}});
    for (id, more) in [("free", json!({})), ("confined", read_only()), ("writes", write)] {
        assert_eq!(client.run(&place, id, &["true"], more).await.code(), 0, "{id}");
    }
    let mut other = Client::connect(&server).await;
    other.ok("fs/readFile", json!({"path": file, "sandbox": {"type": "read-only"}})).await;
}

#[tokio::test]
async fn programs_have_fewer_descriptors_than_their_server() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    let limits = fs::read_to_string(format!("/proc/{}/limits", server.program.child.id().unwrap())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert_eq!(numbers[0], numbers[1], "the server has all that it may");
    let expect = (numbers[1] / 2).clamp(1024, 65_536).min(numbers[1]);
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap().min(expect);
    for (id, more) in [("free", json!({})), ("confined", read_only())] {
        let events = client.run(&place, id, &["sh", "-c", "ulimit -Hn; ulimit -Sn"], more).await;
        let told: Vec<u64> = events.output(None).lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(told[0], expect, "{id}");
        assert!(told[1] == own || told[1] == expect.min(1024), "{id}: {told:?}");
    }
}

#[tokio::test]
async fn programs_end_before_the_server_when_memory_runs_out() {
    let (place, server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    let own = fs::read_to_string(format!("/proc/{}/oom_score_adj", server.program.child.id().unwrap())).unwrap();
    let expect = (own.trim().parse::<i32>().unwrap() + 500).min(1000).to_string();
    let script = "cat /proc/self/oom_score_adj; (echo 0 > /proc/self/oom_score_adj) 2>/dev/null && echo lowered; true";
    let confined = client.run(&place, "confined", &["sh", "-c", script], read_only()).await;
    assert_eq!(confined.output(None).trim(), expect, "and it stays");
    let free = client.run(&place, "free", &["sh", "-c", script], json!({})).await;
    assert_eq!(free.output(None).trim(), format!("{expect}\nlowered"), "the control: it may, where nothing confines it");
}

#[tokio::test]
async fn tasks_of_each_sandbox_are_bounded_by_default() {
    let place = Place::new();
    let mut told = Vec::new();
    for arguments in [&[][..], &["--process-tasks", "0"]] {
        let server = Server::with_arguments(arguments).await;
        let mut client = Client::connect(&server).await;
        let events = client.run(&place, "p", &["cat", "/proc/sys/kernel/pid_max"], read_only()).await;
        told.push(events.output(None).trim().parse::<u64>().unwrap());
    }
    assert!(told[1] > 4396, "the control: without the bound it is the machine's");
    if told[0] == told[1] {
        return eprintln!("skipped: this kernel cannot bound a pid namespace (Linux 6.14)");
    }
    assert_eq!(told[0], 4396, "4,096 and the 300 that the kernel reserves");
}

/// Where the groups of a process are, by their controllers' hierarchies of version 1, or the one of version 2.
fn groups(text: &str) -> Vec<PathBuf> {
    let ours = text.lines().filter(|line| line.contains("/portcullis-"));
    ours.filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (list, group) = (parts.nth(1)?, parts.next()?);
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mount = mounts.lines().find_map(|line| {
            let (mount, kind) = line.split_once(" - ")?;
            let fits = if list.is_empty() {
                kind.starts_with("cgroup2 ")
            } else {
                kind.starts_with("cgroup ")
                    && kind.rsplit(' ').next()?.split(',').any(|word| list.split(',').any(|it| it == word))
            };
            let mut mount = mount.split(' ').skip(3);
            let (root, point) = (mount.next()?.to_owned(), mount.next()?.to_owned());
            fits.then_some((root, point))
        })?;
        Some(PathBuf::from(mount.1).join(group.strip_prefix(&mount.0)?.trim_start_matches('/')))
    })
    .collect()
}

#[tokio::test]
async fn everything_together_is_bounded_by_default_and_leaves_nothing() {
    let (place, mut server) = (Place::new(), Server::start().await);
    let mut client = Client::connect(&server).await;
    let text = client.run(&place, "p", &["cat", "/proc/self/cgroup"], json!({})).await.output(None);
    let found = groups(&text);
    let read = |file: &str| found.iter().find_map(|group| fs::read_to_string(group.parent()?.join(file)).ok());
    let tasks = read("pids.max");
    let memory = read("memory.max").or_else(|| read("memory.limit_in_bytes"));
    let (Some(tasks), Some(memory)) = (tasks, memory) else {
        return eprintln!("skipped: cgroups cannot be made here by this user ({text})");
    };
    let number = |file: &str| fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let share = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"].map(|file| number(file).unwrap() / 2);
    let tasks: u64 = tasks.trim().parse().unwrap();
    assert!(tasks <= 65_536.min(share[0]).min(share[1]), "{tasks}, {share:?}");
    // The operator's own word holds as it is.
    let said = Server::with_arguments(&["--all-tasks", "65536"]).await;
    let text = Client::connect(&said).await.run(&place, "p", &["cat", "/proc/self/cgroup"], json!({})).await.output(None);
    let said: Vec<String> =
        groups(&text).iter().filter_map(|group| fs::read_to_string(group.parent()?.join("pids.max")).ok()).collect();
    assert_eq!(said, ["65536\n"]);
    let machine = fs::read_to_string("/proc/meminfo").unwrap();
    let total = machine.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total = total.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
    let memory: u64 = memory.trim().parse().unwrap();
    assert!(memory > 0 && memory <= total / 5 * 4 + 4096, "{memory} of {total}");
    server.program.signal(rustix::process::Signal::TERM);
    server.program.wait().await;
    let left: Vec<_> = found.iter().filter(|group| group.parent().unwrap().exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn one_program_leaves_pending_signals_to_others() {
    let Some((place, server)) = server_of_its_own_user("pending signals", 64_104).await else { return };
    let mut client = Client::connect(&server).await;
    let one = ["python3", "-c", SIGNALS, "one"];
    greedy(&mut client, &place, SIGNALS, "EAGAIN").await;
    for (id, more) in [("free", json!({})), ("confined", read_only())] {
        assert_eq!(client.run(&place, id, &one, more).await.output(None), "queued\n", "{id}");
    }
    // Unconfined, the same program takes what there is.
    client.start(&place, "control", &["python3", "-c", SIGNALS], json!({})).await;
    client.output("control", "EAGAIN\n").await;
    assert_eq!(client.run(&place, "after", &one, json!({})).await.output(None), "EAGAIN\n");
}

/// Uses up one budget of its user with `act`, which says whether more was given, and tries once more in another process of the same
/// user. With an argument it does no more than that one try.
const USES_UP: &str = "import array, ctypes, fcntl, os, resource, signal, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
libc, kept = ctypes.CDLL(None), []
def inotify():
    return libc.inotify_init() >= 0
def pipe():
    kept.append(os.pipe())
    return fcntl.fcntl(kept[-1][0], 1032) == 65536
def rights():
    if not kept or kept[-1][1] == 8:
        one, other = socket.socketpair()
        one.setblocking(False)
        kept.append([(one, other), 0])
    try:
        kept[-1][0][0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 253))])
    except OSError:
        return False
    kept[-1][1] += 1
    return True
act = dict(inotify=inotify, pipe=pipe, rights=rights)[sys.argv[1]]
if len(sys.argv) > 2: sys.exit(print('given' if act() else 'refused'))
while act(): pass
child = os.fork()
if child == 0:
    kept.clear() if act is not rights else None
    print('given' if act() else 'refused', flush=True)
    os._exit(0)
os.waitpid(child, 0)
print('ready', flush=True)
signal.pause()";

#[tokio::test]
async fn what_a_sandbox_of_root_uses_up_others_have() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    if !client.has_own_uids().await {
        eprintln!("skipped: what_a_sandbox_of_root_uses_up_others_have: sandboxes have no user ids of their own here");
        return;
    }
    for budget in ["inotify", "pipe", "rights"] {
        let greedy = format!("greedy-{budget}");
        client.start(&place, &greedy, &["python3", "-c", USES_UP, budget], read_only()).await;
        // The control: for its own user nothing is left.
        client.output(&greedy, "refused\nready\n").await;
        for (id, more) in [("other", read_only()), ("roots", json!({}))] {
            let id = format!("{id}-{budget}");
            let tried = client.run(&place, &id, &["python3", "-c", USES_UP, budget, "once"], more).await;
            assert_eq!(tried.output(None), "given\n", "{id}");
        }
        client.ok("process/terminate", json!({"processId": greedy})).await;
        client.events(&greedy).await;
    }
}
