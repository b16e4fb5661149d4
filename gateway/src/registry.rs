//! The table of sessions: the only lock of the gateway, never held across an await.

use crate::session::SessionHandle;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Sessions by id. Cloning shares the table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Registry {
    sessions: Arc<Mutex<HashMap<Arc<str>, SessionHandle>>>,
}

impl Registry {
    /// Adds a session.
    pub(crate) fn insert(&self, session: SessionHandle) {
        self.lock(|sessions| sessions.insert(session.id(), session));
    }

    /// The session of an id.
    pub(crate) fn get(&self, id: &str) -> Option<SessionHandle> {
        self.lock(|sessions| sessions.get(id).cloned())
    }

    /// Forgets a session that ended.
    pub(crate) fn remove(&self, id: &str) {
        self.lock(|sessions| sessions.remove(id));
    }

    /// Every session there is.
    pub(crate) fn all(&self) -> Vec<SessionHandle> {
        self.lock(|sessions| sessions.values().cloned().collect())
    }

    /// Lock, do one thing, unlock. A panic elsewhere cannot leave a half-made table, so poison means nothing here.
    fn lock<T>(&self, once: impl FnOnce(&mut HashMap<Arc<str>, SessionHandle>) -> T) -> T {
        once(&mut self.sessions.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
