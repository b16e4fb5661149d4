//! Who has a session: every short story of connections that come, leave, take over and stay away, against a model that is
//! obvious.

use super::*;
use crate::session::message::Terms;

/// How many things happen in a story.
const LENGTH: usize = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// A connection wants the session.
    Want,
    /// One that takes it over.
    TakeOver,
    /// The connection that has it leaves.
    Leave,
    /// One that had it before leaves once more.
    LeaveLate,
    /// Less than the retention goes by.
    Wait,
    /// The retention is over.
    WaitLong,
}

const ACTS: [Act; 6] = [Act::Want, Act::TakeOver, Act::Leave, Act::LeaveLate, Act::Wait, Act::WaitLong];

/// What should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Model {
    Detached { left: Duration },
    Attached { generation: u64, successor: Option<Call> },
    Ended,
}

const SHORT: Duration = Duration::from_secs(60);

#[test]
fn every_short_story_of_connections_ends_as_the_rules_say() {
    let mut story = Vec::new();
    let mut told = 0;
    tell_all(&mut story, &mut told);
    assert_eq!(told, ACTS.len().pow(u32::try_from(LENGTH).unwrap()));
}

fn tell_all(story: &mut Vec<Act>, told: &mut usize) {
    if story.len() == LENGTH {
        tell(story);
        *told += 1;
        return;
    }
    for act in ACTS {
        story.push(act);
        tell_all(story, told);
        story.pop();
    }
}

/// Tells one story to the session and to the model.
fn tell(story: &[Act]) {
    let mut session = Harness::new();
    let mut model = Model::Detached { left: RETENTION };
    let mut generations = 0;
    for act in story {
        session.outputs.clear();
        let mut expect: Vec<(Call, Option<u64>)> = Vec::new();
        let (mut evicts, mut doubts) = (false, false);
        match act {
            Act::Want | Act::TakeOver => {
                let take_over = *act == Act::TakeOver;
                let call = session.call(|call| Input::Attach { call, terms: Terms { take_over, ..Terms::default() } });
                match &mut model {
                    Model::Detached { .. } => {
                        generations += 1;
                        model = Model::Attached { generation: generations, successor: None };
                        expect.push((call, Some(generations)));
                    }
                    Model::Attached { successor: successor @ None, .. } if take_over => {
                        *successor = Some(call);
                        evicts = true;
                    }
                    Model::Attached { .. } => {
                        doubts = true;
                        expect.push((call, None));
                    }
                    Model::Ended => {}
                }
            }
            Act::Leave => {
                session.handle(Input::Detach { generation: generations });
                model = match model {
                    Model::Attached { successor: Some(call), .. } => {
                        generations += 1;
                        expect.push((call, Some(generations)));
                        Model::Attached { generation: generations, successor: None }
                    }
                    Model::Attached { successor: None, .. } => Model::Detached { left: RETENTION },
                    other => other,
                };
            }
            Act::LeaveLate => session.handle(Input::Detach { generation: generations.wrapping_sub(1) }),
            Act::Wait | Act::WaitLong => {
                let step = if *act == Act::Wait { SHORT } else { RETENTION };
                session.now += step;
                session.handle(Input::Timeout);
                if let Model::Detached { left } = &mut model {
                    *left = left.saturating_sub(step);
                    if left.is_zero() {
                        model = Model::Ended;
                    }
                }
            }
        }
        let answers: Vec<(Call, Option<u64>)> = std::mem::take(&mut session.answers)
            .into_iter()
            .map(|(call, answer)| match answer {
                Answer::Attach(generation) => (call, generation),
                other => panic!("{other:?} in {story:?}"),
            })
            .collect();
        assert_eq!(answers, expect, "{act:?} in {story:?}");
        assert_eq!(session.outputs.iter().any(|output| matches!(output, Output::Evict)), evicts, "{act:?} in {story:?}");
        assert_eq!(session.outputs.iter().any(|output| matches!(output, Output::Doubt)), doubts, "{act:?} in {story:?}");
        let is = match (session.state.attachment, model) {
            (Attachment::Attached { .. }, Model::Attached { generation, .. }) => session.state.generation == generation,
            (Attachment::Detached { until }, Model::Detached { left }) => until - session.now == left,
            (Attachment::Ended, Model::Ended) => true,
            _ => false,
        };
        assert!(is, "{:?} and {model:?} after {act:?} in {story:?}", session.state.attachment);
    }
}

#[test]
fn a_client_says_how_long_its_session_is_kept() {
    let mut session = Harness::new();
    let terms = |seconds| Terms { retention: Some(Duration::from_secs(seconds)), ..Terms::default() };
    session.call(|call| Input::Attach { call, terms: terms(5) });
    session.call(|call| Input::Attach { call, terms: terms(500) });
    session.handle(Input::Detach { generation: 1 });
    assert_eq!(session.state.deadline(), Some(session.now + Duration::from_secs(5)), "who was refused changed nothing");
    session.call(|call| Input::Attach { call, terms: Terms::default() });
    session.handle(Input::Detach { generation: 2 });
    assert_eq!(session.state.deadline(), Some(session.now + Duration::from_secs(5)), "what was not asked for stays");
}

#[test]
fn a_change_outlives_its_connection_and_is_answered_to_who_sends_it_again() {
    let mut session = Harness::attached();
    let change = |session: &mut Harness, digest| session.call(|call| Input::Change { call, operation: "o".to_owned(), digest });
    let first = change(&mut session, 1);
    assert!(matches!(session.outputs.pop(), Some(Output::Change { call }) if call == first));
    let refused = change(&mut session, 2);
    let Some(Answer::Done(Err(error))) = session.answers.remove(&refused) else { panic!("another call") };
    assert_eq!(error.message, "operationId o: this operationId belongs to another call; nothing was done");
    session.handle(Input::Detach { generation: 1 });
    assert!(matches!(session.answers.remove(&first), Some(Answer::Done(Err(_)))), "nobody waits after a detach");
    session.attach();
    let again = change(&mut session, 1);
    assert!(session.outputs.iter().all(|output| !matches!(output, Output::Change { .. })), "it is not done twice");
    session.handle(Input::Changed { operation: "o".to_owned(), outcome: Ok(()) });
    assert!(matches!(session.answers.remove(&again), Some(Answer::Done(Ok(())))));
    let late = change(&mut session, 1);
    assert!(matches!(session.answers.remove(&late), Some(Answer::Done(Ok(())))));
}
