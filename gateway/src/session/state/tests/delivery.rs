//! What was sent and whether it has arrived, and clients that come back in ways of their own: none leaves a process without
//! room for ever.

use super::*;

impl Harness {
    fn marked() -> (Self, u64, u64) {
        let mut session = Self::new();
        assert_eq!(session.attach_with(Proof::Mark), Some(1));
        let (one, two) = (session.start("one"), session.start("two"));
        (session, one, two)
    }

    fn fill(&mut self, key: u64) {
        while self.room(key) >= 8192 {
            self.output(key, 8192);
            self.announced();
        }
    }

    fn room(&self, key: u64) -> usize {
        self.state.processes[&key].log.room()
    }

    fn acknowledge(&mut self, process: &str, seq: u64) -> Result<(), RpcError> {
        let params = AcknowledgeParams { process_id: process.to_owned(), seq };
        self.done(|call| Input::Acknowledge { call, params })
    }
}

#[test]
fn a_process_that_starts_while_its_client_comes_and_goes_gets_its_credit() {
    let mut session = Harness::attached();
    let key = session.begin("p").unwrap();
    session.handle(Input::Detach { generation: 1 });
    session.attach();
    session.handle(Input::Started {
        key,
        sandbox_type: "none",
        enforcement: None,
        limits: Vec::new(),
        tree: TreeEnd::Descendants,
    });
    let started = session.outputs.iter().position(|output| matches!(output, Output::Grant { .. }));
    let launched = session.outputs.iter().position(|output| matches!(output, Output::Launch { .. }));
    assert!(started > launched, "{:?}", session.outputs);
    assert_eq!(
        session.outputs.iter().filter(|output| matches!(output, Output::Grant { .. })).count(),
        1,
        "and none before it runs"
    );
}

#[test]
fn what_was_sent_makes_room_once_a_mark_behind_it_is_answered() {
    let (mut session, one, two) = Harness::marked();
    session.output(one, 8192);
    session.announced();
    assert_eq!(session.state.mark(), None, "a small tail harms nobody");
    for key in [one, two] {
        for _ in 0..20 {
            session.output(key, 8192);
        }
    }
    session.announced();
    let first = session.state.mark().unwrap();
    assert_eq!(session.state.mark(), None);
    session.fill(one);
    session.fill(two);
    let second = session.state.mark().unwrap();
    assert_eq!((session.room(one), session.room(two)), (0, 0));
    for (generation, mark) in [(0, first), (2, first), (1, 0), (1, second + 1), (1, u64::MAX)] {
        session.handle(Input::Delivered { generation, mark });
        assert_eq!((session.room(one), session.room(two)), (0, 0), "{generation} {mark} means nothing");
    }
    session.handle(Input::Delivered { generation: 1, mark: first });
    assert!(session.room(one) > 0 && session.room(two) > 0);
    let log = &session.state.processes[&one].log;
    assert_eq!(log.told(), log.last());
    session.fill(one);
    // An answer speaks for those before it, and none counts twice.
    let third = session.state.mark();
    session.handle(Input::Delivered { generation: 1, mark: second });
    assert!(session.room(one) > 0 && session.room(two) > 0);
    session.handle(Input::Delivered { generation: 1, mark: first });
    session.handle(Input::Delivered { generation: 1, mark: third.unwrap_or(second) });
    session.handle(Input::Detach { generation: 1 });
    session.attach_with(Proof::Mark);
    session.handle(Input::Delivered { generation: 2, mark: second });
    assert!(session.state.delivery_is_empty());
}

#[test]
fn marks_on_their_way_are_bounded() {
    let (mut session, one, _) = Harness::marked();
    let mut marks = Vec::new();
    for _ in 0..200 {
        for _ in 0..32 {
            session.output(one, 8192);
        }
        session.announced();
        marks.extend(session.state.mark());
    }
    assert_eq!(marks.len(), 64);
    session.handle(Input::Delivered { generation: 1, mark: marks[0] });
    let late = session.state.mark().unwrap();
    session.handle(Input::Delivered { generation: 1, mark: late });
    assert!(session.room(one) > 0, "it covers all that came meanwhile");
}

