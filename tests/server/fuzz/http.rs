//! Requests to the HTTP port: JSON bodies of every route, made after their descriptions and then spoilt, odd headers,
//! and clients that send slowly, stop reading or leave.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::describe::{Route, routes};
use super::dice::Dice;
use super::mutate::mutated;
use super::rest::Rest;
use super::run::Options;
use super::server::Server;

/// Statuses that requests may be answered with while the server serves. 500 is never among them, and 503 only with the
/// message [`PAUSED`].
const STATUSES: &[u16] = &[100, 200, 400, 403, 404, 405, 408, 409, 413, 414, 422, 429, 431, 501, 505];
/// Begins the message of a request that another client's pause rejects.
const PAUSED: &str = "{\"error\":{\"message\":\"generation is paused";
/// Longest answer that is read.
const MOST_BYTES: usize = 4 << 20;
const CASES: u64 = 480;
const BATCH: u64 = 60;
/// Requests at the same time in a case.
const CLIENTS: usize = 3;

/// One connection of a client.
struct Visit {
    /// What is sent, in pieces.
    pieces: Vec<Vec<u8>>,
    /// Time between two pieces.
    pause: Duration,
    /// Most bytes that are read before the client stops to read.
    reads: usize,
    /// How long the client stays.
    stays: Duration,
}

fn visit(dice: &mut Dice, request: &impl Fn(&mut Dice) -> Vec<u8>) -> Visit {
    let mut sent = request(dice);
    if dice.one_in(8) {
        sent.extend(request(dice));
    }
    if dice.one_in(12) {
        sent = mutated(dice, sent);
    }
    if dice.one_in(10) {
        sent.truncate(dice.below(sent.len() + 1));
    }
    let mut cuts = if dice.one_in(4) { dice.list(4, |dice| dice.below(sent.len() + 1)) } else { Vec::new() };
    cuts.extend([0, sent.len()]);
    cuts.sort_unstable();
    Visit {
        pieces: cuts.windows(2).map(|cut| sent[cut[0]..cut[1]].to_vec()).collect(),
        pause: Duration::from_micros(dice.pick(&[0, 0, 300, 3_000])),
        reads: dice.pick(&[MOST_BYTES, MOST_BYTES, MOST_BYTES, 0, 1, 200, 5_000]),
        stays: Duration::from_millis(dice.pick(&[0, 2, 30, 120, 120, 120, 250])),
    }
}

fn request(dice: &mut Dice, routes: &[Route]) -> Vec<u8> {
    let route = &routes[dice.below(routes.len())];
    let body = if route.takes_body { route.body(dice).into_bytes() } else { Vec::new() };
    request_of(dice, &route.method, &route.path, body)
}

