//! The views of fs workers as clients see them: the next call sees changes of the machine.

use portcullis_tests::{Workspace, at, special};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

async fn write(ws: &mut Workspace, path: &str, sandbox: &Value) -> Result<(), i64> {
    let params = json!({"path": ws.place.uri(path), "dataBase64": "bmV3", "sandbox": sandbox});
    ws.client.call("fs/writeFile", params).await.map(drop).map_err(|refusal| refusal.code)
}

#[tokio::test]
async fn a_view_is_replaced_before_the_next_call() {
    let mut ws = Workspace::new().await;
    ws.place.put("ws/.git/config", "old");
    let sandbox = ws.profile(&[
        special("root", "read"),
        special("project_roots", "write"),
        at(&ws.place.uri("ws/later"), "deny"),
        at(&ws.place.uri("out/o"), "deny"),
    ]);
    for round in 0..3 {
        assert_eq!(write(&mut ws, "ws/in", &sandbox).await, Ok(()), "{round}");
        for (path, code) in [("ws/.git/config", -32603), ("ws/.aws/x", -32603), ("ws/later/x", -32600), ("out/o", -32600)] {
            assert_eq!(write(&mut ws, path, &sandbox).await, Err(code), "{path}");
        }
        match round {
            // Covers that are lost, and names that come to be.
            0 => {
                std::fs::remove_dir_all(ws.place.path("ws/.git")).unwrap();
                ws.place.put("ws/.git/config", "old");
                ws.place.put("ws/.aws/x", "old");
                ws.place.put("ws/later/x", "old");
            }
            // All of it at once.
            _ => {
                std::fs::remove_dir_all(ws.place.path("ws")).unwrap();
                ws.place.put("ws/.git/config", "old");
            }
        }
    }
    assert_eq!(ws.place.content("ws/.git/config"), "old");
    // The control.
    for path in ["ws/.git/config", "ws/later/x", "out/o"] {
        ws.place.put(path, "old");
        let params = json!({"path": ws.place.uri(path), "dataBase64": "bmV3"});
        ws.client.ok("fs/writeFile", params).await;
        assert_eq!(ws.place.content(path), "new");
    }
}

/// A file system in memory on the machine, which goes with this.
struct Mounted(PathBuf);

impl Mounted {
    fn new(place: &Path) -> Self {
        let status = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(place).status().unwrap();
        assert!(status.success());
        Self(place.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _gone = Command::new("umount").arg(&self.0).status();
    }
}

#[tokio::test]
async fn what_the_machine_mounts_and_unmounts_is_seen() {
    if !rustix::process::getuid().is_root() {
        println!("skipped: only root mounts things on the machine");
        return;
    }
    let mut ws = Workspace::new().await;
    let sandbox = ws.profile(&[special("root", "read"), special("project_roots", "write")]);
    ws.place.directory("ws/data");
    assert_eq!(write(&mut ws, "ws/data/before", &sandbox).await, Ok(()));
    let mounted = Mounted::new(&ws.place.path("ws/data"));
    assert_eq!(write(&mut ws, "ws/data/on", &sandbox).await, Ok(()));
    assert!(ws.place.has("ws/data/on") && !ws.place.has("ws/data/before"), "it was written to the mounted file system");
    drop(mounted);
    assert!(ws.place.has("ws/data/before") && !ws.place.has("ws/data/on"));
    assert_eq!(write(&mut ws, "ws/data/after", &sandbox).await, Ok(()));
    assert!(ws.place.has("ws/data/after"));
}
