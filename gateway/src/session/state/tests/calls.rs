//! What a client asks of its processes: starts that are sent again, input, signals, sizes, the list.

use super::*;

#[test]
fn the_same_start_sent_again_is_answered_as_the_first_and_starts_nothing() {
    let mut session = Harness::attached();
    let (first, key) = session.begin_with("p", Some("o"), false);
    let (second, none) = session.begin_with("p", Some("o"), false);
    assert_eq!(none, None);
    assert!(session.start_answer(second).is_none(), "it waits with the first");
    for other in [None, Some("other")] {
        let (call, none) = session.begin_with("p", other, false);
        refused(session.start_answer(call).unwrap(), "process p already exists");
        assert_eq!(none, None);
    }
    // The link is cut: who repeats is answered, and the start goes on.
    session.handle(Input::Detach { generation: 1 });
    refused(session.start_answer(second).unwrap(), "the session was detached before the call ended");
    session.attach();
    let (third, none) = session.begin_with("p", Some("o"), false);
    assert_eq!(none, None);
    let key = key.unwrap();
    session.handle(Input::Started {
        key,
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
    let answer = session.start_answer(first).unwrap().unwrap();
    assert_eq!(session.start_answer(third).unwrap().unwrap(), answer);
    session.close(key);
    let (late, none) = session.begin_with("p", Some("o"), false);
    assert_eq!((session.start_answer(late).unwrap().unwrap(), none), (answer, None));
    session.announced();
    // Even when it is forgotten it is not started anew, and another start is.
    while !session.list().is_empty() {
        session.jump();
    }
    let (later, none) = session.begin_with("p", Some("o"), false);
    let text = "process p was started by this operation before and is forgotten: it is not started again";
    refused(session.start_answer(later).unwrap(), text);
    assert_eq!(none, None);
    assert!(session.begin_with("p", Some("other"), false).1.is_some());
}

#[test]
fn all_that_repeat_a_start_hear_that_it_failed_and_may_try_again() {
    let mut session = Harness::attached();
    let (first, key) = session.begin_with("p", Some("o"), false);
    let (second, _) = session.begin_with("p", Some("o"), false);
    session.handle(Input::StartFailed { key: key.unwrap(), error: RpcError::new(code::INTERNAL, "no") });
    for call in [first, second] {
        refused(session.start_answer(call).unwrap(), "no");
    }
    assert!(session.begin_with("p", Some("o"), false).1.is_some(), "nothing was started");
}

#[test]
fn input_ends_once_and_only_where_it_can() {
    let mut session = Harness::attached();
    refused(session.close_stdin("p"), "unknown process id p");
    let key = session.begin("p").unwrap();
    refused(session.close_stdin("p"), "process id p is starting");
    session.handle(Input::Started {
        key,
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
    let huge = session.ask_write("p", "1", &[0; 16 << 20]);
    session.write_answer(huge).unwrap().unwrap();
    // A write waits, so the end waits behind it; a cut link takes both back.
    let write = session.ask_write("p", "2", b"x");
    let end = session.call(|call| Input::CloseStdin { call, process: "p".to_owned() });
    session.handle(Input::Detach { generation: 1 });
    assert!(matches!(session.answers.remove(&end), Some(Answer::Done(Err(_)))));
    assert!(session.write_answer(write).unwrap().is_err());
    session.attach();
    let write = session.ask_write("p", "2", b"x");
    let end = session.call(|call| Input::CloseStdin { call, process: "p".to_owned() });
    session.handle(Input::Feed { key, feed: Feed::Taken { bytes: 16 << 20 } });
    assert_eq!(session.write_answer(write).unwrap().unwrap(), WriteStatus::Accepted);
    assert!(matches!(session.answers.remove(&end), Some(Answer::Done(Ok(())))));
    let told = |output: &&Output| matches!(output, Output::CloseStdin { .. } | Output::Write { .. });
    let told: Vec<bool> = session.outputs.iter().filter(told).map(|told| matches!(told, Output::CloseStdin { .. })).collect();
    assert_eq!(told, [false, false, true], "the end comes last");
    assert_eq!(session.write("p", "3").unwrap(), WriteStatus::StdinClosed);
    assert_eq!(session.write("p", "2").unwrap(), WriteStatus::Accepted, "an id that was accepted");
    session.close_stdin("p").unwrap();
    session.close(key);
    session.close_stdin("p").unwrap();
    assert_eq!(session.outputs.iter().filter(|output| matches!(output, Output::CloseStdin { .. })).count(), 1);

    let (_, key) = session.begin_with("t", None, true);
    session.handle(Input::Started {
        key: key.unwrap(),
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
    let text = "process t has a terminal, whose input cannot be closed: write the byte \\x04 to end it";
    refused(session.close_stdin("t"), text);
}

#[test]
fn terminals_are_resized_and_nothing_else() {
    let mut session = Harness::attached();
    refused(session.resize("p"), "unknown process id p");
    session.start("p");
    refused(session.resize("p"), "process p has no terminal to resize: it was started without `tty`");
    let (_, key) = session.begin_with("t", None, true);
    refused(session.resize("t"), "process id t is starting");
    let key = key.unwrap();
    session.handle(Input::Started {
        key,
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
    session.resize("t").unwrap();
    assert!(session.outputs.iter().any(|output| matches!(output, Output::Resize { key: of, .. } if *of == key)));
    session.close(key);
    session.resize("t").unwrap();
}

#[test]
fn signals_of_a_start_are_sent_once_it_runs() {
    let mut session = Harness::attached();
    session.signal("nobody", "interrupt");
    let key = session.begin("p").unwrap();
    for name in ["stop", "user1", "continue", "stop", "continue"] {
        session.signal("p", name);
    }
    assert_eq!(session.signalled(), [] as [i32; 0]);
    session.handle(Input::Started {
        key,
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
    assert_eq!(session.signalled(), [10, 19, 18], "each once, in the order in which they were last wanted");
    session.signal("p", "SIGWINCH");
    session.signal("p", "SIGKILL");
    assert_eq!((session.signalled().last(), session.killed()), (Some(&28), vec![key]), "kill is terminate");
    session.exit(key);
    session.signal("p", "terminate");
    assert_eq!(session.signalled().last(), Some(&28));
}

#[test]
fn processes_are_listed_in_the_order_of_their_starts() {
    let mut session = Harness::attached();
    assert!(session.list().is_empty());
    let closed = session.start("z");
    let exited = session.start("y");
    session.begin_with("x", None, true).1.unwrap();
    session.start("w");
    session.output(closed, 3);
    session.close(closed);
    session.exit(exited);
    let listed = session.list();
    let told: Vec<_> = listed
        .iter()
        .map(|process| (process.process_id.as_str(), process.state, process.exit_code, process.tty, process.next_seq))
        .collect();
    let expect = [
        ("z", ProcessState::Closed, Some(3), false, 4),
        ("y", ProcessState::Exited, Some(3), false, 2),
        ("x", ProcessState::Starting, None, true, 1),
        ("w", ProcessState::Running, None, false, 1),
    ];
    assert_eq!(told, expect);
    assert_eq!((listed[2].sandbox_type.as_deref(), listed[3].sandbox_type.as_deref()), (None, Some("none")));
    assert!(listed.iter().all(|process| process.started_at_ms == 7));
}
