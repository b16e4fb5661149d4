//! Clients that come back in ways of their own: none leaves a process without room for ever.

use super::*;

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
