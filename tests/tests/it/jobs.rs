//! What people run in a workspace, under `workspace-write` with the network off: blocking these would be a defect.

use portcullis_tests::{Client, Place, Server};
use serde_json::{Value, json};
use std::path::Path;

/// A workspace `ws` with a home directory in it, and a client.
pub(crate) struct Job {
    client: Client,
    pub(crate) place: Place,
    number: usize,
    _server: Server,
}

impl Job {
    pub(crate) async fn new() -> Self {
        let server = Server::start().await;
        let place = Place::new();
        place.directory("ws/home");
        Self { client: Client::connect(&server).await, place, number: 0, _server: server }
    }

    fn sandbox(&self, entries: &[Value]) -> Value {
        let special = |kind: &str, access: &str| json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access});
        let usual = [special("root", "read"), special("project_roots", "write"), special("slash_tmp", "write")];
        let entries: Vec<&Value> = usual.iter().chain(entries).collect();
        json!({"cwd": self.place.uri("ws"), "workspaceRoots": [self.place.uri("ws")], "windowsSandboxLevel": "disabled",
            "permissions": {"type": "managed", "network": "restricted",
                "file_system": {"type": "restricted", "entries": entries}}})
    }

    fn env(&self, path: &str) -> Value {
        json!({"PATH": path, "HOME": self.place.path("ws/home"), "LANG": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1",
            "npm_config_cache": self.place.path("ws/home/npm"), "npm_config_update_notifier": "false",
            "CARGO_HOME": self.place.path("ws/home/cargo")})
    }

    /// Runs a program below `ws` that must end well, and answers what it wrote to its standard output.
    pub(crate) async fn run(&mut self, argv: &[&str]) -> String {
        let sandbox = self.sandbox(&[]);
        self.run_with(argv, "/usr/bin:/bin", sandbox).await
    }

    async fn run_with(&mut self, argv: &[&str], path: &str, sandbox: Value) -> String {
        self.number += 1;
        let id = self.number.to_string();
        let more = json!({"cwd": self.place.uri("ws"), "env": self.env(path), "sandbox": sandbox});
        let events = self.client.run(&self.place, &id, argv, more).await;
        assert_eq!(events.code(), 0, "{argv:?}: {}", events.output(None));
        events.output(Some("stdout"))
    }
}

/// Says what to install, where the gate would have.
pub(crate) fn needs(program: &str, package: &str) {
    assert!(Path::new(program).exists(), "{program} is missing: install the Debian package {package}");
}

