//! What a connection waits for beside messages.

use crate::scope::TokenScope;
use std::task::Poll;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Waits for the end of a task in any of the sets.
pub(super) async fn one_ended(mut sets: [&mut JoinSet<()>; 4]) {
    std::future::poll_fn(|task| match sets.iter_mut().any(|set| matches!(set.poll_join_next(task), Poll::Ready(Some(_)))) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await;
}

/// Waits until it is too late, and answers how much time there was.
pub(super) async fn overdue(ends: Option<(Duration, Instant)>) -> Duration {
    match ends {
        Some((time, at)) => {
            sleep_until(at).await;
            time
        }
        None => std::future::pending().await,
    }
}

/// Waits until the token of a connection is no longer valid, if that ends it.
pub(super) async fn expired(scope: Option<&TokenScope>) {
    match scope {
        Some(scope) => scope.expired().await,
        None => std::future::pending().await,
    }
}
