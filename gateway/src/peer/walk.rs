//! One scan of all processes for many connections: the holders of their other ends.
//!
//! The time of a scan grows with the number of open descriptors, and confined processes can have many. So one scan runs at a
//! time, in a task of its own, and each answers all connections that arrived before it began. A connection waits for the running
//! scan and for its own, regardless of the number of other connections, and not beyond its deadline.

use super::holder::{self, Holder};
use crate::helper::spawner::Spawner;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// How long a connection waits for its answer, and the longest that a look takes.
pub(super) const DEADLINE: Duration = Duration::from_secs(5);

/// Connections that one scan answers. More of them wait for the next scan.
const QUEUE: usize = 8192;

/// The holder of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Held {
    /// A process that the gateway started, possibly among others.
    Descendant(u32),
    /// Others only.
    Others,
    /// No process that can be looked at.
    Unseen,
}

/// Why it is not known.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum Untold {
    #[error("/proc: {0}")]
    Io(Arc<io::Error>),
    #[error("the scan of /proc did not end within {} s: processes have too many descriptors", DEADLINE.as_secs())]
    Late,
    #[error("the server is shutting down")]
    Closing,
}

/// A handle to the task that looks. Clones share it; the task ends with the last.
#[derive(Debug, Clone)]
pub(crate) struct Looks {
    asks: mpsc::Sender<Ask>,
}

#[derive(Debug)]
struct Ask {
    inode: u32,
    reply: oneshot::Sender<Result<Held, Untold>>,
}

impl Looks {
    /// The task has an owner that runs it.
    pub(crate) fn new(spawner: Spawner) -> (Self, impl Future<Output = ()>) {
        let (asks, queue) = mpsc::channel(QUEUE);
        (Self { asks }, run(queue, spawner))
    }

    /// The holder of the socket with that inode number.
    pub(super) async fn holder(&self, inode: u32) -> Result<Held, Untold> {
        let asked = async {
            let (reply, answer) = oneshot::channel();
            self.asks.send(Ask { inode, reply }).await.map_err(|_| Untold::Closing)?;
            answer.await.map_err(|_| Untold::Closing)?
        };
        timeout(DEADLINE, asked).await.unwrap_or(Err(Untold::Late))
    }
}

async fn run(mut queue: mpsc::Receiver<Ask>, spawner: Spawner) {
    while let Some(first) = queue.recv().await {
        let mut asked = vec![first];
        while asked.len() < QUEUE
            && let Ok(ask) = queue.try_recv()
        {
            asked.push(ask);
        }
        // A connection that has ended needs no answer.
        asked.retain(|ask| !ask.reply.is_closed());
        let inodes: Vec<u32> = asked.iter().map(|ask| ask.inode).collect();
        let ours = spawner.clone();
        let looked = tokio::task::spawn_blocking(move || look(&inodes, || ours.ancestors(), Instant::now() + DEADLINE)).await;
        let looked = looked.unwrap_or(Err(Untold::Closing));
        for Ask { inode, reply } in asked {
            let held = looked.as_ref().map(|found| found.get(&inode).cloned().unwrap_or(Held::Unseen));
            let _gone = reply.send(held.map_err(Clone::clone));
        }
    }
}

/// Looks at every process once. `ancestors` are those whose descendants are refused, at the time of the call.
pub(super) fn look(inodes: &[u32], ancestors: impl Fn() -> Vec<u32>, until: Instant) -> Result<HashMap<u32, Held>, Untold> {
    let failed = |error| Untold::Io(Arc::new(error));
    let mut found: HashMap<u32, Held> = HashMap::new();
    let mut wanted: HashSet<u32> = inodes.iter().copied().collect();
    for pid in holder::processes().map_err(failed)? {
        let mut holds = false;
        if !holder::sockets(pid, until, |inode| holds |= wanted.contains(&inode)) {
            return Err(Untold::Late);
        }
        let Some((holder, held)) = holds.then(|| Holder::settled(pid, &wanted, until)).flatten() else { continue };
        // Of a spawner that began after the look too.
        let is_ours = ancestors().into_iter().any(|ancestor| holder.descends_from(ancestor));
        for inode in held {
            found.insert(inode, if is_ours { Held::Descendant(pid) } else { Held::Others });
            // One descendant is enough, regardless of other holders: an inode number may also stand for two sockets.
            if is_ours {
                wanted.remove(&inode);
            }
        }
    }
    Ok(found)
}
