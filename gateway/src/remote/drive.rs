//! Drives the multiplexer: frames from and to the rendezvous, messages from and to the gateway, questions to the registry.

use super::bridge::bridge;
use super::pump::{self, FromLink, FromStream, NoRoom, ToPump, pump};
use super::{Registered, RemoteError};
use crate::caller::Transport;
use crate::link::Link;
use crate::metrics::{Metrics, Present};
use bytes::Bytes;
use portcullis_relay::destination::Destination;
use portcullis_relay::keys::PublicKeys;
use portcullis_relay::mux::{MAX_STREAMS, Mux, MuxInput, MuxOutput, StreamKey, VALIDATION};
use portcullis_relay::registry::{Registration, Registry, RegistryError};
use portcullis_relay::retry::{Retries, Retry};
use portcullis_relay::segment::{MAX_MESSAGE, QueueError};
use portcullis_relay::socket::{Socket, UNSENT, send_first};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

/// Messages on their way from links: one of each stream at most, since the next waits for it.
const QUEUE: usize = MAX_STREAMS;
/// Streams with those that are over and whose links have not ended yet.
const ATTACHED: usize = 2 * MAX_STREAMS;
/// The first wait before dialling again, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// A connection that lasted for so long was a good one: the next wait is the first again.
const GOOD: Duration = Duration::from_secs(120);
/// How long streams have at the end to deliver what is left.
const FAREWELL: Duration = Duration::from_secs(2);

/// The driver. It owns every stream, its link's pump, and the socket.
pub(super) struct Drive {
    mux: Mux,
    way: Option<Way>,
    registry: Registry,
    socket: Option<Socket>,
    unsent: VecDeque<Bytes>,
    attach: Attach,
    /// Those that are open, and those whose links have not ended yet.
    streams: HashMap<StreamKey, ToPump>,
    /// The most bytes of messages that all streams may hold.
    most_held: usize,
    metrics: Arc<Metrics>,
    /// What did not fit into its stream: at most one message of each, since the next waits for it.
    held: Vec<(StreamKey, Bytes, oneshot::Sender<()>)>,
    pumps: JoinSet<StreamKey>,
    from_links: mpsc::Receiver<FromLink>,
    to_drive: mpsc::Sender<FromLink>,
    questions: JoinSet<(StreamKey, bool)>,
    dials: JoinSet<(Way, Result<Socket, RegistryError>)>,
    registration: String,
    /// Whether there is a socket to the rendezvous.
    reached: watch::Sender<bool>,
    present: Option<Present>,
}

/// What a stream is attached to.
pub(super) enum Attach {
    /// A connection of a gateway, which takes its links here.
    Gateway(mpsc::Sender<Link>),
    /// A WebSocket of its own at a destination, until that is cancelled.
    Destination(Arc<Destination>, CancellationToken),
}

/// What all streams together may hold, and where it is told.
pub(super) struct Bounds {
    /// Bytes of messages, of which one of the longest each way is let in always.
    pub(super) bytes: usize,
    pub(super) metrics: Arc<Metrics>,
}

/// What it takes to dial, which travels with the attempt.
struct Way {
    registry: Registry,
    keys: PublicKeys,
    registration: Registration,
    wait: Duration,
    retries: Retries,
    connected: Option<Instant>,
}

impl Drive {
    pub(super) fn new(
        Registered { registry, identity, registration }: Registered,
        attach: Attach,
        reached: watch::Sender<bool>,
        Bounds { bytes, metrics }: Bounds,
    ) -> Self {
        let keys = identity.public_keys();
        let id = registration.executor_registration_id.clone();
        let mut mux = Mux::new(identity, registry.environment().to_owned(), id.clone());
        mux.handle(MuxInput::Disconnected, Instant::now().into_std());
        let (to_drive, from_links) = mpsc::channel(QUEUE);
        let way =
            Way { registry: registry.clone(), keys, registration, wait: FIRST_WAIT, retries: Retries::new(), connected: None };
        Self {
            mux,
            way: Some(way),
            registry,
            socket: None,
            unsent: VecDeque::new(),
            attach,
            streams: HashMap::new(),
            // One of the longest must fit both ways.
            most_held: bytes.max(2 * MAX_MESSAGE),
            metrics,
            held: Vec::new(),
            pumps: JoinSet::new(),
            from_links,
            to_drive,
            questions: JoinSet::new(),
            dials: JoinSet::new(),
            registration: id,
            reached,
            present: None,
        }
    }

