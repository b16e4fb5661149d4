//! The doors of the rendezvous: three calls of the registry, and who may open them.

use super::Rendezvous;
use super::board::{Question, Token};
use super::forward;
use super::line::{self, Room};
use super::signed::{Role, Ticket, VALID};
use super::store::{Environment, Refused, Store};
use super::upgrade::{self, Carry};
use crate::keys::{PublicKeys, SECURITY_PROFILE};
use crate::registry::is_environment;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot, watch};

/// Bytes of a question: keys and an authorization are a few thousand.
const BODY: usize = 16 * 1024;

/// What every door needs.
#[derive(Clone)]
pub(super) struct Doors {
    executors: Arc<[Vec<u8>]>,
    harnesses: Arc<[Vec<u8>]>,
    /// What URLs of WebSockets begin with; with nothing behind the scheme they lead where their asker found us.
    public_url: Arc<str>,
    pub(super) store: Store,
    /// What other nodes know this one by.
    pub(super) node: Arc<str>,
    pub(super) board: mpsc::Sender<Question>,
    pub(super) upgrades: mpsc::Sender<Carry>,
    /// For frames in line.
    pub(super) room: Room,
    /// The next harness's number.
    pub(super) numbers: Arc<AtomicU64>,
    /// Changes, or has no sender any more, once the rendezvous ends.
    pub(super) stop: watch::Receiver<()>,
}

impl Doors {
    pub(super) fn new(
        rendezvous: &Rendezvous,
        store: Store,
        board: mpsc::Sender<Question>,
        upgrades: mpsc::Sender<Carry>,
        stop: watch::Receiver<()>,
    ) -> Self {
        // Digests are of one length, so that comparing them says nothing of a token.
        let digests =
            |tokens: &[String]| tokens.iter().map(|token| digest(&SHA256, token.as_bytes()).as_ref().to_vec()).collect();
        let found = if rendezvous.tls.is_some() { "wss://" } else { "ws://" };
        Self {
            executors: digests(&rendezvous.executor_tokens),
            harnesses: digests(&rendezvous.harness_tokens),
            public_url: rendezvous.public_url.as_deref().map_or(found, |url| url.trim_end_matches('/')).into(),
            store,
            node: rendezvous.node_url.as_deref().unwrap_or_default().trim_end_matches('/').into(),
            board,
            upgrades,
            room: line::room(),
            numbers: Arc::default(),
            stop,
        }
    }
}

/// All doors.
pub(super) fn routes(doors: Doors) -> Router {
    Router::new()
        .route("/cloud/environment/{environment}/register", post(register))
        .route("/cloud/environment/{environment}/connect", post(connect))
        .route("/cloud/environment/{environment}/validate", post(validate))
        .route("/cloud/environment/{environment}/ws", get(upgrade::of_an_end))
        .route(forward::PATH, get(upgrade::of_a_node))
        .route("/livez", get(StatusCode::OK))
        .route("/readyz", get(ready))
        .layer(DefaultBodyLimit::max(BODY))
        .layer(map_response(one_answer))
        .with_state(doors)
}

/// Each socket has one answer: its deadline is for all of it.
async fn one_answer(mut answer: Response) -> Response {
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// Only while the store answers.
async fn ready(State(doors): State<Doors>) -> Result<StatusCode, No> {
    doors.store.signer().await?;
    Ok(StatusCode::OK)
}

/// A body.
pub(super) struct Json(Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], self.0.to_string()).into_response()
    }
}

/// An answer that says no.
pub(super) struct No(pub(super) StatusCode, pub(super) &'static str, pub(super) &'static str);

impl IntoResponse for No {
    fn into_response(self) -> Response {
        let Self(status, code, message) = self;
        (status, Json(json!({"error": {"code": code, "message": message}}))).into_response()
    }
}

impl From<Refused> for No {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Taken => Self(StatusCode::CONFLICT, "environment_taken", "another token registered this environment"),
            Refused::Unknown => Self(StatusCode::NOT_FOUND, "environment_unknown", "nobody registered this environment"),
            Refused::Offline => Self(StatusCode::CONFLICT, "environment_offline", "nobody serves this environment now"),
            Refused::Stale => Self(StatusCode::FORBIDDEN, "registration_stale", "the registration was replaced; ask again"),
            Refused::Full => Self(
                StatusCode::SERVICE_UNAVAILABLE,
                "environments_full",
                "there is no room for one more environment of this token",
            ),
            Refused::Sockets => Self(StatusCode::TOO_MANY_REQUESTS, "too_many_sockets", "this token has too many sockets open"),
            Refused::Unreachable => {
                Self(StatusCode::SERVICE_UNAVAILABLE, "store_unreachable", "what the nodes share cannot be asked now; try again")
            }
        }
    }
}

const CLOSING: No = No(StatusCode::SERVICE_UNAVAILABLE, "closing", "the rendezvous is shutting down");

#[derive(Deserialize)]
struct Register {
    security_profile: String,
    executor_public_key: PublicKeys,
}

