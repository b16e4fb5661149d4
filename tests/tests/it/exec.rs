//! `portcullis exec` and the README's promise.

use portcullis_tests::{Place, Server, executable, portcullis, without};
use std::process::Output;

async fn exec(arguments: &[&str]) -> (Output, String, String) {
    let output = portcullis(&[&["exec"], arguments].concat()).output().await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    (output, stdout, stderr)
}

#[tokio::test]
async fn a_command_runs_confined_in_the_workspace_with_its_output_and_status() {
    let place = Place::new();
    place.put("file", "content\n");
    let workspace = place.path("").to_str().unwrap().to_owned();
    let (output, stdout, stderr) = exec(&["--workspace", &workspace, "--", "sh", "-c", "cat file; echo err >&2; exit 7"]).await;
    assert_eq!((output.status.code(), stdout.as_str(), stderr.as_str()), (Some(7), "content\n", "err\n"));
    // Who chooses nothing gets the workspace and no more; the control is the same command under full-access.
    let outside = Place::new();
    let made = outside.path("made");
    let write = ["--", "sh", "-c", &format!("echo x >made; echo x >{}", made.display())];
    let (output, _stdout, stderr) = exec(&[&["--workspace", &workspace][..], &write].concat()).await;
    assert!(!output.status.success() && place.has("made") && !outside.has("made"), "{stderr}");
    assert!(stderr.contains(&format!("denied: write {}", made.display())) && stderr.contains("to allow it"), "{stderr}");
    let (output, _stdout, stderr) = exec(&[&["--workspace", &workspace, "--policy", "full-access"][..], &write].concat()).await;
    assert!(output.status.success() && outside.has("made"), "{stderr}");
}

#[tokio::test]
async fn workspace_write_holds_and_without_namespaces_needs_the_operators_word() {
    let (inside, outside) = (Place::new(), Place::new());
    inside.put(".git/config", "before");
    let workspace = inside.path("").to_str().unwrap().to_owned();
    let script = format!("echo x >made; echo x >.git/config; echo x >{}", outside.path("made").display());
    let policy = ["exec", "--workspace", &workspace, "--policy", "workspace-write"];
    let words = [&policy[..], &["--", "sh", "-c", &script]].concat();
    let output = portcullis(&words).output().await.unwrap();
    assert!(inside.has("made") && !outside.has("made"), "{output:?}");
    assert_eq!(inside.content(".git/config"), "before");
    std::fs::remove_file(inside.path("made")).unwrap();
    // Without namespaces it is refused, and with the operator's word it is held but for the protected names.
    let less = |words: &[&str]| without(&["namespaces"], &executable("portcullis"), words).output();
    let output = less(&words).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr.contains("--allow-unprotected-metadata") && stderr.contains(".git") && !inside.has("made"), "{stderr}");
    let output = less(&[&policy[..], &["--allow-unprotected-metadata", "--", "sh", "-c", &script]].concat()).await.unwrap();
    assert!(!output.status.success() && inside.has("made") && !outside.has("made"), "{output:?}");
    assert_eq!(inside.content(".git/config"), "x\n");
}

#[tokio::test]
async fn a_running_server_does_the_same() {
    let server = Server::start().await;
    let place = Place::new();
    let workspace = place.path("").to_str().unwrap().to_owned();
    let (output, stdout, stderr) = exec(&["--url", &server.url, "--workspace", &workspace, "--", "pwd"]).await;
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stdout.trim(), workspace);
}

#[tokio::test]
async fn secrets_of_the_environment_stay_unless_they_are_named() {
    let place = Place::new();
    let workspace = place.path("").to_str().unwrap().to_owned();
    let run = |more: &'static [&'static str]| {
        let mut command =
            portcullis(&[&["exec", "--workspace", &workspace][..], more, &["--", "sh", "-c", "echo $MY_TOKEN-$PLAIN"]].concat());
        command.env("MY_TOKEN", "secret").env("PLAIN", "plain");
        async move { String::from_utf8(command.output().await.unwrap().stdout).unwrap() }
    };
    assert_eq!(run(&[]).await, "-plain\n");
    assert_eq!(run(&["--env", "MY_TOKEN"]).await, "secret-plain\n");
}

#[tokio::test]
async fn git_works_on_a_repository_under_the_default_policy() {
    let place = Place::new();
    let workspace = place.path("").to_str().unwrap().to_owned();
    let git = |arguments: &[&str]| {
        let mut command = tokio::process::Command::new("git");
        command.arg("-C").arg(&workspace).args(arguments).env("GIT_CONFIG_GLOBAL", "/dev/null");
        async move { assert!(command.output().await.expect("git is installed").status.success()) }
    };
    git(&["init", "--quiet"]).await;
    place.put("file", "x");
    let (output, stdout, stderr) = exec(&["--workspace", &workspace, "--", "git", "status", "--short"]).await;
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stdout, "?? file\n");
}
