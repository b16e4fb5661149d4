//! What all harnesses of an executor together may hold.

use crate::remote::{HARNESS, Raw, Remote, exec};
use portcullis_relay::fault::Fault;
use portcullis_relay::keys::Identity;
use portcullis_tests::Place;

const MIB: usize = 1 << 20;

async fn works(remote: &Remote, place: &Place) {
    let (output, stdout, stderr) = exec(&remote.url, "box", HARNESS, &place.path(""), &["echo", "works"]).await;
    assert!(output.status.success() && stdout == "works\n", "{stderr}");
}

/// The least room that an operator may give: 128 MiB for messages on streams.
#[tokio::test]
async fn the_stream_that_holds_most_ends_when_all_hold_too_much() {
    let remote = Remote::with(&["--buffer-bytes", "67108864"]).await;
    let (place, registry, keys) = (Place::new(), remote.registry(), Identity::generate().unwrap());
    let mut streams = Vec::new();
    // Memory is reserved by powers of two: these are 64, 32 and 32 MiB, and all together as much as may be.
    for (begun, length) in [(33, 60), (17, 18), (17, 18)] {
        let mut stream = Raw::open(&registry, &keys, &keys).await.unwrap();
        stream.queue(vec![b'x'; length * MIB]);
        assert_eq!(stream.send(begun * MIB).await, None);
        streams.push(stream);
    }
    let [mut greedy, mut one, mut other] = <[Raw; 3]>::try_from(streams).ok().unwrap();
    // The control: with one of them at its end all goes on.
    let answer = one.answer().await.unwrap();
    assert!(String::from_utf8(answer).unwrap().contains("error"));
    works(&remote, &place).await;
    let mut more = Raw::open(&registry, &keys, &keys).await.unwrap();
    more.queue(vec![b'x'; 18 * MIB]);
    assert_eq!(more.send(17 * MIB).await, None);
    one.queue(vec![b'x'; 2 * MIB]);
    let _reset_of_another = one.send(MIB + MIB / 2).await;
    assert_eq!(greedy.answer().await, Err(Fault::Reset));
    for stream in [&mut one, &mut other, &mut more] {
        assert!(String::from_utf8(stream.answer().await.unwrap()).unwrap().contains("error"));
    }
    works(&remote, &place).await;
    remote.end().await;
}
