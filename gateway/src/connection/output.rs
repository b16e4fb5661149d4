//! Output on its way to the client, and what says that it has arrived.

use super::Connection;
use crate::answer::{Answer, carry_out, text};
use crate::reply;
use crate::session::{Command, Page, Proof};
use portcullis_protocol::process::ReadParams;
use portcullis_protocol::rpc::{Id, RpcError};
use tokio::sync::oneshot;

impl Connection {
    /// What shows that this client has what it was sent.
    pub(super) fn proof(&self, acknowledges: bool) -> Proof {
        match (acknowledges, self.can.answers_pings) {
            (true, _) => Proof::Word,
            (false, true) => Proof::Mark,
            (false, false) => Proof::Sent,
        }
    }

    /// `process/read`. A large page is made beside everything else, and the session is told once a page is in the queue.
    pub(super) async fn read(&mut self, id: Id, params: ReadParams) -> Result<(), RpcError> {
        let replies = self.replies.clone();
        let page = self.command(|reply| Command::Read { params, replies, reply }).await?;
        let session = self.attached.as_ref().map(|(session, _)| session.clone()).ok_or_else(reply::session_ended)?;
        let (blocking, held, way) = (self.disk.blocking.clone(), self.held(), self.way());
        let (receipts, receipt) = oneshot::channel();
        let answer_id = id.clone();
        let answer = async move {
            let Page { result, room, receipt } = page.await.map_err(|_| reply::session_ended())??;
            let _not_taken = receipts.send(receipt);
            let Some(room) = room else { return Ok(text(&answer_id, &result)?.into()) };
            let made = blocking.run(move || text(&answer_id, &result)).await;
            Ok(Answer::large(made.map_err(|lost| reply::internal(lost.to_string()))??, room))
        };
        self.calls.spawn(async move {
            let _room_and_place = held;
            carry_out(id, way, answer).await;
            if let Ok(Some(handed_out)) = receipt.await {
                let _session_ended = session.send(handed_out).await;
            }
        });
        Ok(())
    }

    /// The client answered a mark.
    pub(super) async fn delivered(&self, mark: u64) {
        if let Some((session, attachment)) = &self.attached {
            let _session_ended = session.send(Command::Delivered { generation: attachment.generation, mark }).await;
        }
    }
}