async fn register(
    State(doors): State<Doors>,
    Path(environment): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Json, No> {
    let token = doors.admit(Role::Environment, &headers).await?;
    let question: Register = read(&environment, &body)?;
    if question.security_profile != SECURITY_PROFILE {
        return Err(No(StatusCode::BAD_REQUEST, "security_profile", "only noise_hybrid_ik_v1 is known"));
    }
    let registration = doors.store.register(token.1, &environment, &question.executor_public_key).await?;
    let url = doors.url(&headers, &environment, &registration, token).await?;
    Ok(Json(json!({
        "environment_id": environment,
        "url": url,
        "security_profile": SECURITY_PROFILE,
        "executor_registration_id": registration,
    })))
}

#[derive(Deserialize)]
struct Connect {
    harness_public_key: PublicKeys,
}

async fn connect(
    State(doors): State<Doors>,
    Path(environment): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Json, No> {
    let token = doors.admit(Role::Harness, &headers).await?;
    let question: Connect = read(&environment, &body)?;
    let Environment { registration, keys, node, .. } = doors.store.find(&environment).await?;
    node.ok_or(Refused::Offline)?;
    let url = doors.url(&headers, &environment, &registration, token).await?;
    let expires = now() + VALID.as_secs();
    let authorization = doors.store.signer().await?.authorize(&environment, &registration, &question.harness_public_key, expires);
    Ok(Json(json!({
        "environment_id": environment,
        "url": url,
        "security_profile": SECURITY_PROFILE,
        "executor_registration_id": registration,
        "executor_public_key": keys,
        "harness_key_authorization": authorization.ok_or(CLOSING)?,
    })))
}

#[derive(Deserialize)]
struct Validate {
    executor_registration_id: String,
    harness_public_key: PublicKeys,
    harness_key_authorization: String,
}

async fn validate(
    State(doors): State<Doors>,
    Path(environment): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Json, No> {
    let (_, token) = doors.admit(Role::Environment, &headers).await?;
    let question: Validate = read(&environment, &body)?;
    let Validate { executor_registration_id: registration, harness_public_key: keys, harness_key_authorization: shown } =
        question;
    let owns = match doors.store.find(&environment).await {
        Ok(found) => found.owner == token && found.registration == registration,
        Err(Refused::Unreachable) => return Err(Refused::Unreachable.into()),
        Err(_unknown) => false,
    };
    let valid = owns && doors.store.signer().await?.is_authorized(&environment, &registration, &keys, &shown, now());
    Ok(Json(json!({"valid": valid})))
}

impl Doors {
    /// The token of a request, if it is one of this role and did not ask too often.
    async fn admit(&self, role: Role, headers: &HeaderMap) -> Result<Token, No> {
        let wrong =
            || No(StatusCode::UNAUTHORIZED, "token", "send `Authorization: Bearer TOKEN` with a token of this rendezvous");
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let shown = digest(&SHA256, shown.and_then(|text| text.strip_prefix("Bearer ")).ok_or_else(wrong)?.as_bytes());
        let known = match role {
            Role::Environment => &self.executors,
            Role::Harness => &self.harnesses,
        };
        let token = known.iter().find(|token| verify_slices_are_equal(token, shown.as_ref()).is_ok()).ok_or_else(wrong)?;
        // Nodes may have the tokens in another order, so it is the digest that says which one it is.
        let first = token.first_chunk().copied().map(u64::from_be_bytes);
        let token = (role, first.ok_or_else(wrong)?);
        if self.ask(|answer| Question::Admit { token, answer }).await? {
            Ok(token)
        } else {
            Err(No(StatusCode::TOO_MANY_REQUESTS, "too_often", "this token asked too often; wait a second"))
        }
    }

    pub(super) async fn ask<A>(&self, question: impl FnOnce(oneshot::Sender<A>) -> Question) -> Result<A, No> {
        let (answer, answered) = oneshot::channel();
        self.board.send(question(answer)).await.map_err(|_closing| CLOSING)?;
        answered.await.map_err(|_closing| CLOSING)
    }

    /// The URL of a WebSocket, for one attempt.
    async fn url(&self, headers: &HeaderMap, environment: &str, registration: &str, token: Token) -> Result<String, No> {
        let mut base = self.public_url.to_string();
        if base.ends_with("://") {
            let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).filter(|host| is_host(host));
            base += host.ok_or(No(StatusCode::BAD_REQUEST, "host", "the request has no usable Host"))?;
        }
        let (role, token) = token;
        let expires = now() + VALID.as_secs();
        let ticket = Ticket { role, registration: registration.to_owned(), token, expires, sig: String::new() };
        let query = self.store.signer().await?.sign(environment, &ticket);
        Ok(format!("{base}/cloud/environment/{environment}/ws?{query}"))
    }
}

/// A name or address, with a port or without.
fn is_host(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|letter| letter.is_ascii_alphanumeric() || b".-:[]".contains(&letter))
}

fn read<Q: DeserializeOwned>(environment: &str, body: &[u8]) -> Result<Q, No> {
    if !is_environment(environment) {
        return Err(No(StatusCode::BAD_REQUEST, "environment_id", "the environment's id is none"));
    }
    serde_json::from_slice(body).map_err(|_| No(StatusCode::BAD_REQUEST, "body", "the body is not what this call takes"))
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
