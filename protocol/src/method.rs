//! The closed lists of what can be called and announced.

use crate::base64::{self, Checked, Chunk};
use crate::environment::{ConfigReadParams, InfoParams};
use crate::fs::MissingChangedNotice;
use crate::fs::{
    CopyParams, CreateDirectoryParams, HandleParams, OpenParams, PathParams, PlainPathParams, ReadBlockParams, RemoveParams,
    WalkParams, WatchMissingParams, WriteBlockParams, WriteFileParams,
};
use crate::http::HttpRequestParams;
use crate::init::InitializeParams;
use crate::logged::AcknowledgeParams;
use crate::process::{
    CloseStdinParams, ClosedNotice, ExitedNotice, OutputNotice, ReadParams, ResizeParams, SignalParams, StartParams,
    TerminateParams, WriteParams,
};
use crate::rpc::{RawParams, RpcError, code};
use crate::sandbox::is_near_miss;
use crate::scan::Bulk;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A request, decoded.
#[derive(Debug, Clone)]
pub enum Call {
    /// `initialize`
    Initialize(InitializeParams),
    /// `environment/info`
    EnvironmentInfo(InfoParams),
    /// `environment/status`
    EnvironmentStatus,
    /// `process/start`
    ProcessStart(Box<StartParams>),
    /// `process/read`
    ProcessRead(ReadParams),
    /// `process/acknowledge`
    ProcessAcknowledge(AcknowledgeParams),
    /// `process/write`
    ProcessWrite(WriteParams),
    /// `process/closeStdin`
    ProcessCloseStdin(CloseStdinParams),
    /// `process/resize`
    ProcessResize(ResizeParams),
    /// `process/list`
    ProcessList,
    /// `process/signal`
    ProcessSignal(SignalParams),
    /// `process/terminate`
    ProcessTerminate(TerminateParams),
    /// `fs/readFile`
    FsReadFile(PathParams),
    /// `fs/writeFile`
    FsWriteFile(WriteFileParams),
    /// `fs/createDirectory`
    FsCreateDirectory(CreateDirectoryParams),
    /// `fs/getMetadata`
    FsGetMetadata(PathParams),
    /// `fs/canonicalize`
    FsCanonicalize(PlainPathParams),
    /// `fs/readDirectory`
    FsReadDirectory(PlainPathParams),
    /// `fs/walk`
    FsWalk(WalkParams),
    /// `fs/remove`
    FsRemove(RemoveParams),
    /// `fs/copy`
    FsCopy(CopyParams),
    /// `fs/open`
    FsOpen(OpenParams),
    /// `fs/readBlock`
    FsReadBlock(ReadBlockParams),
    /// `fs/writeBlock`
    FsWriteBlock(WriteBlockParams),
    /// `fs/close`
    FsClose(HandleParams),
    /// `fs/watchMissing`
    FsWatchMissing(WatchMissingParams),
    /// `http/request`
    HttpRequest(Box<HttpRequestParams>),
    /// A method of this wire that is not built; it answers like one that does not exist, but only after the handshake.
    NotBuilt {
        /// Its name.
        method: &'static str,
        /// Its family.
        family: Family,
    },
}

/// Families of methods, in the words of the handshake's errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `environment/info`
    EnvironmentInfo,
    /// `environment/status`
    EnvironmentStatus,
    /// `environmentConfig/*`
    EnvironmentConfig,
    /// Discovery.
    CapabilityDiscovery,
    /// `process/*`
    Exec,
    /// `fs/*`
    Filesystem,
    /// `http/*`
    Http,
}

impl Family {
    /// As in "client must call initialize before using exec methods".
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::EnvironmentInfo => "environment info",
            Self::EnvironmentStatus => "environment status",
            Self::EnvironmentConfig => "environment config",
            Self::CapabilityDiscovery => "capability discovery",
            Self::Exec => "exec",
            Self::Filesystem => "filesystem",
            Self::Http => "http",
        }
    }
}

/// Methods of this wire that are not built.
const NOT_BUILT: [(&str, Family); 3] = [
    ("environmentConfig/read", Family::EnvironmentConfig),
    ("capabilities/discoverV2", Family::CapabilityDiscovery),
    ("capabilityRoots/discoverV1", Family::CapabilityDiscovery),
];

