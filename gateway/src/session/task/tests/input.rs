//! Input of processes.

use super::*;
use portcullis_protocol::process::CloseStdinParams;

#[tokio::test]
async fn input_is_written_once_and_in_order() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "cat") }).await.unwrap();
    for text in ["a\n", "a\n", "b\n"] {
        assert_eq!(client.write("p", "same", text.as_bytes()).await, WriteStatus::Accepted);
    }
    assert_eq!(client.write("p", "empty", b"").await, WriteStatus::Accepted);
    assert_eq!(client.write("p", "other", b"end\n").await, WriteStatus::Accepted);
    client.until("stdout", b"a\nend\n").await;
    assert!(client.terminate("p").await);
    assert_eq!(client.story().await.exit, Some(137));
    assert_eq!(client.write("p", "late", b"x").await, WriteStatus::StdinClosed);
    assert_eq!(client.write("p", "same", b"x").await, WriteStatus::Accepted);
    client.end().await;
}

#[tokio::test]
async fn input_ends_behind_what_was_accepted() {
    let mut client = Client::new().await;
    // It reads once all that it wrote is taken, which is after the end was asked for: most of the input is on its way then.
    let script = "head -c 8388608 /dev/zero; wc -c";
    client.start(StartParams { pipe_stdin: true, ..shell("p", script) }).await.unwrap();
    let chunk = vec![b'x'; 65536];
    for nth in 0..20 {
        assert_eq!(client.write("p", &nth.to_string(), &chunk).await, WriteStatus::Accepted);
    }
    let params = CloseStdinParams { process_id: "p".to_owned() };
    client.ask(|reply| Command::CloseStdin { params, reply }).await.await.unwrap().unwrap();
    assert_eq!(client.write("p", "late", b"x").await, WriteStatus::StdinClosed);
    let story = client.story().await;
    assert!(story.output["stdout"].ends_with(b"\x001310720\n") && story.exit == Some(0));
    client.end().await;
}

#[tokio::test]
async fn a_full_queue_holds_up_that_write_alone() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "read go; cat | wc -c") }).await.unwrap();
    // The pipe holds 64 KiB, the queue 128 chunks, and one is in the pump's hands.
    let chunk = vec![b'x'; 65536];
    let mut waiting = Vec::new();
    for nth in 0..140 {
        waiting.push(client.ask_write("p", &nth.to_string(), &chunk).await);
    }
    // The session answers everything else meanwhile, in order: this read comes after all the writes.
    assert!(client.read("p", 0, 0).await.chunks.is_empty());
    let accepted = waiting.iter_mut().filter_map(|answer| answer.try_recv().ok()).count();
    assert!((126..=134).contains(&accepted), "{accepted} writes were accepted");
    assert!(client.terminate("p").await);
    client.story().await;
    for answer in waiting.iter_mut().skip(accepted) {
        assert_eq!(answer.await.unwrap().unwrap().status, WriteStatus::StdinClosed);
    }
    client.end().await;
}

#[tokio::test]
async fn every_byte_of_input_arrives_once_there_is_a_reader() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "head -c 9175040 | sha256sum; exec cat") }).await.unwrap();
    let (mut waiting, mut all) = (Vec::new(), Vec::new());
    for nth in 0..140_u32 {
        // No chunk is like another, so none can take another's place.
        let chunk: Vec<u8> = (0..65536_u32).map(|at| (at + nth * 7).to_le_bytes()[usize::from(at % 3 == 0)]).collect();
        waiting.push(client.ask_write("p", &nth.to_string(), &chunk).await);
        all.extend(chunk);
    }
    for answer in waiting {
        assert_eq!(answer.await.unwrap().unwrap().status, WriteStatus::Accepted);
    }
    let sum: String = sha2::Digest::finalize(<sha2::Sha256 as sha2::Digest>::new_with_prefix(&all))
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    client.until("stdout", format!("{sum}  -\n").as_bytes()).await;
    client.end().await;
}

#[tokio::test]
async fn a_child_that_closes_its_input_is_told_by_the_next_writes() {
    let mut client = Client::new().await;
    client.start(StartParams { pipe_stdin: true, ..shell("p", "exec <&-; echo closed; exec sleep 1000") }).await.unwrap();
    client.until("stdout", b"closed\n").await;
    let mut nth = 0;
    while client.write("p", &nth.to_string(), b"x").await == WriteStatus::Accepted {
        nth += 1;
        tokio::task::yield_now().await;
    }
    assert_eq!(client.write("p", "more", b"x").await, WriteStatus::StdinClosed);
    assert_eq!(client.write("p", "0", b"x").await, WriteStatus::Accepted);
    client.end().await;
}

#[tokio::test]
async fn a_terminal_echoes_and_ends() {
    let mut client = Client::new().await;
    let started = client.start(StartParams { tty: true, ..shell("p", "exec cat") }).await.unwrap();
    assert_eq!(started.process_id, "p");
    client.write("p", "1", b"hey\n").await;
    client.until("pty", b"hey\r\nhey\r\n").await;
    client.write("p", "2", &[4]).await;
    let story = client.story().await;
    assert_eq!((story.exit, story.output.len()), (Some(0), 0));
    assert_eq!(client.write("p", "3", b"x").await, WriteStatus::StdinClosed);
    client.end().await;
}
