//! The rules of policies once more, slow and obvious: by statements about paths, without tables. It shares no code with what it
//! checks but for the types on the wire.

use portcullis_protocol::path::{AbsolutePath, WirePath};
use portcullis_protocol::sandbox::{Access, Entry, Files, Network, Permissions, Sandbox, Target};
use portcullis_sandbox::compiled::{Resolved, Verdict};
use portcullis_sandbox::policy::{self, Policy};
use portcullis_sandbox::resolve::Machine;
use std::path::{Path, PathBuf};

/// Bytes as choices; where there are no more, every choice is the first.
#[derive(Debug)]
pub(crate) struct Reader<'a>(std::slice::Iter<'a, u8>);

impl<'a> Reader<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self(data.iter())
    }

    fn below(&mut self, bound: u8) -> u8 {
        self.0.next().copied().unwrap_or(0) % bound
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.below(u8::try_from(choices.len()).expect("few")))]
    }

    fn chance(&mut self, of: u8) -> bool {
        self.below(of) == 1
    }

    pub(crate) fn path(&mut self) -> String {
        let names = (0..self.below(5)).map(|_| self.one_of(&NAMES)).collect::<Vec<_>>();
        format!("/{}", names.join("/"))
    }
}

/// Few, so that paths meet; a workspace, the home and what stands for system directories are among them.
const NAMES: [&str; 11] = ["w", "v", "h", "t", "usr", "l", "a", "x.env", ".git", ".aws", "tmp"];

const PROTECTED: [&str; 4] = [".git", ".codex", ".agents", ".aws"];

/// What exists, and where the one link leads.
#[derive(Debug)]
pub(crate) struct SetUp {
    missing: Option<PathBuf>,
    link: bool,
}

impl SetUp {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let missing = reader.chance(2).then(|| PathBuf::from(reader.path())).filter(|path| path != Path::new("/"));
        Self { missing, link: reader.chance(2) }
    }

    pub(crate) fn machine() -> Machine {
        Machine { tmpdir: Some("/t".into()), slash_tmp: true, minimal: vec!["/usr".into()] }
    }

    pub(crate) fn everything() -> Policy {
        Policy { files: policy::Files::Unrestricted, network: policy::Network::Enabled }
    }

    /// `/l` leads to `/a`, if there is a link.
    pub(crate) fn resolve(&self, path: &AbsolutePath) -> Resolved {
        let (path, links) = match path.as_path().strip_prefix("/l") {
            Ok(below) if self.link => (Path::new("/a").join(below), vec![PathBuf::from("/l")]),
            // Joined with nothing, a path would end with a slash.
            _itself => (path.as_path().to_owned(), Vec::new()),
        };
        let path: PathBuf = path.iter().collect();
        match &self.missing {
            Some(missing) if path.starts_with(missing) => Resolved::Missing { path, links },
            _exists => Resolved::Real { path, links },
        }
    }

    fn real(&self, path: &Path) -> (PathBuf, bool) {
        match self.resolve(&AbsolutePath::new(path).expect("absolute")) {
            Resolved::Real { path, .. } => (path, true),
            Resolved::Missing { path, .. } | Resolved::Hidden { path, .. } => (path, false),
            Resolved::Refused(problem) => panic!("{problem}"),
        }
    }
}

/// A sandbox as a client could send it.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) sandbox: Sandbox,
}

