//! `exec --environment`: environments by their names, in a file and in variables.

use crate::remote::{HARNESS, Remote};
use portcullis_tests::{Place, Server, executable, portcullis};

/// Runs `echo works` with arguments before it and variables, and answers its status and what it said.
async fn echo(place: &Place, arguments: &[&str], variables: &[(&str, &str)]) -> (i32, String) {
    let workspace = place.path("");
    let usual = ["exec", "--workspace", workspace.to_str().unwrap()];
    let mut command = portcullis(&[&usual, arguments, &["--", "echo", "works"]].concat());
    let output = command.env_remove("CODEX_HOME").envs(variables.iter().copied()).output().await.unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

const WORKS: (i32, &str) = (0, "works\n");

#[tokio::test]
async fn servers_and_programs_are_reached_by_their_names() {
    let (server, place) = (Server::start().await, Place::new());
    let program = executable("portcullis");
    let text = format!(
        "[[environments]]\nid = \"near\"\nurl = \"{}\"\n[[environments]]\nid = \"child\"\nprogram = \"{}\"\nargs = [\"serve\", \"--listen\", \"stdio\"]\n[[environments]]\nid = \"gone\"\nprogram = \"/does/not/exist\"\n",
        server.url,
        program.display()
    );
    place.put("environments.toml", &text);
    let file = place.path("environments.toml");
    let of_file = |id| ["--environments", file.to_str().unwrap(), "--environment", id];
    for id in ["near", "child", "local"] {
        let (status, said) = echo(&place, &of_file(id), &[]).await;
        assert!(status == WORKS.0 && said.starts_with(WORKS.1), "{id}: {said}");
    }
    let (home, home_file) = (place.path(""), ["--environment", "near"]);
    let (status, said) = echo(&place, &home_file, &[("CODEX_HOME", home.to_str().unwrap())]).await;
    assert_eq!((status, said.as_str()), WORKS);
    for (id, expect) in [("other", "there are: near, child, gone"), ("gone", "start /does/not/exist of environment `gone`")] {
        let (status, said) = echo(&place, &of_file(id), &[]).await;
        assert!(status == 125 && said.contains(expect), "{said}");
    }
    place.put("environments.toml", "\n\nwrong = 1\n");
    let (status, said) = echo(&place, &of_file("near"), &[]).await;
    assert!(status == 125 && said.contains("line 3: unknown field `wrong`"), "{said}");
    let (status, said) = echo(&place, &["--environment", "near"], &[]).await;
    assert!(status == 125 && said.contains("no file says what it is"), "{said}");
}

#[tokio::test]
async fn variables_say_where_remote_is_and_change_nothing_unless_it_is_named() {
    let (remote, place) = (Remote::with(&[]).await, Place::new());
    let all = [
        ("CODEX_EXEC_SERVER_NOISE_REGISTRY_URL", remote.url.as_str()),
        ("CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID", "box"),
        ("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", HARNESS),
        ("CODEX_EXEC_SERVER_NOISE_CHATGPT_ACCOUNT_ID", "an-account"),
    ];
    let named = ["--environment", "remote"];
    let (status, said) = echo(&place, &named, &all).await;
    assert_eq!((status, said.as_str()), WORKS);
    let (status, said) = echo(&place, &named, &all[..2]).await;
    assert!(status == 125 && said.contains("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN must be set too"), "{said}");
    let nowhere = [("CODEX_EXEC_SERVER_URL", "ws://127.0.0.1:9")];
    let (status, said) = echo(&place, &named, &nowhere).await;
    assert!(status == 125 && said.contains("127.0.0.1:9"), "{said}");
    for variables in [&nowhere[..], &all[..2]] {
        let (status, said) = echo(&place, &[], variables).await;
        assert_eq!((status, said.as_str()), WORKS);
    }
    remote.end().await;
}
