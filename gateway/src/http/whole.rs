//! The body of an answer as one.

use super::fetch::within;
use super::{Answer, failed};
use crate::budget::{Budget, Charge};
use portcullis_protocol::rpc::RpcError;
use tokio::time::Instant;

/// Bytes of a body that comes whole: in base64 it is as large as the largest message (64 MiB). A larger one comes in parts.
pub(super) const LARGEST: usize = 48 << 20;
/// Bytes that a body may have before it is charged; with every slot of a connection in use that is no more than one large.
const SMALL: usize = 1 << 20;

/// Reads all of it, with the room that it takes: as much as it announces, or as much as it may. One budget, in one step, so that
/// no two bodies wait for one another.
pub(crate) async fn whole(
    mut answer: Answer,
    budget: &Budget,
    deadline: Option<Instant>,
) -> Result<(Vec<u8>, Option<Charge>), RpcError> {
    let read = within(deadline, read(&mut answer, budget)).await;
    read.unwrap_or_else(|| Err(failed("failed to read the response body: timed out: timeoutMs ran out")))
}

async fn read(answer: &mut Answer, budget: &Budget) -> Result<(Vec<u8>, Option<Charge>), RpcError> {
    let too_large = || {
        failed(format!(
            "failed to read the response body: it is larger than {LARGEST} bytes, the most that comes whole; ask for it in parts \
             with streamResponse"
        ))
    };
    let announced = answer.length().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    if announced.is_some_and(|length| length > LARGEST) {
        return Err(too_large());
    }
    let (mut body, mut room) = (Vec::new(), None);
    while let Some(more) = answer.next().await {
        let more =
            more.map_err(|cause| failed(format!("failed to read the response body: after {} bytes: {cause}", body.len())))?;
        let length = body.len() + more.len();
        if length > LARGEST {
            return Err(too_large());
        }
        if length > SMALL && room.is_none() {
            room = Some(budget.charge(announced.unwrap_or(LARGEST)).await);
        }
        body.extend_from_slice(&more);
    }
    Ok((body, room))
}
