//! A set of grants that hides a place lifts nothing that another set narrows: neither entries that lead through the place nor the
//! repositories that pointers name through it. Processes and file calls get the same answer.

use super::gateway::{Spawner, Worker, policy, shell};
use super::place::Place;
use crate::Test;
use portcullis_protocol::helper::{ExitStatus, FsOperation};
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::policy::{Access, Policy};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

pub(crate) const TESTS: &[Test] = &[
    ("hidden::hiding_a_link_lifts_no_entry_of_the_ceiling", hiding_a_link_lifts_no_entry_of_the_ceiling),
    ("hidden::hiding_a_link_lifts_no_repositorys_protection", hiding_a_link_lifts_no_repositorys_protection),
    ("hidden::parts_of_a_protected_repository_stay_read_only", parts_of_a_protected_repository_stay_read_only),
    ("hidden::a_pointer_that_the_request_protects_tells_nothing", a_pointer_that_the_request_protects_tells_nothing),
];

/// A workspace with a repository, and links into it in a hidden directory.
fn workspace() -> Place {
    let place = Place::with(&["ws/store/repo/hooks", "ws/a/b", "hidden", "more"]);
    fs::write(place.at("ws/store/repo/config"), "old").unwrap();
    symlink(place.at("ws/store"), place.at("hidden/g")).unwrap();
    symlink("../hidden/g", place.at("more/g")).unwrap();
    symlink(place.at("ws"), place.at("hidden/ws")).unwrap();
    place
}

impl Place {
    /// Everything can be read and the workspace be changed.
    fn wide(&self, more: &[(&Path, Access)]) -> Policy {
        policy(&[&[(Path::new("/"), Access::Read), (&self.at("ws"), Access::Write)], more].concat())
    }

    /// What programs need can be read, and the workspace be changed.
    fn minimal(&self) -> Policy {
        let system = ["/bin", "/usr", "/lib", "/lib64"].map(Path::new).into_iter().filter(|path| path.exists());
        let workspace = self.at("ws");
        policy(&system.map(|path| (path, Access::Read)).chain([(workspace.as_path(), Access::Write)]).collect::<Vec<_>>())
    }

    /// Whether a process, and whether a file call, changes a file of the workspace; and that neither moves or removes its directories.
    fn changes(&self, spawner: &mut Spawner, policy: &Policy, name: &str) -> [bool; 2] {
        let file = self.at("ws").join(name);
        let before = fs::read(&file).unwrap_or_default();
        let script = format!("cd {} && echo new >{name}", self.at("ws").display());
        let by_process = spawner.run(&shell(&script), Some(policy)).0.status == ExitStatus::Code(0);
        let mut worker = Worker::start(Some(policy));
        let by_call = worker.write(&file, b"new").is_ok();
        if !by_process && !by_call {
            assert_eq!(fs::read(&file).unwrap_or_default(), before);
            let top = PathBuf::from(name).iter().next().map(|first| self.at("ws").join(first)).unwrap();
            let moved = format!("mv {} {}", top.display(), self.at("ws/moved").display());
            assert_ne!(spawner.run(&shell(&moved), Some(policy)).0.status, ExitStatus::Code(0), "{name}");
            let path = AbsolutePath::new(&top).unwrap();
            let removed = worker.ask(FsOperation::Remove { path, recursive: true, force: true, follow: true }, b"").0;
            assert!(removed.is_err() && top.exists(), "{name}: {removed:?}");
        }
        [by_process, by_call]
    }
}

fn hiding_a_link_lifts_no_entry_of_the_ceiling() {
    let (mut spawner, place) = (Spawner::start(), workspace());
    let hiding = place.wide(&[(&place.at("hidden"), Access::Deny)]);
    fs::create_dir(place.at("ws/a/.git")).unwrap();
    for (entry, access, name) in [
        ("hidden/ws/a", Access::Read, "a/b/file"),
        ("hidden/ws/a", Access::Write, "a/.git/config"),
        ("hidden/ws/a", Access::Write, "a/.git/hooks"),
    ] {
        let ceiling = place.wide(&[(&place.at(entry), access)]);
        let [plain, denied] = [place.wide(&[]), hiding.clone()].map(|own| own.bounded_by(&ceiling).unwrap());
        for both in [&plain, &denied, &ceiling.clone().bounded_by(&hiding).unwrap()] {
            assert_eq!(place.changes(&mut spawner, both, name), [false; 2], "{entry}, {name}");
        }
        // The controls: beside it, and without the entry.
        assert_eq!(place.changes(&mut spawner, &denied, "beside"), [true; 2]);
        assert_eq!(place.changes(&mut spawner, &hiding, name), [true; 2], "{name}");
        fs::remove_file(place.at("ws").join(name)).unwrap();
    }
    spawner.close();
}

