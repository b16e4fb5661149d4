//! Tokens that open less than everything.

use portcullis_tests::{Client, PATIENCE, Place, Refusal, Server, portcullis};
use serde_json::{Value, json};
use tokio::time::timeout;

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// A server that shares a secret, with clocks that are never apart.
async fn serve(place: &Place, arguments: &[&str]) -> Server {
    place.put("secret", SECRET);
    let secret = place.path("secret").display().to_string();
    let auth = ["serve", "--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", &secret];
    let skew = ["--ws-max-clock-skew-seconds", "0"];
    Server::with(portcullis(&[&auth[..], &skew, arguments].concat())).await
}

async fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = timeout(PATIENCE, portcullis(arguments).output()).await.unwrap().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap().trim().to_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// A token that the program signs.
async fn token(place: &Place, expires: &str, arguments: &[&str]) -> String {
    let secret = place.path("secret").display().to_string();
    let words = ["token", "--secret-file", &secret, "--expires", expires];
    let (status, token, stderr) = run(&[&words[..], arguments].concat()).await;
    assert_eq!(status, Some(0), "{stderr}");
    token
}

async fn resume(server: &Server, token: &str, session: &str) -> Result<Value, Refusal> {
    let mut client = Client::dial_with(&server.url, Some(token)).await;
    client.initialize_with(Some(session), json!({"takeOver": true})).await
}

fn file(place: &Place, name: &str) -> Value {
    json!({"path": place.uri(name), "dataBase64": "eA=="})
}

#[tokio::test]
async fn a_token_of_a_workspace_opens_nothing_else() {
    let place = Place::new();
    for name in ["ws", "other", "operators"] {
        place.directory(name);
    }
    let at = |name: &str| place.path(name).display().to_string();
    let server = serve(&place, &["--policy", "workspace-write", "--workspace", &at("ws"), "--workspace", &at("operators")]).await;
    let narrow =
        token(&place, "600", &["--policy", "workspace-write", "--workspace", &at("ws"), "--workspace", &at("other")]).await;
    let plain = token(&place, "600", &[]).await;
    let mut scoped = Client::connect_with_token(&server.url, &narrow).await;
    let mut unscoped = Client::connect_with_token(&server.url, &plain).await;
    let wider = json!({"type": "danger-full-access"});
    for (nth, sandbox) in [Value::Null, wider, json!({"type": "workspace-write", "cwd": place.uri("")})].into_iter().enumerate() {
        let at = |name: &str| {
            let mut params = file(&place, &format!("{name}/file-{nth}"));
            params["sandbox"] = sandbox.clone();
            params
        };
        let script = format!("for name in ws other operators; do echo x >$name/process-{nth}; done 2>/dev/null; true");
        // What both allow; what the operator does not; and what the token does not, whose control is the token of everything.
        scoped.ok("fs/writeFile", at("ws")).await;
        scoped.refused("fs/writeFile", at("other")).await;
        scoped.refused("fs/writeFile", at("operators")).await;
        unscoped.ok("fs/writeFile", at("operators")).await;
        let argv = ["sh", "-c", &script];
        scoped.run(&place, &format!("p{nth}"), &argv, json!({"sandbox": sandbox})).await;
        let made = |name: &str| place.has(&format!("{name}/process-{nth}"));
        assert_eq!([made("ws"), made("other"), made("operators")], [true, false, false], "{sandbox}");
        unscoped.run(&place, &format!("p{nth}"), &argv, json!({"sandbox": sandbox})).await;
        assert_eq!([made("other"), made("operators")], [false, true], "{sandbox}");
    }
}

#[tokio::test]
async fn methods_outside_of_the_scope_are_refused_by_name() {
    let place = Place::new();
    let server = serve(&place, &[]).await;
    place.put("file", "content");
    let narrow = token(&place, "600", &["--method", "fs/readFile", "--method", "process/*"]).await;
    let mut scoped = Client::connect_with_token(&server.url, &narrow).await;
    scoped.ok("environment/info", json!({})).await;
    scoped.ok("environment/status", json!({})).await;
    scoped.ok("fs/readFile", json!({"path": place.uri("file")})).await;
    assert_eq!(scoped.run(&place, "p", &["true"], json!({})).await.code(), 0);
    let refusal = scoped.refused("fs/writeFile", file(&place, "file")).await;
    assert_eq!(refusal.code, -32600);
    for words in ["fs/writeFile", "fs/readFile, process/*"] {
        assert!(refusal.message.contains(words), "{refusal:?}");
    }
    assert_eq!(scoped.refused("no/such", json!({})).await.code, -32600);
    assert_eq!(place.content("file"), "content");
    let mut unscoped = Client::connect_with_token(&server.url, &token(&place, "600", &[]).await).await;
    unscoped.ok("fs/writeFile", file(&place, "file")).await;
    assert_eq!(place.content("file"), "x");
}

