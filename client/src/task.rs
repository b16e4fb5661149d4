//! The client's task: it carries out what [`Core`] decides. It alone owns the transport and who waits for which answer.

use crate::link::{Carried, Received};
use crate::mailbox::{Letter, Mailbox, Taken};
use crate::options::Token;
use crate::pending::Again;
use crate::process::ProcessEvent;
use crate::recovery::{Core, Input, LinkId, Output, Reply, RouteId, Settings, Ticket};
use crate::relay::Way;
use crate::tls::Tls;
use crate::{ClientStatus, ExecServerError, dial};
use portcullis_protocol::init::InitializeResult;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinError, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

/// Messages that the link has not taken yet; while there are more, nothing is taken from the handles.
const MOST_UNSENT: usize = 64;
/// How long the end of a connection may take that nobody waits for.
const FAREWELL: Duration = Duration::from_secs(1);

/// Two bounded channels of texts: one message each, whole.
#[derive(Debug)]
pub struct Transport {
    /// Towards the server.
    pub outgoing: mpsc::Sender<String>,
    /// From the server; it ends when the link does.
    pub incoming: mpsc::Receiver<String>,
}

/// Where an answer goes.
pub(crate) type Answer = oneshot::Sender<Result<Reply, ExecServerError>>;
/// Where the answer of something goes that is followed. With the answer comes what ends it again, if nobody takes it.
pub(crate) type RouteAnswer = oneshot::Sender<Result<(Reply, Claim), ExecServerError>>;
/// A part of a body, or why it broke off.
pub(crate) type Part = Result<Vec<u8>, ExecServerError>;

/// What the handles ask of the task.
#[derive(Debug)]
pub(crate) enum Order {
    Call { method: String, params: String, again: Again, is_cleanup: bool, fail_fast: bool, answer: Answer },
    Start { process: String, params: String, again: bool, fail_fast: bool, mailbox: Mailbox<ProcessEvent>, answer: RouteAnswer },
    Attach { process: String, after: u64, mailbox: Mailbox<ProcessEvent>, answer: RouteAnswer },
    Http { request: String, params: String, fail_fast: bool, mailbox: Mailbox<Part>, answer: RouteAnswer },
}

/// What has to be ended when its owner is dropped, told without waiting.
#[derive(Debug)]
pub(crate) enum Litter {
    /// A process that nobody took.
    Process(RouteId),
    /// A file handle.
    Handle(String),
}

/// A process that was started and not taken yet: dropped, it ends it.
#[derive(Debug)]
pub(crate) struct Claim {
    route: RouteId,
    litter: Option<mpsc::Sender<Litter>>,
}

impl Claim {
    /// Its owner has it.
    pub(crate) fn take(mut self) {
        self.litter = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(litter) = self.litter.take() {
            // If the line is full the process runs on, and its session's end ends it.
            let _full = litter.try_send(Litter::Process(self.route));
        }
    }
}

/// How links are opened.
#[derive(Debug)]
pub(crate) enum Dialler {
    /// Once: this one is open.
    Given(Transport),
    /// Over a WebSocket.
    Url { url: String, token: Option<Token>, tls: Option<Tls>, silence: Option<Duration> },
    /// Through a rendezvous.
    Relay(Way),
}

/// What the handles and the task share.
#[derive(Debug)]
pub(crate) struct Ends {
    pub(crate) orders: mpsc::Receiver<Order>,
    pub(crate) litter: mpsc::Receiver<Litter>,
    /// The other end of `litter`, which keeps no task alive.
    pub(crate) litter_sender: mpsc::Sender<Litter>,
    pub(crate) bell: Arc<Notify>,
    pub(crate) status: watch::Sender<ClientStatus>,
    pub(crate) ready: oneshot::Sender<Result<Box<InitializeResult>, ExecServerError>>,
}

struct OpenLink {
    id: LinkId,
    transport: Carried,
    carrier: Option<JoinHandle<String>>,
}

enum Waiting {
    Call(Answer),
    Route(RouteId, RouteAnswer),
    Start(RouteId, RouteAnswer),
}

type Dialled = Result<(Carried, Option<JoinHandle<String>>), String>;

struct Task {
    core: Core,
    dialler: Option<Dialler>,
    url: String,
    dials: JoinSet<(LinkId, Dialled)>,
    /// The newest of the dials, if it is not done.
    dialling: Option<(LinkId, AbortHandle)>,
    link: Option<OpenLink>,
    unsent: VecDeque<String>,
    waiting: HashMap<Ticket, Waiting>,
    processes: HashMap<RouteId, Mailbox<ProcessEvent>>,
    bodies: HashMap<RouteId, Mailbox<Part>>,
    litter: mpsc::Sender<Litter>,
    status: watch::Sender<ClientStatus>,
    ready: Option<oneshot::Sender<Result<Box<InitializeResult>, ExecServerError>>>,
    names: u64,
}

