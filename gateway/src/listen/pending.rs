//! Pending connections: accepted sockets whose request has not arrived, and the choice of the one that is closed for a new one.
//!
//! A process on this machine can open connections faster than a deadline closes them, send nothing, and open each one again. A
//! confined process with the network on can do that too, and the peer check cannot look at thousands of connections a second. So
//! pending connections do not count against `max-connections`. They have a bound of their own. At that bound a new connection is
//! accepted, and another one is closed:
//!
//! * Of the source with the most pending connections. A flood therefore closes its own connections and no connection of another
//!   source. A client behind a slow link has an address of its own, so a flood from this machine never closes it. A source is an
//!   address (of IPv6 a network of 64 bits), all of loopback, or a user: at a unix socket, and of a server of root also at the other
//!   end of a connection from this machine. There each sandbox may have a user of its own, so a flood closes no connection of a
//!   client, however slow it is. Other servers and their sandboxes have one user, so no question to the kernel is spent on it.
//! * Of that source the oldest one. At the bound B and R new connections a second each connection of the source has B/R seconds for
//!   its request: 0.2 s at 4,096 and 20,000, which is as much as one thread accepts. A client on this machine needs less than a
//!   millisecond. A random choice would close some connections at once and let others live longer, and longer helps no client here:
//!   only clients from elsewhere need more, and they are of another source. The age counts from accept, so bytes that arrive one at
//!   a time gain nothing.
//! * Not one whose whole request has arrived and that waits for the server, for the peer check above all. If a source has no other
//!   connections, its newest one is closed. The peer check looks at many connections together in order of arrival: with the oldest
//!   closed first, under load no connection would live until its result.

use crate::descriptors;
use crate::peer::Ends;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;

/// The least bound, also for a smaller `max-connections`. A small bound leaves a client little time for its request, and the peer check few
/// connections that it can look at together.
const LEAST: usize = 4096;

/// All pending connections of a listener. The task that accepts owns them.
#[derive(Debug)]
pub(super) struct PendingConnections {
    bound: usize,
    count: usize,
    next: u64,
    sources: HashMap<Source, OfSource>,
}

/// The origin of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Loopback,
    V4(Ipv4Addr),
    /// The upper half of an address: one machine may have the whole lower half.
    V6(u64),
    /// Of this machine.
    User(u32),
}

/// The name of a pending connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    source: Source,
    number: u64,
}

/// The connections of one source in order of arrival.
#[derive(Debug, Default)]
struct OfSource {
    silent: BTreeMap<u64, Entry>,
    /// Those that were found to wait for the server, when a connection had to be closed.
    waiting: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    progress: Progress,
    /// Its end closes the connection.
    _open: oneshot::Sender<()>,
}

/// Whether the request of a connection has arrived, so that the client waits for the server. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress(Arc<AtomicBool>);

/// A connection that became pending.
#[derive(Debug)]
pub(super) struct Added {
    pub(super) key: Key,
    pub(super) progress: Progress,
    /// Ends when the connection is to be closed.
    pub(super) closed: oneshot::Receiver<()>,
    /// Whether a connection was closed for it, or it was closed itself.
    pub(super) is_full: bool,
}

impl Source {
    /// `user` is the one at the other end of a TCP connection, where that is known.
    pub(super) fn of(ends: &Ends, user: Option<u32>) -> Self {
        match (ends, user) {
            (_, Some(uid)) => Self::User(uid),
            (Ends::Unix { uid, .. }, None) => Self::User(*uid),
            (Ends::Tcp { peer, .. }, None) => match peer.ip().to_canonical() {
                ip if ip.is_loopback() => Self::Loopback,
                IpAddr::V4(ip) => Self::V4(ip),
                IpAddr::V6(ip) => Self::V6(upper_half(ip)),
            },
        }
    }
}

fn upper_half(ip: Ipv6Addr) -> u64 {
    u64::try_from(ip.to_bits() >> 64).unwrap_or(u64::MAX)
}

