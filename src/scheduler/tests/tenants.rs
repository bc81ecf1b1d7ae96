//! Tenants share the server by the service that they have had. With one tenant, plans are as if there were none.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::harness::*;
use super::rules::{BLOCK_SIZE, config, prompt, shape};
use super::simulation::*;
use crate::scheduler::*;
use crate::types::*;

/// Requests of the random arrivals, in all runs together.
const ARRIVALS: u64 = 10_000;
const ARRIVALS_OF_RUN: u64 = 25;
/// Most samples of a group.
const MOST_SAMPLES: usize = 8;

pub(super) fn tenant(number: u64) -> Tenant {
    Tenant::parse(&format!("tenant-{number}"), "tenant").expect("a name")
}

/// The number of a request's tenant.
pub(super) fn number_of(request: RequestKey) -> u64 {
    request.0 / 1_000_000
}

fn request_of(number: u64, index: u64) -> u64 {
    number * 1_000_000 + index
}

/// The tenants of a plan's tasks, in its order.
fn tenants_of(plan: &StepPlan) -> Vec<u64> {
    plan.tasks().map(|task| number_of(task.sample.group.request)).collect()
}

fn count(tenants: impl IntoIterator<Item = u64>) -> BTreeMap<u64, usize> {
    tenants.into_iter().fold(BTreeMap::new(), |mut counts, number| {
        *counts.entry(number).or_default() += 1;
        counts
    })
}

#[test]
fn tenants_take_turns_and_the_requests_of_each_do_too() {
    let mut harness = Harness::new(config(1, 100), 50, BLOCK_SIZE);
    let (a, b, c) = (request_of(0, 0), request_of(0, 1), request_of(1, 0));
    for (request, groups) in [(a, 3), (b, 1), (c, 2)] {
        let groups = (0..groups).map(|index| group(key(request, index), &prompt(5), 1, 1)).collect();
        harness.add_for(&tenant(number_of(RequestKey(request))), groups).expect("room");
    }
    let order: Vec<GroupKey> = harness.run().iter().flat_map(StepPlan::tasks).map(|task| task.sample.group).collect();
    assert_eq!(order, [key(a, 0), key(c, 0), key(c, 1), key(b, 0), key(a, 1), key(a, 2)]);
}

#[test]
fn a_tenant_takes_places_of_one_with_more_and_nothing_is_computed_again() {
    let mut harness = Harness::new(config(4, 100), 50, BLOCK_SIZE);
    harness.add_for(&tenant(0), vec![group(key(0, 0), &prompt(6), 6, 20)]).expect("room");
    harness.step();
    assert_eq!(tenants_of(&harness.step()), [0; 4]);
    harness.add_for(&tenant(1), vec![group(key(request_of(1, 0), 0), &[3; 5], 3, 9)]).expect("room");
    let plan = harness.step();
    assert_eq!(shape(&plan), [(7, 1), (0, 5), (7, 1), (7, 1)], "after the oldest, in the place of the youngest");
    // Its prompt and first tokens were service too: it gets the second place when the other has had as much.
    let plans: Vec<_> = (0..3).map(|_| count(tenants_of(&harness.step()))).collect();
    assert_eq!([&plans[0], &plans[2]], [&[(0, 3), (1, 1)].into(), &[(0, 2), (1, 2)].into()], "{plans:?}");
    let rest = harness.run();
    assert!(rest.iter().all(|plan| shape(plan).iter().all(|&(_, tokens)| tokens == 1)), "no token is computed twice");
    assert_eq!(harness.scheduler.stats().preemptions, 0);
}

#[test]
fn a_tenant_takes_blocks_of_one_that_holds_those_of_more() {
    let mut harness = Harness::new(config(8, 100), 14, BLOCK_SIZE);
    let groups = (0..3).map(|index| group(key(0, index), &[index; 12], 1, 12)).collect();
    harness.add_for(&tenant(0), groups).expect("room");
    harness.step();
    let stats = harness.scheduler.stats();
    assert_eq!((stats.running_samples, stats.free_blocks), (3, 5));
    harness.step();
    harness.add_for(&tenant(1), vec![group(key(request_of(1, 0), 0), &[3; 16], 1, 4)]).expect("room");
    let plan = harness.step();
    assert_eq!(shape(&plan), [(13, 1), (0, 16), (13, 1)], "the youngest gave its blocks up");
    assert_eq!(harness.scheduler.stats().preemptions, 1);
    harness.run();
    assert!(harness.results.values().all(|result| result.done));
}

#[test]
fn a_tenant_that_was_idle_has_no_credit_for_it() {
    let mut harness = Harness::new(config(2, 100), 50, BLOCK_SIZE);
    let many = |number: u64, index: u64, n: u32| {
        (0..n).map(|prompt_index| group(key(request_of(number, index), prompt_index), &prompt(4), 1, 8)).collect()
    };
    harness.add_for(&tenant(1), many(1, 0, 1)).expect("room");
    harness.run();
    // Whether another is served in the meantime, or was served last.
    for round in 0..2 {
        harness.add_for(&tenant(0), many(0, round, 30)).expect("room");
        match round {
            0 => (0..100).for_each(|_| drop(harness.step())),
            _ => drop(harness.run()),
        }
        harness.add_for(&tenant(1), many(1, 2 * round + 1, 20)).expect("room");
        harness.add_for(&tenant(0), many(0, round + 10, 20)).expect("room");
        let tokens: Vec<u64> = (0..60).flat_map(|_| tenants_of(&harness.step())).collect();
        let tokens = count(tokens);
        assert!(tokens[&0].abs_diff(tokens[&1]) <= 16, "{tokens:?}");
        harness.run();
    }
}

