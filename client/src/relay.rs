//! A transport through a rendezvous, end to end encrypted.

use crate::options::{RemoteExecServerConnectArgs, Token};
use crate::task::Transport;
use portcullis_relay::credentials::Bearer;
use portcullis_relay::fault::Fault;
use portcullis_relay::harness::{Harness, HarnessInput, HarnessOutput};
use portcullis_relay::keys::Identity;
use portcullis_relay::noise::Binding;
use portcullis_relay::registry::Registry;
use portcullis_relay::segment::QueueError;
use portcullis_relay::socket::{Socket, UNSENT, send_first};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_tungstenite::tungstenite::Bytes;

/// Messages in line in one direction.
const QUEUE: usize = 128;
/// Bytes of messages that the client did not take yet: one of the longest. While there are so many no frame is read.
const UNTAKEN: usize = 64 << 20;
/// How long what is left may take to leave at the end: a stream that closes has as long.
const FAREWELL: Duration = Duration::from_secs(5);

/// A way to an environment. The keys are the same for every attempt.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    registry: Registry,
    identity: Arc<Identity>,
}

impl Way {
    /// # Errors
    /// The registry's URL, the environment or the token cannot be used, or there is no randomness.
    pub(crate) fn new(
        remote: &RemoteExecServerConnectArgs,
        account: Option<&str>,
        tls: Option<&crate::Tls>,
    ) -> Result<Self, String> {
        let RemoteExecServerConnectArgs { base_url, environment_id, token } = remote;
        let token = Token::reveal(token);
        let credentials = account.map_or_else(|| Bearer::new(token), |account| Bearer::of_account(token, account));
        let credentials = Arc::new(credentials.map_err(|error| error.to_string())?);
        let registry = Registry::with(base_url, environment_id, credentials, tls.map(crate::Tls::config));
        let identity = Identity::generate().map_err(|error| error.to_string())?;
        Ok(Self { registry: registry.map_err(|error| error.to_string())?, identity: Arc::new(identity) })
    }

    /// Where the registry is, for people.
    pub(crate) fn url(&self) -> String {
        self.registry.url()
    }

    /// Connects, and answers the transport with the task that carries it, which answers why it ended; its owner joins it.
    ///
    /// # Errors
    /// The executor was not reached, or is not the one that the registry means; the text says why.
    pub(crate) async fn dial(&self) -> Result<(Transport, JoinHandle<String>), String> {
        let keys = self.identity.public_keys();
        let mut bundle = self.registry.connect(&keys).await.map_err(|error| error.to_string())?;
        let socket = match Socket::dial(&bundle.url, self.registry.tls()).await {
            // A URL lives for a moment only: the next one decides.
            Err(error) if error.is_final() => {
                bundle = self.registry.connect(&keys).await.map_err(|error| error.to_string())?;
                Socket::dial(&bundle.url, self.registry.tls()).await
            }
            dialled => dialled,
        };
        let socket = socket.map_err(|error| error.to_string())?;
        let stream = portcullis_relay::stream_name();
        let (environment, registration) = (self.registry.environment(), &bundle.executor_registration_id);
        let binding = Binding { environment, registration, stream: &stream };
        let authorization = &bundle.harness_key_authorization;
        let begun = Harness::start(&self.identity, &bundle.executor_public_key, binding, authorization, now());
        let harness = begun.map_err(|error| error.to_string())?;
        let (to_server, outgoing) = mpsc::channel(QUEUE);
        let (incoming, from_server) = mpsc::channel(QUEUE);
        let (opened, is_opened) = oneshot::channel();
        let drive = Drive {
            harness,
            socket,
            outgoing: Some(outgoing),
            incoming: Some(incoming),
            opened: Some(opened),
            unsent: VecDeque::new(),
            untaken: VecDeque::new(),
            untaken_bytes: 0,
            held: None,
        };
        let carrier = tokio::spawn(drive.run());
        match is_opened.await {
            Ok(()) => Ok((Transport { outgoing: to_server, incoming: from_server }, carrier)),
            Err(_ended) => Err(carrier.await.unwrap_or_else(|panicked| panicked.to_string())),
        }
    }
}

/// One stream over one WebSocket.
struct Drive {
    harness: Harness,
    socket: Socket,
    outgoing: Option<mpsc::Receiver<String>>,
    incoming: Option<mpsc::Sender<String>>,
    opened: Option<oneshot::Sender<()>>,
    unsent: VecDeque<Bytes>,
    untaken: VecDeque<String>,
    untaken_bytes: usize,
    /// A message that did not fit into the stream yet.
    held: Option<Bytes>,
}