    /// Drives until `ended`, and then until what is left was delivered, for at most 2 s. An error is the registry's, which does not
    /// accept the token any more, or a defect of this program.
    pub(super) async fn run(mut self, ended: CancellationToken) -> Result<(), RemoteError> {
        let mut farewell = None;
        let result = loop {
            self.carry_out();
            while self.shed() {
                self.carry_out();
            }
            let dials = self.socket.is_none() && farewell.is_none();
            if let Some(way) = self.way.take_if(|_| dials) {
                self.dials.spawn(dial(way));
            }
            let is_done = self.streams.is_empty() && self.pumps.is_empty() && self.unsent.is_empty();
            if farewell.is_some_and(|until| is_done || Instant::now() >= until) {
                break Ok(());
            }
            let deadline = self.deadline().into_iter().chain(farewell).min();
            let outgoing = self.socket.as_ref().map(|socket| socket.outgoing.clone());
            let reads = self.unsent.len() < UNSENT;
            tokio::select! {
                sent = send_first(outgoing.as_ref(), &mut self.unsent) => {
                    if !sent {
                        self.disconnected().await;
                    }
                }
                frame = receive(self.socket.as_mut()), if reads => match frame {
                    Some(frame) => self.handle(MuxInput::Frame(frame)),
                    None => self.disconnected().await,
                },
                Some(from_link) = self.from_links.recv() => self.of_link(from_link),
                Some(Ok((stream, is_allowed))) = self.questions.join_next() => self.handle(MuxInput::Validated { stream, is_allowed }),
                Some(ended) = self.pumps.join_next() => match ended {
                    Ok(stream) => drop(self.streams.remove(&stream)),
                    Err(error) => tracing::error!("a relay stream's pump: {error}"),
                },
                Some(dialled) = self.dials.join_next() => match dialled {
                    Ok((way, Ok(socket))) => self.connected(way, socket),
                    Ok((_, Err(error))) => break Err(error.into()),
                    // What it takes to dial again went with it.
                    Err(error) => break Err(RemoteError::defect("dial the rendezvous", &error)),
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => self.handle(MuxInput::Timer),
                () = ended.cancelled(), if farewell.is_none() => farewell = Some(Instant::now() + FAREWELL),
            }
        };
        self.end().await;
        result
    }

    /// When the multiplexer has something to do. While the socket does not take what there is it is not asked for more, so that what
    /// is due stays due: it waits for the socket, and not for the time.
    fn deadline(&self) -> Option<Instant> {
        self.mux.deadline().map(Instant::from_std).filter(|_| self.unsent.len() < UNSENT)
    }

    fn handle(&mut self, input: MuxInput) {
        self.mux.handle(input, Instant::now().into_std());
    }

    /// Does what the multiplexer wants done, as far as the socket keeps up.
    fn carry_out(&mut self) {
        loop {
            for (stream, bytes, taken) in std::mem::take(&mut self.held) {
                self.queue(stream, bytes, taken);
            }
            if self.unsent.len() >= UNSENT {
                return;
            }
            let Some(output) = self.mux.poll(Instant::now().into_std()) else { return };
            match output {
                MuxOutput::Send(bytes) => self.unsent.push_back(bytes),
                MuxOutput::Validate { stream, harness, authorization } => {
                    let (registry, registration) = (self.registry.clone(), self.registration.clone());
                    self.questions.spawn(async move {
                        let asked = registry.validate(&registration, &harness, authorization.reveal());
                        (stream, timeout(VALIDATION, asked).await.unwrap_or_default())
                    });
                }
                MuxOutput::Opened(stream) => self.opened(stream),
                MuxOutput::Message(stream, bytes) => {
                    if self.streams.get(&stream).is_some_and(|link| link.send(bytes) == Err(NoRoom)) {
                        self.abort(stream);
                    }
                }
                MuxOutput::Closed(stream, fault) => {
                    tracing::info!(reason = %fault, "a relay stream ended");
                    if let Some(link) = self.streams.get_mut(&stream) {
                        link.end();
                    }
                }
                MuxOutput::Dropped(error) => tracing::warn!("what came from the rendezvous was dropped: {error}"),
            }
        }
    }

    /// Ends the stream that holds most if all together hold too much, and answers whether there was one: a harness that is let in
    /// may begin a message of 64 MiB on each of its streams, and take none of what it is sent. One that was ended holds nothing more, so
    /// no stream is chosen twice.
    fn shed(&mut self) -> bool {
        let waiting: usize = self.streams.values().map(ToPump::held).sum();
        let held = waiting + self.mux.held().map(|(_, bytes)| bytes).sum::<usize>();
        self.metrics.relay_held(held);
        if held <= self.most_held {
            return false;
        }
        let mut each: HashMap<StreamKey, usize> = self.mux.held().collect();
        for (stream, link) in &self.streams {
            *each.entry(*stream).or_default() += link.held();
        }
        let Some((stream, bytes)) = each.into_iter().max_by_key(|(_, bytes)| *bytes) else { return false };
        let most = self.most_held;
        tracing::warn!(bytes, held, most, "all relay streams together hold too much: the one that holds most ends");
        self.metrics.relay_shed();
        self.abort(stream);
        true
    }

    /// Ends a stream now, with what did not arrive of it.
    fn abort(&mut self, stream: StreamKey) {
        self.handle(MuxInput::Abort(stream));
        if let Some(link) = self.streams.get_mut(&stream) {
            link.drop_all();
        }
    }

    fn opened(&mut self, stream: StreamKey) {
        if self.streams.len() >= ATTACHED {
            return self.handle(MuxInput::Abort(stream));
        }
        let (to_pump, from_stream) = pump::channel();
        if self.attach(stream, from_stream) {
            self.streams.insert(stream, to_pump);
        } else {
            self.handle(MuxInput::Abort(stream));
        }
    }

    fn attach(&mut self, stream: StreamKey, from_stream: FromStream) -> bool {
        let to_drive = self.to_drive.clone();
        match &self.attach {
            Attach::Gateway(links) => {
                let (link, end) = Link::pair("relay JSON-RPC message from a harness", true);
                if links.try_send(link.over(Transport::Relay, "")).is_err() {
                    // Sixteen others came in the same moment, or the gateway closes: this one comes again.
                    return false;
                }
                self.pumps.spawn(pump(stream, end, from_stream, to_drive));
            }
            Attach::Destination(destination, stopped) => {
                self.pumps.spawn(bridge(stream, Arc::clone(destination), from_stream, to_drive, stopped.clone()));
            }
        }
        true
    }

    fn of_link(&mut self, from_link: FromLink) {
        match from_link {
            FromLink::Message { stream, bytes, taken } => self.queue(stream, bytes, taken),
            FromLink::Ended { stream } => self.handle(MuxInput::Close(stream)),
        }
    }

    fn queue(&mut self, stream: StreamKey, bytes: Bytes, taken: oneshot::Sender<()>) {
        match self.mux.queue(stream, bytes.clone()) {
            Err(QueueError::Full) => self.held.push((stream, bytes, taken)),
            Err(QueueError::Length(length)) => {
                tracing::error!("a message of {length} bytes cannot be sent over the relay: its stream ends");
                self.abort(stream);
            }
            Ok(()) | Err(_) => {
                let _pump_over = taken.send(());
            }
        }
    }

    fn connected(&mut self, mut way: Way, socket: Socket) {
        way.connected = Some(Instant::now());
        let registration = &way.registration.executor_registration_id;
        if *registration != self.registration {
            self.registration.clone_from(registration);
            self.handle(MuxInput::Registered(self.registration.clone()));
        }
        tracing::info!("the rendezvous was reached");
        self.reached.send_replace(true);
        self.present = Some(self.metrics.relay_connected());
        (self.way, self.socket) = (Some(way), Some(socket));
        self.handle(MuxInput::Connected);
    }

    async fn disconnected(&mut self) {
        self.reached.send_replace(false);
        self.present = None;
        self.unsent.clear();
        if let Some(socket) = self.socket.take() {
            let reason = socket.end(FAREWELL).await.unwrap_or_else(|| "its task is gone".to_owned());
            tracing::warn!("the connection to the rendezvous ended: {reason}");
        }
        self.handle(MuxInput::Disconnected);
    }

    async fn end(mut self) {
        if let Some(socket) = self.socket.take() {
            let _reason = socket.end(FAREWELL).await;
        }
        self.streams.values_mut().for_each(ToPump::drop_all);
        self.dials.shutdown().await;
        self.questions.shutdown().await;
        self.pumps.shutdown().await;
    }
}

async fn receive(socket: Option<&mut Socket>) -> Option<Bytes> {
    match socket {
        Some(socket) => socket.incoming.recv().await,
        None => std::future::pending().await,
    }
}

/// Dials until there is a socket: by the URL that is there, or with a new registration if it is not valid any more. Only a registry
/// that does not accept the credentials ends it.
async fn dial(mut way: Way) -> (Way, Result<Socket, RegistryError>) {
    let mut is_first = way.connected.is_none();
    if way.connected.take().is_some_and(|connected| connected.elapsed() >= GOOD) {
        way.wait = FIRST_WAIT;
    }
    loop {
        if !is_first {
            // Between half of it and all, so that executors that lost one rendezvous do not come back in step.
            let half = u32::from(uuid::Uuid::new_v4().as_bytes()[0]);
            sleep(way.wait / 2 + way.wait * half / 512).await;
            way.wait = (way.wait * 2).min(LONGEST_WAIT);
        }
        is_first = false;
        match Socket::dial(&way.registration.url, way.registry.tls()).await {
            Ok(socket) => return (way, Ok(socket)),
            Err(error) if error.is_final() => match way.registry.register(&way.keys).await {
                Ok(registration) => {
                    way.registration = registration;
                    way.retries.reset();
                    if let Ok(socket) = Socket::dial(&way.registration.url, way.registry.tls()).await {
                        return (way, Ok(socket));
                    }
                }
                Err(error) => {
                    let Retry::After(wait) = way.retries.renewal(&error) else { return (way, Err(error)) };
                    tracing::warn!("register again: {error}; the next attempt is in {} ms", wait.as_millis());
                    sleep(wait).await;
                    is_first = true;
                }
            },
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

#[cfg(test)]
mod tests;