/// A decoded request, and how many of its members nobody knew.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// What is called.
    pub call: Call,
    /// Unknown members; they changed nothing.
    pub ignored: u32,
}

impl Call {
    /// Decodes a request: method first, then its parameters.
    ///
    /// # Errors
    /// −32601 for a method that does not exist, −32602 for parameters that do not decode or hold a member that looks like a
    /// misspelt `sandbox`.
    pub fn decode(method: &str, params: Option<RawParams<'_>>) -> Result<Decoded, RpcError> {
        let params = Params { method, text: params.map_or("null", RawParams::get), bulk: params.and_then(|params| params.bulk) };
        if let Some((method, family)) = NOT_BUILT.into_iter().find(|(name, _)| *name == method) {
            let call = Self::NotBuilt { method, family };
            return match method {
                "environmentConfig/read" => params.check::<ConfigReadParams>(call),
                _unread => Ok(Decoded { call, ignored: 0 }),
            };
        }
        match method {
            "initialize" => params.read(Self::Initialize),
            "environment/info" => params.info(),
            "environment/status" => params.nothing(Self::EnvironmentStatus),
            "process/start" => params.read(|start| Self::ProcessStart(Box::new(start))),
            "process/read" => params.read(Self::ProcessRead),
            "process/acknowledge" => params.read(Self::ProcessAcknowledge),
            "process/write" => {
                params.read_apart("chunk", |p, bytes| WriteParams { chunk: Chunk(bytes), ..p }, Self::ProcessWrite)
            }
            "process/closeStdin" => params.read(Self::ProcessCloseStdin),
            "process/resize" => params.read(Self::ProcessResize),
            "process/list" => params.nothing(Self::ProcessList),
            "process/signal" => params.read(Self::ProcessSignal),
            "process/terminate" => params.read(Self::ProcessTerminate),
            "fs/readFile" => params.read(Self::FsReadFile),
            "fs/writeFile" => {
                let filled = |p, bytes| WriteFileParams { data_base64: Checked(Ok(bytes)), ..p };
                params.read_apart("dataBase64", filled, Self::FsWriteFile)
            }
            "fs/createDirectory" => params.read(Self::FsCreateDirectory),
            "fs/getMetadata" => params.read(Self::FsGetMetadata),
            "fs/canonicalize" => params.read(Self::FsCanonicalize),
            "fs/readDirectory" => params.read(Self::FsReadDirectory),
            "fs/walk" => params.read(Self::FsWalk),
            "fs/remove" => params.read(Self::FsRemove),
            "fs/copy" => params.read(Self::FsCopy),
            "fs/open" => params.read(Self::FsOpen),
            "fs/readBlock" => params.read(Self::FsReadBlock),
            "fs/writeBlock" => {
                params.read_apart("chunk", |p, bytes| WriteBlockParams { chunk: Chunk(bytes), ..p }, Self::FsWriteBlock)
            }
            "fs/close" => params.read(Self::FsClose),
            "fs/watchMissing" => params.read(Self::FsWatchMissing),
            "http/request" => params.read(|request| Self::HttpRequest(Box::new(request))),
            unknown => Err(RpcError::unknown_method(unknown)),
        }
    }

