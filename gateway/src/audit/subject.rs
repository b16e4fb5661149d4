//! What a record says of a call: which paths and commands it is about, and never what is in them.

use portcullis_protocol::method::Call;
use portcullis_protocol::path::WirePath;
use serde_json::{Value, json};

/// Bytes of a text in a record; of a longer one the beginning is told. The URI of any path that the system takes fits, whatever
/// its bytes.
const TEXT: usize = 13 << 10;

/// Whether a call is recorded. Those that are not say something of the gateway itself, or bring a client what its own process
/// wrote; what matters of that is in the records of its start and its end.
pub(crate) fn is_recorded(call: &Call) -> bool {
    !matches!(
        call,
        Call::EnvironmentInfo(_)
            | Call::EnvironmentStatus
            | Call::ProcessRead(_)
            | Call::ProcessAcknowledge(_)
            | Call::ProcessList
            | Call::NotBuilt { .. }
    )
}

/// Whether a call is refused while nothing can be recorded. What ends something is carried out all the same, and recorded later:
/// a full disk must not keep anybody from stopping what fills it.
pub(crate) fn must_be_possible(call: &Call) -> bool {
    is_recorded(call)
        && !matches!(call, Call::ProcessTerminate(_) | Call::ProcessSignal(_) | Call::ProcessCloseStdin(_) | Call::FsClose(_))
}

/// What a call is about. Paths are URIs, which are unambiguous whatever bytes a path holds.
pub(crate) fn subject(call: &Call) -> Value {
    match call {
        Call::Initialize(params) => json!({
            "client": bounded(&params.client_name), "resumes": params.resume_session_id.is_some(), "takesOver": params.take_over,
        }),
        Call::ProcessStart(params) => json!({
            "process": bounded(&params.process_id),
            "program": params.argv.first().map(|program| bounded(program)),
            "arguments": params.argv.len().saturating_sub(1),
            "cwd": uri(&params.cwd),
            "terminal": params.tty,
        }),
        Call::ProcessWrite(params) => json!({"process": bounded(&params.process_id), "bytes": params.chunk.0.len()}),
        Call::ProcessCloseStdin(params) => json!({"process": bounded(&params.process_id)}),
        Call::ProcessResize(params) => json!({"process": bounded(&params.process_id)}),
        Call::ProcessSignal(params) => json!({"process": bounded(&params.process_id), "signal": params.signal.number()}),
        Call::ProcessTerminate(params) => json!({"process": bounded(&params.process_id)}),
        Call::FsReadFile(params) | Call::FsGetMetadata(params) => json!({"path": uri(&params.path)}),
        Call::FsCanonicalize(params) | Call::FsReadDirectory(params) => json!({"path": uri(&params.path)}),
        Call::FsWriteFile(params) => {
            let bytes = params.data_base64.0.as_ref().map(Vec::len).ok();
            json!({"path": uri(&params.path), "bytes": bytes})
        }
        Call::FsCreateDirectory(params) => json!({"path": uri(&params.path)}),
        Call::FsWalk(params) => json!({"path": uri(&params.path)}),
        Call::FsRemove(params) => json!({"path": uri(&params.path)}),
        Call::FsCopy(params) => {
            json!({"path": uri(&params.source_path), "to": uri(&params.destination_path)})
        }
        Call::FsOpen(params) => {
            json!({"path": uri(&params.path), "handle": bounded(&params.handle_id), "mode": params.mode})
        }
        Call::FsReadBlock(params) => json!({"handle": bounded(&params.handle_id), "offset": params.offset, "bytes": params.len}),
        Call::FsWriteBlock(params) => {
            json!({"handle": bounded(&params.handle_id), "offset": params.offset, "bytes": params.chunk.0.len()})
        }
        Call::FsClose(params) => json!({"handle": bounded(&params.handle_id)}),
        Call::FsWatchMissing(params) => json!({
            "watch": params.watch_id, "path": params.missing.first().map(uri), "more": params.missing.len().saturating_sub(1),
        }),
        Call::HttpRequest(params) => json!({"method": bounded(&params.method), "url": shown(&params.url)}),
        Call::EnvironmentInfo(_)
        | Call::EnvironmentStatus
        | Call::ProcessRead(_)
        | Call::ProcessAcknowledge(_)
        | Call::ProcessList
        | Call::NotBuilt { .. } => Value::Null,
    }
}

/// A path of this machine, whatever its bytes; one of another machine as it was written, as far as it can be shown.
fn uri(path: &WirePath) -> String {
    path.local().map_or_else(|_foreign| bounded(&path.to_string()), |path| bounded(&path.to_uri()))
}

/// A URL without user and query, which may be secrets; nothing of a text that is none.
fn shown(text: &str) -> Option<String> {
    let mut url = url::Url::parse(text).ok()?;
    url.set_query(None);
    url.set_fragment(None);
    let _has_no_host = url.set_username("").and_then(|()| url.set_password(None));
    Some(bounded(url.as_str()))
}

/// A text, or its beginning.
pub(crate) fn bounded(text: &str) -> String {
    let mut end = text.len().min(TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    if end == text.len() { text.to_owned() } else { format!("{}…", &text[..end]) }
}
