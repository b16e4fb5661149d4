//! What entries take of the machine's `/dev/shm` is held as elsewhere.

use super::*;

/// A place in shared memory, with the same policy for it as for a workspace.
fn places() -> [(tempfile::TempDir, PathBuf); 2] {
    ["/var/tmp", "/dev/shm"].map(|above| {
        let directory = tempfile::tempdir_in(above).unwrap();
        let path = directory.path().canonicalize().unwrap();
        fs::write(path.join("denied"), "old").unwrap();
        (directory, path)
    })
}

pub(super) fn denials_in_shared_memory_hold_as_elsewhere() {
    let mut spawner = Spawner::start();
    for (nth, (_directory, place)) in (1..).zip(places()) {
        let (denied, missing) = (place.join("denied"), place.join("missing/name"));
        let granting = [(Path::new("/"), Access::Read), (&*place, Access::Write)];
        let denying = policy(&[granting[0], granting[1], (&denied, Access::Deny), (&missing, Access::Deny)]);
        let look = format!("cat {}; mkdir {}", denied.display(), place.join("missing").display());
        let (outcome, _) = spawner.run(&shell(&look), Some(&denying));
        assert_eq!(outcome.stdout, "", "{place:?}");
        assert!(!place.join("missing").exists(), "{place:?}: nothing is left");

        // A process outside replaces what is covered.
        let (stdout, _stderr) = spawner.start_process(nth, &shell("echo ready; exec sleep 1000"), Some(&denying));
        assert!(matches!(spawner.event(), SpawnerEvent::Started { .. }));
        BufReader::new(stdout).read_line(&mut String::new()).unwrap();
        fs::write(place.join("new"), "new").unwrap();
        fs::rename(place.join("new"), &denied).unwrap();
        match spawner.event() {
            SpawnerEvent::Exited { status: ExitStatus::Signal(9), failure: Some(failure), .. } => {
                assert!(failure.contains("denied` was made, moved or replaced from outside"), "{failure}");
            }
            other => panic!("{place:?}: {other:?}"),
        }
        // The control: without the denials.
        let (outcome, _) = spawner.run(&shell(&look), Some(&policy(&granting)));
        assert_eq!((outcome.stdout.as_str(), place.join("missing").is_dir()), ("new", true), "{place:?}");
    }
    spawner.close();
}