    /// The name of its method, out of a closed list: what a client makes up is never among them.
    #[must_use]
    pub fn method(&self) -> &'static str {
        match self {
            Self::Initialize(_) => "initialize",
            Self::EnvironmentInfo(_) => "environment/info",
            Self::EnvironmentStatus => "environment/status",
            Self::ProcessStart(_) => "process/start",
            Self::ProcessRead(_) => "process/read",
            Self::ProcessAcknowledge(_) => "process/acknowledge",
            Self::ProcessWrite(_) => "process/write",
            Self::ProcessCloseStdin(_) => "process/closeStdin",
            Self::ProcessResize(_) => "process/resize",
            Self::ProcessList => "process/list",
            Self::ProcessSignal(_) => "process/signal",
            Self::ProcessTerminate(_) => "process/terminate",
            Self::FsReadFile(_) => "fs/readFile",
            Self::FsWriteFile(_) => "fs/writeFile",
            Self::FsCreateDirectory(_) => "fs/createDirectory",
            Self::FsGetMetadata(_) => "fs/getMetadata",
            Self::FsCanonicalize(_) => "fs/canonicalize",
            Self::FsReadDirectory(_) => "fs/readDirectory",
            Self::FsWalk(_) => "fs/walk",
            Self::FsRemove(_) => "fs/remove",
            Self::FsCopy(_) => "fs/copy",
            Self::FsOpen(_) => "fs/open",
            Self::FsReadBlock(_) => "fs/readBlock",
            Self::FsWriteBlock(_) => "fs/writeBlock",
            Self::FsClose(_) => "fs/close",
            Self::FsWatchMissing(_) => "fs/watchMissing",
            Self::HttpRequest(_) => "http/request",
            Self::NotBuilt { method, .. } => method,
        }
    }

    /// The family whose handshake rule holds; none for `initialize` itself.
    #[must_use]
    pub fn family(&self) -> Option<Family> {
        Some(match self {
            Self::Initialize(_) => return None,
            Self::EnvironmentInfo(_) => Family::EnvironmentInfo,
            Self::EnvironmentStatus => Family::EnvironmentStatus,
            Self::ProcessStart(_)
            | Self::ProcessRead(_)
            | Self::ProcessAcknowledge(_)
            | Self::ProcessWrite(_)
            | Self::ProcessCloseStdin(_)
            | Self::ProcessResize(_)
            | Self::ProcessList
            | Self::ProcessSignal(_)
            | Self::ProcessTerminate(_) => Family::Exec,
            Self::HttpRequest(_) => Family::Http,
            Self::NotBuilt { family, .. } => *family,
            _fs => Family::Filesystem,
        })
    }
}

/// A notification of the server, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// `process/output`
    Output(OutputNotice),
    /// `process/exited`
    Exited(ExitedNotice),
    /// `process/closed`
    Closed(ClosedNotice),
    /// `fs/missingChanged`
    MissingChanged(MissingChangedNotice),
}

impl Notice {
    /// Decodes a notification; none if it is not one of this list, which a client leaves alone.
    ///
    /// # Errors
    /// Its parameters do not decode: the server breaks the rules of the wire.
    pub fn decode(method: &str, params: RawParams<'_>) -> Result<Option<Self>, serde_json::Error> {
        let text = params.get();
        Ok(Some(match method {
            "process/output" => Self::Output(serde_json::from_str(text)?),
            "process/exited" => Self::Exited(serde_json::from_str(text)?),
            "process/closed" => Self::Closed(serde_json::from_str(text)?),
            "fs/missingChanged" => Self::MissingChanged(serde_json::from_str(text)?),
            _unknown => return Ok(None),
        }))
    }
}

struct Params<'a> {
    method: &'a str,
    text: &'a str,
    bulk: Option<Bulk<'a>>,
}

