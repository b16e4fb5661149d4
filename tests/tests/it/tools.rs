//! Programs that use more of the kernel than most, under the tables of `workspace-write`: debuggers, a virtual machine, archives.

use crate::jobs::{Job, needs};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Whether a program is installed. The gate installs those of Debian's packages; elsewhere the test names the missing program.
#[expect(clippy::print_stderr, reason = "a skipped test says so in its output")]
fn is_there(program: &str, package: &str) -> bool {
    let is_there = Path::new(program).exists();
    if !is_there {
        eprintln!("skipped: {program} is missing (Debian package {package})");
    }
    is_there
}

#[tokio::test]
async fn gdb_stops_steps_and_prints_in_a_child_of_its_own() {
    needs("/usr/bin/cc", "gcc");
    if !is_there("/usr/bin/gdb", "gdb") {
        return;
    }
    let mut job = Job::new().await;
    let code =
        "int twice(int n) {\n  int result = n;\n  result += n;\n  return result;\n}\nint main(void) { return twice(21) - 42; }\n";
    job.place.put("ws/p.c", code);
    job.run(&["cc", "-g", "-O0", "-o", "p", "p.c"]).await;
    let commands = ["break twice", "run", "next", "next", "print result", "backtrace", "continue"];
    let commands: Vec<&str> = commands.iter().flat_map(|command| ["-ex", *command]).collect();
    let said =
        job.run(&[&["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off"][..], &commands, &["./p"]].concat()).await;
    assert!(said.contains("= 42") && said.contains("main ()") && said.contains("exited normally"), "{said}");
}

#[tokio::test]
async fn a_java_machine_runs_threads_and_compiles() {
    if !is_there("/usr/bin/java", "default-jdk-headless") {
        return;
    }
    let mut job = Job::new().await;
    job.run(&["java", "-XX:-UsePerfData", "-version"]).await;
    if !is_there("/usr/bin/javac", "default-jdk-headless") {
        return;
    }
    let code = "public class Hello { public static void main(String[] a) throws Exception {
        java.util.concurrent.atomic.AtomicInteger sum = new java.util.concurrent.atomic.AtomicInteger();
        Thread[] all = new Thread[8];
        for (int i = 0; i < 8; i++) { final int n = i; all[i] = new Thread(() -> sum.addAndGet(n)); all[i].start(); }
        for (Thread one : all) one.join();
        Process p = new ProcessBuilder(\"echo\", \"child\").redirectErrorStream(true).start();
        System.out.println(sum.get() + \" \" + new String(p.getInputStream().readAllBytes()).trim()); } }";
    job.place.put("ws/Hello.java", code);
    job.run(&["javac", "-J-XX:-UsePerfData", "Hello.java"]).await;
    assert_eq!(job.run(&["java", "-XX:-UsePerfData", "-cp", ".", "Hello"]).await, "28 child\n");
}

#[tokio::test]
async fn archives_and_copies_keep_the_bits_of_directories() {
    needs("/usr/bin/git", "git");
    needs("/usr/bin/python3", "python3");
    let mut job = Job::new().await;
    job.run(&["sh", "-c", "mkdir from && echo content >from/file && chmod 2775 from"]).await;
    job.run(&["cp", "-a", "from", "by-cp"]).await;
    job.run(&["cp", "-rp", "from", "by-cp-p"]).await;
    job.run(&["sh", "-c", "tar cf all.tar from && mkdir by-tar && tar xpf all.tar -C by-tar"]).await;
    job.run(&["python3", "-c", "import shutil; shutil.copytree('from', 'by-python')"]).await;
    job.run(&["git", "init", "-q", "--shared=group", "by-git"]).await;
    let mut copies = vec!["from", "by-cp", "by-cp-p", "by-tar/from", "by-python", "by-git/.git", "by-git/.git/objects"];
    if is_there("/usr/bin/rsync", "rsync") {
        job.run(&["rsync", "-a", "from/", "by-rsync"]).await;
        copies.push("by-rsync");
    }
    for copy in copies {
        let mode = std::fs::metadata(job.place.path(&format!("ws/{copy}"))).unwrap().mode();
        assert_eq!(mode & 0o6000, 0o2000, "{copy}: {mode:o}");
    }
    // A file with such a bit is copied without it, and the program says so.
    job.place.put("ws/lent", "content");
    job.place.mode("ws/lent", 0o6755);
    let said = job.run(&["sh", "-c", "cp -a lent copied 2>&1 || echo failed; stat -c %a copied"]).await;
    assert!(said.contains("Operation not permitted") && !said.ends_with("6755\n"), "{said}");
}

#[tokio::test]
async fn git_packs_and_python_makes_environments_and_children() {
    needs("/usr/bin/git", "git");
    needs("/usr/bin/python3", "python3");
    let mut job = Job::new().await;
    let git = "git init -q r && cd r && git config user.email a@b && git config user.name a && for i in 1 2 3; do echo $i >f && git add f &&
        git commit -qm $i; done && git gc -q --aggressive && git fsck --strict && git worktree add -q ../w && git log --oneline | wc -l";
    assert_eq!(job.run(&["sh", "-c", git]).await.trim(), "3");
    job.run(&["python3", "-m", "venv", "--without-pip", "v"]).await;
    let children = "
import multiprocessing, os, shutil, subprocess, tempfile
def double(n, out): out.put(n * 2)
if __name__ == '__main__':
    print(subprocess.run(['sh', '-c', 'cat'], input=b'piped', capture_output=True, check=True).stdout.decode())
    for kind in ('fork', 'spawn', 'forkserver') [:2]:
        ways = multiprocessing.get_context(kind)
        out = ways.Queue()
        child = ways.Process(target=double, args=(21, out)); child.start(); print(out.get()); child.join()
    with tempfile.TemporaryDirectory(dir='.') as made, tempfile.TemporaryFile(dir='.') as unnamed: unnamed.write(b'x')
";
    job.place.put("ws/children.py", children);
    assert_eq!(job.run(&["v/bin/python", "children.py"]).await, "piped\n42\n42\n");
}
