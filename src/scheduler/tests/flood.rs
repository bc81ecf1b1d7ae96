//! One tenant floods the server with samples, and seven others ask for a few at a time.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::harness::*;
use super::rules::config;
use super::tenants::{number_of, tenant};
use crate::scheduler::*;
use crate::types::*;

const STEPS: usize = 300;

/// How the tenants ask.
#[derive(Clone, Copy)]
struct Load {
    /// Most sequences that run at the same time.
    places: usize,
    /// Samples that tenant 0 asks for at once.
    flood: u32,
    /// Whether the other tenants always have 8 samples; they ask for 8 more when all have ended otherwise.
    refills: bool,
    /// Whether all share one name.
    is_unfair: bool,
}

/// The service that the tenants had.
#[derive(Default)]
struct Served {
    /// For each request of the seven, the steps from its arrival to its first token.
    first_tokens: Vec<usize>,
    /// Number of tokens sampled in all steps.
    tokens: usize,
    /// Tokens by tenant, of the steps in which all tenants had waiting samples.
    backlogged: BTreeMap<u64, usize>,
    preemptions: u64,
}

impl Served {
    fn mean_wait(&self) -> f64 {
        self.first_tokens.iter().sum::<usize>() as f64 / self.first_tokens.len() as f64
    }

    fn jain(&self) -> f64 {
        let tokens = || self.backlogged.values().map(|&tokens| tokens as f64);
        tokens().sum::<f64>().powi(2) / (tokens().count() as f64 * tokens().map(|tokens| tokens * tokens).sum::<f64>())
    }
}

/// A request of a tenant.
fn request(rng: &mut ChaCha8Rng, tenant: u64, last: &mut u64, n: u32) -> Group {
    *last += 1;
    let tokens: Vec<TokenId> = (0..rng.random_range(8..40)).map(|_| rng.random_range(0..VOCAB as TokenId)).collect();
    group(key(tenant * 1_000_000 + *last, 0), &tokens, n, rng.random_range(15..50))
}

fn serve(seed: u64, load: Load) -> Served {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let limits = SchedulerConfig { max_queued_samples: 2000, ..config(load.places, 256) };
    let mut harness = Harness::new(limits, 2000, 8);
    harness.is_unchecked = true;
    let (mut last, mut served) = (0, Served::default());
    let name = |number: u64| if load.is_unfair { Tenant::default() } else { tenant(number) };
    let groups = (0..load.flood / 8).map(|_| request(&mut rng, 0, &mut last, 8)).collect();
    harness.add_for(&name(0), groups).expect("room");
    // The flood has all places when the others come.
    (0..8).for_each(|_| drop(harness.step()));
    let mut arrived: BTreeMap<GroupKey, usize> = BTreeMap::new();
    let mut open = vec![Vec::<GroupKey>::new(); 8];
    for step in 0..STEPS {
        for number in 1..8 {
            let asked = &mut open[number as usize];
            asked.retain(|key| !harness.results[key].done);
            let open: usize = asked.iter().map(|key| harness.results[key].samples.len()).sum();
            let groups: Vec<Group> = match load.refills {
                true => (open..8).map(|_| request(&mut rng, number, &mut last, 1)).collect(),
                // Tenants with odd numbers ask for one prompt, the others for eight.
                false if open == 0 && number % 2 == 1 => vec![request(&mut rng, number, &mut last, 8)],
                false if open == 0 => (0..8).map(|_| request(&mut rng, number, &mut last, 1)).collect(),
                false => Vec::new(),
            };
            asked.extend(groups.iter().map(|group| group.key));
            arrived.extend(groups.iter().map(|group| (group.key, step)));
            harness.add_for(&name(number), groups).expect("room");
        }
        let plan = harness.step();
        let is_full = !load.is_unfair && harness.backlogged().len() == 8;
        for task in plan.tasks() {
            served.tokens += 1;
            let number = number_of(task.sample.group.request);
            *served.backlogged.entry(number).or_default() += usize::from(is_full);
            served.first_tokens.extend(arrived.remove(&task.sample.group).map(|arrival| step + 1 - arrival));
        }
    }
    assert!(load.flood == 0 || harness.results.values().any(|result| !result.done), "the flood lasts");
    Served { preemptions: harness.scheduler.stats().preemptions, ..served }
}

#[test]
fn a_flood_leaves_others_their_share_and_their_time_to_first_token() {
    let seed = rand::random();
    println!("seed {seed}");
    for places in [64, 96] {
        let load = Load { places, flood: 1000, refills: false, is_unfair: false };
        let (fair, light) = (serve(seed, load), serve(seed, Load { flood: 0, ..load }));
        let unfair = serve(seed, Load { is_unfair: true, ..load });
        let waits = [fair.mean_wait(), light.mean_wait(), unfair.mean_wait()];
        let throughput = fair.tokens as f64 / unfair.tokens as f64;
        println!("{places} places: {waits:?} steps to the first token, {throughput:.3} of the throughput");
        assert!(waits[0] <= 2.0 * waits[1], "steps to the first token: {waits:?}");
        assert!(throughput >= 0.95, "{} tokens, {} without tenants", fair.tokens, unfair.tokens);
        assert_eq!(fair.preemptions, 0, "nothing is computed twice");
    }
}

#[test]
fn backlogged_tenants_are_served_alike() {
    let seed = rand::random();
    println!("seed {seed}");
    for places in [16, 32, 40] {
        let load = Load { places, flood: 1000, refills: true, is_unfair: false };
        let (fair, unfair) = (serve(seed, load), serve(seed, Load { is_unfair: true, ..load }));
        let throughput = fair.tokens as f64 / unfair.tokens as f64;
        println!("{places} places: Jain {:.3}, throughput {throughput:.3}, {:?}", fair.jain(), fair.backlogged);
        assert_eq!(fair.backlogged.len(), 8);
        assert!(fair.jain() >= 0.95, "{:?}", fair.backlogged);
        assert!(throughput >= 0.95, "{} tokens, {} without tenants", fair.tokens, unfair.tokens);
    }
}