pub(crate) async fn run(settings: Settings, dialler: Dialler, ends: Ends) {
    let Ends { mut orders, mut litter, litter_sender, bell, status, ready } = ends;
    let url = match &dialler {
        Dialler::Url { url, .. } => url.clone(),
        Dialler::Relay(way) => way.url(),
        Dialler::Given(_) => String::new(),
    };
    let mut task = Task {
        core: Core::new(settings, Instant::now().into_std()),
        dialler: Some(dialler),
        url,
        dials: JoinSet::new(),
        dialling: None,
        link: None,
        unsent: VecDeque::new(),
        waiting: HashMap::new(),
        processes: HashMap::new(),
        bodies: HashMap::new(),
        litter: litter_sender,
        status,
        ready: Some(ready),
        names: 0,
    };
    task.carry_out().await;
    loop {
        let deadline = task.core.deadline();
        let until = deadline.map_or_else(Instant::now, Instant::from_std);
        let has_unsent = !task.unsent.is_empty();
        let reads = task.core.wants_messages();
        let outgoing = task.link.as_ref().map(|link| link.transport.outgoing.clone());
        tokio::select! {
            () = sleep_until(until), if deadline.is_some() => task.handle(Input::Tick),
            dialled = task.dials.join_next(), if !task.dials.is_empty() => task.dialled(dialled).await,
            sent = send_first(outgoing, &mut task.unsent), if has_unsent => {
                if !sent {
                    // Its reader finds the end, behind what came before it.
                    task.unsent.clear();
                }
            }
            () = bell.notified() => task.look_at_mailboxes(),
            Some(litter) = litter.recv() => task.clean_up(litter),
            message = receive(task.link.as_mut()), if reads => task.received(message).await,
            order = orders.recv(), if task.unsent.len() < MOST_UNSENT => match order {
                Some(order) => task.order(order),
                None => break,
            },
        }
        task.carry_out().await;
    }
    task.end().await;
}

/// Sends the first message, or waits for ever without a link.
async fn send_first(outgoing: Option<mpsc::Sender<String>>, unsent: &mut VecDeque<String>) -> bool {
    let Some(outgoing) = outgoing else { return std::future::pending().await };
    let Ok(permit) = outgoing.reserve().await else { return false };
    if let Some(text) = unsent.pop_front() {
        permit.send(text);
    }
    true
}

async fn receive(link: Option<&mut OpenLink>) -> Option<Received> {
    match link {
        Some(link) => link.transport.incoming.recv().await,
        None => std::future::pending().await,
    }
}

impl Task {
    fn handle(&mut self, input: Input) {
        self.core.handle(input, Instant::now().into_std());
    }

    fn name(&mut self) -> u64 {
        self.names += 1;
        self.names
    }

    fn order(&mut self, order: Order) {
        let (ticket, route) = (self.name(), self.name());
        let (input, waiting) = match order {
            Order::Call { method, params, again, is_cleanup, fail_fast, answer } => {
                (Input::Call { ticket, method, params, again, is_cleanup, fail_fast }, Waiting::Call(answer))
            }
            Order::Start { process, params, again, fail_fast, mailbox, answer } => {
                self.processes.insert(route, mailbox);
                (Input::Start { ticket, route, process, params, again, fail_fast }, Waiting::Start(route, answer))
            }
            Order::Attach { process, after, mailbox, answer } => {
                self.processes.insert(route, mailbox);
                (Input::Attach { ticket, route, process, after }, Waiting::Route(route, answer))
            }
            Order::Http { request, params, fail_fast, mailbox, answer } => {
                self.bodies.insert(route, mailbox);
                (Input::Http { ticket, route, request, params, fail_fast }, Waiting::Route(route, answer))
            }
        };
        self.waiting.insert(ticket, waiting);
        self.handle(input);
    }

    fn clean_up(&mut self, litter: Litter) {
        match litter {
            Litter::Process(route) => self.handle(Input::Abandon { route }),
            Litter::Handle(handle) => {
                let params = serde_json::json!({"handleId": handle}).to_string();
                let (ticket, method) = (self.name(), "fs/close".to_owned());
                self.handle(Input::Call { ticket, method, params, again: Again::Send, is_cleanup: true, fail_fast: false });
            }
        }
    }

    fn look_at_mailboxes(&mut self) {
        let mut inputs = Vec::new();
        let mut look = |route, Taken { seq, cost, events, gone }| {
            if events > 0 || gone {
                inputs.push(Input::Taken { route, seq, cost, events, gone });
            }
            !gone
        };
        self.processes.retain(|route, mailbox| look(*route, mailbox.taken()));
        self.bodies.retain(|route, mailbox| look(*route, mailbox.taken()));
        for input in inputs {
            self.handle(input);
        }
    }

    async fn dialled(&mut self, dialled: Option<Result<(LinkId, Dialled), JoinError>>) {
        // One that was told to stop is none, nor is one that was done at that moment.
        let Some(Ok((link, outcome))) = dialled else { return };
        let is_wanted = self.dialling.take_if(|(dialling, _)| *dialling == link).is_some();
        match outcome {
            Ok((transport, carrier)) if is_wanted => {
                self.link = Some(OpenLink { id: link, transport, carrier });
                self.handle(Input::Opened { link });
            }
            Ok((_unwanted, carrier)) => {
                if let Some(carrier) = carrier {
                    carrier.abort();
                    let _aborted = carrier.await;
                }
            }
            Err(reason) => self.handle(Input::Unreachable { link, reason }),
        }
    }