impl<'a> Params<'a> {
    fn read<T: Deserialize<'a>>(&self, call: impl FnOnce(T) -> Call) -> Result<Decoded, RpcError> {
        let (mut ignored, mut suspect) = (0_u32, None);
        let mut json = serde_json::Deserializer::from_str(self.text);
        let params = serde_ignored::deserialize(&mut json, |path| {
            ignored = ignored.saturating_add(1);
            if let serde_ignored::Path::Map { parent: serde_ignored::Path::Root, key } = &path
                && looks_like_sandbox(key)
            {
                suspect = Some(key.clone());
            }
        });
        if let Some(member) = suspect {
            let text = format!("{}: unknown field `{member}`: did you mean `sandbox`? nothing was done", self.method);
            return Err(RpcError::new(code::INVALID_PARAMS, text));
        }
        match params {
            Ok(params) => Ok(Decoded { call: call(params), ignored }),
            Err(error) => Err(self.wrong(&error)),
        }
    }

    /// Reads parameters that may be mostly one member in base64. That is decoded from where it was found, and the rest is read
    /// without it, since to read that member as JSON costs as much as all else. Where that fails everything is read, which says why.
    fn read_apart<T: DeserializeOwned>(
        &self,
        member: &str,
        fill: impl FnOnce(T, Vec<u8>) -> T,
        call: fn(T) -> Call,
    ) -> Result<Decoded, RpcError> {
        let bulk = self.bulk.filter(|bulk| bulk.name == member);
        if let Some(bulk) = bulk
            && let Ok(bytes) = base64::decode(bulk.text)
        {
            let rest = Params { method: self.method, text: &bulk.around.concat(), bulk: None };
            let read = rest.read(|params: T| call(fill(params, bytes)));
            if read.is_ok() {
                return read;
            }
        }
        self.read(call)
    }

    /// Parameters of a method that is not built: they are checked all the same, before the handshake is.
    fn check<T: Deserialize<'a>>(&self, call: Call) -> Result<Decoded, RpcError> {
        self.read(|_checked: T| call)
    }

    /// What was attempted, in front of the words that clients of this wire know.
    fn wrong(&self, error: &serde_json::Error) -> RpcError {
        RpcError::new(code::INVALID_PARAMS, format!("{}: {}", self.method, without_position(error)))
    }

    /// Absent, null and `{}` are all nothing; only what is asked for beyond them has a name.
    fn info(&self) -> Result<Decoded, RpcError> {
        let members: Result<Option<serde_json::Map<String, Value>>, _> = serde_json::from_str(self.text);
        match members.and_then(|members| serde_json::from_value(Value::Object(members.unwrap_or_default()))) {
            Ok(params) => Ok(Decoded { call: Call::EnvironmentInfo(params), ignored: 0 }),
            Err(_wrong) => {
                let text = format!("{}: takes `enforcement` and `extensions` (true or false), or no parameters", self.method);
                Err(RpcError::new(code::INVALID_PARAMS, text))
            }
        }
    }

    /// Absent, null and `{}` are all nothing.
    fn nothing(&self, call: Call) -> Result<Decoded, RpcError> {
        match serde_json::from_str::<Value>(self.text) {
            Ok(Value::Null) => Ok(Decoded { call, ignored: 0 }),
            Ok(Value::Object(members)) if members.is_empty() => Ok(Decoded { call, ignored: 0 }),
            Ok(_) => {
                let text = format!("{}: takes no parameters: send none, null or {{}}", self.method);
                Err(RpcError::new(code::INVALID_PARAMS, text))
            }
            Err(error) => Err(self.wrong(&error)),
        }
    }
}

/// A request whose sandbox is misspelt must not run without one.
fn looks_like_sandbox(member: &str) -> bool {
    let lower = member.to_ascii_lowercase();
    ["sandbox", "permission"].iter().any(|part| lower.contains(part))
        || ["sandbox", "sandboxPolicy", "policy", "policies", "permissions", "permissionProfile"]
            .iter()
            .any(|name| is_near_miss(member, name))
}

