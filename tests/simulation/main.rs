//! Simulates the engine with all that serves below it (scheduler, cache, updates, sleep, adapters, leases, drains) in
//! one thread on a virtual clock, with random clients and faults, each run from one integer.
//!
//! `make test` runs the same 150 seeds each time; `make simulate` runs others for as long as asked. A failure prints
//! the seed that repeats it. `world` is a run; `clients` and `pushes` are what its clients do, `faults` what goes
//! wrong. `executor` takes the device's place and `model` the model's: unlike the one in the engine's unit tests,
//! which sees private types, it samples by what it reads of the KV cache. `requests` and `book` say what must be true
//! of every answer, and `policy` which weights clients may expect. `mutants` plants bugs that a run must find.

mod book;
mod calls;
mod catalog;
mod clients;
mod dice;
mod executor;
mod faults;
mod model;
mod mutants;
mod options;
mod policy;
mod pushes;
mod requests;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use catalog::Catalog;
use faults::{Fault, PLANNED_PANIC};
use options::Options;
use world::{Summary, World};

/// Least number of kinds of faults that a bounded run must have met, of those that there are.
const LEAST_FAULTS: usize = 20;

/// Panics that a run causes on purpose print nothing.
fn silence_planned_panics() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&PLANNED_PANIC) {
            hook(info);
        }
    }));
}

#[test]
fn the_engine_keeps_its_invariants_whatever_happens() {
    silence_planned_panics();
    let (options, catalog, started) = (Options::read(), Arc::new(Catalog::new()), Instant::now());
    let (mut runs, mut sum) = (0, Summary::default());
    for seed in options.seeds() {
        let run = catch_unwind(AssertUnwindSafe(|| World::new(seed, &catalog).run()));
        let Ok(summary) = run else {
            let (steps, took) = (sum.steps, started.elapsed());
            panic!("seed {seed} fails, after {steps} steps in {took:.1?}: repeat it with SIMULATE_SEED={seed}");
        };
        runs += 1;
        sum.add(&summary);
    }
    let seconds = started.elapsed().as_secs_f64();
    let Summary { steps, turns, requests, calls, faults } = &sum;
    println!(
        "{runs} runs from seed {}: {steps} steps in {seconds:.1} s, {:.0} a second",
        options.first,
        *steps as f64 / seconds
    );
    println!("{turns} turns, {requests} requests, {calls} calls");
    Fault::ALL.iter().for_each(|&fault| println!("{fault:?}: {}", faults.of(fault)));
    let is_bounded = options.is_bounded();
    assert!(!is_bounded || faults.kinds() >= LEAST_FAULTS, "only {} kinds of faults happened", faults.kinds());
}