impl Case {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let local = |path: &str| WirePath::parse(path).expect("absolute");
        let entries = (0..reader.below(7)).map(|_| read_entry(reader)).collect();
        let roots = ["/w", "/v"].into_iter().filter(|_| reader.chance(2)).map(local).collect();
        let network = reader.one_of(&[Network::Restricted, Network::Enabled]);
        let files = Files::Restricted { entries, glob_scan_max_depth: None };
        Self {
            sandbox: Sandbox {
                permissions: Permissions::Managed { files, network },
                cwd: Some(local("/w")),
                workspace_roots: roots,
                roots_default_to_cwd: false,
                home: reader.chance(2).then(|| local("/h")),
                protect_nested: reader.chance(3),
                ignored: 0,
            },
        }
    }

    fn entries(&self) -> &[Entry] {
        match &self.sandbox.permissions {
            Permissions::Managed { files: Files::Restricted { entries, .. }, .. } => entries,
            other => panic!("{other:?}"),
        }
    }

    fn roots(&self) -> Vec<PathBuf> {
        self.sandbox.workspace_roots.iter().map(|root| root.local().expect("local").as_path().to_owned()).collect()
    }

    /// Whether it would mean less than it says.
    pub(crate) fn is_refused(&self) -> bool {
        let no_roots = self.roots().is_empty();
        let writes = self.entries().iter().any(|entry| entry.access == Access::Write && !self.places(entry).is_empty());
        let is_lost = |entry: &Entry| match (&entry.target, entry.access) {
            (Target::Home(_), _) => self.sandbox.home.is_none(),
            (Target::Glob(glob), _) => {
                glob.starts_with("~/") && self.sandbox.home.is_none() || glob.starts_with("codex-project-roots://") && no_roots
            }
            (Target::ProjectRoots { .. }, Access::Deny) => no_roots,
            (Target::Nothing(kind), Access::Deny) => kind != "current_working_directory",
            (Target::Nothing(_), Access::Read) => writes,
            _other => false,
        };
        self.entries().iter().any(is_lost)
    }

    /// The paths of an entry; none of a glob.
    fn places(&self, entry: &Entry) -> Vec<PathBuf> {
        match &entry.target {
            Target::Path(path) => vec![path.local().expect("local").as_path().to_owned()],
            Target::Root => vec!["/".into()],
            Target::Minimal => vec!["/usr".into()],
            Target::Tmpdir => vec!["/t".into()],
            Target::SlashTmp => vec!["/tmp".into()],
            Target::Home(below) => vec![Path::new("/h").join(below).iter().collect()],
            Target::ProjectRoots { subpath } => {
                self.roots().iter().map(|root| root.join(subpath.as_deref().unwrap_or_default()).iter().collect()).collect()
            }
            Target::Nothing(kind) if kind == "current_working_directory" && entry.access == Access::Deny => vec!["/w".into()],
            Target::Nothing(_) | Target::Glob(_) => Vec::new(),
        }
    }

    /// Whether the files are not confined at all.
    fn is_everything(&self) -> bool {
        let mut all = self.entries().iter().flat_map(|entry| self.places(entry).into_iter().map(|path| (path, entry.access)));
        let merged = |path: &Path| self.merged(path).map(|(access, _)| access);
        !self.sandbox.protect_nested
            && merged(Path::new("/")) == Some(Access::Write)
            && !self.entries().iter().any(|entry| matches!(entry.target, Target::Glob(_)))
            && all.all(|(path, _)| merged(&path) == Some(Access::Write))
    }

    /// What all entries of one path say together: deny before write before read; skipped only if all skip.
    fn merged(&self, path: &Path) -> Option<(Access, bool)> {
        let here: Vec<_> = self.entries().iter().filter(|entry| self.places(entry).iter().any(|place| place == path)).collect();
        let access =
            [Access::Deny, Access::Write, Access::Read].into_iter().find(|it| here.iter().any(|entry| entry.access == *it))?;
        Some((access, access != Access::Write && here.iter().all(|entry| entry.skip_missing)))
    }

    /// What the sandbox says of a real path.
    pub(crate) fn verdict(&self, set_up: &SetUp, path: &Path) -> Verdict {
        if self.is_everything() {
            return Verdict::Write;
        }
        if self.entries().iter().any(|entry| matches!(&entry.target, Target::Glob(glob) if self.glob_denies(set_up, glob, path)))
        {
            return Verdict::Denied;
        }
        let said = self.statements(set_up);
        let mut above: Vec<&Path> = path.ancestors().collect();
        above.reverse();
        let mut verdict = Verdict::Unlisted;
        for place in above {
            let is_here = |say: Say| said.iter().any(|(at, it)| at == place && *it == say);
            let name = place.file_name().unwrap_or_default();
            let is_protected = PROTECTED.iter().any(|protected| name == *protected);
            let is_at_top = said.iter().any(|(at, say)| *say == Say::Top && Some(at.as_path()) == place.parent());
            let is_writable = verdict == Verdict::Write;
            verdict = if is_here(Say::Deny) {
                Verdict::Denied
            } else if is_here(Say::Write) {
                Verdict::Write
            } else if is_here(Say::Read) {
                if is_writable || verdict == Verdict::Protected { Verdict::Protected } else { Verdict::Read }
            } else if is_writable && (is_here(Say::Narrow) || is_protected && (is_at_top || self.sandbox.protect_nested)) {
                Verdict::Protected
            } else {
                verdict
            };
        }
        verdict
    }

    /// What the entries say of which paths, where they lead and where they stand by name.
    fn statements(&self, set_up: &SetUp) -> Vec<(PathBuf, Say)> {
        let mut said = Vec::new();
        for named in self.entries().iter().flat_map(|entry| self.places(entry)) {
            let (access, skip) = self.merged(&named).expect("it is an entry's");
            let (real, exists) = set_up.real(&named);
            if skip && !exists {
                continue;
            }
            let here = match access {
                Access::Deny => Some(Say::Deny),
                Access::Read => Some(if exists { Say::Read } else { Say::Narrow }),
                Access::Write => exists.then_some(Say::Write),
            };
            said.extend(here.map(|say| (real.clone(), say)));
            let by_name = match access {
                Access::Deny => Say::Deny,
                Access::Read => Say::Narrow,
                Access::Write => Say::Top,
            };
            if access == Access::Write {
                said.push((real.clone(), Say::Top));
            }
            // The name as written, and the link's place where the entry has the link's name.
            let mut names = vec![named.clone()];
            if set_up.link && named.starts_with("/l") && named.file_name() == Some("l".as_ref()) {
                names.push("/l".into());
            }
            said.extend(names.into_iter().filter(|name| *name != real).map(|name| (name, by_name)));
        }
        said
    }

    fn glob_denies(&self, set_up: &SetUp, glob: &str, path: &Path) -> bool {
        let bases: Vec<(PathBuf, &str)> = if let Some(pattern) = glob.strip_prefix("codex-project-roots://") {
            self.roots().into_iter().map(|root| (root, pattern)).collect()
        } else if let Some(pattern) = glob.strip_prefix("~/") {
            vec![("/h".into(), pattern)]
        } else if let Some(pattern) = glob.strip_prefix('/') {
            vec![("/".into(), pattern)]
        } else {
            vec![("/w".into(), glob)]
        };
        bases.into_iter().any(|(base, pattern)| {
            let parts: Vec<&str> = pattern.split('/').collect();
            let literal = parts.iter().take_while(|part| !part.contains(['*', '?'])).count().min(parts.len() - 1);
            let base = parts[..literal].iter().fold(base, |base, part| base.join(part));
            // Where the base leads, and where it stands by name.
            [set_up.real(&base).0, base].iter().any(|base| {
                let below = path.ancestors().filter_map(|above| above.strip_prefix(base).ok());
                let below = below.map(|below| below.iter().map(|name| name.to_str().expect("text")).collect::<Vec<_>>());
                below.filter(|names| !names.is_empty()).any(|names| match_names(&parts[literal..], &names))
            })
        })
    }
}

