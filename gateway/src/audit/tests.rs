//! The chain, and what becomes of it when its file is tampered with, torn, full or locked.

use super::chain::Digest;
use super::journal::{go_on, write_out};
use super::*;
use proptest::prelude::*;
use std::io::Write;
use std::time::UNIX_EPOCH;

fn entry(nth: usize) -> Entry {
    let on = serde_json::json!({"path": format!("file:///work/{nth}\n\"\u{e9}")});
    Entry { action: "fs/writeFile", outcome: "ok", connection: Some(1), on, ..Entry::default() }
}

/// A whole log of so many lines, each with its end.
fn log(lines: usize) -> Vec<Vec<u8>> {
    let mut chain = Chain::new();
    (0..lines).map(|nth| chain.next(UNIX_EPOCH, &entry(nth))).collect()
}

fn verify(log: &[u8]) -> Result<Verified, AuditFault> {
    verify_audit(log, None)
}

/// The number of the line that is wrong.
fn fault(log: &[u8]) -> u64 {
    match verify(log) {
        Err(AuditFault::Line { line, .. }) => line,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_log_is_verified_and_its_head_is_the_digest_of_its_last_line() {
    assert_eq!(verify(b"").unwrap().lines, 0);
    let lines = log(5);
    let verified = verify(&lines.concat()).unwrap();
    let head = Digest::of(lines[4].strip_suffix(b"\n").unwrap()).to_string();
    assert_eq!((verified.lines, &verified.head), (5, &head));
    let earlier = Digest::of(lines[2].strip_suffix(b"\n").unwrap()).to_string();
    assert!(verify_audit(&*lines.concat(), Some(&earlier)).unwrap().has_known);
    assert!(!verify_audit(&*lines[..2].concat(), Some(&earlier)).unwrap().has_known, "its end is missing");
}

proptest! {
    #[test]
    fn any_changed_byte_is_found(lines in 2..8_usize, at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let log = log(lines);
        let (mut bytes, head) = (log.concat(), verify(&log.concat()).unwrap().head);
        let at = at.index(bytes.len());
        let line = bytes[..at].iter().filter(|byte| **byte == b'\n').count() as u64 + 1;
        bytes[at] ^= 1 << bit;
        match verify(&bytes) {
            Err(AuditFault::Line { line: found, .. }) => prop_assert!((line..=line + 1).contains(&found)),
            Err(AuditFault::Read(error)) => prop_assert!(false, "{error}"),
            // Nothing follows the last line: only who keeps the head sees that it is another one.
            Ok(verified) => prop_assert!(line == lines as u64 && verified.head != head),
        }
    }

    #[test]
    fn lines_that_are_gone_swapped_or_repeated_are_found(
        lines in 3..10_usize,
        one in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(),
    ) {
        let log = log(lines);
        // Not the last, of which only the head tells.
        let (one, other) = (one.index(lines - 1), other.index(lines - 1));
        let mut gone = log.clone();
        gone.remove(one);
        prop_assert_eq!(fault(&gone.concat()), one as u64 + 1);
        let mut repeated = log.clone();
        repeated.insert(one, log[other].clone());
        prop_assert!(verify(&repeated.concat()).is_err());
        if one != other {
            let mut swapped = log.clone();
            swapped.swap(one, other);
            prop_assert_eq!(fault(&swapped.concat()), one.min(other) as u64 + 1);
        }
        let mut cut = log.clone();
        let half = cut[one].len() / 2;
        cut[one].truncate(half);
        prop_assert!(verify(&cut.concat()).is_err());
    }

    #[test]
    fn a_log_torn_anywhere_goes_on_and_stays_whole(lines in 1..6_usize, keep in any::<prop::sample::Index>()) {
        let bytes = log(lines).concat();
        let keep = keep.index(bytes.len() + 1);
        let mut torn = bytes[..keep].to_vec();
        let (mut chain, waiting) = go_on(&torn, UNIX_EPOCH).unwrap();
        torn.extend(waiting);
        torn.extend(chain.next(UNIX_EPOCH, &entry(99)));
        let verified = verify(&torn).unwrap();
        prop_assert_eq!(&verified.head, &chain.head.to_string());
        // What was torn is kept as it was, and cannot be changed later either.
        prop_assert_eq!(&torn[..keep], &bytes[..keep]);
        if let Some(at) = (0..keep).rev().find(|at| bytes[*at] != b'\n') {
            torn[at] ^= 1;
            prop_assert!(verify(&torn).is_err());
        }
    }
}

#[test]
fn nothing_is_appended_to_what_is_no_log() {
    for other in ["hello\n", "{}\n", "hello\nworld\n"] {
        assert!(go_on(other.as_bytes(), UNIX_EPOCH).is_err(), "{other}");
    }
    let mut lines = log(3);
    lines.remove(1);
    assert!(go_on(&lines.concat(), UNIX_EPOCH).is_err());
}

/// Takes so many bytes and then none.
struct Full(Vec<u8>, usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.1 - self.0.len()).min(7);
        self.0.extend(&bytes[..taken]);
        if taken == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_a_full_disk_did_not_take_is_written_later_from_there_on() {
    let bytes = log(3).concat();
    for room in 0..bytes.len() {
        let (mut disk, mut waiting) = (Full(Vec::new(), room), bytes.clone());
        assert_eq!(write_out(&mut disk, &mut waiting).unwrap_err().kind(), io::ErrorKind::StorageFull);
        disk.1 = bytes.len();
        write_out(&mut disk, &mut waiting).unwrap();
        assert_eq!((disk.0, waiting.len()), (bytes.clone(), 0));
    }
}

/// Does something with an audit log, and ends it.
async fn with<T>(file: &AuditFile, once: impl AsyncFnOnce(&Audit) -> T) -> T {
    let (audit, task) = Audit::open(file, &Entry { action: "serve/started", outcome: "ok", ..Entry::default() }).unwrap();
    let task = tokio::spawn(task);
    let done = once(&audit).await;
    audit.stop().await;
    task.await.unwrap();
    done
}

#[expect(clippy::disallowed_methods, reason = "a test looks at its own directory")]
fn content(file: &AuditFile) -> Vec<u8> {
    std::fs::read(&file.path).unwrap()
}

fn actions(file: &AuditFile) -> Vec<String> {
    let content = String::from_utf8(content(file)).unwrap();
    let lines = content.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| line["action"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_restart_goes_on_with_the_chain_and_one_server_writes_at_a_time() {
    let place = tempfile::tempdir().unwrap();
    let file = AuditFile { path: place.path().join("audit"), sync: true };
    with(&file, async |audit| {
        audit.record(entry(1)).await.unwrap();
        let second = Audit::open(&file, &Entry::default()).map(|_| ()).unwrap_err();
        assert!(matches!(second, AuditError::Taken(_)), "{second}");
    })
    .await;
    with(&file, async |audit| audit.note(entry(2))).await;
    let expect = ["serve/started", "fs/writeFile", "serve/stopped"];
    assert_eq!(actions(&file), [expect, expect].concat());
    assert_eq!(verify(&content(&file)).unwrap().lines, 6);
    use std::os::unix::fs::PermissionsExt as _;
    #[expect(clippy::disallowed_methods, reason = "a test looks at its own directory")]
    let mode = std::fs::metadata(&file.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn refusals_without_end_are_counted_and_not_told_one_by_one() {
    let place = tempfile::tempdir().unwrap();
    let file = AuditFile { path: place.path().join("audit"), sync: false };
    with(&file, async |audit| {
        for _client in 0..REFUSALS + 40 {
            audit.refused(Entry { action: "connect", ..Entry::default() }).await;
        }
    })
    .await;
    let told = actions(&file).iter().filter(|action| *action == "connect").count();
    assert_eq!(told as u64, REFUSALS);
    let last = String::from_utf8(content(&file)).unwrap();
    let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
    assert_eq!(last["omitted"], 40, "the last line tells of those that had none");
}

#[tokio::test]
async fn an_entry_without_room_is_counted_in_the_next_line() {
    let place = tempfile::tempdir().unwrap();
    let file = AuditFile { path: place.path().join("audit"), sync: false };
    let (audit, task) = Audit::open(&file, &entry(0)).unwrap();
    for nth in 0..QUEUE + 3 {
        audit.note(entry(nth));
    }
    let task = tokio::spawn(task);
    audit.record(entry(0)).await.unwrap();
    audit.stop().await;
    task.await.unwrap();
    let log = String::from_utf8(content(&file)).unwrap();
    let lost = log.lines().find(|line| line.contains("audit/lost")).unwrap();
    assert!(lost.contains(r#""on":{"entries":3}"#), "{lost}");
    assert!(verify(log.as_bytes()).is_ok());
}
