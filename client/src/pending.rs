//! Calls without their answers: in flight, or in line for a link.

use crate::ExecServerError;
use std::collections::{BTreeMap, VecDeque};

/// Bound of the calls of the handles. A server carries out far fewer side by side; more means that somebody does not wait.
pub(crate) const MOST_CALLS: usize = 1024;

/// What becomes of a call whose link ended before its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// It is sent again: the server sees that it is the same, or doing it twice is doing it once.
    Send,
    /// It fails, and whether it was carried out is not known.
    Lost,
    /// It fails, and it changed nothing.
    Fail,
}

/// What a call counts against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    /// The bound of calls.
    Regular,
    /// One more, so that what others do not give back can be given back.
    Reserved,
    /// Nothing: the client's own, at most a few a process.
    Own,
}

/// A call. `O` says whose it is.
#[derive(Debug)]
pub(crate) struct Call<O> {
    pub(crate) owner: O,
    pub(crate) method: String,
    pub(crate) params: String,
    pub(crate) again: Again,
    pub(crate) slot: Slot,
    /// Whether some link had it.
    pub(crate) sent: bool,
}

impl<O> Call<O> {
    /// What its caller is told when it will not be answered.
    pub(crate) fn failed(&self, disconnect: &str, ended: Option<&str>) -> ExecServerError {
        match (self.sent, self.again, ended) {
            (true, Again::Lost, _) | (true, Again::Send, Some(_)) => {
                ExecServerError::Lost { method: self.method.clone(), reason: ended.unwrap_or(disconnect).to_owned() }
            }
            (_, _, Some(message)) => ExecServerError::Failed(message.to_owned()),
            (_, _, None) => ExecServerError::Disconnected(disconnect.to_owned()),
        }
    }
}

/// Calls without their answers.
#[derive(Debug)]
pub(crate) struct Pending<O> {
    in_flight: BTreeMap<i64, Call<O>>,
    in_line: VecDeque<Call<O>>,
    regular: usize,
    is_reserve_used: bool,
    next: i64,
}

impl<O> Pending<O> {
    pub(crate) fn new() -> Self {
        Self { in_flight: BTreeMap::new(), in_line: VecDeque::new(), regular: 0, is_reserve_used: false, next: 1 }
    }

    /// Takes a slot for a call of a handle.
    pub(crate) fn admit(&mut self, is_cleanup: bool) -> Result<Slot, ExecServerError> {
        if self.regular < MOST_CALLS {
            self.regular += 1;
            return Ok(Slot::Regular);
        }
        if is_cleanup && !self.is_reserve_used {
            self.is_reserve_used = true;
            return Ok(Slot::Reserved);
        }
        Err(ExecServerError::Limit(MOST_CALLS))
    }

    fn release(&mut self, slot: Slot) {
        match slot {
            Slot::Regular => self.regular -= 1,
            Slot::Reserved => self.is_reserve_used = false,
            Slot::Own => {}
        }
    }

    /// Puts a call at the end of the line.
    pub(crate) fn line_up(&mut self, call: Call<O>) {
        self.in_line.push_back(call);
    }

    /// Marks a call as sent and answers its id, which is never used again.
    pub(crate) fn send(&mut self, call: Call<O>) -> i64 {
        let id = self.next;
        self.next += 1;
        self.in_flight.insert(id, Call { sent: true, ..call });
        id
    }

    /// The first of the line leaves it.
    pub(crate) fn first_in_line(&mut self) -> Option<Call<O>> {
        self.in_line.pop_front()
    }

    /// Those that stand in line, in their order.
    pub(crate) fn in_line(&self) -> impl Iterator<Item = &Call<O>> {
        self.in_line.iter()
    }

    /// A call in flight.
    pub(crate) fn asked(&self, id: i64) -> Option<&Call<O>> {
        self.in_flight.get(&id)
    }

    /// An answer came. None if nobody waits for it.
    pub(crate) fn answered(&mut self, id: i64) -> Option<Call<O>> {
        let call = self.in_flight.remove(&id)?;
        self.release(call.slot);
        Some(call)
    }

