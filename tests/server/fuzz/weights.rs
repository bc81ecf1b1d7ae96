//! Cases of the service Weights.

use rollout_server::server::pb;
use tonic::Code;

use super::control::{ANY, call, order, patient, target};
use super::dice::Dice;
use super::push::update;
use super::rollout::small_generate;
use super::run::{Case, Facts, Target};
use super::wire::Call;

const ADAPTERS: &[&str] = &["student", "teacher", "third", "nobody"];
/// Codes that pushes and calls about adapters may answer with, in any state.
pub const CODES: &[Code] = &[
    Code::InvalidArgument,
    Code::DeadlineExceeded,
    Code::FailedPrecondition,
    Code::ResourceExhausted,
    Code::Aborted,
    Code::NotFound,
    Code::DataLoss,
    Code::AlreadyExists,
];

pub fn list_parameters(dice: &mut Dice) -> Call {
    call(dice, "rollout.v1.Weights/ListParameters", &pb::ListParametersRequest {})
}

pub fn list_adapters(dice: &mut Dice) -> Call {
    call(dice, "rollout.v1.Weights/ListAdapters", &pb::ListAdaptersRequest {})
}

pub fn checksum(dice: &mut Dice, facts: &Facts) -> Call {
    let names: Vec<&str> = facts.parameters.iter().map(|parameter| parameter.name.as_str()).collect();
    let names = dice.list(5, |dice| dice.name(&names));
    call(dice, "rollout.v1.Weights/Checksum", &pb::ChecksumRequest { names })
}

pub fn remove_adapter(dice: &mut Dice) -> Call {
    let name = dice.name(ADAPTERS);
    let expected_generation = if dice.one_in(3) { dice.maybe(Dice::u64) } else { None };
    patient(call(dice, "rollout.v1.Weights/RemoveAdapter", &pb::RemoveAdapterRequest { name, expected_generation }))
}

pub fn cancel_update(dice: &mut Dice) -> Call {
    let id = dice.maybe(|dice| if dice.coin() { dice.below(50) as u64 } else { dice.u64() });
    call(dice, "rollout.v1.Weights/CancelUpdate", &pb::CancelUpdateRequest { id })
}

/// A case with requests beside pushes. Their results may be NaN, as the pushed policy may compute NaN.
fn beside(dice: &mut Dice, calls: Vec<Call>) -> Case {
    let mut prelude = Vec::new();
    if dice.one_in(3) {
        prelude.push(order(dice));
    }
    let work = (0..dice.below(3)).map(|_| {
        let mut request = small_generate(dice);
        request.check = None;
        request
    });
    let calls = work.collect::<Vec<_>>().into_iter().chain(calls).collect();
    Case::at_once(prelude, calls)
}

#[tokio::test]
async fn update_with_anything() {
    let make = |dice: &mut Dice, facts: &Facts| {
        let pushes = (0..dice.pick(&[1, 1, 1, 2])).map(|_| update(dice, facts)).collect();
        beside(dice, pushes)
    };
    target("update_with_anything", CODES, 1000, make).run().await;
}

/// Pushes to a server with two ranks and little room for pushes.
#[tokio::test]
async fn update_of_two_ranks() {
    let make = |dice: &mut Dice, facts: &Facts| {
        let push = vec![update(dice, facts)];
        beside(dice, push)
    };
    let flags = &["--tp", "2", "--staging-bytes", "600KiB"];
    Target { name: "update_of_two_ranks", codes: CODES, cases: 300, batch: 50, make, flags }.run().await;
}

#[tokio::test]
async fn parameters_are_listed() {
    let make = |dice: &mut Dice, _: &Facts| list_parameters(dice).into();
    target("parameters_are_listed", ANY, 300, make).run().await;
}

#[tokio::test]
async fn checksums_of_anything() {
    let make = |dice: &mut Dice, facts: &Facts| {
        let calls = (0..1 + dice.below(3)).map(|_| checksum(dice, facts)).collect();
        beside(dice, calls)
    };
    target("checksums_of_anything", CODES, 200, make).run().await;
}

#[tokio::test]
async fn adapters_are_listed() {
    let make = |dice: &mut Dice, facts: &Facts| {
        let mut calls = vec![list_adapters(dice)];
        if dice.one_in(3) {
            calls.push(update(dice, facts));
        }
        beside(dice, calls)
    };
    target("adapters_are_listed", CODES, 200, make).run().await;
}

#[tokio::test]
async fn adapters_are_removed() {
    let make = |dice: &mut Dice, facts: &Facts| {
        let mut calls = vec![remove_adapter(dice)];
        if dice.coin() {
            calls.push(update(dice, facts));
        }
        beside(dice, calls)
    };
    target("adapters_are_removed", CODES, 300, make).run().await;
}

#[tokio::test]
async fn updates_are_cancelled() {
    let make = |dice: &mut Dice, facts: &Facts| {
        let calls = vec![update(dice, facts), cancel_update(dice), cancel_update(dice)];
        beside(dice, calls)
    };
    target("updates_are_cancelled", CODES, 300, make).run().await;
}