/// The position is one in the parameters, which the client never sees as a text of its own.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) if error.line() > 0 => text[..at].to_owned(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::RedirectPolicy;
    use crate::rpc::{self, Message};
    use serde_json::value::RawValue;

    fn decode(method: &str, params: &str) -> Result<Decoded, RpcError> {
        let raw: Box<RawValue> = serde_json::from_str(params).unwrap();
        Call::decode(method, Some(RawParams::from(&*raw)))
    }

    /// Decodes a message both as it is and as if its bytes had not been found by the way.
    fn decode_both(method: &str, params: &str) -> [Result<Call, RpcError>; 2] {
        let message = format!(r#"{{"id":1,"method":"{method}","params":{params}}}"#);
        let Ok(Message::Request { params: Some(found), .. }) = rpc::parse(message.as_bytes()) else { panic!("{message}") };
        assert!(found.bulk.is_some());
        let mut whole = found;
        whole.bulk = None;
        [found, whole].map(|params| Call::decode(method, Some(params)).map(|decoded| decoded.call))
    }

    #[test]
    fn bytes_that_were_found_by_the_way_are_those_of_the_parameters() {
        let bytes: Vec<u8> = (0..=255).cycle().take(5000).collect();
        let (text, path) = (base64::encode(&bytes), "file:///p");
        let sent = |call: &Call| match call {
            Call::FsWriteFile(p) => (p.data_base64.0.clone().unwrap(), format!("{p:?}")),
            Call::FsWriteBlock(p) => (p.chunk.0.clone(), format!("{p:?}")),
            Call::ProcessWrite(p) => (p.chunk.0.clone(), format!("{p:?}")),
            other => panic!("{other:?}"),
        };
        for (method, params) in [
            ("fs/writeFile", format!(r#"{{"path":"{path}","dataBase64":"{text}","operationId":"o","new":1}}"#)),
            ("fs/writeFile", format!(r#"{{ "dataBase64" : "{text}" , "sandbox": {{"a":[1]}} , "path" : "{path}" }}"#)),
            ("fs/writeBlock", format!(r#"{{"handleId":"h","offset":7,"chunk":"{text}"}}"#)),
            ("process/write", format!(r#"{{"processId":"p","chunk":"{text}","writeId":"w"}}"#)),
        ] {
            let [found, whole] = decode_both(method, &params).map(|call| sent(&call.unwrap()));
            assert_eq!(found, whole);
            assert_eq!(found.0, bytes);
        }
        for (method, params) in [
            ("fs/writeFile", format!(r#"{{"dataBase64":"{text}"}}"#)),
            ("fs/writeFile", format!(r#"{{"path":"{path}","dataBase64":"","x":"{text}","sandBox":1}}"#)),
            ("fs/writeFile", format!(r#"{{"path":"{path}","dataBase64":"{text}","sandBox":{{}}}}"#)),
            ("fs/writeBlock", format!(r#"{{"handleId":"h","offset":-7,"chunk":"{text}"}}"#)),
            ("process/write", format!(r#"{{"processId":"p","chunk":"!{text}","writeId":"w"}}"#)),
        ] {
            let [found, whole] = decode_both(method, &params).map(Result::unwrap_err);
            assert_eq!(found, whole);
        }
        let wrong = format!(r#"{{"path":"{path}","dataBase64":"{text}="}}"#);
        let [found, whole] = decode_both("fs/writeFile", &wrong).map(|call| format!("{:?}", call.unwrap()));
        assert_eq!(found, whole);
        assert!(found.contains("Invalid"), "{found}");
    }

    #[test]
    fn a_call_knows_the_name_it_was_called_by() {
        let path = r#"{"path":"file:///p"}"#;
        let process = r#"{"processId":"p"}"#;
        for (method, params) in [
            ("initialize", r#"{"clientName":"c"}"#),
            ("environment/info", "null"),
            ("environment/status", "null"),
            ("process/start", r#"{"processId":"p","argv":["a"],"cwd":"file:///","env":{},"tty":false}"#),
            ("process/read", process),
            ("process/acknowledge", r#"{"processId":"p","seq":1}"#),
            ("process/write", r#"{"processId":"p","chunk":"","writeId":"w"}"#),
            ("process/closeStdin", process),
            ("process/resize", r#"{"processId":"p","rows":1,"cols":1}"#),
            ("process/list", "null"),
            ("process/signal", r#"{"processId":"p","signal":"interrupt"}"#),
            ("process/terminate", process),
            ("fs/readFile", path),
            ("fs/writeFile", r#"{"path":"file:///p","dataBase64":""}"#),
            ("fs/createDirectory", path),
            ("fs/getMetadata", path),
            ("fs/canonicalize", path),
            ("fs/readDirectory", path),
            ("fs/remove", path),
            ("fs/copy", r#"{"sourcePath":"file:///p","destinationPath":"file:///q","recursive":false}"#),
            ("fs/open", r#"{"handleId":"h","path":"file:///p"}"#),
            ("fs/readBlock", r#"{"handleId":"h","offset":0,"len":1}"#),
            ("fs/writeBlock", r#"{"handleId":"h","offset":0,"chunk":""}"#),
            ("fs/close", r#"{"handleId":"h"}"#),
            ("fs/watchMissing", r#"{"watchId":1,"missing":[]}"#),
            ("http/request", r#"{"method":"GET","url":"u","requestId":"r"}"#),
        ] {
            assert_eq!(decode(method, params).unwrap().call.method(), method);
        }
    }

    #[track_caller]
    fn refused(method: &str, params: &str, expect_code: i32, expect: &str) {
        let error = decode(method, params).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (expect_code, expect));
    }

    #[test]
    fn unknown_methods_come_before_their_parameters() {
        refused("no/such", "3", code::METHOD_NOT_FOUND, "exec-server stub does not implement `no/such` yet");
        refused("initialized", "{}", code::METHOD_NOT_FOUND, "exec-server stub does not implement `initialized` yet");
        let unbuilt = decode("capabilities/discoverV2", "{}").unwrap().call;
        assert!(matches!(unbuilt, Call::NotBuilt { family: Family::CapabilityDiscovery, .. }));
    }

    #[test]
    fn wrong_parameters_are_said_in_known_words() {
        let wrong = |method: &str, params: &str, expect: &str| {
            refused(method, params, code::INVALID_PARAMS, &format!("{method}: {expect}"));
        };
        assert_eq!(
            Call::decode("initialize", None).unwrap_err().message,
            "initialize: invalid type: null, expected struct InitializeParams"
        );
        wrong("initialize", "{}", "missing field `clientName`");
        wrong("fs/readFile", "{}", "missing field `path`");
        wrong("fs/readFile", r#"{"path":"a"}"#, "`a`: invalid URI: relative URL without a base");
        wrong("process/write", r#"{"processId":"p","chunk":"!!","writeId":"q"}"#, "Invalid symbol 33, offset 0.");
        wrong("process/resize", r#"{"processId":"p","rows":3}"#, "missing field `cols`");
        wrong("process/resize", r#"{"processId":"p","rows":0,"cols":3}"#, "invalid value: integer `0`, expected a nonzero u16");
        wrong("process/resize", r#"{"processId":"p","rows":"3","cols":3}"#, "invalid type: string \"3\", expected a nonzero u16");
        wrong("process/closeStdin", r#"{"processId":3}"#, "invalid type: integer `3`, expected a string");
        wrong("process/list", r#"{"processId":"p"}"#, "takes no parameters: send none, null or {}");
        assert!(decode("process/resize", r#"{"processId":"p","rows":65536,"cols":3}"#).is_err());
        assert!(decode("process/signal", r#"{"processId":"p","signal":"SIGUSR1"}"#).is_ok());
        assert!(decode("process/signal", r#"{"processId":"p","signal":"SIGFOO"}"#).unwrap_err().message.contains("`interrupt`"));
        wrong("environment/info", r#"{"x":1}"#, "takes `enforcement` and `extensions` (true or false), or no parameters");
        wrong("environment/info", "[true]", "takes `enforcement` and `extensions` (true or false), or no parameters");
        wrong("environment/status", r#"{"x":1}"#, "takes no parameters: send none, null or {}");
        wrong("fs/watchMissing", "{}", "missing field `watchId`");
        wrong("environmentConfig/read", r#"{"cwd":"/"}"#, "missing field `configPaths`");
        assert!(decode("process/read", r#"{"processId":"p","afterSeq":-1}"#).is_err());
        assert!(decode("fs/open", r#"{"handleId":"w","path":"/f","mode":null}"#).is_err());
        let start = |more: &str| {
            decode("process/start", &format!(r#"{{"processId":"p","argv":[],"cwd":"/","env":{{}},"tty":false{more}}}"#))
        };
        assert!(start("").is_ok());
        assert!(
            start(
                r#","envPolicy":null,"arg0":null,"sandbox":null,"managedNetwork":null,"networkProxy":null,"shellSnapshot":null"#
            )
            .is_ok()
        );
        assert!(start(r#","size":{"rows":1,"cols":65535},"operationId":"o""#).is_ok());
        assert!(start(r#","size":{"rows":1}"#).is_err());
        assert!(start(r#","size":{"rows":1,"cols":0}"#).is_err());
        assert!(start(r#","operationId":3"#).is_err());
        assert!(start(r#","pipeStdin":null"#).is_err());
        assert!(start(r#","networkProxy":"zz""#).is_err());
    }

    #[test]
    fn requests_over_http_in_the_words_that_clients_know() {
        let request = |more: &str| decode("http/request", &format!(r#"{{"method":"GET","url":"u","requestId":"r"{more}}}"#));
        let Call::HttpRequest(plain) = request("").unwrap().call else { panic!("another call") };
        assert_eq!((plain.redirect_policy, plain.stream_response, plain.headers.len()), (RedirectPolicy::Follow, false, 0));
        assert!(request(r#","bodyBase64":null,"timeoutMs":null"#).is_ok());
        for (more, expect) in [
            (r#","redirectPolicy":"zz""#, "unknown variant `zz`, expected `follow` or `stop`"),
            (r#","headers":[{"name":"X"}]"#, "missing field `value`"),
            (r#","headers":{"a":"b"}"#, "invalid type: map, expected a sequence"),
            (r#","bodyBase64":"!!""#, "Invalid symbol 33, offset 0."),
        ] {
            let error = request(more).unwrap_err();
            assert_eq!((error.code, error.message), (code::INVALID_PARAMS, format!("http/request: {expect}")));
        }
        refused("http/request", "{}", code::INVALID_PARAMS, "http/request: missing field `method`");
    }

    #[test]
    fn notices_of_this_list_and_others() {
        let decode = |method: &str, params: &str| {
            let raw: Box<RawValue> = serde_json::from_str(params).unwrap();
            Notice::decode(method, RawParams::from(&*raw))
        };
        let closed = Notice::Closed(ClosedNotice { process_id: "p".to_owned(), seq: 3 });
        assert_eq!(decode("process/closed", r#"{"processId":"p","seq":3}"#).unwrap(), Some(closed));
        assert_eq!(
            decode("fs/missingChanged", r#"{"watchId":7}"#).unwrap(),
            Some(Notice::MissingChanged(MissingChangedNotice { watch_id: 7 }))
        );
        assert_eq!(decode("process/moved", "{}").unwrap(), None);
        assert!(decode("process/exited", r#"{"processId":"p","seq":3}"#).is_err(), "an exit has a status");
    }

    #[test]
    fn a_misspelt_sandbox_is_refused_and_other_strangers_are_counted() {
        for member in [
            "sandBox",
            "sandbox_policy",
            "sand-box",
            "sandboxContext",
            "Policy",
            "snadbox",
            "snadbxo",
            "polices",
            "policies",
            "permissions",
            "permissionProfile",
            "permision",
            "premissons",
            "filePermissions",
            "fileSystemSandboxContext",
        ] {
            let error = decode("fs/readFile", &format!(r#"{{"path":"/f","{member}":{{}}}}"#)).unwrap_err();
            assert!(error.message.contains(&format!("unknown field `{member}`")), "{member}: {}", error.message);
        }
        let decoded = decode("fs/readFile", r#"{"path":"/f","junk":1,"trace":{"a":1}}"#).unwrap();
        assert_eq!(decoded.ignored, 2);
    }

    /// Where a method does not know a member of another, or of a newer client, it counts it.
    #[test]
    fn no_member_of_the_wire_looks_like_a_misspelt_sandbox() {
        for member in [
            // initialize
            "clientName resumeSessionId protocolVersion capabilities",
            // fs
            "path dataBase64 followSymlinks recursive force options handleId mode offset len sourcePath destinationPath cwd",
            "maxDepth maxDirectories maxEntries followDirectorySymlinks pruneHiddenDirectories atomic",
            // process
            "processId argv env envPolicy tty pipeStdin arg0 managedNetwork enforceManagedNetwork networkProxy shellSnapshot",
            "afterSeq maxBytes waitMs chunk writeId signal size cols rows scopeId metadata inherit exclude includeOnly set",
            "ignoreDefaultExcludes prependPathDirs loopbackPorts allowLocalBinding credentialMasking providerId",
            // On any of them.
            "trace traceId operationId stallMs ceilingMs drainMs timeoutMs deadlineMs",
        ]
        .iter()
        .flat_map(|line| line.split(' '))
        {
            assert!(!looks_like_sandbox(member), "{member}");
        }
    }

    #[test]
    fn the_sandbox_is_kept_as_text_under_each_of_its_names() {
        for name in ["sandbox", "sandboxPolicy", "policy"] {
            let decoded = decode("fs/readFile", &format!(r#"{{"path":"/f","{name}":{{"type": "read-only"}}}}"#)).unwrap();
            let Call::FsReadFile(params) = decoded.call else { panic!() };
            assert_eq!(params.sandbox.unwrap().get(), r#"{"type": "read-only"}"#);
        }
        assert!(decode("fs/readFile", r#"{"path":"/f","sandbox":null,"policy":{}}"#).is_err(), "two names are one too many");
    }
}