    async fn received(&mut self, message: Option<Received>) {
        let Some(id) = self.link.as_ref().map(|link| link.id) else { return };
        match message {
            Some(Received::Text(text)) => self.handle(Input::Message { link: id, text }),
            Some(Received::Binary(message)) => self.handle(Input::Binary { link: id, message }),
            None => {
                let reason = self.hang_up(Duration::ZERO).await.unwrap_or_else(|| "the server is gone".to_owned());
                self.handle(Input::Ended { link: id, reason });
            }
        }
    }

    /// Ends the link; one that does not end in time is torn down. Answers why it had ended, if it had.
    async fn hang_up(&mut self, patience: Duration) -> Option<String> {
        self.unsent.clear();
        let OpenLink { transport, carrier, .. } = self.link.take()?;
        let has_ended = transport.incoming.has_ended();
        let mut carrier = carrier?;
        if has_ended {
            return carrier.await.ok();
        }
        drop(transport);
        if timeout(patience, &mut carrier).await.is_err() {
            carrier.abort();
            let _aborted = carrier.await;
        }
        None
    }

    /// Does what the core wants done.
    async fn carry_out(&mut self) {
        while let Some(output) = self.core.poll() {
            match output {
                Output::Dial { link } => self.dial(link),
                Output::HangUp { link } => {
                    if let Some((_, dial)) = self.dialling.take_if(|(dialling, _)| *dialling == link) {
                        dial.abort();
                    }
                    if self.link.as_ref().is_some_and(|open| open.id == link) {
                        self.hang_up(Duration::ZERO).await;
                    }
                }
                Output::Send { link, text } => {
                    if self.link.as_ref().is_some_and(|open| open.id == link) {
                        self.unsent.push_back(text);
                    }
                }
                Output::Ready(outcome) => {
                    let outcome = outcome.map_err(|error| match error {
                        ExecServerError::Connect { reason, .. } => ExecServerError::Connect { url: self.url.clone(), reason },
                        other => other,
                    });
                    if let Some(ready) = self.ready.take() {
                        let _caller_gone = ready.send(outcome);
                    }
                }
                Output::Answer { ticket, outcome } => self.answer(ticket, outcome),
                Output::Event { route, event, cost } => {
                    if let Some(mailbox) = self.processes.get(&route) {
                        let seq = event.last_seq().unwrap_or_default();
                        mailbox.put(Letter { item: event, cost, seq });
                    }
                }
                Output::Part { route, part, seq, cost } => {
                    if let Some(mailbox) = self.bodies.get(&route) {
                        mailbox.put(Letter { item: part, cost, seq });
                    }
                }
                Output::End { route } => {
                    self.processes.get(&route).into_iter().for_each(Mailbox::end);
                    self.bodies.get(&route).into_iter().for_each(Mailbox::end);
                }
                Output::Status(status) => {
                    self.status.send_replace(status);
                }
            }
        }
    }

    fn dial(&mut self, link: LinkId) {
        let dial = match self.dialler.take() {
            Some(Dialler::Given(transport)) => self.dials.spawn(async move { (link, Ok((transport.into(), None))) }),
            Some(Dialler::Url { url, token, tls, silence }) => {
                let again = Dialler::Url { url: url.clone(), token: token.clone(), tls: tls.clone(), silence };
                self.dialler = Some(again);
                self.dials.spawn(async move {
                    let dialled = dial::websocket(&url, token.as_ref(), tls.as_ref(), silence).await;
                    (link, dialled.map(|(transport, carrier)| (transport, Some(carrier))))
                })
            }
            Some(Dialler::Relay(way)) => {
                self.dialler = Some(Dialler::Relay(way.clone()));
                self.dials
                    .spawn(async move { (link, way.dial().await.map(|(transport, carrier)| (transport.into(), Some(carrier)))) })
            }
            None => return,
        };
        self.dialling = Some((link, dial));
    }

    fn answer(&mut self, ticket: Ticket, outcome: Result<Reply, ExecServerError>) {
        match self.waiting.remove(&ticket) {
            Some(Waiting::Call(answer)) => {
                let _caller_gone = answer.send(outcome);
            }
            Some(Waiting::Route(route, answer)) => {
                let claim = |result| (result, Claim { route, litter: None });
                let _caller_gone = answer.send(outcome.map(claim));
            }
            Some(Waiting::Start(route, answer)) => {
                // A caller that is gone drops the claim, which ends the process.
                let claim = |result| (result, Claim { route, litter: Some(self.litter.clone()) });
                let _caller_gone = answer.send(outcome.map(claim));
            }
            None => {}
        }
    }

    /// Nobody has a handle any more.
    async fn end(mut self) {
        for mailbox in self.processes.values() {
            mailbox.end();
        }
        for mailbox in self.bodies.values() {
            mailbox.end();
        }
        self.hang_up(FAREWELL).await;
        self.dials.shutdown().await;
    }
}