#[tokio::test]
async fn git_reads_a_protected_repository_and_commits_where_it_may() {
    needs("/usr/bin/git", "git");
    let mut job = Job::new().await;
    let git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"];
    let with = |arguments: &[&'static str]| [&git[..], arguments].concat();
    // The repository is made outside, as by whoever gave the workspace; its `.git` may not even be made inside.
    for arguments in [&["init", "-q"][..], &["commit", "-q", "--allow-empty", "-m", "first"]] {
        let made = tokio::process::Command::new("/usr/bin/git")
            .args(&with(arguments)[1..])
            .current_dir(job.place.path("ws"))
            .env("HOME", job.place.path("ws/home"))
            .output()
            .await
            .unwrap();
        assert!(made.status.success(), "{made:?}");
    }
    job.place.put("ws/file", "one\n");
    assert!(job.run(&with(&["status", "--short"])).await.contains("?? file"));
    assert!(job.run(&with(&["log", "--oneline"])).await.contains("first"));
    let granted = job.sandbox(&[json!({"path": {"type": "path", "path": job.place.uri("ws/.git")}, "access": "write"})]);
    for arguments in [&["add", "file"][..], &["commit", "-q", "-m", "second"], &["checkout", "-q", "-b", "topic"]] {
        job.run_with(&with(arguments), "/usr/bin:/bin", granted.clone()).await;
    }
    job.place.put("ws/file", "one\ntwo\n");
    assert!(job.run(&with(&["diff"])).await.contains("+two"));
    assert!(job.run(&with(&["log", "--oneline"])).await.contains("second"));
    // A clone below the workspace is none of the workspace's own metadata.
    job.run(&with(&["clone", "-q", ".", "copy"])).await;
    assert_eq!(job.place.content("ws/copy/file"), "one\n");
}

#[tokio::test]
async fn make_and_a_compiler_build_and_run() {
    needs("/usr/bin/make", "make");
    needs("/usr/bin/cc", "gcc");
    let mut job = Job::new().await;
    job.place.put("ws/hello.c", "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 0; }\n");
    job.place.put("ws/Makefile", "all: hello\n\t./hello\nhello: hello.o\n\tcc -o $@ $^\n");
    assert!(job.run(&["make", "-j2"]).await.contains("hello\n"));
    assert!(job.place.has("ws/hello.o"));
}

#[tokio::test]
async fn cargo_builds_tests_and_runs_offline() {
    let mut job = Job::new().await;
    job.place.put("ws/Cargo.toml", "[package]\nname = \"tiny\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n");
    job.place.put("ws/build.rs", "fn main() { println!(\"cargo::rustc-env=WORD=built\"); }\n");
    let code =
        "fn main() { println!(\"{}\", env!(\"WORD\")); }\n#[test]\nfn threads() { std::thread::spawn(|| ()).join().unwrap(); }\n";
    job.place.put("ws/src/main.rs", code);
    let cargo = Path::new(env!("CARGO"));
    let path = format!("{}:/usr/bin:/bin", cargo.parent().unwrap().display());
    let sandbox = job.sandbox(&[]);
    for (arguments, expect) in
        [(["build", "--offline"], ""), (["test", "--offline"], "1 passed"), (["run", "--offline"], "built\n")]
    {
        let argv = [&[cargo.to_str().unwrap()], &arguments[..]].concat();
        let output = job.run_with(&argv, &path, sandbox.clone()).await;
        assert!(output.contains(expect), "{arguments:?}: {output}");
    }
}

#[tokio::test]
async fn npm_installs_a_local_package_and_runs_scripts() {
    needs("/usr/bin/node", "nodejs");
    needs("/usr/bin/npm", "npm");
    let mut job = Job::new().await;
    job.place.put("ws/part/package.json", r#"{"name": "part", "version": "1.0.0", "main": "index.js"}"#);
    job.place.put("ws/part/index.js", "module.exports = 'from the part'\n");
    let app = r#"{"name": "app", "version": "1.0.0", "scripts": {"postinstall": "node -e \"require('fs').writeFileSync('installed', '')\"", "start": "node -p \"require('part')\""}}"#;
    job.place.put("ws/package.json", app);
    job.run(&["npm", "pack", "--silent", "./part"]).await;
    // With a package it installs that one only; alone it also runs the workspace's own scripts.
    for package in [&["./part-1.0.0.tgz"][..], &[]] {
        job.run(&[&["npm", "install", "--offline", "--no-audit", "--no-fund"], package].concat()).await;
    }
    assert!(job.place.has("ws/node_modules/part/index.js") && job.place.has("ws/installed"));
    assert!(job.run(&["npm", "run", "--silent", "start"]).await.contains("from the part"));
}

#[tokio::test]
async fn node_starts_processes_and_threads() {
    needs("/usr/bin/node", "nodejs");
    let mut job = Job::new().await;
    let script = "
        const { spawnSync, spawn } = require('child_process');
        const { Worker } = require('worker_threads');
        const done = spawnSync('cat', { input: 'through a pipe' });
        if (done.error) throw done.error;
        console.log(done.stdout.toString());
        new Worker('require(\"worker_threads\").parentPort.postMessage(\"from a thread\")', { eval: true })
            .on('message', text => { console.log(text);
                spawn('sh', ['-c', 'echo from a child']).stdout.on('data', data => console.log(data.toString().trim())); });";
    assert_eq!(job.run(&["node", "-e", script]).await, "through a pipe\nfrom a thread\nfrom a child\n");
}

#[tokio::test]
async fn python_has_its_event_loop_its_pairs_and_its_pools() {
    needs("/usr/bin/python3", "python3");
    let mut job = Job::new().await;
    job.place.put(
        "ws/job.py",
        "
import asyncio, concurrent.futures, socket, subprocess, tempfile

async def talk():
    one, other = socket.socketpair()
    reader, _ = await asyncio.open_connection(sock=one)
    _, writer = await asyncio.open_connection(sock=other)
    writer.write(b'through a pair\\n')
    await writer.drain()
    print((await reader.readline()).decode().strip())
    child = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
    print((await child.communicate(b'through a child'))[0].decode())

if __name__ == '__main__':
    asyncio.run(talk())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        print(sum(pool.map(lambda number: len(subprocess.check_output(['printf', 'x' * number])), range(4))))
    with tempfile.NamedTemporaryFile() as file:
        print(file.write(b'12345'))
",
    );
    assert_eq!(job.run(&["python3", "job.py"]).await, "through a pair\nthrough a child\n6\n5\n");
}

#[tokio::test]
async fn bash_does_not_take_its_pipes_for_a_login_from_afar() {
    needs("/bin/bash", "bash");
    let mut job = Job::new().await;
    job.place.put("ws/home/.bashrc", "echo it read its startup file\n");
    // A shell that may not ask whether its input is a socket believes that it is one, and reads the file.
    assert_eq!(job.run(&["bash", "-c", "echo $((1 + 1)) <(:) | tr -d /; type -t ulimit"]).await.lines().last(), Some("builtin"));
    assert_eq!(job.run(&["bash", "-c", "echo clean"]).await, "clean\n");
    // The control: one that is told to reads it.
    assert!(job.run(&["bash", "-i", "-c", "true"]).await.contains("it read its startup file"));
}

#[tokio::test]
async fn a_server_on_the_sandboxes_own_loopback_is_reached_inside_and_nothing_is_reached_outside() {
    let mut job = Job::new().await;
    job.place.put("ws/page", "from inside");
    job.place.put(
        "ws/serve.py",
        "
import http.server, socket, sys, threading, urllib.request
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen('http://127.0.0.1:%d/page' % server.server_port, timeout=60).read().decode())
for address in sys.argv[1:]:
    host, port = address.rsplit(':', 1)
    try:
        socket.create_connection((host, int(port)), 60)
        print('reached')
    except OSError:
        print('out of reach')
",
    );
    let outside = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = outside.local_addr().unwrap().to_string();
    assert_eq!(job.run(&["python3", "serve.py", &address]).await, "from inside\nout of reach\n");
    // The control: without a sandbox the listener outside is reached.
    assert_eq!(job.run_with(&["python3", "serve.py", &address], "/usr/bin:/bin", Value::Null).await, "from inside\nreached\n");
}

#[tokio::test]
async fn python_has_semaphores_in_a_dev_of_its_own() {
    needs("/usr/bin/python3", "python3");
    let mut job = Job::new().await;
    job.place.put(
        "ws/job.py",
        "
import concurrent.futures, multiprocessing
if __name__ == '__main__':
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context('spawn')) as pool:
        print(sum(pool.map(abs, range(-3, 1))))
",
    );
    assert_eq!(job.run(&["python3", "job.py"]).await, "6\n");
}
