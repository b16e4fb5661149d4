//! A small server: one session, processes that write, and either the rules that every server of this wire has, or those with the
//! extensions.

use super::{LinkId, Seeded, request};
use crate::process::ProcessEvent;
use portcullis_protocol::rpc::{self, Id, RpcError, code};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;

#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) extensions: bool,
    /// How many events of a process are kept while nobody has them. None: all.
    pub(super) most_kept: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Server {
    pub(super) rules: Rules,
    is_made: bool,
    attached: Option<LinkId>,
    processes: BTreeMap<String, Process>,
    pub(super) starts: BTreeMap<String, u32>,
    pub(super) changes: BTreeMap<String, u32>,
    pub(super) writes: Vec<String>,
    acknowledgeable: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Process {
    operation: Value,
    log: Vec<Value>,
    /// Outputs that are still to come, and whether one comes behind the exit.
    left: u64,
    has_late_output: bool,
    has_exited: bool,
    is_closed: bool,
    is_followed: bool,
    kept: usize,
}

type Sent = Vec<(LinkId, String)>;

impl Server {
    pub(super) fn new(rules: Rules) -> Self {
        let process = || Process {
            operation: Value::Null,
            log: Vec::new(),
            left: 30,
            has_late_output: true,
            has_exited: false,
            is_closed: false,
            is_followed: false,
            kept: 0,
        };
        let processes = ["a", "b"].map(|name| (name.to_owned(), process()));
        Self {
            rules,
            is_made: false,
            attached: None,
            processes: BTreeMap::from(processes),
            starts: BTreeMap::new(),
            changes: BTreeMap::new(),
            writes: Vec::new(),
            acknowledgeable: BTreeMap::new(),
        }
    }

    pub(super) fn ended(&mut self, link: LinkId) {
        if self.attached == Some(link) {
            self.attached = None;
        }
    }

    pub(super) fn may_acknowledge(&mut self, process: &str, seq: u64) {
        let most = self.acknowledgeable.entry(process.to_owned()).or_default();
        *most = (*most).max(seq);
    }

    pub(super) fn unfollowed(&mut self, random: &mut Seeded) -> Option<String> {
        let mut free: Vec<_> = self
            .processes
            .iter_mut()
            .filter(|(_, process)| !process.is_followed && process.operation.is_null() && process.log.len() > 2)
            .collect();
        free.retain(|(name, _)| name.len() == 1);
        if free.is_empty() {
            return None;
        }
        let at = usize::try_from(random.below(free.len() as u64)).unwrap();
        let (name, process) = &mut free[at];
        process.is_followed = true;
        Some(name.clone())
    }

    pub(super) fn is_ended(&self, process: &str) -> bool {
        self.processes.get(process).is_none_or(|process| process.is_closed)
    }

    /// Lets processes write.
    pub(super) fn go_on(&mut self, is_late: bool, random: &mut Seeded) -> Sent {
        let mut sent = Vec::new();
        let names: Vec<String> = self.processes.keys().cloned().collect();
        for name in names {
            let process = self.processes.get_mut(&name).unwrap();
            if process.is_closed || random.one_in(2) {
                continue;
            }
            let event = match (process.left, process.has_exited, process.has_late_output) {
                (1, false, true) | (0, false, _) => {
                    process.has_exited = true;
                    json!({"type": "exited", "exitCode": 3, "sandboxDenied": false})
                }
                (0, true, _) => {
                    process.is_closed = true;
                    json!({"type": "closed"})
                }
                _ => {
                    process.left -= 1;
                    json!({"type": "output", "stream": "stdout", "chunk": "eA=="})
                }
            };
            if is_late {
                process.left = process.left.min(3);
            }
            sent.extend(self.happened(&name, event));
        }
        sent
    }

    fn happened(&mut self, name: &str, mut event: Value) -> Option<(LinkId, String)> {
        let process = self.processes.get_mut(name)?;
        event["seq"] = json!(process.log.len() + 1);
        process.log.push(event.clone());
        if let Some(most) = self.rules.most_kept {
            process.kept = process.kept.max(process.log.len().saturating_sub(most));
        }
        let mut params = event;
        let method = format!("process/{}", params["type"].as_str().unwrap());
        params["processId"] = json!(name);
        let text = json!({"method": method, "params": params}).to_string();
        self.attached.map(|link| (link, text))
    }

    pub(super) fn message(&mut self, link: LinkId, text: &str, _now: Instant, random: &mut Seeded) -> Sent {
        let Some((id, method, params)) = request(text) else { return Vec::new() };
        if method != "initialize" && self.attached != Some(link) {
            return Vec::new();
        }
        let mut behind = Vec::new();
        let answered = match method.as_str() {
            "initialize" => self.initialize(link, &params),
            "process/start" => self.start(&params, random),
            "process/read" => self.read(&params),
            "process/terminate" => {
                let name = params["processId"].as_str().unwrap().to_owned();
                for event in self.rest(&name) {
                    behind.extend(self.happened(&name, event));
                }
                Ok(json!({"running": true}))
            }
            "process/acknowledge" => {
                let (name, seq) = (params["processId"].as_str().unwrap(), params["seq"].as_u64().unwrap());
                assert!(self.rules.extensions, "nobody announced it");
                assert!(seq <= self.acknowledgeable[name], "only what was taken is acknowledged");
                Ok(json!({}))
            }
            "process/write" => {
                let name = params["writeId"].as_str().unwrap().to_owned();
                if !self.writes.contains(&name) {
                    self.writes.push(name);
                }
                Ok(json!({"status": "accepted"}))
            }
            "change" => {
                *self.changes.entry(params["name"].as_str().unwrap().to_owned()).or_default() += 1;
                Ok(json!({}))
            }
            _look => Ok(json!({})),
        };
        let mut sent = vec![(link, answer(&id, answered))];
        // A very short process may be told of before the answer to its start.
        if random.one_in(8) {
            sent.splice(0..0, behind)
        } else {
            sent.splice(1..1, behind)
        };
        sent
    }

    fn initialize(&mut self, link: LinkId, params: &Value) -> Result<Value, RpcError> {
        assert_eq!(params["resumeSessionId"].is_string(), self.is_made, "only the first makes a session");
        let may_take = self.rules.extensions && params["takeOver"] == json!(true);
        if self.attached.is_some_and(|attached| attached != link) && !may_take {
            return Err(RpcError::new(code::ATTACHED, "session s is already attached to another connection"));
        }
        self.is_made = true;
        self.attached = Some(link);
        let mut info = json!({"shell": {"name": "sh", "path": "/bin/sh"}});
        if self.rules.extensions && params["extensions"] == json!(true) {
            info["extensions"] =
                json!({"processEvents": true, "processAcknowledge": true, "takeOver": true, "operationId": true});
        }
        Ok(json!({"sessionId": "s", "environmentInfo": info, "binaryFrames": self.rules.extensions}))
    }

    fn start(&mut self, params: &Value, random: &mut Seeded) -> Result<Value, RpcError> {
        let name = params["processId"].as_str().unwrap().to_owned();
        if let Some(known) = self.processes.get(&name) {
            let is_same = self.rules.extensions && known.operation == params["operationId"] && !known.operation.is_null();
            return if is_same { Ok(json!({"processId": name})) } else { Err(RpcError::new(-32600, "already exists")) };
        }
        *self.starts.entry(name.clone()).or_default() += 1;
        let process = Process {
            operation: params["operationId"].clone(),
            log: Vec::new(),
            left: random.below(60),
            has_late_output: random.one_in(2),
            has_exited: false,
            is_closed: false,
            is_followed: true,
            kept: 0,
        };
        self.processes.insert(name.clone(), process);
        Ok(json!({"processId": name}))
    }

    /// What happens to a process that is killed.
    fn rest(&mut self, name: &str) -> Vec<Value> {
        let Some(process) = self.processes.get_mut(name).filter(|process| !process.is_closed) else { return Vec::new() };
        process.is_closed = true;
        let exited = json!({"type": "exited", "exitCode": 137, "sandboxDenied": false});
        let exited = (!std::mem::replace(&mut process.has_exited, true)).then_some(exited);
        exited.into_iter().chain([json!({"type": "closed"})]).collect()
    }

    fn read(&self, params: &Value) -> Result<Value, RpcError> {
        let name = params["processId"].as_str().unwrap();
        let process = self.processes.get(name).ok_or_else(|| RpcError::new(-32600, "unknown process id"))?;
        let after = usize::try_from(params["afterSeq"].as_u64().unwrap()).unwrap();
        let next = process.log.len() + 1;
        let mut result = json!({"chunks": [], "nextSeq": next, "exited": process.has_exited, "closed": process.is_closed,
            "exitCode": process.has_exited.then_some(3), "failure": null, "sandboxDenied": false});
        if let Some(exited) = process.log.iter().find(|event| event["type"] == "exited") {
            result["exitCode"] = exited["exitCode"].clone();
        }
        let from = after.max(process.kept);
        if params["events"] == json!(true) {
            assert!(self.rules.extensions, "nobody announced it");
            let gap =
                (process.kept > after).then(|| json!({"type": "gap", "fromSeq": after + 1, "toSeq": process.kept, "bytes": 1}));
            let page: Vec<Value> = gap.into_iter().chain(process.log.iter().skip(from).take(5).cloned()).collect();
            result["events"] = json!(page);
        } else {
            let kept = process.log.iter().skip(from).filter(|event| event["type"] == "output");
            result["chunks"] = kept.cloned().collect();
        }
        Ok(result)
    }

    /// Whether a client was told what happened.
    pub(super) fn is_as_logged(&self, process: &str, event: &ProcessEvent) {
        let log = &self.processes[process].log;
        let logged = &log[usize::try_from(event.last_seq().unwrap()).unwrap() - 1];
        let (kind, code) = match event {
            ProcessEvent::Output { .. } => ("output", None),
            ProcessEvent::Exited { code, .. } => ("exited", Some(*code)),
            ProcessEvent::Closed { .. } => ("closed", None),
            ProcessEvent::Gap { .. } | ProcessEvent::Failed { .. } => panic!("{event:?} is in no log"),
        };
        assert_eq!((logged["type"].as_str(), logged["exitCode"].as_i64()), (Some(kind), code.map(i64::from)), "{process}");
        let is_last = log.len() == usize::try_from(event.last_seq().unwrap()).unwrap();
        assert_eq!(kind == "closed", is_last && self.processes[process].is_closed, "{process}: closed is last");
    }
}

fn answer(id: &Id, outcome: Result<Value, RpcError>) -> String {
    match outcome {
        Ok(result) => rpc::result_text(id, &result).unwrap(),
        Err(error) => rpc::error_text(id, &error),
    }
}
