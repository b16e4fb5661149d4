//! Watches for what is not there.

use portcullis_tests::{Client, PATIENCE, Place, Server};
use serde_json::{Value, json};
use tokio::time::timeout;

fn params(id: u64, missing: &[String]) -> Value {
    json!({"watchId": id, "missing": missing, "present": null})
}

async fn watches(client: &mut Client, params: Value) -> bool {
    client.ok("fs/watchMissing", params).await["watching"].as_bool().unwrap()
}

/// The next notification says that this watch has ended: none of another came before.
async fn told(client: &mut Client, id: u64) {
    let notice = client.wait(|message| message["method"] == "fs/missingChanged").await;
    assert_eq!(notice["params"], json!({"watchId": id}));
}

#[tokio::test]
async fn a_client_is_told_once_when_something_comes() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    place.directory("d");
    assert!(watches(&mut client, params(1, &[place.uri("x"), place.uri("d/y"), place.uri("deep/er/z")])).await);
    assert!(watches(&mut client, json!({"watchId": 2, "missing": [place.uri("last")], "present": place.uri("d")})).await);
    // An id in use is refused, and its watch stays.
    assert!(!watches(&mut client, params(1, &[place.uri("other")])).await);
    place.put("unrelated", "");
    place.put("d/x", "");
    place.put("d/y", "");
    told(&mut client, 1).await;
    place.put("x", "");
    place.put("last", "");
    told(&mut client, 2).await;
    // The id is free again, and each way of coming counts.
    for (nth, (name, come)) in [
        ("deep/er/z", (|place: &Place| drop(place.directory("deep"))) as fn(&Place)),
        ("moved", |place| std::fs::rename(place.path("x"), place.path("moved")).unwrap()),
        ("link", |place| drop(place.link("link", "/nowhere"))),
        // With its directory it can be watched no more.
        ("d/late", |place| std::fs::rename(place.path("d"), place.path("e")).unwrap()),
        ("deep/late", |place| std::fs::remove_dir(place.path("deep")).unwrap()),
    ]
    .into_iter()
    .enumerate()
    {
        let id = 1 + nth as u64 % 2;
        assert!(watches(&mut client, params(id, &[place.uri(name)])).await, "{name}");
        come(&place);
        told(&mut client, id).await;
    }
}

#[tokio::test]
async fn what_cannot_be_watched_is_for_the_client_to_look_for() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = Client::connect(&server).await;
    place.put("there", "");
    place.directory("d");
    place.link("linked", place.path("d"));
    for (nth, missing) in [
        &[][..],
        &[place.uri("there"), place.uri("x")],
        &[place.uri("x"), place.uri("there")],
        &[place.uri("there/x")],
        &[place.uri("linked/x")],
        &["file:///C:/x".to_owned()],
        &["file:///".to_owned()],
    ]
    .into_iter()
    .enumerate()
    {
        assert!(!watches(&mut client, params(nth as u64, missing)).await, "{missing:?}");
        // What was refused holds no id.
        assert!(watches(&mut client, params(nth as u64, &[place.uri("x")])).await);
    }
    let absent = json!({"watchId": 90, "missing": [place.uri("x")], "present": place.uri("absent")});
    assert!(!watches(&mut client, absent).await);
    let mut id = 100;
    while watches(&mut client, params(id, &[place.uri("x")])).await {
        id += 1;
        assert!(id < 1000, "watches without bound");
    }
    assert!(id > 100);
}

#[tokio::test]
async fn a_watch_tells_nothing_of_what_the_ceiling_hides() {
    let place = Place::new();
    for name in ["ws", "hidden"] {
        place.directory(name);
    }
    let workspace = place.path("ws");
    let policy = format!(
        "description = \"Read one directory.\"\nfiles = \"restricted\"\nnetwork = \"restricted\"\n\n[[entries]]\npath = \"{}\"\n\
         access = \"read\"\n",
        workspace.display()
    );
    place.put("own.toml", policy);
    let file = place.path("own.toml");
    let bounded = Server::with_arguments(&["--policy", file.to_str().unwrap()]).await;
    let free = Server::start().await;
    for (server, hidden) in [(&bounded, false), (&free, true)] {
        let mut client = Client::connect(server).await;
        assert!(watches(&mut client, params(1, &[place.uri("ws/x")])).await);
        assert_eq!(watches(&mut client, params(2, &[place.uri("hidden/x")])).await, hidden);
    }
}

#[tokio::test]
async fn watches_end_with_their_connection() {
    let (server, place) = (Server::start().await, Place::new());
    let armed = || {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.program.child.id().unwrap())).unwrap();
        let leads_to = descriptors.flatten().filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok());
        leads_to.filter(|place| place.as_os_str() == "anon_inode:inotify").count()
    };
    let mut other = Client::connect(&server).await;
    let mut client = Client::connect(&server).await;
    for id in 0..3 {
        assert!(watches(&mut client, params(id, &[place.uri("x")])).await);
    }
    assert_eq!(armed(), 3);
    drop(client);
    let gone = async {
        while armed() > 0 {
            other.ok("environment/status", json!({})).await;
        }
    };
    timeout(PATIENCE, gone).await.expect("the descriptors go away");
}
