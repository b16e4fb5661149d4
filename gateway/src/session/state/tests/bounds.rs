//! Processes that are stopped because their time is over.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

impl Harness {
    fn later(&mut self, time: Duration) {
        self.now += time;
        self.handle(Input::Timeout);
    }

    /// The signals and kills since the last look.
    fn orders(&mut self) -> Vec<String> {
        let orders = std::mem::take(&mut self.outputs).into_iter().filter_map(|output| match output {
            Output::Signal { signal, .. } => Some(format!("{}", signal.number())),
            Output::Kill { .. } => Some("kill".to_owned()),
            _ => None,
        });
        orders.collect()
    }
}

#[test]
fn a_silent_process_is_interrupted_then_killed_and_the_reason_is_read() {
    let mut session = Harness::attached();
    session.bounds.stall = Some(SECOND * 3);
    let key = session.start("p");
    for _ in 0..3 {
        session.later(SECOND * 2);
        session.output(key, 1);
    }
    session.later(SECOND * 2);
    session.ask_write("p", "1", b"x");
    session.later(SECOND * 2);
    assert_eq!(session.orders(), Vec::<String>::new(), "both directions count");
    assert_eq!(session.state.deadline(), Some(session.now + SECOND));
    session.later(SECOND);
    assert_eq!(session.orders(), ["2"]);
    session.later(SECOND * 4);
    assert_eq!(session.orders(), Vec::<String>::new());
    session.later(SECOND);
    assert_eq!(session.orders(), ["kill"]);
    session.exit(key);
    let read = session.read("p", 0).unwrap();
    assert!(read.failure.as_ref().is_some_and(|reason| reason.contains("3000 ms") && reason.contains("stallMs")), "{read:?}");
    session.later(SECOND * 60);
    assert_eq!(session.orders(), Vec::<String>::new(), "what has ended is not watched");
}

#[test]
fn the_ceiling_holds_whatever_a_process_says_and_ends_with_it() {
    let mut session = Harness::attached();
    session.bounds.ceiling = Some(SECOND * 3);
    let (talks, ends) = (session.start("talks"), session.start("ends"));
    session.exit(ends);
    for _ in 0..3 {
        session.later(SECOND);
        session.output(talks, 1);
    }
    assert_eq!(session.orders(), ["2"], "and only the one that runs");
    session.exit(talks);
    session.later(SECOND * 9);
    assert_eq!(session.orders(), Vec::<String>::new(), "it ended in time");
}

#[test]
fn terminate_gives_the_grace_that_was_asked_for() {
    let mut session = Harness::attached();
    let key = session.start("p");
    let terminate = |session: &mut Harness, grace| {
        let process = "p".to_owned();
        session.call(|call| Input::Terminate { call, process, grace, report: false });
        session.orders()
    };
    assert_eq!(terminate(&mut session, SECOND * 9), ["15"]);
    assert_eq!(terminate(&mut session, SECOND * 2), ["15"]);
    session.later(SECOND * 2);
    assert_eq!(session.orders(), ["kill"], "the earlier end counts");
    assert_eq!(terminate(&mut session, Duration::ZERO), ["kill"]);
    session.exit(key);
    assert_eq!(terminate(&mut session, SECOND), Vec::<String>::new());
    assert_eq!(terminate(&mut session, Duration::MAX), Vec::<String>::new());
}