#[tokio::test]
async fn a_connection_ends_with_its_token_and_its_session_stays() {
    let place = Place::new();
    let server = serve(&place, &[]).await;
    let long = token(&place, "600", &["--method", "process/*"]).await;
    let short = token(&place, "20", &["--method", "process/*"]).await;
    let mut scoped = Client::connect_with_token(&server.url, &short).await;
    scoped.start(&place, "p", &["sleep", "600"], json!({})).await;
    assert_eq!(scoped.closed().await, Some(4003));
    // Its session goes on, for who has another token of the same scope.
    let mut again = Client::dial_with(&server.url, Some(&long)).await;
    again.initialize(Some(&scoped.session)).await.unwrap();
    again.send(&json!({"method": "initialized"})).await;
    let listed = again.ok("process/list", json!({})).await;
    assert!(listed.to_string().contains("\"p\""), "{listed}");
}

#[tokio::test]
async fn a_session_is_for_connections_of_its_scope() {
    let place = Place::new();
    let server = serve(&place, &[]).await;
    let one = token(&place, "600", &["--method", "process/*"]).await;
    let same = token(&place, "700", &["--method", "process/*"]).await;
    let more = token(&place, "600", &["--method", "process/*", "--method", "fs/*"]).await;
    let plain = token(&place, "600", &[]).await;
    let scoped = Client::connect_with_token(&server.url, &one).await;
    let unscoped = Client::connect_with_token(&server.url, &plain).await;
    for (token, session) in [(&more, &scoped), (&plain, &scoped), (&one, &unscoped)] {
        let refusal = resume(&server, token, &session.session).await.unwrap_err();
        assert_eq!(refusal.message, format!("unknown session id {}", session.session));
    }
    resume(&server, &same, &scoped.session).await.unwrap();
    resume(&server, &plain, &unscoped.session).await.unwrap();
}

#[tokio::test]
async fn tokens_are_signed_by_the_program_or_refused() {
    let place = Place::new();
    let server = serve(&place, &["--ws-issuer", "me", "--ws-audience", "here"]).await;
    let right = token(&place, "600", &["--issuer", "me", "--audience", "here"]).await;
    Client::connect_with_token(&server.url, &right).await.cut();
    let other = token(&place, "600", &["--issuer", "you", "--audience", "here"]).await;
    let (status, _stdout, stderr) = {
        place.put("token", other);
        let token_file = place.path("token").display().to_string();
        run(&["exec", "--url", &server.url, "--token-file", &token_file, "--", "true"]).await
    };
    assert_eq!(status, Some(125));
    assert!(stderr.contains("issuer mismatch"), "{stderr}");
    // A policy file goes into the token.
    let policy = place.path("own.toml").display().to_string();
    place.put(
        "own.toml",
        "description = \"x\"\nfiles = \"restricted\"\nnetwork = \"restricted\"\n[[entries]]\npath = \"/usr\"\naccess = \"read\"\n",
    );
    let spelt = token(&place, "600", &["--issuer", "me", "--audience", "here", "--policy", &policy]).await;
    let mut client = Client::connect_with_token(&server.url, &spelt).await;
    client.ok("fs/getMetadata", json!({"path": "file:///usr/bin"})).await;
    client.refused("fs/readFile", json!({"path": place.uri("secret")})).await;
    let secret = place.path("secret").display().to_string();
    for (arguments, words) in [
        (&["--policy", "no-such"][..], "no policy is named `no-such`"),
        (&["--policy", "workspace-write"], "`policy`"),
        (&["--method", "fs"], "is no method"),
    ] {
        let words_of = ["token", "--secret-file", &secret, "--expires", "60"];
        let (status, stdout, stderr) = run(&[&words_of[..], arguments].concat()).await;
        assert_eq!((status, stdout.as_str()), (Some(1), ""), "{arguments:?}");
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    }
}
