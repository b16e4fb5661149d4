//! The doors of the rendezvous: three calls of the registry, and the WebSocket.

use super::Rendezvous;
use super::board::{Executor, Question, Refused, Token};
use super::signed::{Role, Signer, Ticket, VALID};
use super::sockets::{self, CLAIMS, QUEUE};
use crate::frame::MAX_FRAME;
use crate::keys::{PublicKeys, SECURITY_PROFILE};
use crate::registry::is_environment;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use axum::Router;
use axum::body::Bytes;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{DefaultBodyLimit, Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// Bytes of a question: keys and an authorization are a few thousand.
const BODY: usize = 16 * 1024;

/// What carries one WebSocket.
pub(super) type Carry = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What every door needs.
#[derive(Clone)]
pub(super) struct Doors {
    executors: Arc<[Vec<u8>]>,
    harnesses: Arc<[Vec<u8>]>,
    public_url: Option<Arc<str>>,
    signer: Arc<Signer>,
    board: mpsc::Sender<Question>,
    upgrades: mpsc::Sender<Carry>,
    /// The next harness's number.
    numbers: Arc<AtomicU64>,
}

impl Doors {
    pub(super) fn new(
        rendezvous: &Rendezvous,
        signer: Arc<Signer>,
        board: mpsc::Sender<Question>,
        upgrades: mpsc::Sender<Carry>,
    ) -> Self {
        // Digests are of one length, so that comparing them says nothing of a token.
        let digests =
            |tokens: &[String]| tokens.iter().map(|token| digest(&SHA256, token.as_bytes()).as_ref().to_vec()).collect();
        Self {
            executors: digests(&rendezvous.executor_tokens),
            harnesses: digests(&rendezvous.harness_tokens),
            public_url: rendezvous.public_url.as_deref().map(|url| url.trim_end_matches('/').into()),
            signer,
            board,
            upgrades,
            numbers: Arc::default(),
        }
    }
}

/// All doors.
pub(super) fn routes(doors: Doors) -> Router {
    Router::new()
        .route("/cloud/environment/{environment}/register", post(register))
        .route("/cloud/environment/{environment}/connect", post(connect))
        .route("/cloud/environment/{environment}/validate", post(validate))
        .route("/cloud/environment/{environment}/ws", get(upgrade))
        .route("/livez", get(StatusCode::OK))
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(doors)
}

/// A body.
struct Json(Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], self.0.to_string()).into_response()
    }
}

/// An answer that says no.
struct No(StatusCode, &'static str, &'static str);

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
            Refused::Full => Self(StatusCode::SERVICE_UNAVAILABLE, "environments_full", "too many environments are served"),
            Refused::Sockets => Self(StatusCode::TOO_MANY_REQUESTS, "too_many_sockets", "this token has too many sockets open"),
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
    let (name, keys) = (environment.clone(), Box::new(question.executor_public_key));
    let registered = doors.ask(|answer| Question::Register { token: token.1, environment: name, keys, answer }).await?;
    let registration = registered?;
    let url = doors.url(&headers, &environment, &registration, token)?;
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
    let name = environment.clone();
    let (registration, keys) = doors.ask(|answer| Question::Find { environment: name, answer }).await??;
    let url = doors.url(&headers, &environment, &registration, token)?;
    let expires = now() + VALID.as_secs();
    let authorization = doors.signer.authorize(&environment, &registration, &question.harness_public_key, expires);
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
    let (name, registered) = (environment.clone(), registration.clone());
    let owns = doors.ask(|answer| Question::Owns { token, environment: name, registration: registered, answer }).await?;
    let valid = owns && doors.signer.is_authorized(&environment, &registration, &keys, &shown, now());
    Ok(Json(json!({"valid": valid})))
}

async fn upgrade(
    State(doors): State<Doors>,
    Path(environment): Path<String>,
    RawQuery(query): RawQuery,
    upgrade: WebSocketUpgrade,
) -> Result<Response, No> {
    let ticket = query.as_deref().and_then(Ticket::of_query);
    let Some(ticket) = ticket.filter(|ticket| doors.signer.is_valid(&environment, ticket, now())) else {
        return Err(No(
            StatusCode::FORBIDDEN,
            "url_expired",
            "this URL is not valid, or not any more; ask the registry for another",
        ));
    };
    let (board, upgrades) = (doors.board.clone(), doors.upgrades.clone());
    let Ticket { role, registration, token, .. } = ticket;
    let upgrade = upgrade.max_frame_size(MAX_FRAME).max_message_size(MAX_FRAME);
    match role {
        Role::Environment => {
            let ((claims, claimed), (frames, to_send)) = (mpsc::channel(CLAIMS), mpsc::channel(QUEUE));
            let (own, executor) = (frames.downgrade(), Executor { claims, frames });
            let ask = |answer| Question::Serve { token, environment, registration, executor, answer };
            let replaced = doors.ask(ask).await??;
            let left = Left { board, token: (role, token) };
            Ok(upgrade.on_upgrade(move |socket| async move {
                let carry = async move {
                    sockets::executor(socket, claimed, to_send, own, replaced).await;
                    left.tell().await;
                };
                let _closing = upgrades.send(Box::pin(carry)).await;
            }))
        }
        Role::Harness => {
            let number = doors.numbers.fetch_add(1, Ordering::Relaxed);
            let executor = doors.ask(|answer| Question::Use { token, environment, registration, answer }).await??;
            let left = Left { board, token: (role, token) };
            Ok(upgrade.on_upgrade(move |socket| async move {
                let carry = async move {
                    sockets::harness(socket, number, executor).await;
                    left.tell().await;
                };
                let _closing = upgrades.send(Box::pin(carry)).await;
            }))
        }
    }
}

/// A socket that is counted, until it is told or dropped that it is gone: an upgrade may come to nothing.
struct Left {
    board: mpsc::Sender<Question>,
    token: Token,
}

impl Left {
    /// Waits for its turn, unlike a drop.
    async fn tell(self) {
        let _closing = self.board.reserve().await;
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        // If the line is full the token is a place short until the rendezvous ends.
        let _full = self.board.try_send(Question::Gone { token: self.token });
    }
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
        let number = known.iter().position(|token| verify_slices_are_equal(token, shown.as_ref()).is_ok());
        let token = (role, number.ok_or_else(wrong)?);
        if self.ask(|answer| Question::Admit { token, answer }).await? {
            Ok(token)
        } else {
            Err(No(StatusCode::TOO_MANY_REQUESTS, "too_often", "this token asked too often; wait a second"))
        }
    }

    async fn ask<A>(&self, question: impl FnOnce(oneshot::Sender<A>) -> Question) -> Result<A, No> {
        let (answer, answered) = oneshot::channel();
        self.board.send(question(answer)).await.map_err(|_closing| CLOSING)?;
        answered.await.map_err(|_closing| CLOSING)
    }

    /// The URL of a WebSocket, for one attempt. Without an operator's word it leads where its asker found us.
    fn url(&self, headers: &HeaderMap, environment: &str, registration: &str, token: Token) -> Result<String, No> {
        let base = match &self.public_url {
            Some(url) => url.to_string(),
            None => {
                let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).filter(|host| is_host(host));
                format!("ws://{}", host.ok_or(No(StatusCode::BAD_REQUEST, "host", "the request has no usable Host"))?)
            }
        };
        let (role, number) = token;
        let expires = now() + VALID.as_secs();
        let ticket = Ticket { role, registration: registration.to_owned(), token: number, expires, sig: String::new() };
        Ok(format!("{base}/cloud/environment/{environment}/ws?{}", self.signer.sign(environment, &ticket)))
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
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
