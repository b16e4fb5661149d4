//! WebSockets: whose they are, where they lead, and what carries them.

use super::accept::Place;
use super::board::{self, Counted, Executor, Question};
use super::forward;
use super::line::Line;
use super::routes::{Doors, No, now};
use super::signed::{Role, Ticket};
use super::sockets::{self, CLAIMS};
use super::store::{Lease, RENEWAL, Refused, Store};
use crate::frame::MAX_FRAME;
use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::extract::{Extension, Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// What carries one WebSocket.
pub(super) type Carry = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The socket of an executor or a harness.
pub(super) async fn of_an_end(
    State(doors): State<Doors>,
    Path(environment): Path<String>,
    RawQuery(query): RawQuery,
    Extension(place): Extension<Place>,
    upgrade: WebSocketUpgrade,
) -> Result<Response, No> {
    let query = query.unwrap_or_default();
    let ticket = valid(&doors, &environment, &query).await?;
    let counted = count(&doors, &ticket).await?;
    if ticket.role == Role::Environment {
        return serve(&doors, environment, ticket, counted, place, upgrade).await;
    }
    let found = doors.store.find(&environment).await?;
    if found.registration != ticket.registration {
        return Err(Refused::Stale.into());
    }
    let node = found.node.ok_or(Refused::Offline)?;
    if *node == *doors.node {
        return local(&doors, environment, ticket, counted, place, upgrade).await;
    }
    let far = forward::dial(&node, &environment, &query).await?;
    Ok(accept(&doors, upgrade, place, counted, |socket, stop| async move {
        tokio::select! {
            () = forward::carry(socket, far) => {}
            () = told(stop) => {}
        }
    }))
}

/// The socket of a harness at another node, which showed it this ticket. No further node is asked.
pub(super) async fn of_a_node(
    State(doors): State<Doors>,
    Path(environment): Path<String>,
    RawQuery(query): RawQuery,
    Extension(place): Extension<Place>,
    upgrade: WebSocketUpgrade,
) -> Result<Response, No> {
    let ticket = valid(&doors, &environment, &query.unwrap_or_default()).await?;
    if ticket.role != Role::Harness {
        return Err(EXPIRED);
    }
    let counted = count(&doors, &ticket).await?;
    local(&doors, environment, ticket, counted, place, upgrade).await
}

const EXPIRED: No =
    No(StatusCode::FORBIDDEN, "url_expired", "this URL is not valid, or not any more; ask the registry for another");

async fn valid(doors: &Doors, environment: &str, query: &str) -> Result<Ticket, No> {
    let ticket = Ticket::of_query(query).ok_or(EXPIRED)?;
    let signer = doors.store.signer().await?;
    if signer.is_valid(environment, &ticket, now()) { Ok(ticket) } else { Err(EXPIRED) }
}

/// A place among the sockets of the token that the ticket was given for.
async fn count(doors: &Doors, ticket: &Ticket) -> Result<Counted, No> {
    let token = (ticket.role, ticket.token);
    Ok(doors.ask(|answer| Question::Come { token, answer }).await??)
}

/// An executor's socket: it has the newest lease from now on.
async fn serve(
    doors: &Doors,
    environment: String,
    ticket: Ticket,
    counted: Counted,
    place: Place,
    upgrade: WebSocketUpgrade,
) -> Result<Response, No> {
    let ((claims, claimed), (frames, to_send)) = (mpsc::channel(CLAIMS), Line::new(&doors.room));
    let (own, executor) = (frames.downgrade(), Executor { claims, frames });
    let store = doors.store.clone();
    let lease = store.lease(ticket.token, &environment, &ticket.registration, &doors.node).await?;
    let boxed = Box::new(lease.clone());
    let replaced = doors.ask(|answer| Question::Serve { lease: boxed, executor, answer }).await?;
    Ok(accept(doors, upgrade, place, counted, |socket, stop| async move {
        tokio::select! {
            () = sockets::executor(socket, claimed, to_send, own, replaced) => {}
            () = until_replaced(&store, &lease) => {}
            () = told(stop) => {}
        }
        store.release(&lease).await;
    }))
}

/// A harness's socket, whose executor has its own at this node.
async fn local(
    doors: &Doors,
    environment: String,
    ticket: Ticket,
    counted: Counted,
    place: Place,
    upgrade: WebSocketUpgrade,
) -> Result<Response, No> {
    let number = doors.numbers.fetch_add(1, Ordering::Relaxed);
    let executor = doors.ask(|answer| Question::Use { environment, registration: ticket.registration, answer }).await??;
    Ok(accept(doors, upgrade, place, counted, move |socket, stop| async move {
        tokio::select! {
            () = sockets::harness(socket, number, executor) => {}
            () = told(stop) => {}
        }
    }))
}

/// Accepts the upgrade, and gives what carries the socket to its owner. It is to end when it is told of the rendezvous's end.
fn accept<C>(
    doors: &Doors,
    upgrade: WebSocketUpgrade,
    place: Place,
    counted: Counted,
    carry: impl FnOnce(WebSocket, watch::Receiver<()>) -> C + Send + 'static,
) -> Response
where
    C: Future<Output = ()> + Send + 'static,
{
    let (upgrades, stop) = (doors.upgrades.clone(), doors.stop.clone());
    upgrade.max_frame_size(MAX_FRAME).max_message_size(MAX_FRAME).on_upgrade(move |socket| async move {
        let carried = carry(socket, stop);
        let carry = async move {
            carried.await;
            drop((place, counted));
        };
        let _closing = upgrades.send(Box::pin(carry)).await;
    })
}

/// Renews a lease until it turns out that a newer one was given. A store without an answer takes nobody's.
async fn until_replaced(store: &Store, lease: &Lease) {
    let mut ticks = interval_at(Instant::now() + RENEWAL, RENEWAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if store.renew(lease).await == Err(Refused::Stale) {
            board::ousted(&lease.environment);
            return;
        }
    }
}

/// Waits for the end of the rendezvous.
async fn told(mut stop: watch::Receiver<()>) {
    let _nobody_tells_any_more = stop.changed().await;
}