#[test]
fn tenants_without_requests_are_forgotten() {
    let mut harness = Harness::new(config(8, 100), 50, BLOCK_SIZE);
    for number in 0..1000 {
        harness.add_for(&tenant(number), vec![group(key(request_of(number, 0), 0), &prompt(3), 1, 1)]).expect("room");
        harness.run();
    }
    assert!(harness.scheduler.tenants.num_known() <= 65, "{}", harness.scheduler.tenants.num_known());
}

/// A random run of requests of up to five tenants. `name` has the name of each. Calls `check` after each step.
fn simulate(
    seed: u64,
    is_unchecked: bool,
    name: impl Fn(u64) -> Tenant,
    mut check: impl FnMut(&mut Harness, StepPlan),
) -> Harness {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (config, num_blocks, block_size) = random_config(&mut rng);
    let mut harness = Harness::new(config, num_blocks, block_size);
    harness.stop_string = stop_string;
    harness.is_unchecked = is_unchecked;
    harness.executor.repeats = seed.is_multiple_of(2);
    let (arrival, tenants) = (rng.random_range(0.05..1.0), rng.random_range(2..=5));
    let mut arrivals = 0;
    for step in 0.. {
        if arrivals == ARRIVALS_OF_RUN && !harness.scheduler.has_work() {
            break;
        }
        assert!(step < 100_000, "no end in sight");
        while arrivals < ARRIVALS_OF_RUN && rng.random_bool(arrival) {
            // Half of all requests are of the first tenant.
            let number = if rng.random_bool(0.5) { 0 } else { rng.random_range(0..tenants) };
            let groups = random_request(&mut rng, request_of(number, arrivals));
            // A full queue refuses the request, which must have no outcomes then.
            let _ = harness.add_for(&name(number), groups);
            arrivals += 1;
        }
        let request = RequestKey(request_of(rng.random_range(0..tenants), rng.random_range(0..ARRIVALS_OF_RUN)));
        if rng.random_bool(0.02) && harness.groups.keys().any(|key| key.request == request) {
            harness.abort(request);
        }
        let plan = harness.step();
        check(&mut harness, plan);
    }
    harness
}

/// The service that backlogged tenants have had since both of two were.
#[derive(Default)]
struct Book {
    /// The difference of their counters when the later of the two became backlogged.
    begun: BTreeMap<(TenantId, TenantId), i128>,
    /// The largest change of such a difference.
    most: u64,
}

impl Book {
    fn note(&mut self, harness: &mut Harness) {
        let counters: Vec<(TenantId, i128)> = harness.backlogged();
        let before = std::mem::take(&mut self.begun);
        for (index, &(first, a)) in counters.iter().enumerate() {
            for &(second, b) in &counters[index + 1..] {
                let begun = before.get(&(first, second)).copied().unwrap_or(a - b);
                self.begun.insert((first, second), begun);
                self.most = self.most.max((a - b - begun).unsigned_abs() as u64);
            }
        }
    }
}

#[test]
fn no_tenant_starves_and_backlogged_tenants_have_had_like_service() {
    let base = rand::random::<u32>();
    let (mut most, mut preemptions) = (0.0_f64, 0);
    for seed in (u64::from(base)..).take((ARRIVALS / ARRIVALS_OF_RUN) as usize) {
        println!("seed {seed}");
        let mut book = Book::default();
        let harness = simulate(seed, !seed.is_multiple_of(8), tenant, |harness, _| book.note(harness));
        let stats = harness.scheduler.stats();
        assert_eq!((stats.running_samples, stats.waiting_samples), (0, 0));
        assert_eq!(stats.free_blocks, stats.total_blocks);
        for (key, result) in &harness.results {
            assert!(result.done != result.aborted, "{key:?} has ended once");
        }
        if seed.is_multiple_of(16) {
            for (key, result) in &harness.results {
                compare_with_alone(&harness.groups[key], result, harness.executor.repeats);
            }
        }
        // The paper's bound: twice the service that a tenant may have above that of another, which is all that its
        // running sequences have left when the other's next one is due, and the first tokens of a group.
        let SchedulerConfig { max_num_seqs, max_model_len, .. } = harness.scheduler.config;
        let bound = 2 * 2 * max_num_seqs * (max_model_len + MOST_SAMPLES);
        most = most.max(book.most as f64 / bound as f64);
        assert!(book.most <= bound as u64, "{} of {bound}", book.most);
        preemptions += stats.preemptions;
    }
    println!("{most:.3} of the bound, {preemptions} preemptions");
    assert!(most > 0.02 && preemptions > 1000, "too little turmoil");
}

#[test]
fn one_tenant_is_served_as_if_there_were_none() {
    let base = rand::random::<u32>();
    for seed in (u64::from(base)..).take(20) {
        println!("seed {seed}");
        let [plans, named] = ["", "the-only-one"].map(|name| {
            let mut plans = Vec::new();
            let name = Tenant::parse(name, "tenant").expect("a name");
            simulate(seed, true, |_| name.clone(), |_, plan| plans.push(format!("{plan:?}")));
            plans
        });
        assert_eq!(plans, named);
    }
}