impl Drive {
    /// Carries until either end is gone, and says why it ended.
    async fn run(mut self) -> String {
        loop {
            if let Some(reason) = self.carry_out() {
                return self.end(reason).await;
            }
            // While the socket does not take what there is the stream is not asked for more: what is due then waits for it alone.
            let deadline = self.harness.deadline().map(Instant::from_std).filter(|_| self.unsent.len() < UNSENT);
            let takes = self.opened.is_none() && self.held.is_none();
            let reads = self.unsent.len() < UNSENT && self.untaken_bytes < UNTAKEN;
            tokio::select! {
                sent = send_first(Some(&self.socket.outgoing), &mut self.unsent) => {
                    if !sent {
                        // Its reader finds the end, behind what came before it.
                        self.unsent.clear();
                    }
                }
                given = give_first(self.incoming.as_ref(), &mut self.untaken) => match given {
                    Some(bytes) => self.untaken_bytes -= bytes,
                    None => {
                        // Who reads is gone; what is still to be sent decides when this ends.
                        self.incoming = None;
                        self.untaken.clear();
                    }
                },
                frame = self.socket.incoming.recv(), if reads => match frame {
                    Some(frame) => self.harness.handle(HarnessInput::Frame(frame), now()),
                    None => {
                        let ended = self.socket.carrier.join_next().await;
                        let reason = ended.and_then(Result::ok).unwrap_or_else(|| "the rendezvous is gone".to_owned());
                        return self.end(reason).await;
                    }
                },
                text = take(self.outgoing.as_mut()), if takes => match text {
                    Some(text) => self.held = Some(text.into()),
                    None => {
                        self.outgoing = None;
                        self.harness.handle(HarnessInput::Close, now());
                    }
                },
                // Nobody else would end it: whoever dials may be out of time, and gone.
                () = gone(self.opened.as_mut()) => return self.end("nobody waits for the stream any more".to_owned()).await,
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.harness.handle(HarnessInput::Timer, now());
                }
            }
        }
    }

    /// Does what the stream wants done, as far as the socket keeps up. Answers why it is over, if it is.
    fn carry_out(&mut self) -> Option<String> {
        loop {
            if let Some(bytes) = self.held.take() {
                match self.harness.queue(bytes.clone()) {
                    Err(QueueError::Full) => self.held = Some(bytes),
                    Err(error @ QueueError::Length(_)) => return Some(error.to_string()),
                    Ok(()) | Err(_) => {}
                }
            }
            if self.unsent.len() >= UNSENT {
                return None;
            }
            match self.harness.poll(now())? {
                HarnessOutput::Send(bytes) => self.unsent.push_back(bytes),
                HarnessOutput::Opened => {
                    let _dialler_gone = self.opened.take().map(|opened| opened.send(()));
                }
                HarnessOutput::Message(bytes) => {
                    let Ok(text) = String::from_utf8(bytes.into()) else {
                        return Some("the server sent what is no text".to_owned());
                    };
                    self.untaken_bytes += text.len();
                    self.untaken.push_back(text);
                }
                HarnessOutput::Closed(Fault::Done) => return Some("the client closed the connection".to_owned()),
                HarnessOutput::Closed(fault) => return Some(fault.to_string()),
            }
        }
    }

    /// Hands over what came before the end, sends what is left of the stream, and closes the socket.
    async fn end(mut self, reason: String) -> String {
        while self.incoming.is_some() && !self.untaken.is_empty() {
            if give_first(self.incoming.as_ref(), &mut self.untaken).await.is_none() {
                break;
            }
        }
        let until = Instant::now() + FAREWELL;
        let left = async { while !self.unsent.is_empty() && send_first(Some(&self.socket.outgoing), &mut self.unsent).await {} };
        let _left = timeout_at(until, left).await;
        let _ended = self.socket.end(until.saturating_duration_since(Instant::now())).await;
        reason
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// Gives the client its first message and answers its length, or waits for ever if there is none. None: the client is gone.
async fn give_first(incoming: Option<&mpsc::Sender<String>>, untaken: &mut VecDeque<String>) -> Option<usize> {
    let Some(incoming) = incoming.filter(|_| !untaken.is_empty()) else { return std::future::pending().await };
    let permit = incoming.reserve().await.ok()?;
    let text = untaken.pop_front()?;
    let length = text.len();
    permit.send(text);
    Some(length)
}

async fn take(outgoing: Option<&mut mpsc::Receiver<String>>) -> Option<String> {
    match outgoing {
        Some(outgoing) => outgoing.recv().await,
        None => std::future::pending().await,
    }
}

/// Waits until nobody waits for the stream to open any more; for ever once it is.
async fn gone(opened: Option<&mut oneshot::Sender<()>>) {
    match opened {
        Some(opened) => opened.closed().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::JoinSet;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_stream_that_nobody_waits_for_any_more_ends() {
        let identity = Identity::generate().unwrap();
        let binding = Binding { environment: "box", registration: "one", stream: "stream" };
        let harness = Harness::start(&identity, &identity.public_keys(), binding, "may", now()).unwrap();
        let ((to_socket, mut sent), (_from_rendezvous, received)) = (mpsc::channel(16), mpsc::channel(16));
        let mut carrier = JoinSet::new();
        carrier.spawn(async move {
            while sent.recv().await.is_some() {}
            "closed".to_owned()
        });
        let (opened, waits) = oneshot::channel();
        let drive = Drive {
            harness,
            socket: Socket { outgoing: to_socket, incoming: received, carrier },
            outgoing: None,
            incoming: None,
            opened: Some(opened),
            unsent: VecDeque::new(),
            untaken: VecDeque::new(),
            untaken_bytes: 0,
            held: None,
        };
        let driving = drive.run();
        drop(waits);
        // The executor would have ten seconds for its answer.
        let reason = timeout(Duration::from_secs(5), driving).await.expect("it ends at once");
        assert_eq!(reason, "nobody waits for the stream any more");
    }
}