    /// The link ended: what can be sent again stands in line again, before all others and in its order; the rest leaves.
    pub(crate) fn cut(&mut self) -> Vec<Call<O>> {
        let (again, failed): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.in_flight).into_values().partition(|call| call.again == Again::Send);
        for call in again.into_iter().rev() {
            self.in_line.push_front(call);
        }
        for call in &failed {
            self.release(call.slot);
        }
        failed
    }

    /// Everything leaves.
    pub(crate) fn end(&mut self) -> Vec<Call<O>> {
        (self.regular, self.is_reserve_used) = (0, false);
        let in_flight = std::mem::take(&mut self.in_flight).into_values();
        in_flight.chain(std::mem::take(&mut self.in_line)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn call(owner: usize, again: Again, slot: Slot) -> Call<usize> {
        Call { owner, method: "m".to_owned(), params: "{}".to_owned(), again, slot, sent: false }
    }

    #[test]
    fn calls_are_bounded_and_a_cleanup_has_a_slot_of_its_own() {
        let mut pending = Pending::new();
        for owner in 0..MOST_CALLS {
            let slot = pending.admit(owner % 2 == 0).unwrap();
            pending.send(call(owner, Again::Lost, slot));
        }
        assert_eq!(pending.admit(false), Err(ExecServerError::Limit(MOST_CALLS)));
        let slot = pending.admit(true).unwrap();
        assert_eq!(slot, Slot::Reserved);
        let id = pending.send(call(9999, Again::Send, slot));
        assert!(pending.admit(true).is_err(), "one, not two");
        assert_eq!(pending.answered(id).unwrap().owner, 9999);
        assert!(pending.answered(id).is_none(), "once");
        assert_eq!(pending.admit(true), Ok(Slot::Reserved));
        assert!(pending.answered(1).is_some());
        assert_eq!(pending.admit(false), Ok(Slot::Regular));
    }

    #[test]
    fn what_a_caller_is_told_says_whether_it_may_have_happened() {
        let told = |sent, again, ended| Call { sent, ..call(0, again, Slot::Own) }.failed("cut", ended);
        let lost = |reason: &str| ExecServerError::Lost { method: "m".to_owned(), reason: reason.to_owned() };
        for (sent, again, ended, expect) in [
            (true, Again::Lost, None, lost("cut")),
            (true, Again::Lost, Some("end"), lost("end")),
            (true, Again::Send, Some("end"), lost("end")),
            (true, Again::Fail, None, ExecServerError::Disconnected("cut".to_owned())),
            (true, Again::Fail, Some("end"), ExecServerError::Failed("end".to_owned())),
            (false, Again::Lost, Some("end"), ExecServerError::Failed("end".to_owned())),
            (false, Again::Send, Some("end"), ExecServerError::Failed("end".to_owned())),
        ] {
            assert_eq!(told(sent, again, ended), expect, "{sent} {again:?} {ended:?}");
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Call(Again, bool),
        Answer(i64),
        Cut,
        Flush,
    }

    fn step() -> impl Strategy<Value = Step> {
        let again = prop_oneof![Just(Again::Send), Just(Again::Lost), Just(Again::Fail)];
        prop_oneof![
            4 => (again, any::<bool>()).prop_map(|(again, cleanup)| Step::Call(again, cleanup)),
            3 => (1_i64..60).prop_map(Step::Answer),
            1 => Just(Step::Cut),
            2 => Just(Step::Flush),
        ]
    }

    proptest! {
        #[test]
        fn every_call_leaves_once_and_gives_its_slot_back(steps in prop::collection::vec(step(), 0..80)) {
            let mut pending = Pending::new();
            let (mut made, mut left) = (0, Vec::new());
            for step in steps {
                match step {
                    Step::Call(again, cleanup) => {
                        let slot = pending.admit(cleanup).unwrap();
                        pending.line_up(call(made, again, slot));
                        made += 1;
                    }
                    Step::Answer(id) => left.extend(pending.answered(id).map(|call| call.owner)),
                    Step::Cut => {
                        let failed = pending.cut();
                        prop_assert!(failed.iter().all(|call| call.again != Again::Send));
                        left.extend(failed.into_iter().map(|call| call.owner));
                    }
                    Step::Flush => while let Some(call) = pending.first_in_line() {
                        pending.send(call);
                    },
                }
                prop_assert_eq!(pending.regular, made - left.len());
            }
            left.extend(pending.end().into_iter().map(|call| call.owner));
            left.sort_unstable();
            prop_assert_eq!(left, (0..made).collect::<Vec<_>>());
        }
    }
}
