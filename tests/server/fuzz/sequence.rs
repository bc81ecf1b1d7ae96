//! Several clients at the same time, each with a random sequence of calls of all methods.

use super::control::{health, info, pause, reflection, reset_prefix_cache, resume, sleep, status, wake};
use super::dice::Dice;
use super::push::update;
use super::rollout::{abort, generate, score, small_generate};
use super::run::{Case, Facts, Target};
use super::weights::{CODES, cancel_update, checksum, list_adapters, list_parameters, remove_adapter};
use super::wire::Call;

fn any(dice: &mut Dice, facts: &Facts) -> Call {
    let mut call = match dice.below(24) {
        0..4 => small_generate(dice),
        4..6 => generate(dice),
        6..8 => score(dice),
        8 => abort(dice),
        9..12 => update(dice, facts),
        12 => checksum(dice, facts),
        13 => remove_adapter(dice),
        14 => list_adapters(dice),
        15 => reset_prefix_cache(dice),
        16 => sleep(dice),
        17 | 18 => wake(dice),
        19 => pause(dice),
        20 | 21 => resume(dice),
        22 => status(dice),
        _ => dice.pick(&[info as fn(&mut Dice) -> Call, list_parameters, cancel_update, health, reflection])(dice),
    };
    // A call that waits for a policy or for Resume must not wait for ever, and a pushed policy may compute NaN.
    call.timeout.get_or_insert_with(|| "300m".into());
    call.check = None;
    call
}

fn sequences(dice: &mut Dice, facts: &Facts) -> Case {
    let mut sequence = |_| (0..8).map(|_| any(dice, facts)).collect();
    Case { prelude: Vec::new(), clients: (0..5).map(&mut sequence).collect() }
}

#[tokio::test]
async fn clients_at_the_same_time() {
    let (cases, batch) = (60, 5);
    let name = "clients_at_the_same_time";
    Target { name, codes: CODES, cases, batch, make: sequences, flags: &[] }.run().await;
}

#[tokio::test]
async fn clients_of_two_ranks() {
    let (cases, batch) = (30, 5);
    let flags = &["--tp", "2", "--staging-bytes", "600KiB"];
    Target { name: "clients_of_two_ranks", codes: CODES, cases, batch, make: sequences, flags }.run().await;
}
