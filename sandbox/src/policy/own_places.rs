//! Places of the server itself in the policies of its clients.

use super::{Access, Files, Grant, GrantSets, Policy};
use portcullis_protocol::path::AbsolutePath;

impl Policy {
    /// The same policy without this place and everything below it, whatever its entries say; if it restricts files at all. What
    /// is not there when the policy is enforced is not hidden.
    #[must_use]
    pub fn hiding(mut self, path: &AbsolutePath) -> Self {
        if let Files::Restricted(GrantSets { first, .. }) = &mut self.files {
            first.entries.retain(|entry| !entry.path.as_path().starts_with(path.as_path()));
            let at = first.entries.partition_point(|entry| entry.path < *path);
            first.entries.insert(at, Grant { path: path.clone(), access: Access::Deny, skip_missing: true });
            first.own_places.push((path.clone(), Access::Deny));
        }
        self
    }

    /// The same policy where this file is read-only if an entry makes it writable, by name and whatever the entries say. It grants
    /// nothing: what is not writable stays as it is.
    #[must_use]
    pub fn keeping(mut self, path: &AbsolutePath) -> Self {
        if let Files::Restricted(GrantSets { first, .. }) = &mut self.files {
            first.own_places.push((path.clone(), Access::Read));
            let above = first.entries.iter().filter(|entry| path.as_path().starts_with(entry.path.as_path()));
            let decides = above.max_by_key(|entry| (entry.path.as_path().as_os_str().len(), entry.access));
            if decides.is_some_and(|entry| entry.access == Access::Write) {
                first.entries.retain(|entry| entry.path != *path);
                let at = first.entries.partition_point(|entry| entry.path < *path);
                first.entries.insert(at, Grant { path: path.clone(), access: Access::Read, skip_missing: true });
            }
        }
        self
    }
}
