//! Runs the cases of a target in batches, and checks after each batch that the server is as it was.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rollout_server::server::pb;
use tonic::Code;

use super::dice::Dice;
use super::push::Segment;
use super::rest::{self, Rest};
use super::server::Server;
use super::wire::{Call, Connection, Outcome};

/// Longest message of a status in bytes: HTTP/2 clients refuse longer headers.
const MAX_STATUS_BYTES: usize = 8 << 10;
/// Seed of `make test`, so that its cases are the same each time.
const SEED: u64 = 12;

/// One method under test, with its cases.
pub struct Target {
    pub name: &'static str,
    /// Codes that its calls, and those beside them, may end with. INTERNAL, UNKNOWN and, while the server serves,
    /// UNAVAILABLE are never among them.
    pub codes: &'static [Code],
    /// Number of cases in a bounded run.
    pub cases: u64,
    /// Number of cases between two checks of the server.
    pub batch: u64,
    pub make: fn(&mut Dice, &Facts) -> Case,
    pub flags: &'static [&'static str],
}

/// Facts of the server that cases are made with.
pub struct Facts {
    pub parameters: Vec<pb::Parameter>,
    pub segment: Segment,
}

/// Number of calls by how they ended.
type Tally = BTreeMap<String, u64>;

/// A case: several clients at the same time, each of which makes its calls one after the other, when the calls of the
/// prelude have ended.
#[derive(Default)]
pub struct Case {
    pub prelude: Vec<Call>,
    pub clients: Vec<Vec<Call>>,
}

impl Case {
    /// A case whose calls are all made at the same time.
    pub fn at_once(prelude: Vec<Call>, calls: Vec<Call>) -> Self {
        Self { prelude, clients: calls.into_iter().map(|call| vec![call]).collect() }
    }
}

impl From<Call> for Case {
    fn from(call: Call) -> Self {
        Self::at_once(Vec::new(), vec![call])
    }
}

/// Options of a run, from the environment: `FUZZ_SEED`; `FUZZ_CASE`, a case or a range of cases such as 100..150;
/// `FUZZ_SECONDS` for each target, with a random seed.
pub struct Options {
    pub seed: u64,
    pub cases: std::ops::Range<u64>,
    seconds: Option<Duration>,
    started: Instant,
}

impl Options {
    /// Those of a target with `cases` cases in a bounded run.
    pub fn read(cases: u64) -> Self {
        let number = |text: &str| text.trim().parse::<u64>().unwrap_or_else(|e| panic!("{text:?}: {e}"));
        #[expect(clippy::disallowed_methods, reason = "`cargo test` hands a test no arguments that its harness lacks")]
        let given = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let seconds = given("FUZZ_SECONDS").map(|text| Duration::from_secs(number(&text)));
        let unset = if seconds.is_some() { u64::from(rand::random::<u32>()) } else { SEED };
        let seed = given("FUZZ_SEED").map_or(unset, |text| number(&text));
        let given_cases = given("FUZZ_CASE").map(|text| match text.split_once("..") {
            Some((from, to)) => number(from)..number(to),
            None => number(&text)..number(&text) + 1,
        });
        let end = if seconds.is_some() { u64::MAX } else { cases };
        Self { seed, cases: given_cases.unwrap_or(0..end), seconds, started: Instant::now() }
    }

    /// Whether the batch that begins with case `from` is to be run.
    pub fn goes_on(&self, from: u64) -> bool {
        from < self.cases.end && self.seconds.is_none_or(|seconds| self.started.elapsed() < seconds)
    }

    /// What repeats `cases`, for the report of a failure.
    pub fn again(&self, cases: &str) -> String {
        format!("FUZZ_SEED={} FUZZ_CASE={cases}", self.seed)
    }
}

impl Target {
    pub async fn run(self) {
        run(self).await;
    }
}

async fn run(target: Target) {
    let options = Options::read(target.cases);
    let mut server = Server::start(target.flags).await;
    let connection = server.connect().await;
    let segment = Segment::new(target.name);
    let facts = Facts { parameters: rest::parameters(&connection).await, segment };
    let rest = Rest::before(&connection).await;
    let mut from = options.cases.start;
    let mut tally = Tally::new();
    while options.goes_on(from) {
        let to = options.cases.end.min(from + target.batch);
        println!("fuzz {}: seed {}, cases {from}..{to}", target.name, options.seed);
        for case in from..to {
            let mut dice = Dice::of(options.seed, target.name, case);
            let made = (target.make)(&mut dice, &facts);
            match perform(&target, &connection, made).await {
                Ok(ends) => ends.into_iter().for_each(|(how, count)| *tally.entry(how).or_default() += count),
                Err(why) => server.fail(target.name, &options.again(&case.to_string()), &why),
            }
        }
        if let Err(why) = rest.check(&connection).await.and_then(|()| server.check_log()) {
            server.fail(target.name, &options.again(&format!("{from}..{to}")), &why);
        }
        from = to;
    }
    println!("fuzz {}: {} cases, calls by their ends: {tally:?}", target.name, from - options.cases.start);
    let (refused, all) = (tally.get("InvalidArgument").copied().unwrap_or_default(), tally.values().sum::<u64>());
    // Cases that are nearly all refused at the door would test little.
    assert!(all < 100 || refused * 10 < all * 9, "{}: {refused} of {all} calls were refused", target.name);
}

/// Runs one case: every call must end with an allowed status, and the server must answer afterwards.
async fn perform(target: &Target, connection: &Connection, case: Case) -> Result<Tally, String> {
    let mut clients = tokio::task::JoinSet::new();
    let mut ends = follow(connection, target.codes, case.prelude).await?;
    for calls in case.clients {
        let (connection, codes) = (connection.clone(), target.codes);
        clients.spawn(async move { follow(&connection, codes, calls).await });
    }
    while let Some(followed) = clients.join_next().await {
        ends.extend(followed.expect("no panic")?);
    }
    rest::status(connection).await?;
    let mut tally = Tally::new();
    ends.into_iter().for_each(|how| *tally.entry(how).or_default() += 1);
    Ok(tally)
}

/// Makes calls one after the other, and returns how each ended.
async fn follow(connection: &Connection, codes: &[Code], calls: Vec<Call>) -> Result<Vec<String>, String> {
    let mut ends = Vec::new();
    for call in calls {
        let judged = connection.call(&call).await.and_then(|outcome| judge(codes, &call, outcome));
        ends.push(judged.map_err(|why| format!("{why}\n  call: {}", call.describe()))?);
    }
    Ok(ends)
}

/// How the call ended; an error if it must not end so.
fn judge(codes: &[Code], call: &Call, outcome: Outcome) -> Result<String, String> {
    let Outcome::Answered { code, message, messages } = outcome else { return Ok("left".into()) };
    let start: String = message.chars().take(300).collect();
    if message.len() >= MAX_STATUS_BYTES {
        return Err(format!("{}: {code:?} with a message of {} bytes: {start}...", call.method, message.len()));
    }
    if code != Code::Ok && !codes.contains(&code) {
        return Err(format!("{}: {code:?}, which is none of {:?}: {start}", call.method, codes));
    }
    if let (Some(check), Code::Ok) = (&call.check, code) {
        check(&messages).map_err(|why| format!("{}: {why}", call.method))?;
    }
    Ok(format!("{code:?}"))
}