impl Progress {
    /// The request has arrived.
    pub(super) fn began(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// The answer is ready, and it is not an upgrade.
    pub(super) fn ended(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    fn is_waiting(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl PendingConnections {
    /// As many as there may be connections, but not more than a quarter of the descriptors of this process: sessions, processes and
    /// files need the others.
    pub(super) fn new(connections: usize) -> Self {
        Self::bounded(connections.max(LEAST).min(descriptors::limit().map_or(usize::MAX, |all| all / 4)))
    }

    fn bounded(bound: usize) -> Self {
        Self { bound: bound.max(1), count: 0, next: 0, sources: HashMap::new() }
    }

    /// The most that there may be.
    pub(super) fn bound(&self) -> usize {
        self.bound
    }

    /// Adds a connection, and closes one if there are too many: see the top of this file.
    pub(super) fn add(&mut self, source: Source) -> Added {
        let (key, progress) = (Key { source, number: self.next }, Progress::default());
        let (open, closed) = oneshot::channel();
        let entry = Entry { progress: progress.clone(), _open: open };
        self.sources.entry(source).or_default().silent.insert(key.number, entry);
        (self.next, self.count) = (self.next + 1, self.count + 1);
        let is_full = self.count > self.bound;
        if let Some(victim) = is_full.then(|| self.victim()).flatten() {
            self.remove(victim);
        }
        Added { key, progress, closed, is_full }
    }

    /// A connection is pending no more: it was served, refused or closed.
    pub(super) fn remove(&mut self, Key { source, number }: Key) {
        let Some(of_source) = self.sources.get_mut(&source) else { return };
        if of_source.silent.remove(&number).or_else(|| of_source.waiting.remove(&number)).is_some() {
            self.count -= 1;
        }
        if of_source.len() == 0 {
            self.sources.remove(&source);
        }
    }

    /// The connection that is closed for a new one. Of several sources with the most connections the one with the oldest.
    fn victim(&mut self) -> Option<Key> {
        let most = self.sources.values().map(OfSource::len).max()?;
        let of_most = self.sources.iter_mut().filter(|(_, of_source)| of_source.len() == most);
        let found = of_most.filter_map(|(source, of_source)| {
            let (silent, waiting) = (of_source.oldest_silent(), of_source.waiting.last_key_value());
            let number = silent.or_else(|| waiting.map(|(number, _)| *number))?;
            Some((silent.is_none(), number, *source))
        });
        let (_, number, source) = found.min_by_key(|(is_waiting, number, _)| (*is_waiting, *number))?;
        Some(Key { source, number })
    }
}

impl OfSource {
    fn len(&self) -> usize {
        self.silent.len() + self.waiting.len()
    }

    /// The oldest whose request has not arrived. Those before it move to the others, so that each is passed once.
    fn oldest_silent(&mut self) -> Option<u64> {
        while let Some(oldest) = self.silent.first_entry() {
            if !oldest.get().progress.is_waiting() {
                return Some(*oldest.key());
            }
            let (number, entry) = oldest.remove_entry();
            self.waiting.insert(number, entry);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HERE: Source = Source::Loopback;

    fn elsewhere(last: u8) -> Source {
        Source::V4(Ipv4Addr::new(192, 0, 2, last))
    }

    fn is_open(added: &mut Added) -> bool {
        added.closed.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }

    /// The numbers of those that are open.
    fn open(all: &mut [Added]) -> Vec<u64> {
        all.iter_mut().filter_map(|added| is_open(added).then_some(added.key.number)).collect()
    }

    #[test]
    fn the_oldest_silent_connection_is_closed_for_a_new_one() {
        let mut pending = PendingConnections::bounded(3);
        let mut all: Vec<Added> = (0..3).map(|_| pending.add(HERE)).collect();
        assert_eq!((open(&mut all), all[2].is_full), (vec![0, 1, 2], false));
        all.push(pending.add(HERE));
        assert_eq!((open(&mut all), all[3].is_full), (vec![1, 2, 3], true));
        // One that was served makes room for another.
        pending.remove(all.remove(2).key);
        all.push(pending.add(HERE));
        assert_eq!((open(&mut all), all[3].is_full, pending.count), (vec![1, 3, 4], false, 3));
    }

    #[test]
    fn a_connection_that_waits_for_the_server_is_kept() {
        let mut pending = PendingConnections::bounded(3);
        let mut all: Vec<Added> = (0..3).map(|_| pending.add(HERE)).collect();
        all[0].progress.began();
        all.push(pending.add(HERE));
        assert_eq!(open(&mut all), [0, 2, 3]);
        // If all of them wait, the new one is closed.
        [2, 3].into_iter().for_each(|nth| all[nth].progress.began());
        all.push(pending.add(HERE));
        assert_eq!((open(&mut all), all[4].is_full), (vec![0, 2, 3], true));
        // A new one from elsewhere is not.
        all.push(pending.add(elsewhere(1)));
        assert_eq!(open(&mut all), [0, 2, 5]);
    }

    #[test]
    fn a_flood_of_one_source_closes_no_connection_of_another() {
        let mut pending = PendingConnections::bounded(8);
        let mut slow = vec![pending.add(elsewhere(1)), pending.add(Source::User(1)), pending.add(Source::V6(1))];
        let mut flood: Vec<Added> = (0..100).map(|_| pending.add(HERE)).collect();
        assert_eq!(open(&mut slow), [0, 1, 2]);
        assert_eq!(open(&mut flood), [98, 99, 100, 101, 102]);
        slow.extend((2..4).map(|last| pending.add(elsewhere(last))));
        assert_eq!((open(&mut slow), open(&mut flood)), (vec![0, 1, 2, 103, 104], vec![100, 101, 102]));
    }

    #[test]
    fn addresses_of_one_machine_are_one_source() {
        let ends = |peer: &str| Ends::Tcp { peer: peer.parse().unwrap(), local: "127.0.0.1:1".parse().unwrap() };
        let of = |peer: &str| Source::of(&ends(peer), None);
        for here in ["127.0.0.1:1", "127.9.9.9:2", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(of(here), HERE, "{here}");
        }
        assert_eq!(of("192.0.2.1:1"), of("[::ffff:192.0.2.1]:2"));
        assert_ne!(of("192.0.2.1:1"), of("192.0.2.2:1"));
        assert_eq!(of("[2001:db8::1]:1"), of("[2001:db8::ffff:ffff:ffff:ffff]:1"));
        assert_ne!(of("[2001:db8::1]:1"), of("[2001:db8:0:1::1]:1"));
        assert_eq!(Source::of(&Ends::Unix { inode: 1, uid: 7, pid: None }, None), Source::User(7));
        assert_eq!(Source::of(&ends("127.0.0.1:1"), Some(7)), Source::User(7));
    }

    proptest! {
        #[test]
        fn as_many_are_open_as_are_counted(bound in 1_usize..6, steps in prop::collection::vec((0_u8..4, 0_u8..3, 0_usize..20), 0..60)) {
            let mut pending = PendingConnections::bounded(bound);
            let mut all: Vec<Added> = Vec::new();
            for (act, source, nth) in steps {
                match act {
                    0 | 1 => all.push(pending.add(elsewhere(source))),
                    2 => all.get(nth).into_iter().for_each(|added| added.progress.began()),
                    _ if nth < all.len() => pending.remove(all.swap_remove(nth).key),
                    _ => {}
                }
                let open = open(&mut all).len();
                prop_assert_eq!(pending.count, open);
                prop_assert_eq!(pending.sources.values().map(OfSource::len).sum::<usize>(), open);
                prop_assert!(open <= bound && pending.sources.values().all(|of_source| of_source.len() > 0));
            }
        }
    }
}