#[test]
fn a_client_that_acknowledges_is_taken_at_its_word_and_at_nothing_else() {
    let mut session = Harness::new();
    assert_eq!(session.attach_with(Proof::Word), Some(1));
    let key = session.start("p");
    session.fill(key);
    assert_eq!((session.state.mark(), session.room(key)), (None, 0));
    let page = session.read("p", 0).unwrap();
    assert_eq!((page.chunks.len(), session.room(key)), (512, 0), "a page is not a proof");
    refused(session.acknowledge("x", 0), "unknown process id x");
    refused(session.acknowledge("p", 513), "process p has no event 513 yet: its last is 512");
    assert_eq!(session.room(key), 0);
    session.acknowledge("p", 100).unwrap();
    session.acknowledge("p", 1).unwrap();
    session.fill(key);
    assert_eq!(session.state.processes[&key].log.last(), 612);
    session.read("p", 200).unwrap();
    assert!(session.room(key) > 0, "a cursor is");
    session.fill(key);
    session.read("p", 9999).unwrap();
    assert_eq!(session.room(key), 0, "one from the future is not");
    let deadline = session.state.deadline();
    assert_eq!(deadline, None, "it is waited for");
}

#[test]
fn a_page_of_what_was_missed_counts_once_a_mark_behind_it_is_answered() {
    let (mut session, one, _) = Harness::marked();
    session.handle(Input::Detach { generation: 1 });
    while session.room(one) >= 8192 {
        session.output(one, 8192);
    }
    assert_eq!(session.attach_with(Proof::Mark), Some(2));
    let call = session.ask_read("one", 0, 0);
    let Some(Answer::Read(Ok(_), Some(page))) = session.answers.remove(&call) else { panic!("no receipt") };
    // The time to catch up passes while the page is on its way: it is not given up.
    session.jump();
    assert_eq!((session.state.mark(), session.room(one)), (None, 0));
    session.handle(Input::HandedOut { generation: 1, page });
    assert_eq!(session.state.mark(), None, "a stale connection says nothing");
    session.handle(Input::HandedOut { generation: 2, page });
    let mark = session.state.mark().unwrap();
    session.jump();
    assert_eq!(session.room(one), 0);
    session.handle(Input::Delivered { generation: 2, mark });
    assert!(session.room(one) > 0);
    let call = session.ask_read("one", 0, 0);
    assert!(matches!(session.answers.remove(&call), Some(Answer::Read(Ok(_), None))), "it has caught up");
}

#[test]
fn spools_of_a_session_share_a_quota_and_pages_of_them_are_read_beside_it() {
    let mut session = Harness::attached();
    session.state.limits = SpoolLimits { process: 1 << 20, session: 1536 << 10 };
    let keys = [session.start("one"), session.start("two")];
    session.handle(Input::Detach { generation: 1 });
    let mut files: BTreeMap<(u64, u64), Vec<u8>> = BTreeMap::new();
    for key in keys {
        while session.room(key) >= 8192 {
            session.output(key, 8192);
            for output in std::mem::take(&mut session.outputs) {
                if let Output::Spool { key, write } = output {
                    files.insert((key, write.at), write.bytes);
                    session.handle(Input::SpoolWritten { key, is_written: true });
                }
            }
        }
    }
    let spooled = keys.map(|key| session.state.processes[&key].log.spooled());
    assert_eq!(spooled, [1 << 20, 512 << 10], "the first has what a process may, the second what is left of the session's");
    session.attach();
    let (read, cut) = (session.ask_read("one", 0, 0), session.ask_read("two", 0, 0));
    let mut asked = std::mem::take(&mut session.outputs).into_iter();
    let Some(Output::ReadSpool { call, key, extents }) = asked.next() else { panic!("nothing is read") };
    assert_eq!(call, read);
    // Nobody else waits for it.
    assert!(session.read("two", 9999).is_ok() && session.read_answer(read).is_none());
    let slots = extents.iter().map(|(at, length)| files[&(key, *at)][..*length].to_vec()).collect();
    session.handle(Input::SpoolRead { call, slots: Ok(slots) });
    let page = session.read_answer(read).unwrap().unwrap();
    assert_eq!(page.chunks.len(), usize::try_from(session.state.processes[&key].log.last()).unwrap());
    session.handle(Input::Detach { generation: 2 });
    refused(session.read_answer(cut).unwrap(), "the session was detached before the call ended");
    session.handle(Input::SpoolRead { call: cut, slots: Ok(Vec::new()) });
}

