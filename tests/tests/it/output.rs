//! Output of processes whose client is away, slow, or says itself how far it has come.

use portcullis_protocol::base64::decode;
use portcullis_tests::{Client, PATIENCE, Place, Server, Watched};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

/// What a process may be ahead of its client.
const WINDOW: usize = 4 << 20;

/// The text that `seq 1 LAST` writes.
fn numbers(last: u32) -> Vec<u8> {
    let mut text = Vec::new();
    for number in 1..=last {
        text.extend_from_slice(number.to_string().as_bytes());
        text.push(b'\n');
    }
    text
}

/// A server, and a session whose processes wait for the test before they write.
struct Stage {
    server: Server,
    place: Place,
    client: Client,
}

/// A process that waits.
struct Waiting {
    id: &'static str,
    pid: i32,
    /// The last event that its client has seen.
    seen: u64,
}

impl Stage {
    async fn new(arguments: &[&str]) -> Self {
        let server = Server::with_arguments(arguments).await;
        let (place, client) = (Place::new(), Client::connect(&server).await);
        Self { server, place, client }
    }

    /// Starts a process that says which one it is, and goes on with `script` once it is let go.
    async fn start(&mut self, id: &'static str, script: &str, more: Value) -> Waiting {
        mknodat(CWD, self.place.path(id), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let script = format!("echo $$; read x <{id}; {script}");
        self.client.start(&self.place, id, &["sh", "-c", &script], more).await;
        let pid = self.client.process_id(id).await;
        Waiting { id, pid, seen: 1 }
    }

    /// Lets a process go on.
    fn go(&self, process: &Waiting) {
        std::fs::write(self.place.path(process.id), "\n").unwrap();
    }

    /// Cuts the connection, lets the processes go on, waits until they end or find no more room, and resumes.
    async fn while_away(mut self, processes: &[Waiting], they_end: bool, acknowledges: bool) -> Self {
        let session = self.client.session.clone();
        let watched: Vec<Watched> = processes.iter().map(|process| Watched::new(process.pid)).collect();
        self.client.cut();
        for process in processes {
            std::fs::write(self.place.path(process.id), "\n").unwrap();
        }
        if they_end {
            for process in watched {
                process.ended().await;
            }
        } else {
            for process in processes {
                tokio::time::timeout(PATIENCE, process.is_held_up()).await.expect("no more room in time");
            }
        }
        self.client = if acknowledges {
            acknowledging(&self.server, Some(&session)).await
        } else {
            Client::resume(&self.server, &session).await
        };
        self
    }
}

impl Waiting {
    /// Waits until it has written what memory holds, and sleeps in a write to its pipe.
    async fn is_held_up(&self) {
        let look = |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", self.pid)).unwrap();
        let written = || -> usize {
            let io = look("io");
            io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap().parse().unwrap()
        };
        while written() < WINDOW || !look("wchan").contains("pipe_write") {
            tokio::task::yield_now().await;
        }
    }
}

fn chunk(of: &Value) -> Vec<u8> {
    decode(of["chunk"].as_str().unwrap()).unwrap()
}

/// Everything behind an event, page by page, to the close: its output, the gaps, and whether the numbers are dense.
async fn events(client: &mut Client, id: &str, mut after: u64) -> (Vec<u8>, Vec<Value>) {
    let (mut output, mut gaps) = (Vec::new(), Vec::new());
    loop {
        let page = client.ok("process/read", json!({"processId": id, "afterSeq": after, "waitMs": 60_000, "events": true})).await;
        assert_eq!(page["chunks"], json!([]));
        let mut bytes = 0;
        for event in page["events"].as_array().unwrap() {
            let first = event.get("seq").or_else(|| event.get("fromSeq")).unwrap();
            assert_eq!(*first, after + 1, "{event}");
            after = event.get("seq").or_else(|| event.get("toSeq")).unwrap().as_u64().unwrap();
            match event["type"].as_str().unwrap() {
                "output" => {
                    let chunk = chunk(event);
                    bytes += chunk.len();
                    output.extend(chunk);
                }
                "gap" => gaps.push(event.clone()),
                "closed" => return (output, gaps),
                other => assert_eq!(other, "exited"),
            }
        }
        assert!(bytes <= 1 << 20, "a page has a bound");
        assert_eq!(page["nextSeq"], after + 1);
    }
}

/// Follows a process to its close, by a page of all that was missed and then by what is announced, as clients do that know
/// nothing else.
async fn page_and_follow(client: &mut Client, process: &Waiting) -> Vec<u8> {
    let asked = json!({"processId": process.id, "afterSeq": process.seen, "maxBytes": null});
    let page = client.ok("process/read", asked).await;
    assert!(page.get("gap").is_none() && page.get("events").is_none(), "no more members than clients know");
    let (mut output, mut seen) = (Vec::new(), process.seen);
    for part in page["chunks"].as_array().unwrap() {
        assert_eq!(part["seq"], seen + 1);
        seen += 1;
        output.extend(chunk(part));
    }
    let next = page["nextSeq"].as_u64().unwrap();
    let mut is_closed = page["closed"] == true;
    seen = next - 1;
    while !is_closed {
        let notice = client.notice(process.id).await;
        let seq = notice["params"]["seq"].as_u64().unwrap();
        if seq > seen {
            assert_eq!(seq, seen + 1);
            seen = seq;
            if notice["method"] == "process/output" {
                output.extend(chunk(&notice["params"]));
            }
        }
        is_closed = notice["method"] == "process/closed";
    }
    output
}

/// Everything was there, once and in order.
#[track_caller]
fn same(output: &[u8], expected: &[u8]) {
    let at = output.iter().zip(expected).position(|(one, other)| one != other);
    assert_eq!((output.len(), at), (expected.len(), None));
}

#[tokio::test]
async fn what_was_written_while_nobody_was_there_is_read_to_the_byte() {
    let mut stage = Stage::new(&[]).await;
    let script = "exec seq 1 5300000";
    let processes = [stage.start("p", script, json!({})).await, stage.start("q", script, json!({})).await];
    let mut stage = stage.while_away(&processes, true, false).await;
    let expected = numbers(5_300_000);
    assert!(expected.len() > 40_000_000);
    same(&page_and_follow(&mut stage.client, &processes[0]).await, &expected);
    let (output, gaps) = events(&mut stage.client, "q", 1).await;
    same(&output, &expected);
    assert_eq!(gaps, [] as [Value; 0]);
}

#[tokio::test]
async fn what_finds_no_room_on_disk_waits_and_is_not_lost() {
    let expected = numbers(6_500_000);
    assert!(expected.len() > 50_000_000);
    // Who pages instead of listening says so: else what was announced meanwhile need not be kept for it.
    for pages_events in [false, true] {
        let mut stage = Stage::new(&["--spool-bytes", "2097152"]).await;
        let process = stage.start("p", "exec seq 1 6500000", json!({})).await;
        let mut stage = stage.while_away(std::slice::from_ref(&process), false, pages_events).await;
        let listed = stage.client.ok("process/list", json!({})).await;
        assert_eq!(listed["processes"][0]["state"], "running");
        if pages_events {
            let (output, gaps) = events(&mut stage.client, "p", 1).await;
            same(&output, &expected);
            assert_eq!(gaps, [] as [Value; 0]);
        } else {
            same(&page_and_follow(&mut stage.client, &process).await, &expected);
        }
    }
}

#[tokio::test]
async fn a_spool_that_cannot_be_written_loses_nothing() {
    let mut stage = Stage::new(&["--spool-dir", "/proc/no/such/folder"]).await;
    let processes = [stage.start("p", "exec seq 1 2000000", json!({})).await];
    let mut stage = stage.while_away(&processes, false, false).await;
    same(&page_and_follow(&mut stage.client, &processes[0]).await, &numbers(2_000_000));
}

#[tokio::test]
async fn the_oldest_goes_where_the_start_said_so_and_the_gap_is_exact() {
    let mut stage = Stage::new(&["--spool-bytes", "4194304"]).await;
    let script = "exec seq 1 5300000";
    let more = json!({"whenFull": "dropOldest"});
    let processes = [stage.start("p", script, more.clone()).await, stage.start("q", script, more).await];
    let mut stage = stage.while_away(&processes, true, false).await;
    let expected = numbers(5_300_000);
    let (output, gaps) = events(&mut stage.client, "p", 1).await;
    assert_eq!(gaps.len(), 1, "one hole: {gaps:?}");
    let asked = json!({"processId": "q", "afterSeq": 1, "maxBytes": null});
    let page = stage.client.ok("process/read", asked).await;
    let chunks = page["chunks"].as_array().unwrap();
    assert_eq!(chunks[0]["seq"].as_u64(), page["gap"]["toSeq"].as_u64().map(|to| to + 1));
    for (output, gap) in [(output, &gaps[0]), (chunks.iter().flat_map(chunk).collect(), &page["gap"])] {
        assert_eq!(gap["fromSeq"], 2, "it begins behind what was sent");
        let lost = usize::try_from(gap["bytes"].as_u64().unwrap()).unwrap();
        assert!(output.len() >= 6 << 20, "the newest is there: {} bytes", output.len());
        assert_eq!(output.len() + lost, expected.len());
        same(&output, &expected[lost..]);
    }
}

/// Connects with `acknowledge`.
async fn acknowledging(server: &Server, session: Option<&str>) -> Client {
    let mut client = Client::dial(&server.url).await;
    let params = json!({"clientName": "test", "resumeSessionId": session, "acknowledge": true});
    let attached = async {
        loop {
            match client.call("initialize", params.clone()).await {
                Ok(result) => break result,
                Err(refusal) if refusal.code == -32010 => tokio::task::yield_now().await,
                Err(other) => panic!("{other:?}"),
            }
        }
    };
    let result = tokio::time::timeout(PATIENCE, attached).await.unwrap();
    client.session = result["sessionId"].as_str().unwrap().to_owned();
    client.send(&json!({"method": "initialized"})).await;
    client
}

/// Reads notifications until so many bytes came, and answers the last number.
async fn take(client: &mut Client, id: &str, bytes: usize) -> u64 {
    let (mut taken, mut seq) = (0, 0);
    while taken < bytes {
        let notice = client.notice(id).await;
        assert_eq!(notice["method"], "process/output");
        taken += chunk(&notice["params"]).len();
        seq = notice["params"]["seq"].as_u64().unwrap();
    }
    assert_eq!(taken, bytes, "not a byte more than the window");
    seq
}

/// That a process runs and nothing more comes of it.
async fn stands_still(client: &mut Client, last: u64) {
    for _twice in 0..2 {
        let listed = client.ok("process/list", json!({})).await;
        let process = &listed["processes"][0];
        assert_eq!((&process["state"], &process["nextSeq"]), (&json!("running"), &json!(last + 1)));
    }
}

#[tokio::test]
async fn what_is_not_acknowledged_holds_the_process_up() {
    let (server, place) = (Server::start().await, Place::new());
    let mut client = acknowledging(&server, None).await;
    client.start(&place, "p", &["head", "-c", "12582912", "/dev/zero"], json!({})).await;
    let mut last = take(&mut client, "p", WINDOW).await;
    // The pongs of this client say nothing.
    stands_still(&mut client, last).await;
    // What cannot be known yet is refused and changes nothing.
    let acknowledge = |seq: u64| json!({"processId": "p", "seq": seq});
    let refusal = client.refused("process/acknowledge", acknowledge(last + 1)).await;
    assert_eq!((refusal.code, refusal.message), (-32602, format!("process p has no event {} yet: its last is {last}", last + 1)));
    let future = json!({"processId": "p", "afterSeq": last + 1, "events": true});
    assert_eq!(client.refused("process/read", future).await.code, -32602);
    let refusal = client.refused("process/acknowledge", json!({"processId": "x", "seq": 0})).await;
    assert_eq!((refusal.code, refusal.message.as_str()), (-32600, "unknown process id x"));
    stands_still(&mut client, last).await;
    // It is all there for one who comes anew.
    let session = client.session.clone();
    client.cut();
    let mut client = acknowledging(&server, Some(&session)).await;
    let page = client.ok("process/read", json!({"processId": "p"})).await;
    assert_eq!((&page["chunks"][0]["seq"], page.get("gap")), (&json!(1), None));
    last = page["nextSeq"].as_u64().unwrap() - 1;
    assert_eq!(client.ok("process/acknowledge", acknowledge(last)).await, json!({}));
    assert_eq!(client.ok("process/acknowledge", acknowledge(1)).await, json!({}), "backwards changes nothing");
    let already: usize = page["chunks"].as_array().unwrap().iter().map(|part| chunk(part).len()).sum();
    let (mut bytes, mut is_closed) = (already, page["closed"] == true);
    while !is_closed {
        let notice = client.notice("p").await;
        let seq = notice["params"]["seq"].as_u64().unwrap();
        if seq <= last {
            // It was announced before the page was made, which has it too.
            continue;
        }
        assert_eq!(seq, last + 1);
        last = seq;
        match notice["method"].as_str().unwrap() {
            "process/output" => bytes += chunk(&notice["params"]).len(),
            "process/closed" => is_closed = true,
            _ => {}
        }
        if last % 100 == 0 {
            client.ok("process/acknowledge", acknowledge(last)).await;
        }
    }
    assert_eq!(bytes, 12_582_912);
    client.ok("process/acknowledge", acknowledge(last)).await;
}

#[tokio::test]
async fn a_client_that_knows_nothing_of_it_gets_everything_live() {
    let mut stage = Stage::new(&[]).await;
    let last = 24_000_000;
    let process = stage.start("p", &format!("exec seq 1 {last}"), json!({})).await;
    stage.go(&process);
    let (mut output, mut seen) = (Vec::new(), process.seen);
    loop {
        let notice = stage.client.notice("p").await;
        seen += 1;
        assert_eq!(notice["params"]["seq"], seen);
        match notice["method"].as_str().unwrap() {
            "process/output" => output.extend(chunk(&notice["params"])),
            "process/closed" => break,
            _ => {}
        }
    }
    let expected = numbers(last);
    assert!(expected.len() > 200_000_000);
    same(&output, &expected);
}

#[tokio::test]
async fn a_process_that_waits_for_room_can_be_ended() {
    let (server, place) = (Server::with_arguments(&["--spool-bytes", "1048576"]).await, Place::new());
    let mut client = acknowledging(&server, None).await;
    client.start(&place, "p", &["cat", "/dev/zero"], json!({})).await;
    take(&mut client, "p", WINDOW).await;
    let session = client.session.clone();
    // Attached first, then with nobody there meanwhile.
    assert_eq!(client.ok("process/terminate", json!({"processId": "p"})).await, json!({"running": true}));
    loop {
        if client.notice("p").await["method"] == "process/closed" {
            break;
        }
    }
    client.start(&place, "q", &["cat", "/dev/zero"], json!({})).await;
    take(&mut client, "q", WINDOW).await;
    client.cut();
    let mut client = acknowledging(&server, Some(&session)).await;
    assert_eq!(client.ok("process/terminate", json!({"processId": "q"})).await, json!({"running": true}));
    for id in ["p", "q"] {
        let (output, gaps) = events(&mut client, id, 0).await;
        assert!(output.len() >= WINDOW && gaps.is_empty());
    }
}
