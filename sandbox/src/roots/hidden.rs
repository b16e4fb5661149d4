//! Which paths of one set of grants another set hides.

use super::follow;
use crate::policy::{Access, Grant, Grants, Policy};
use std::path::{Path, PathBuf};

/// The denials of the other sets of grants. An entry whose path leads through one grants nothing, and no error tells whether the path
/// exists or where a link leads. What the entry takes away holds all the same: no set lifts what another one narrows.
pub(super) struct HiddenByOthers<'a> {
    sets: Vec<&'a Grants>,
    /// Denied places by their sets, as they are named and as they are.
    denied: Vec<(usize, PathBuf)>,
}

impl<'a> HiddenByOthers<'a> {
    pub(super) fn new(policy: &'a Policy) -> Self {
        let sets: Vec<&Grants> = policy.files.sets().collect();
        let denies = |set: usize| sets[set].entries.iter().filter(|grant| grant.access == Access::Deny);
        // One set alone hides nothing from itself.
        let with_others = if sets.len() > 1 { 0..sets.len() } else { 0..0 };
        let denied = with_others.flat_map(|set| denies(set).map(move |grant| (set, grant.path.as_path())));
        let places = |(set, named): (usize, &Path)| {
            let real = follow(named).ok().map(|followed| (set, followed.path));
            [(set, named.to_owned())].into_iter().chain(real)
        };
        let denied = denied.flat_map(places).collect();
        Self { sets, denied }
    }

    /// Whether a path lies below a denial of another set than `own`, and not in a path that this other set grants again below it.
    pub(super) fn covers(&self, own: usize, path: &Path) -> bool {
        self.denied.iter().filter(|(set, place)| *set != own && path != place && path.starts_with(place)).any(|(set, place)| {
            let is_granted = |grant: &Grant| grant.access != Access::Deny && path.starts_with(grant.path.as_path());
            let deeper = |grant: &&Grant| is_granted(grant) && grant.path.as_path().starts_with(place);
            !self.sets[*set].entries.iter().any(|grant| deeper(&grant))
        })
    }
}
