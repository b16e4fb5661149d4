//! Routes of requests over HTTP.

use super::Connection;
use crate::answer::{Answer, carry_out, text};
use crate::http::{self, Parts, Request, fetch, send_parts};
use crate::reply;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::http::{HttpRequestParams, HttpRequestResult};
use portcullis_protocol::rpc::{self, Id, RpcError, code};
use portcullis_sandbox::policy::Network;
use std::sync::Arc;
use tokio::sync::oneshot;

impl Connection {
    /// `http/request`. It holds a slot until its result: with the body whole, or before the first part of it.
    pub(super) fn http(&mut self, id: Id, params: HttpRequestParams) -> Result<(), RpcError> {
        let (streams, request_id) = (params.stream_response, params.request_id.clone());
        let request = Request::new(params, &self.core.config.environment)?;
        let scope = self.scope.as_ref().and_then(|scope| scope.policy());
        if scope.is_some_and(|policy| policy.network == Network::Restricted) {
            let text =
                format!("{}: the token of this connection leaves requests no network, so nothing was sent", request.attempt());
            return Err(RpcError::new(code::INTERNAL, text));
        }
        if streams {
            self.http_in_parts(id, request, request_id)
        } else {
            self.http_whole(id, request);
            Ok(())
        }
    }

    fn http_whole(&mut self, id: Id, request: Request) {
        let (core, bodies) = (Arc::clone(&self.core), self.bodies.whole.clone());
        self.run(id.clone(), async move {
            let (attempt, deadline) = (request.attempt(), request.deadline());
            let answer = fetch(&core.outbound, request).await?;
            let (status, headers) = answer.head();
            let body = http::whole(answer, &bodies, deadline).await;
            let (body, _room) = body.map_err(|error| RpcError { message: format!("{attempt}: {}", error.message), ..error })?;
            let headers = serde_json::to_string(&headers);
            let headers =
                headers.map_err(|error| reply::internal(format!("{attempt}: the headers cannot be written: {error}")))?;
            let head = format!(r#","status":{status},"headers":{headers}"#);
            Ok(rpc::bytes_result_text(&id, "bodyBase64", &body, &head).into())
        });
    }

    fn http_in_parts(&mut self, id: Id, request: Request, request_id: String) -> Result<(), RpcError> {
        let in_use = self.bodies.reserve(&request_id)?;
        let (core, outgoing, way, held) = (Arc::clone(&self.core), self.outgoing.clone(), self.way(), self.held());
        let (room, deadline) = (self.bodies.parts.clone(), request.deadline());
        let parts = Parts { request_id, outgoing, room, metrics: Arc::clone(&self.core.metrics), deadline };
        let ((answers, answered), (begin, begun)) = (oneshot::channel(), oneshot::channel());
        let answer_id = id.clone();
        let call = async move {
            let answer = fetch(&core.outbound, request).await?;
            let (status, headers) = answer.head();
            let result = text(&answer_id, &HttpRequestResult { status, headers, body: Chunk::default() })?;
            let _connection_gone = answers.send((answer, in_use));
            Ok(Answer::from(result))
        };
        self.calls.spawn(async move {
            let _room_and_place = held;
            carry_out(id, way, call).await;
            // The parts come behind the result.
            if let Ok(answer) = answered.await {
                let _connection_gone = begin.send(answer);
            }
        });
        self.bodies.tasks.spawn(async move {
            if let Ok((answer, in_use)) = begun.await {
                send_parts(answer, parts, in_use).await;
            }
        });
        Ok(())
    }
}
