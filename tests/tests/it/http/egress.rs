//! What requests may reach. Each refusal has its control: the same request where nothing forbids it.

use super::origin::{Origin, server};
use super::{body, request};
use portcullis_tests::{Client, PATIENCE, Place, Refusal, Server, portcullis};
use serde_json::json;
use tokio::time::timeout;

async fn fetch(server: &Server, url: &str) -> Result<String, Refusal> {
    let mut client = Client::connect(server).await;
    client.call("http/request", request(url, json!({}))).await.map(|result| body(&result))
}

/// Refused by the rule, and nothing reached the server.
async fn refused(server: &Server, url: &str, origin: &Origin, expect: &str) {
    let before = origin.accepted();
    let refusal = fetch(server, url).await.expect_err(url);
    assert_eq!(refusal.code, -32603, "{refusal:?}");
    assert!(refusal.message.contains(expect) && refusal.message.contains("--allow-egress"), "{url}: {refusal:?}");
    assert_eq!(origin.accepted(), before, "{url}: it was connected to");
}

#[tokio::test]
async fn a_rule_admits_what_it_names_and_nothing_else() {
    let (own, other) = (Origin::start().await, Origin::start().await);
    let entry = format!("127.0.0.1:{}", own.port);
    let (ruled, free) = (server(&["--allow-egress", &entry], &[]).await, server(&[], &[]).await);
    fetch(&ruled, &own.url("/")).await.unwrap();
    let localhost = format!("http://localhost:{}/", own.port);
    for url in [
        other.url("/"),
        // A redirect is a request of its own.
        own.url(&format!("/to?{}", other.url("/"))),
        own.url(&format!("/to?http://0x7f.1:{}/", other.port)),
        format!("http://own@127.0.0.1:{}/", other.port),
        format!("http://[::ffff:127.0.0.1]:{}/", other.port),
        format!("http://0.0.0.0:{}/", other.port),
        // The address is admitted, the name is not.
        localhost.clone(),
    ] {
        refused(&ruled, &url, &other, "the operator's egress rule does not name").await;
    }
    fetch(&free, &other.url("/")).await.unwrap();
    fetch(&free, &own.url(&format!("/to?{}", other.url("/")))).await.unwrap();
    fetch(&free, &own.url(&format!("/to?http://0x7f.1:{}/", other.port))).await.unwrap();
    fetch(&free, &format!("http://0.0.0.0:{}/", other.port)).await.unwrap();
    fetch(&free, &localhost).await.unwrap();
    // Every spelling of the address that is admitted is that address.
    for host in ["2130706433", "0177.0.0.1", "[::ffff:7f00:1]"] {
        let result = fetch(&ruled, &format!("http://{host}:{}/", own.port)).await;
        assert!(result.is_ok(), "{host}: {result:?}");
    }
}

#[tokio::test]
async fn a_name_leads_to_no_address_that_is_not_public() {
    let origin = Origin::start().await;
    let url = format!("http://localhost:{}/", origin.port);
    refused(&server(&["--allow-egress", "*"], &[]).await, &url, &origin, "has no public address").await;
    refused(&server(&["--allow-egress", "*"], &[]).await, &origin.url("/"), &origin, "has no public address").await;
    // The control: named itself, or its address.
    fetch(&server(&["--allow-egress", "localhost"], &[]).await, &url).await.unwrap();
    let both = server(&["--allow-egress", "*", "--allow-egress", "127.0.0.1"], &[]).await;
    fetch(&both, &url).await.unwrap();
    fetch(&both, &origin.url("/")).await.unwrap();
}

#[tokio::test]
async fn a_ceiling_without_network_closes_the_way_out() {
    let origin = Origin::start().await;
    let entry = format!("127.0.0.1:{}", origin.port);
    let expect = "the operator's policy leaves requests no network";
    refused(&server(&["--policy", "read-only"], &[]).await, &origin.url("/"), &origin, expect).await;
    fetch(&server(&["--policy", "read-only", "--allow-egress", &entry], &[]).await, &origin.url("/")).await.unwrap();
    fetch(&server(&["--policy", "full-access"], &[]).await, &origin.url("/")).await.unwrap();
}

