//! Whatever happens in whatever order.

use super::*;

/// Operations of a client and of pumps, as a fuzzer sees them.
#[derive(Debug, Clone)]
enum Step {
    Attach,
    Detach { stale: bool },
    Start(u8),
    StartWith { process: u8, operation: u8 },
    Started(u8),
    Failed(u8),
    Read { process: u8, after: u64, wait: u16 },
    Write { process: u8, id: u8 },
    CloseStdin(u8),
    Taken(u8),
    Terminate(u8),
    Output(u8, u16),
    Exit(u8),
    Close(u8),
    Announce,
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let process = 0..3_u8;
    prop_oneof![
        Just(Step::Attach),
        any::<bool>().prop_map(|stale| Step::Detach { stale }),
        process.clone().prop_map(Step::Start),
        (process.clone(), 0..2_u8).prop_map(|(process, operation)| Step::StartWith { process, operation }),
        process.clone().prop_map(Step::Started),
        process.clone().prop_map(Step::Failed),
        (process.clone(), 0..6_u64, 0..3000_u16).prop_map(|(process, after, wait)| Step::Read { process, after, wait }),
        (process.clone(), any::<u8>()).prop_map(|(process, id)| Step::Write { process, id }),
        process.clone().prop_map(Step::CloseStdin),
        process.clone().prop_map(Step::Taken),
        process.clone().prop_map(Step::Terminate),
        (process.clone(), 1..9000_u16).prop_map(|(process, bytes)| Step::Output(process, bytes)),
        process.clone().prop_map(Step::Exit),
        process.prop_map(Step::Close),
        Just(Step::Announce),
        (0..40_000_u16).prop_map(Step::Wait),
    ]
}

/// What a pump would do: which key a process has, and how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pumped {
    Starting,
    Running,
    Exited,
    Closed,
}

proptest! {
    #[test]
    fn whatever_happens_calls_are_answered_once_and_events_stay_in_order(steps in prop::collection::vec(step(), 1..120)) {
        let mut session = Harness::new();
        let mut pumps: BTreeMap<u8, (u64, Pumped)> = BTreeMap::new();
        let (mut asked, mut generation, mut attached) = (BTreeSet::new(), 0, false);
        let mut announced: BTreeMap<String, u64> = BTreeMap::new();
        for step in steps {
            let generation_before = session.state.generation;
            match step {
                Step::Attach => {
                    let call = session.call(|call| Input::Attach { call, terms: Terms::default() });
                    if let Some(Answer::Attach(got)) = session.answers.get(&call) {
                        prop_assert_eq!(got.is_some(), !attached);
                        if let Some(got) = got {
                            (generation, attached) = (*got, true);
                            announced.clear();
                        }
                    }
                }
                Step::Detach { stale: true } => {
                    session.handle(Input::Detach { generation: generation.wrapping_sub(1) });
                    if attached && !session.has_ended() {
                        let is_attached = matches!(session.state.attachment, Attachment::Attached { .. });
                        prop_assert!(is_attached, "a stale generation changes nothing");
                    }
                }
                Step::Detach { stale: false } => {
                    session.handle(Input::Detach { generation });
                    attached = false;
                    prop_assert!(asked.iter().all(|call| session.answers.contains_key(call)), "nothing waits after a detach");
                }
                Step::Start(process) => if let Some(key) = session.begin(&process.to_string()) {
                    pumps.insert(process, (key, Pumped::Starting));
                },
                Step::StartWith { process, operation } if attached => {
                    let (call, key) = session.begin_with(&process.to_string(), Some(&operation.to_string()), false);
                    match key {
                        Some(key) => drop(pumps.insert(process, (key, Pumped::Starting))),
                        None => drop(asked.insert(call)),
                    }
                }
                Step::Started(process) => if let Some((key, at @ Pumped::Starting)) = pumps.get_mut(&process) {
                    *at = Pumped::Running;
                    session.handle(Input::Started { key: *key, sandbox_type: "none", enforcement: None, limits: Vec::new(), tree: TreeEnd::Descendants });
                },
                Step::Failed(process) => if let Some((key, Pumped::Starting)) = pumps.get(&process).copied() {
                    pumps.remove(&process);
                    session.handle(Input::StartFailed { key, error: RpcError::new(0, "") });
                },
                // Only an attached client asks.
                Step::Read { process, after, wait } if attached => {
                    asked.insert(session.ask_read(&process.to_string(), after, wait.into()));
                }
                Step::Write { process, id } if attached => {
                    asked.insert(session.ask_write(&process.to_string(), &id.to_string(), &[0; 100]));
                }
                Step::CloseStdin(process) if attached => {
                    let process = process.to_string();
                    asked.insert(session.call(|call| Input::CloseStdin { call, process }));
                }
                Step::Taken(process) => if let Some((key, Pumped::Running)) = pumps.get(&process).copied() {
                    session.handle(Input::Feed { key, feed: Feed::Taken { bytes: 100 } });
                },
                Step::Terminate(process) if attached => {
                    let process = process.to_string();
                    asked.insert(session.call(|call| Input::Terminate { call, process, grace: Duration::ZERO, report: false }));
                }
                Step::Output(process, bytes) => if let Some((key, Pumped::Running | Pumped::Exited)) = pumps.get(&process).copied() {
                    session.output(key, bytes.into());
                },
                Step::Exit(process) => if let Some((key, at @ Pumped::Running)) = pumps.get_mut(&process) {
                    *at = Pumped::Exited;
                    let key = *key;
                    session.exit(key);
                },
                Step::Close(process) => if let Some((key, at @ Pumped::Exited)) = pumps.get_mut(&process) {
                    *at = Pumped::Closed;
                    let key = *key;
                    session.handle(Input::Feed { key, feed: Feed::Closed });
                    // Nothing comes after it, whatever a broken pump says.
                    let last = session.state.processes.get(&key).map(|process| process.log.last());
                    session.output(key, 1);
                    prop_assert_eq!(session.state.processes.get(&key).map(|process| process.log.last()), last);
                },
                Step::Announce => if let Some(Message { text, .. }) = session.state.announce() {
                    prop_assert!(attached);
                    let event: serde_json::Value = serde_json::from_str(&text).unwrap();
                    let (process, seq) = (&event["params"]["processId"], event["params"]["seq"].as_u64().unwrap());
                    let before = announced.insert(process.as_str().unwrap().to_owned(), seq);
                    let is_next = before.is_none_or(|before| seq == before + 1 || seq == 1);
                    prop_assert!(is_next, "{} after {:?}", seq, before);
                },
                Step::Wait(seconds) => {
                    session.now += Duration::from_millis(u64::from(seconds));
                    session.handle(Input::Timeout);
                }
                Step::StartWith { .. } | Step::Read { .. } | Step::Write { .. } | Step::CloseStdin(_) | Step::Terminate(_) => {}
            }
            if session.has_ended() {
                prop_assert!(!attached, "only a detached session expires");
                prop_assert_eq!(session.state.generation, generation_before);
                return Ok(());
            }
            if let Some(deadline) = session.state.deadline() {
                prop_assert!(deadline > session.now, "what is due was done");
            }
        }
        // Every call is answered at the latest when its time is up.
        session.now += Duration::from_secs(4);
        session.handle(Input::Timeout);
        session.handle(Input::Detach { generation });
        prop_assert!(asked.iter().all(|call| session.answers.contains_key(call)));
    }
}
