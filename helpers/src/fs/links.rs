//! The links that the paths of a policy lead through.
//!
//! Entries and bases of globs are resolved once, before the worker is confined. If one of the links on their way leads
//! elsewhere later, what the policy says of the old target is right no more, and of the new one it says nothing: then every
//! request is answered [`FsError::Stale`], and a new worker resolves anew. What has no link on its way costs nothing.

use super::trace::{Ending, Last, trace};
use portcullis_protocol::helper::FsError;
use portcullis_protocol::path::AbsolutePath;
use portcullis_sandbox::compiled::Resolved;
use portcullis_sandbox::kernel_files::{Hidden, hidden};
use portcullis_sandbox::policy::{Policy, PolicyError};
use portcullis_sandbox::roots::Roots;
use rustix::fs::{AtFlags, CWD, readlinkat, statat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Bound of the places that are looked at again for each request, at about a microsecond each: as many as a policy may have
/// entries. Most have no link, and entries share theirs.
const MOST_PLACES: usize = 8192;

/// Places on the way of a policy's paths, and what was there.
#[derive(Debug)]
pub(super) struct Links {
    /// The text of the link; none where there was none, or nothing that the confined worker could look at. There it cannot
    /// follow a link either.
    places: HashMap<PathBuf, Option<Vec<u8>>>,
    /// Something changed between the resolution and the first look, so that no later look can tell.
    moved: bool,
}

impl Links {
    /// Looks at every link that was met. `is_own` says which places are the worker's own in /proc: nobody can point them
    /// elsewhere, and they differ from thread to thread.
    ///
    /// # Errors
    /// More places than the bound.
    pub(super) fn new(policy: &Policy, roots: &Roots, is_own: impl Fn(&Path) -> bool) -> Result<Self, PolicyError> {
        let mut links = Self { places: HashMap::new(), moved: false };
        let entries = policy.files.sets().flat_map(|grants| &grants.entries).map(|grant| &grant.path);
        let globs = policy.files.sets().flat_map(|grants| &grants.deny_globs);
        for named in entries.chain(globs.map(|glob| &glob.base)) {
            links.add(named, roots.resolve(named), &is_own);
        }
        let count = links.places.len();
        if count > MOST_PLACES {
            return Err(PolicyError::Bound { what: "links on the way of its paths", count, bound: MOST_PLACES });
        }
        Ok(links)
    }

    /// That every link still reads as it did.
    pub(super) fn check(&self) -> Result<(), FsError> {
        let same = |(place, was): (&PathBuf, &Option<Vec<u8>>)| text(place) == *was;
        if self.moved || !self.places.iter().all(same) { Err(FsError::Stale) } else { Ok(()) }
    }

    /// Whether the policy leads through a link at this place. To change it would be to change what the policy covers.
    pub(super) fn cover(&self, real: &Path) -> bool {
        self.places.get(real).is_some_and(Option::is_some)
    }

    /// Whether one of the places lies in a tree.
    pub(super) fn lie_below(&self, tree: &Path) -> bool {
        self.places.keys().any(|place| place.starts_with(tree))
    }

    fn add(&mut self, named: &AbsolutePath, resolved: Resolved, is_own: &impl Fn(&Path) -> bool) {
        let (path, links, missing) = match resolved {
            Resolved::Real { path, links } | Resolved::Hidden { path, links } => (path, links, false),
            Resolved::Missing { path, links } => (path, links, true),
            // The tables refuse it too, and with them the policy.
            Resolved::Refused(_problem) => return,
        };
        if links.is_empty() {
            return;
        }
        // What is missing behind a link may come to be a link as well.
        let gap = if missing { first_missing(&path) } else { None };
        for place in links.into_iter().chain(gap).filter(|place| !is_own(place)) {
            let now = text(&place);
            self.places.entry(place).or_insert(now);
        }
        // Behind the name of a process nothing was resolved.
        if matches!(hidden(&path), Some(Hidden::Process(_))) {
            return;
        }
        // The looks came after the resolution. That it still comes out the same proves that they saw what it saw; where it
        // cannot be done again, the way leads through what the confined worker cannot reach, or nowhere.
        let again = trace(named.as_path(), Last::Follow, |_step| Ok(()));
        self.moved |= again.is_ok_and(|again| again.ending != Ending::NotDirectory && again.real != path);
    }
}

fn text(place: &Path) -> Option<Vec<u8>> {
    readlinkat(CWD, place, Vec::new()).ok().map(std::ffi::CString::into_bytes)
}

fn first_missing(path: &Path) -> Option<PathBuf> {
    let missing = |place: &&Path| statat(CWD, *place, AtFlags::SYMLINK_NOFOLLOW).is_err_and(|errno| errno == Errno::NOENT);
    path.ancestors().take_while(missing).last().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Tree, confined, confined_with, policy, refusal};
    use super::super::{View, carry_out};
    use super::*;
    use portcullis_protocol::helper::{FsDone, FsOperation};
    use portcullis_sandbox::policy::DenyGlob;

    fn read(view: &View, tree: &Tree, name: &str) -> Result<Vec<u8>, FsError> {
        let operation = FsOperation::ReadFile { path: tree.path(name), follow: true, limit: 100 };
        let answer = carry_out(view, operation, b"", Vec::new());
        answer.outcome.map(|_content| answer.payload)
    }

    fn write(view: &View, tree: &Tree, name: &str) -> Result<FsDone, FsError> {
        carry_out(view, FsOperation::WriteFile { path: tree.path(name), follow: true }, b"x", Vec::new()).outcome
    }

    fn copy(view: &View, tree: &Tree, from: &str, to: &str) -> Result<FsDone, FsError> {
        let operation = FsOperation::Copy { source: tree.path(from), destination: tree.path(to), recursive: true };
        carry_out(view, operation, b"", Vec::new()).outcome
    }

    fn remove(view: &View, tree: &Tree, name: &str) -> Result<FsDone, FsError> {
        let operation = FsOperation::Remove { path: tree.path(name), recursive: true, force: true, follow: true };
        carry_out(view, operation, b"", Vec::new()).outcome
    }

    /// Points a link elsewhere, as something outside would: at once.
    fn retarget(tree: &Tree, name: &str, text: &str) {
        tree.link("next", text);
        std::fs::rename(tree.at("next"), tree.at(name)).unwrap();
    }

    fn versions() -> Tree {
        let tree = Tree::new();
        for version in ["v1", "v2"] {
            tree.put(&format!("{version}/secret.env"), b"secret");
            tree.put(&format!("{version}/plain"), b"plain");
        }
        tree.link("current", "v1");
        tree
    }

    fn denying(tree: &Tree, glob: bool) -> View {
        if glob {
            let glob = DenyGlob { base: tree.path("current"), pattern: "*.env".to_owned() };
            confined_with(&[(tree.root(), "read")], &[glob])
        } else {
            confined(&[(tree.root(), "read"), (&tree.at("current/secret.env"), "deny")])
        }
    }

    #[test]
    fn a_denial_through_a_link_outlives_what_the_link_led_to() {
        for glob in [false, true] {
            let tree = versions();
            let view = denying(&tree, glob);
            assert_eq!(refusal(read(&view, &tree, "current/secret.env")), 13);
            assert_eq!(refusal(read(&view, &tree, "v1/secret.env")), 13);
            // The control: what no entry denies is read, through the link too.
            assert_eq!(read(&view, &tree, "current/plain").unwrap(), b"plain");
            assert_eq!(read(&view, &tree, "v2/secret.env").unwrap(), b"secret");
            retarget(&tree, "current", "v2");
            for name in ["current/secret.env", "v2/secret.env", "v1/secret.env", "v1/plain"] {
                assert_eq!(read(&view, &tree, name), Err(FsError::Stale), "{name}");
            }
            assert_eq!(copy(&view, &tree, "current/secret.env", "v1/copy"), Err(FsError::Stale));
            // The worker that comes instead knows the new target.
            let view = denying(&tree, glob);
            assert_eq!(refusal(read(&view, &tree, "current/secret.env")), 13);
            assert_eq!(refusal(read(&view, &tree, "v2/secret.env")), 13);
            // And the old one again, once the link leads there again.
            retarget(&tree, "current", "v1");
            assert_eq!(read(&view, &tree, "current/secret.env"), Err(FsError::Stale));
        }
    }

    #[test]
    fn a_link_that_moves_while_the_worker_starts_is_noticed() {
        let tree = versions();
        let policy = policy(&[(tree.root(), "read"), (&tree.at("current/secret.env"), "deny")], &[]);
        for (moves, expect) in [(false, Ok(b"secret".to_vec())), (true, Err(FsError::Stale))] {
            let roots = Roots::open(&policy).unwrap();
            if moves {
                retarget(&tree, "current", "v2");
            }
            let view = View::confined(&policy, roots, &[]).unwrap();
            assert_eq!(read(&view, &tree, "v2/secret.env"), expect);
        }
    }

    #[test]
    fn links_that_lead_nowhere_or_into_the_worker_itself_do_not_make_it_stale() {
        let tree = versions();
        tree.link("loop", "loop");
        tree.link("through_file", "v1/plain/x");
        let denied = ["loop/x", "loop", "through_file/y", "through_file"].map(|name| tree.at(name));
        let own = ["/proc/self/fd/0", "/proc/thread-self/environ", "/dev/stdin"].map(PathBuf::from);
        let mut entries: Vec<_> = denied.iter().chain(&own).map(|path| (path.as_path(), "deny")).collect();
        entries.push((tree.root(), "read"));
        let view = confined(&entries);
        // In another thread, to which thread-self is another.
        let got = std::thread::scope(|scope| scope.spawn(|| read(&view, &tree, "current/plain")).join().unwrap());
        assert_eq!(got.unwrap(), b"plain");
        assert_eq!(refusal(read(&view, &tree, "loop")), 13);
    }

    #[test]
    fn more_links_than_the_bound_are_refused() {
        let tree = versions();
        let names: Vec<_> = (0..=MOST_PLACES / 40).map(|at| format!("v1/{at}")).collect();
        for name in &names {
            for at in 0..40 {
                let next = if at == 39 { ".".to_owned() } else { format!("{}_{}", name.trim_start_matches("v1/"), at + 1) };
                tree.link(&format!("{name}_{at}"), next);
            }
        }
        let entries: Vec<_> = names.iter().map(|name| tree.at(format!("{name}_0"))).collect();
        let compile = |count: usize| {
            let entries: Vec<_> = entries[..count].iter().map(|path| (path.as_path(), "deny")).collect();
            let policy = policy(&entries, &[]);
            View::confined(&policy, Roots::open(&policy).unwrap(), &[])
        };
        assert!(compile(names.len() - 1).is_ok());
        let refused = compile(names.len()).unwrap_err().to_string();
        assert_eq!(refused, "policy with 8200 links on the way of its paths: the bound is 8192");
    }

    #[test]
    fn a_link_that_goes_away_or_is_no_link_any_more_is_noticed() {
        let tree = versions();
        let view = denying(&tree, false);
        std::fs::rename(tree.at("current"), tree.at("aside")).unwrap();
        assert_eq!(read(&view, &tree, "v2/plain"), Err(FsError::Stale));
        tree.mkdir("current");
        assert_eq!(read(&view, &tree, "v2/plain"), Err(FsError::Stale));
        std::fs::remove_dir(tree.at("current")).unwrap();
        std::fs::rename(tree.at("aside"), tree.at("current")).unwrap();
        assert_eq!(read(&view, &tree, "v2/plain").unwrap(), b"plain");
    }

    #[test]
    fn a_link_where_nothing_was_at_the_end_of_a_link_is_noticed() {
        let tree = versions();
        retarget(&tree, "current", "v3");
        let view = denying(&tree, false);
        assert_eq!(read(&view, &tree, "v2/secret.env").unwrap(), b"secret");
        tree.link("v3", "v2");
        assert_eq!(read(&view, &tree, "v2/secret.env"), Err(FsError::Stale));
        std::fs::remove_file(tree.at("v3")).unwrap();
        // A directory there is covered as it is.
        tree.put("v3/secret.env", b"secret");
        assert_eq!(refusal(read(&view, &tree, "v3/secret.env")), 13);
        assert_eq!(refusal(read(&view, &tree, "current/secret.env")), 13);
    }

    #[test]
    fn what_a_deny_entry_names_is_denied_wherever_a_new_link_leads() {
        for glob in [false, true] {
            let tree = versions();
            tree.link("here", ".");
            tree.link("to_secret", "here/v1/secret.env");
            tree.link("round", "here/v1/../v2/plain");
            let view = if glob {
                let glob = DenyGlob { base: tree.path("v1"), pattern: "*.env".to_owned() };
                confined_with(&[(tree.root(), "write")], &[glob])
            } else {
                confined(&[(tree.root(), "write"), (&tree.at("v1/secret.env"), "deny")])
            };
            std::fs::rename(tree.at("v1"), tree.at("old")).unwrap();
            tree.link("v1", "v2");
            for name in ["v1/secret.env", "here/v1/secret.env", "current/secret.env", "to_secret"] {
                assert_eq!(refusal(read(&view, &tree, name)), 13, "{name}");
                assert_eq!(refusal(write(&view, &tree, name)), 13, "{name}");
                assert_eq!(remove(&view, &tree, name).is_ok(), name == "to_secret", "{name}");
                assert_eq!(refusal(copy(&view, &tree, "v2/plain", "v1/secret.env")), 13);
                let path = tree.path("v1/secret.env");
                let stat = carry_out(&view, FsOperation::GetMetadata { path: path.clone(), follow: true }, b"", Vec::new());
                assert_eq!(refusal(stat.outcome), 13);
                let real = carry_out(&view, FsOperation::Canonicalize { path }, b"", Vec::new());
                assert_eq!(refusal(real.outcome), 13);
            }
            // The controls: other names through the same links, and dots that no name can be made of.
            for name in ["v1/plain", "here/v1/plain", "round"] {
                assert_eq!(read(&view, &tree, name).unwrap(), b"plain", "{name}");
            }
            assert_eq!(tree.get("v2/secret.env"), b"secret");
        }
    }

    #[test]
    fn links_that_the_policy_leads_through_are_not_for_its_client_to_change() {
        let tree = Tree::new();
        for name in ["ws/v1/secret", "ws/v2/secret", "ws/lib/x"] {
            tree.put(name, b"secret");
        }
        tree.link("ws/current", "v1");
        tree.link("ws/other", "v2");
        tree.link("ws/alias", "lib");
        let (ws, secret, alias) = (tree.at("ws"), tree.at("ws/current/secret"), tree.at("ws/alias/x"));
        let view = confined(&[(&ws, "write"), (&secret, "deny"), (&alias, "read")]);
        for link in ["ws/current", "ws/alias"] {
            assert_eq!(refusal(remove(&view, &tree, link)), 30, "{link}");
            assert_eq!(refusal(copy(&view, &tree, "ws/other", link)), 30, "{link}");
        }
        assert_eq!(refusal(remove(&view, &tree, "ws")), 30);
        assert_eq!(std::fs::read_link(tree.at("ws/current")).unwrap(), Path::new("v1"));
        assert_eq!(tree.names("ws"), ["alias", "current", "lib", "other", "v1", "v2"]);
        // The controls: another link, and what lies behind the links.
        assert_eq!(remove(&view, &tree, "ws/other"), Ok(FsDone::Changed));
        assert_eq!(write(&view, &tree, "ws/current/new"), Ok(FsDone::Changed));
        assert_eq!(read(&view, &tree, "ws/v2/secret").unwrap(), b"secret");
    }
}