#[tokio::test]
async fn behind_an_address_no_other_host_is_asked_for() {
    let origin = Origin::start().await;
    let headers = json!({"headers": [{"name": "Host", "value": "other.example"}]});
    let (ruled, free) = (server(&["--allow-egress", "127.0.0.1"], &[]).await, server(&[], &[]).await);
    let refusal = Client::connect(&ruled).await.refused("http/request", request(&origin.url("/"), headers.clone())).await;
    assert!(refusal.message.contains("its Host header is not") && origin.accepted() == 0, "{refusal:?}");
    let result = Client::connect(&free).await.ok("http/request", request(&origin.url("/"), headers)).await;
    assert!(body(&result).contains("host: other.example"));
}

#[tokio::test]
async fn proxies_are_used_where_the_rule_admits_them_and_the_name() {
    let (origin, proxy) = (Origin::start().await, Origin::start().await);
    let named = format!("http://user:word@127.0.0.1:{}", proxy.port);
    let environment = [("HTTP_PROXY", named.as_str()), ("NO_PROXY", "skipped.invalid")];
    let free = server(&[], &environment).await;
    let through = fetch(&free, "http://far.invalid/x?q=1").await.unwrap();
    assert!(through.starts_with("GET http://far.invalid/x?q=1 HTTP/1.1\r\n"), "{through}");
    assert!(
        through.contains("host: far.invalid\r\n") && through.contains("proxy-authorization: Basic dXNlcjp3b3Jk\r\n"),
        "{through}"
    );
    let skipped = fetch(&free, "http://skipped.invalid/").await.unwrap_err();
    assert!(skipped.message.contains("look up `skipped.invalid`"), "{skipped:?}");
    assert_eq!(proxy.accepted(), 1);

    // The proxy is admitted, and one of two names.
    let entry = format!("127.0.0.1:{}", proxy.port);
    let both = server(&["--allow-egress", &entry, "--allow-egress", "far.invalid"], &environment).await;
    fetch(&both, "http://far.invalid/").await.unwrap();
    refused(&both, "http://near.invalid/", &proxy, "does not name near.invalid:80").await;
    refused(&both, &origin.url("/"), &origin, "does not name 127.0.0.1").await;

    // The name is admitted and the proxy is not: the place itself is asked.
    let entry = format!("127.0.0.1:{}", origin.port);
    let direct = server(&["--allow-egress", &entry], &environment).await;
    let before = (proxy.accepted(), origin.accepted());
    assert!(fetch(&direct, &origin.url("/")).await.unwrap().starts_with("GET / HTTP/1.1"));
    assert_eq!((proxy.accepted(), origin.accepted()), (before.0, before.1 + 1));
}

#[tokio::test]
async fn a_token_without_network_reaches_nothing_whatever_the_rule() {
    let (place, origin) = (Place::new(), Origin::start().await);
    place.put("secret", "of thirty-two bytes at the very least");
    let secret = place.path("secret").display().to_string();
    let auth = ["serve", "--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", &secret, "--allow-egress", "127.0.0.1"];
    let server = Server::with(portcullis(&auth)).await;
    for (scope, reaches) in [(&["--policy", "read-only"][..], false), (&["--policy", "full-access"], true), (&[], true)] {
        let words = [&["token", "--secret-file", &secret, "--expires", "600"][..], scope].concat();
        let output = timeout(PATIENCE, portcullis(&words).output()).await.unwrap().unwrap();
        let token = String::from_utf8(output.stdout).unwrap();
        let mut client = Client::connect_with_token(&server.url, token.trim()).await;
        let before = origin.accepted();
        match client.call("http/request", request(&origin.url("/"), json!({}))).await {
            Ok(result) => assert!(reaches && result["status"] == 200, "{scope:?}: {result}"),
            Err(refusal) => {
                assert!(!reaches && refusal.message.contains("the token of this connection"), "{scope:?}: {refusal:?}")
            }
        }
        assert_eq!(origin.accepted() - before, usize::from(reaches));
    }
}
