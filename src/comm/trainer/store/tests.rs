//! The client beside exchanges that were recorded between torch 2.15's own client and its store, with and without
//! libuv, which are the same; and beside stores that misbehave.

use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::Instant;

use super::*;

/// The bytes that torch's client sends and gets for the constructor, and for `get("broadcast_from/0/0")`; the ping's
/// number is ours.
const RECORDED: [(&[u8], &[u8]); 4] = [
    (b"\x00\xce\xf7\x85<\rllor", b"llor"),
    (b"\x04\x05\0\0\0\0\0\0\0init/\x01\0\0\0\0\0\0\0", b"\x02\0\0\0\0\0\0\0"),
    (b"\x06\x01\0\0\0\0\0\0\0\x13\0\0\0\0\0\0\0/broadcast_from/0/0", b"\0"),
    (b"\x03\x13\0\0\0\0\0\0\0/broadcast_from/0/0", b"\x0b\0\0\0\0\0\0\0hello world"),
];

/// A store that reads what the exchanges have, answers, and then closes the connection.
fn store(exchanges: Vec<(Vec<u8>, Vec<u8>)>) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let serve = move || {
        let (mut stream, _) = listener.accept().expect("a client");
        for (query, answer) in exchanges {
            let mut bytes = vec![0; query.len()];
            stream.read_exact(&mut bytes).expect("a query");
            assert_eq!(bytes, query);
            // In two parts, as a network may bring it.
            let (first, second) = answer.split_at(answer.len() / 2);
            stream.write_all(first).and_then(|()| stream.flush()).expect("the client reads");
            std::thread::sleep(Duration::from_millis(5));
            stream.write_all(second).expect("the client reads");
        }
    };
    (port, std::thread::spawn(serve))
}

fn recorded() -> Vec<(Vec<u8>, Vec<u8>)> {
    RECORDED.iter().map(|(query, answer)| (query.to_vec(), answer.to_vec())).collect()
}

fn exchange(port: u16, timeout: &TrainerTimeout) -> Result<(i64, Vec<u8>)> {
    let mut store = Store::connect("127.0.0.1", port, timeout)?;
    Ok((store.add("init/", 1)?, store.get("/broadcast_from/0/0", 11)?))
}

#[test]
fn the_bytes_are_those_of_torchs_client() {
    let (port, served) = store(recorded());
    let got = exchange(port, &TrainerTimeout::new(Duration::from_secs(60))).expect("answers");
    assert_eq!(got, (2, b"hello world".to_vec()));
    served.join().expect("it sends what was recorded");
}

#[test]
fn a_store_that_comes_late_is_found() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address").port();
    let timeout = TrainerTimeout::new(Duration::from_secs(60));
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        let listener = TcpListener::bind(("127.0.0.1", free)).expect("the port is free again");
        let (mut stream, _) = listener.accept().expect("a client");
        let mut greeting = [0; 10];
        stream.read_exact(&mut greeting).expect("a greeting");
        stream.write_all(&greeting[6..]).expect("the client reads");
    });
    let store = Store::connect("127.0.0.1", free, &timeout);
    assert!(store.is_ok(), "{:?}", store.err());
    late.join().expect("it was found");
}

#[test]
fn stores_that_misbehave_are_refused() {
    for (cut, what) in [(0, "nothing"), (1, "a greeting"), (2, "a sum"), (3, "a key that is there")] {
        let (port, served) = store(recorded()[..cut].to_vec());
        let error = exchange(port, &TrainerTimeout::new(Duration::from_secs(60))).expect_err(what);
        assert!(matches!(error, Error::Aborted(_)), "after {what}: {error}");
        served.join().expect("it sends what was recorded");
    }
    for (at, answer, what) in [
        (0, b"roll".to_vec(), "the ping's number is another"),
        (2, vec![1], "the wait was cancelled"),
        (3, 12u64.to_le_bytes().to_vec(), "it is longer than allowed"),
        (3, u64::MAX.to_le_bytes().to_vec(), "no machine has as many bytes"),
    ] {
        let mut exchanges = recorded();
        exchanges.truncate(at + 1);
        exchanges[at].1 = answer;
        let (port, served) = store(exchanges);
        let error = exchange(port, &TrainerTimeout::new(Duration::from_secs(60))).expect_err(what);
        assert!(matches!(error, Error::Aborted(_)), "{what}: {error}");
        served.join().expect("it sends what it was told");
    }
}

#[test]
fn nobody_waits_for_ever() {
    let short = TrainerTimeout::new(Duration::from_millis(100));
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("its address").port();
    let error = exchange(port, &short).expect_err("it says nothing");
    assert!(matches!(&error, Error::DeadlineExceeded(why) if why.contains("--update-idle-seconds")), "{error}");
    drop(silent);
    assert!(matches!(exchange(port, &short), Err(Error::DeadlineExceeded(_))), "nobody listens");
    assert!(matches!(exchange(0, &short), Err(Error::DeadlineExceeded(_))), "nobody can listen");

    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("its address").port();
    let (long, started) = (TrainerTimeout::new(Duration::from_secs(3600)), Instant::now());
    let ends = long.clone();
    let end = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        ends.cancel();
    });
    assert!(matches!(exchange(port, &long), Err(Error::Aborted(_))), "the call has ended");
    assert!(started.elapsed() < Duration::from_secs(600));
    end.join().expect("it ends");
    let unknown = Store::connect("no such host.", 1, &short).err().expect("no machine has this name");
    assert!(matches!(&unknown, Error::InvalidArgument { field, .. } if field == "master_address"), "{unknown}");
}
