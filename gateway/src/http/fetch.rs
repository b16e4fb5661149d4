//! A request, to the end of its redirects.

use super::request::Request;
use super::{Answer, Outbound, failed, redirect};
use portcullis_protocol::rpc::RpcError;
use tokio::time::{Instant, timeout_at};

/// Redirects that are followed, as browsers and the clients of this wire have it: enough for every honest one.
const REDIRECTS: usize = 10;

/// Makes the request, and the next as long as answers point elsewhere. An error says what was attempted first.
pub(crate) async fn fetch(outbound: &Outbound, request: Request) -> Result<Answer, RpcError> {
    let attempt = request.attempt();
    let deadline = request.deadline;
    let fetched = within(deadline, follow(outbound, request)).await;
    let fetched = fetched.unwrap_or_else(|| Err(failed("timed out: timeoutMs ran out before the answer began")));
    fetched.map_err(|error| RpcError { message: format!("{attempt}: {}", error.message), ..error })
}

/// Waits until a deadline, if there is one; none if that has passed.
pub(super) async fn within<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => timeout_at(deadline, work).await.ok(),
        None => Some(work.await),
    }
}

async fn follow(outbound: &Outbound, mut request: Request) -> Result<Answer, RpcError> {
    let first = request.attempt();
    for _ in 0..=REDIRECTS {
        let answer = outbound.exchange(&request).await;
        // On the way, the place that failed is another than the one that was asked for.
        let attempt = request.attempt();
        let there = |error: RpcError| match attempt == first {
            true => error,
            false => RpcError {
                message: format!("redirected to {}: {}", attempt.trim_start_matches("http/request "), error.message),
                ..error
            },
        };
        let answer = answer.map_err(there)?;
        match redirect::next(&request, answer.status, &answer.headers).map_err(there)? {
            Some(next) => request = next,
            None => return Ok(answer),
        }
    }
    Err(failed(format!("too many redirects: more than {REDIRECTS}")))
}
