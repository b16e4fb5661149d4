//! What waits for one listener: the client's task puts in, the listener takes out. Each holds the lock for a moment, never over
//! an await. The bound is kept by the task, which reads no more from the server while too much waits.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::sync::Notify;

/// How much is taken before the task is told. Less would wake it for every line of output.
const TELL_BYTES: usize = 64 * 1024;
/// The same as a count.
const TELL_EVENTS: usize = 16;

/// Something for a listener.
#[derive(Debug)]
pub(crate) struct Letter<T> {
    pub(crate) item: T,
    /// What it counts for.
    pub(crate) cost: usize,
    /// Its number; 0 if it has none.
    pub(crate) seq: u64,
}

/// What a listener did since the task looked.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// The number of the last that it took.
    pub(crate) seq: u64,
    /// What all that it took counts for.
    pub(crate) cost: usize,
    pub(crate) events: usize,
    /// It is gone: nothing will be taken.
    pub(crate) gone: bool,
}

/// The task's end.
#[derive(Debug)]
pub(crate) struct Mailbox<T>(Arc<Mutex<Inner<T>>>);

/// The listener's end.
#[derive(Debug)]
pub(crate) struct Listener<T> {
    inner: Arc<Mutex<Inner<T>>>,
    bell: Arc<Notify>,
}

#[derive(Debug)]
struct Inner<T> {
    letters: VecDeque<Letter<T>>,
    ended: bool,
    waker: Option<Waker>,
    taken: Taken,
}

/// A mailbox and its listener, who rings the bell when it took enough.
pub(crate) fn pair<T>(bell: &Arc<Notify>) -> (Mailbox<T>, Listener<T>) {
    let inner = Inner { letters: VecDeque::new(), ended: false, waker: None, taken: Taken::default() };
    let inner = Arc::new(Mutex::new(inner));
    (Mailbox(Arc::clone(&inner)), Listener { inner, bell: Arc::clone(bell) })
}

/// Nobody panics with it, so that it is never poisoned.
fn lock<T>(inner: &Mutex<Inner<T>>) -> MutexGuard<'_, Inner<T>> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Mailbox<T> {
    pub(crate) fn put(&self, letter: Letter<T>) {
        let mut inner = lock(&self.0);
        if !inner.taken.gone {
            inner.letters.push_back(letter);
        }
        wake(inner);
    }

    /// Nothing follows.
    pub(crate) fn end(&self) {
        let mut inner = lock(&self.0);
        inner.ended = true;
        wake(inner);
    }

    /// What was taken since the last call.
    pub(crate) fn taken(&self) -> Taken {
        let mut inner = lock(&self.0);
        let gone = inner.taken.gone;
        mem::replace(&mut inner.taken, Taken { gone, ..Taken::default() })
    }
}

fn wake<T>(mut inner: MutexGuard<'_, Inner<T>>) {
    let waker = inner.waker.take();
    drop(inner);
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl<T> Listener<T> {
    pub(crate) fn poll(&mut self, task: &mut Context<'_>) -> Poll<Option<T>> {
        let mut inner = lock(&self.inner);
        let Some(Letter { item, cost, seq }) = inner.letters.pop_front() else {
            if inner.ended {
                return Poll::Ready(None);
            }
            inner.waker = Some(task.waker().clone());
            return Poll::Pending;
        };
        let is_last = inner.ended && inner.letters.is_empty();
        let taken = &mut inner.taken;
        taken.seq = taken.seq.max(seq);
        taken.cost += cost;
        taken.events += 1;
        if is_last || taken.cost >= TELL_BYTES || taken.events >= TELL_EVENTS {
            drop(inner);
            self.bell.notify_one();
        }
        Poll::Ready(Some(item))
    }
}

impl<T> Drop for Listener<T> {
    fn drop(&mut self) {
        let mut inner = lock(&self.inner);
        inner.taken.gone = true;
        inner.letters.clear();
        drop(inner);
        self.bell.notify_one();
    }
}