fn hiding_a_link_lifts_no_repositorys_protection() {
    let (mut spawner, place) = (Spawner::start(), workspace());
    let through = |name: &str| place.at(name).to_str().unwrap().to_owned();
    fs::create_dir(place.at("hidden/tree")).unwrap();
    fs::write(place.at("hidden/tree/commondir"), through("ws/store/repo")).unwrap();
    let ceiling = place.wide(&[]);
    let hiding: Vec<_> = [place.wide(&[(&place.at("hidden"), Access::Deny)]), place.wide(&[(&place.at("more"), Access::Deny)])]
        .into_iter()
        .chain([place.minimal()])
        .map(|own| own.bounded_by(&ceiling).unwrap())
        .collect();
    let write = |text: &str| fs::write(place.at("ws/.git"), text).unwrap();
    let pointers: [(&str, &dyn Fn()); 4] = [
        ("a file", &|| write(&format!("gitdir: {}", through("more/g/repo")))),
        ("a file and a note", &|| write(&format!("gitdir: {}", through("hidden/tree")))),
        ("a note", &|| {
            fs::create_dir(place.at("ws/.git")).unwrap();
            fs::write(place.at("ws/.git/commondir"), through("more/g/repo")).unwrap();
        }),
        ("nothing", &|| {}),
    ];
    for (which, put) in pointers {
        put();
        for both in [ceiling.clone()].iter().chain(&hiding) {
            let changed = place.changes(&mut spawner, both, "store/repo/config");
            // The control: nothing leads there.
            assert_eq!(changed, [which == "nothing"; 2], "{which}, {both:?}");
        }
        let _none = fs::remove_file(place.at("ws/.git")).or_else(|_directory| fs::remove_dir_all(place.at("ws/.git")));
    }
    // A `.git` that is a link starts no process.
    symlink(place.at("more/g/repo"), place.at("ws/.git")).unwrap();
    for both in &hiding {
        assert!(Worker::start(Some(both)).write(place.at("ws/store/repo/config"), b"new").is_err());
        spawner.fail(&shell("true"), Some(both));
    }
    spawner.close();
}

fn parts_of_a_protected_repository_stay_read_only() {
    let (mut spawner, place) = (Spawner::start(), workspace());
    let (ceiling, repository) = (place.wide(&[]), place.at("ws/store/repo"));
    let [config, hooks] = ["config", "hooks"].map(|name| repository.join(name));
    let read = (Path::new("/"), Access::Read);
    let requests = [
        (policy(&[read, (&config, Access::Write)]), "store/repo/config"),
        (place.wide(&[(&repository, Access::Read), (&config, Access::Write)]), "store/repo/config"),
        (place.wide(&[(&repository, Access::Read), (&hooks, Access::Write)]), "store/repo/hooks/post-checkout"),
        (place.wide(&[(&repository, Access::Deny), (&hooks, Access::Write)]), "store/repo/hooks/post-checkout"),
        (policy(&[read, (&hooks, Access::Write)]), "store/repo/hooks/post-checkout"),
    ];
    for is_protected in [true, false] {
        for (own, name) in &requests {
            if is_protected {
                fs::write(place.at("ws/.git"), "gitdir: store/repo\n").unwrap();
            }
            let both = own.clone().bounded_by(&ceiling).unwrap();
            // The control: the same where nothing leads there.
            assert_eq!(place.changes(&mut spawner, &both, name), [!is_protected; 2], "{own:?}");
            if is_protected {
                fs::remove_file(place.at("ws/.git")).unwrap();
            }
        }
    }
    // What every set names is free.
    fs::write(place.at("ws/.git"), "gitdir: store/repo\n").unwrap();
    let naming = place.wide(&[(&hooks, Access::Write)]);
    let both = place.wide(&[(&repository, Access::Read), (&hooks, Access::Write)]).bounded_by(&naming).unwrap();
    assert_eq!(place.changes(&mut spawner, &both, "store/repo/hooks/post-checkout"), [true; 2]);
    assert_eq!(place.changes(&mut spawner, &both, "store/repo/config"), [false; 2]);
    spawner.close();
}

fn a_pointer_that_the_request_protects_tells_nothing() {
    let (mut spawner, place) = (Spawner::start(), workspace());
    // Under these ceilings a client may write the `.git` itself.
    let hiding = policy(&[(Path::new("/"), Access::Write), (&place.at("hidden"), Access::Deny)]);
    let showing = policy(&[(Path::new("/"), Access::Write), (&place.at("elsewhere"), Access::Deny)]);
    for (ceiling, is_hidden) in [(hiding, true), (showing, false)] {
        let both = place.wide(&[]).bounded_by(&ceiling).unwrap();
        for (name, leads) in [("g/repo", true), ("absent/repo", false)] {
            fs::write(place.at("ws/.git"), format!("gitdir: {}", place.at("hidden").join(name).display())).unwrap();
            // The control: what is shown counts.
            let changed = place.changes(&mut spawner, &both, "store/repo/config");
            assert_eq!(changed, [is_hidden || !leads; 2], "{name}, {is_hidden}");
        }
    }
    spawner.close();
}