/// What is said of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Say {
    Deny,
    Write,
    Read,
    /// Not writing, where that is granted.
    Narrow,
    /// The names below it that are protected.
    Top,
}

fn read_entry(reader: &mut Reader<'_>) -> Entry {
    let access = reader.one_of(&[Access::Read, Access::Write, Access::Deny]);
    let below = |reader: &mut Reader<'_>| reader.path().trim_start_matches('/').to_owned();
    let target = match reader.below(12) {
        0 => Target::Root,
        1 => Target::Minimal,
        2 => Target::ProjectRoots { subpath: Some(below(reader)).filter(|path| !path.is_empty()) },
        3 => Target::Tmpdir,
        4 => Target::SlashTmp,
        5 if access != Access::Write => Target::Home(below(reader)),
        6 => Target::Nothing(reader.one_of(&["current_working_directory", "unknown"]).to_owned()),
        7 | 8 if access == Access::Deny => Target::Glob(read_glob(reader)),
        _path => Target::Path(WirePath::parse(&reader.path()).expect("absolute")),
    };
    Entry { target, access, skip_missing: reader.chance(4) }
}

fn read_glob(reader: &mut Reader<'_>) -> String {
    let start = reader.one_of(&["", "/", "~/", "codex-project-roots://"]);
    let count = 1 + reader.below(3);
    let parts =
        (0..count).map(|_| reader.one_of(&["*", "**", "*.env", "?", "w", "a", "l", ".git", "x*", "??"])).collect::<Vec<_>>();
    format!("{start}{}", parts.join("/"))
}

/// Two stars match any number of names; at the end at least one.
fn match_names(parts: &[&str], names: &[&str]) -> bool {
    match (parts, names) {
        ([], _) => names.is_empty(),
        (["**"], _) => !names.is_empty(),
        (["**", rest @ ..], _) => match_names(rest, names) || !names.is_empty() && match_names(parts, &names[1..]),
        ([part, rest @ ..], [name, below @ ..]) => match_letters(part.as_bytes(), name.as_bytes()) && match_names(rest, below),
        (_, []) => false,
    }
}

fn match_letters(part: &[u8], name: &[u8]) -> bool {
    match (part, name) {
        ([], _) => name.is_empty(),
        ([b'*', rest @ ..], _) => match_letters(rest, name) || !name.is_empty() && match_letters(part, &name[1..]),
        ([b'?', rest @ ..], [_, below @ ..]) => match_letters(rest, below),
        ([letter, rest @ ..], [other, below @ ..]) => letter == other && match_letters(rest, below),
        (_, []) => false,
    }
}