/// A request with this body, which may be spoilt, and with odd headers.
pub fn request_of(dice: &mut Dice, method: &str, path: &str, mut body: Vec<u8>) -> Vec<u8> {
    if dice.one_in(6) {
        body = mutated(dice, body);
    }
    let method = if dice.one_in(30) { dice.pick(&["HEAD", "OPTIONS", "PUT", "BREW", "get"]) } else { method };
    let version = if dice.one_in(20) { dice.pick(&["1.0", "2.0", "0.9", "1.1 "]) } else { "1.1" };
    let query = if dice.one_in(6) { query(dice) } else { String::new() };
    let mut head = format!("{method} {path}{query} HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n");
    if dice.one_in(6) {
        head.push_str(&odd_headers(dice));
    }
    if !dice.one_in(30) {
        head.push_str("content-type: application/json\r\n");
    }
    if dice.one_in(8) {
        head.push_str("transfer-encoding: chunked\r\n");
        body = [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n0\r\n\r\n"].concat();
    } else {
        let wrong = if dice.one_in(20) { dice.pick(&[1, 100, 1 << 40]) } else { 0 };
        head.push_str(&format!("content-length: {}\r\n", body.len() + wrong));
    }
    [head.as_bytes(), b"\r\n", &body].concat()
}

fn query(dice: &mut Dice) -> String {
    let value = dice.pick(&["", "1", "2", "keep", "abort", "true", "-1", "%00", "weights", "a&level=9", "JSON"]);
    let name = dice.pick(&["level", "mode", "tags", "config_format", "clear_cache", "x", ""]);
    format!("?{name}={value}")
}

fn odd_headers(dice: &mut Dice) -> String {
    let long = "a".repeat(dice.pick(&[1, 4_000, 40_000]));
    match dice.below(12) {
        0 => format!("x-request-id: {long}\r\n"),
        1 => "x-request-id: a\r\n".into(),
        2 => "x-a: b\r\n".repeat(dice.pick(&[10, 100])),
        3 => format!("authorization: Bearer {long}\r\n"),
        4 => "expect: 100-continue\r\n".into(),
        5 => "accept-encoding: gzip\r\ncontent-encoding: gzip\r\n".into(),
        6 => "origin: http://evil.example\r\n".into(),
        7 => "content-length: 5\r\n".into(),
        8 => "upgrade: h2c\r\nconnection: upgrade\r\n".into(),
        9 => "x-a: \u{1f980}\u{7f}\r\n".into(),
        10 => ": \r\n".into(),
        _ => format!("{long}: b\r\n"),
    }
}

/// Makes one visit, and returns what the client has read. The system closes what is left with a reset.
async fn make(address: &str, visit: &Visit) -> Result<Vec<u8>, String> {
    let mut stream = TcpStream::connect(address).await.map_err(|e| format!("cannot connect: {e}"))?;
    let mut read = Vec::new();
    let exchange = async {
        let (mut from, mut to) = stream.split();
        let sends = async {
            for piece in &visit.pieces {
                // Fails when the server has closed the connection, which may have answered before.
                if to.write_all(piece).await.is_err() {
                    break;
                }
                tokio::time::sleep(visit.pause).await;
            }
        };
        let reads = async {
            let mut part = vec![0; 16 << 10];
            while read.len() < visit.reads {
                match from.read(&mut part).await {
                    Ok(0) | Err(_) => return,
                    Ok(length) => read.extend(&part[..length]),
                }
            }
            std::future::pending().await
        };
        tokio::join!(sends, reads);
    };
    // A client that leaves before the end is as good as any.
    let _ = timeout(visit.stays, exchange).await;
    Ok(read)
}

/// The status of the first answer, if there is one that may be given.
fn judge(read: &[u8]) -> Result<Option<u16>, String> {
    let text = String::from_utf8_lossy(read);
    let start: String = text.chars().take(600).collect();
    let Some(line) = text.strip_prefix("HTTP/1.") else {
        return if read.is_empty() { Ok(None) } else { Err(format!("no HTTP: {start}")) };
    };
    let Some(status) = line.get(2..5).and_then(|status| status.parse().ok()) else { return Ok(None) };
    let is_paused = status == 503 && text.contains(PAUSED);
    if !(STATUSES.contains(&status) || is_paused) || text.contains("InternalServerError") {
        return Err(format!("it must not be answered so: {start}"));
    }
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return Ok(Some(status)) };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    if head.contains("application/json") && length == Some(body.len()) {
        serde_json::from_str::<Value>(body).map_err(|e| format!("{e} in {start}"))?;
    }
    Ok(Some(status))
}

#[tokio::test]
async fn http_requests_of_any_kind() {
    let server = Server::start(&[]).await;
    let routes = routes(&server.http).await;
    check("http_requests_of_any_kind", CASES, server, |dice| request(dice, &routes)).await;
}

/// Makes the requests of the target `name`, up to [`CLIENTS`] at the same time, and checks each answer and the server.
pub async fn check(name: &str, cases: u64, mut server: Server, request: impl Fn(&mut Dice) -> Vec<u8>) {
    let options = Options::read(cases);
    let connection = server.connect().await;
    let rest = Rest::before(&connection).await;
    let (mut answers, mut refused) = (0_u32, 0_u32);
    let mut from = options.cases.start;
    while options.goes_on(from) {
        let to = options.cases.end.min(from + BATCH);
        println!("fuzz {name}: seed {}, cases {from}..{to}", options.seed);
        for case in from..to {
            let mut dice = Dice::of(options.seed, name, case);
            let visits: Vec<Visit> = (0..1 + dice.below(CLIENTS)).map(|_| visit(&mut dice, &request)).collect();
            let mut clients = tokio::task::JoinSet::new();
            for visit in visits {
                let address = server.http.clone();
                clients.spawn(async move { (make(&address, &visit).await, visit) });
            }
            while let Some(made) = clients.join_next().await {
                let (read, visit) = made.expect("no panic");
                match read.and_then(|read| judge(&read)) {
                    Ok(None) => {}
                    Ok(Some(status)) => (answers, refused) = (answers + 1, refused + u32::from(status >= 400)),
                    Err(why) => {
                        let sent =
                            String::from_utf8_lossy(&visit.pieces.concat()).chars().take(2000).collect::<String>();
                        server.fail(name, &options.again(&case.to_string()), &format!("{why}\n  sent: {sent}"));
                    }
                }
            }
        }
        if let Err(why) = rest.check(&connection).await.and_then(|()| server.check_log()) {
            server.fail(name, &options.again(&format!("{from}..{to}")), &why);
        }
        from = to;
    }
    println!("fuzz {name}: {answers} answers, {refused} of them refusals");
    // Requests that are nearly all refused would test little.
    assert!(answers < 100 || refused * 10 < answers * 9, "{refused} of {answers} were refused");
}