impl Harness {
    /// What a fast process and a prompt client do: fills the room, and answers every mark at once. How many bytes went.
    fn flow(&mut self, key: u64, generation: u64, most: usize) -> usize {
        let mut went = 0;
        while self.room(key) > 0 && went < most {
            let bytes = self.room(key).min(8192);
            self.output(key, bytes);
            self.announced();
            self.answer_marks(generation);
            went += bytes;
        }
        went
    }

    fn answer_marks(&mut self, generation: u64) {
        while let Some(mark) = self.state.mark() {
            self.handle(Input::Delivered { generation, mark });
        }
    }

    /// A client that has come back, behind by a hundred bytes, while its process fills all room.
    fn behind() -> (Self, u64) {
        let (mut session, key, _) = Self::marked();
        session.output(key, 100);
        session.announced();
        session.handle(Input::Detach { generation: 1 });
        assert_eq!(session.attach_with(Proof::Mark), Some(2));
        session.flow(key, 2, 64 << 20);
        assert_eq!(session.room(key), 0, "what it missed holds up what follows");
        (session, key)
    }
}

#[test]
fn a_client_that_never_pages_what_it_missed_gets_what_follows() {
    let (mut session, key) = Harness::behind();
    session.jump();
    session.answer_marks(2);
    assert_eq!(session.flow(key, 2, 64 << 20), 64 << 20);
}

#[test]
fn a_client_that_asks_once_from_where_it_is_gets_what_follows() {
    let (mut session, key) = Harness::behind();
    // It had the one event before the cut.
    let params = ReadParams { process_id: "one".to_owned(), after_seq: Some(1), max_bytes: Some(1), ..ReadParams::default() };
    let call = session.call(|call| Input::Read { call, params });
    let Some(Answer::Read(Ok(_), receipt)) = session.answers.remove(&call) else { panic!("a page") };
    if let Some(page) = receipt {
        session.handle(Input::HandedOut { generation: 2, page });
    }
    session.answer_marks(2);
    assert_eq!(session.flow(key, 2, 64 << 20), 64 << 20);
}

#[test]
fn a_closed_process_stays_while_its_client_reads_it_and_no_longer() {
    for (proof, stays) in [(Proof::Word, true), (Proof::Mark, false)] {
        let mut session = Harness::attached();
        let key = session.start("p");
        session.handle(Input::Detach { generation: 1 });
        session.now += Duration::from_secs(4);
        for _ in 0..400 {
            session.output(key, 8192);
        }
        session.close(key);
        session.now += Duration::from_secs(85);
        session.handle(Input::Timeout);
        assert_eq!(session.attach_with(proof), Some(2));
        assert!(session.read("p", 0).is_ok());
        session.now += Duration::from_secs(6);
        assert!(session.read("p", 100).is_ok(), "its client is here and reads");
        session.now += RETENTION * 2;
        session.handle(Input::Timeout);
        assert_eq!(session.read("p", 200).is_ok(), stays, "{proof:?}: one that says when it has everything is waited for");
        if stays {
            let last = session.state.processes[&key].log.last();
            session.acknowledge("p", last).unwrap();
            session.now += RETENTION * 2;
            session.handle(Input::Timeout);
            assert!(session.read("p", last).is_err());
        }
    }
}

#[test]
fn a_change_that_is_sent_twice_at_once_gives_back_its_second_place_in_the_order() {
    let mut session = Harness::attached();
    let change = |session: &mut Harness| session.call(|call| Input::Change { call, operation: "o".to_owned(), digest: 1 });
    change(&mut session);
    session.outputs.clear();
    let second = change(&mut session);
    assert!(matches!(session.outputs[..], [Output::Repeated { call }] if call == second), "{:?}", session.outputs);
}
