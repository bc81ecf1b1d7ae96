//! Cases of the service Control, of health and of reflection.

use rollout_server::server::pb;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::{ExtensionRequest, ServerReflectionRequest};

use super::dice::Dice;
use super::mutate::{raw_call, rough};
use super::run::{Case, Facts, Target};
use super::wire::{Call, End};
use super::{rollout, wire};

/// A call with a valid message, which is sent in odd ways or with changed bytes.
pub fn call<M: prost::Message + std::fmt::Debug>(dice: &mut Dice, method: &'static str, message: &M) -> Call {
    if dice.one_in(3) {
        return raw_call(dice, method, message.encode_to_vec());
    }
    let mut call = Call::of(method, message);
    rough(dice, &mut call);
    call
}

pub fn info(dice: &mut Dice) -> Call {
    call(dice, "rollout.v1.Control/GetInfo", &pb::GetInfoRequest {})
}

pub fn status(dice: &mut Dice) -> Call {
    call(dice, "rollout.v1.Control/GetStatus", &pb::GetStatusRequest {})
}

pub fn reset_prefix_cache(dice: &mut Dice) -> Call {
    call(dice, "rollout.v1.Control/ResetPrefixCache", &pb::ResetPrefixCacheRequest {})
}

/// Gives a deadline to an order that waits for requests to end, so that it does not wait for ever.
pub fn patient(mut call: Call) -> Call {
    call.timeout.get_or_insert_with(|| "200m".into());
    call
}

pub fn sleep(dice: &mut Dice) -> Call {
    let request = pb::SleepRequest { level: dice.enumeration(2), mode: dice.enumeration(3) };
    patient(call(dice, "rollout.v1.Control/Sleep", &request))
}

pub fn wake(dice: &mut Dice) -> Call {
    let tags = dice.list(3, |dice| dice.enumeration(1).wrapping_add(1));
    let request = pb::WakeRequest { tags, reload: dice.coin() };
    patient(call(dice, "rollout.v1.Control/Wake", &request))
}

pub fn pause(dice: &mut Dice) -> Call {
    let request = pb::PauseRequest { mode: dice.enumeration(3) };
    patient(call(dice, "rollout.v1.Control/Pause", &request))
}

pub fn resume(dice: &mut Dice) -> Call {
    patient(call(dice, "rollout.v1.Control/Resume", &pb::ResumeRequest {}))
}

/// An order that brings the server into some lifecycle state, whatever state it is in.
pub fn order(dice: &mut Dice) -> Call {
    let make = dice.pick(&[sleep as fn(&mut Dice) -> Call, wake, wake, pause, resume, resume]);
    let mut order = make(dice);
    (order.end, order.leave) = (End::Closed, wire::Leave::Never);
    order
}

/// A case with the call that `make` makes, in some lifecycle state and beside running requests.
fn beside_work(dice: &mut Dice, make: fn(&mut Dice) -> Call) -> Case {
    let mut prelude = Vec::new();
    if dice.coin() {
        prelude.push(order(dice));
    }
    let mut calls: Vec<Call> = (0..dice.below(3)).map(|_| rollout::small_generate(dice)).collect();
    calls.push(make(dice));
    if dice.one_in(4) {
        calls.push(make(dice));
    }
    Case::at_once(prelude, calls)
}

pub fn health(dice: &mut Dice) -> Call {
    let service = dice.name(&["", "rollout.v1.Rollout", "rollout.v1.Weights", "grpc.health.v1.Health", "nobody"]);
    let method = dice.pick(&["grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"]);
    let mut call = call(dice, method, &HealthCheckRequest { service });
    if method.ends_with("Watch") {
        call.leave = wire::Leave::AfterMessages(1);
        call.timeout.get_or_insert_with(|| "100m".into());
    }
    call
}

fn reflect_one(dice: &mut Dice) -> ServerReflectionRequest {
    let name = dice.name(&["rollout.v1.Rollout", "rollout.v1.GenerateRequest", "rollout/v1/control.proto", "nobody"]);
    let message_request = match dice.below(6) {
        0 => None,
        1 => Some(MessageRequest::FileByFilename(name)),
        2 => Some(MessageRequest::FileContainingSymbol(name)),
        3 => {
            let extension = ExtensionRequest { containing_type: name, extension_number: dice.u32() as i32 };
            Some(MessageRequest::FileContainingExtension(extension))
        }
        4 => Some(MessageRequest::AllExtensionNumbersOfType(name)),
        _ => Some(MessageRequest::ListServices(name)),
    };
    ServerReflectionRequest { host: dice.name(&["", "localhost"]), message_request }
}

pub fn reflection(dice: &mut Dice) -> Call {
    const METHOD: &str = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let one = reflect_one(dice);
    let mut call = call(dice, METHOD, &one);
    for _ in 0..dice.below(4) {
        let next = reflect_one(dice);
        call.body.extend(Call::of(METHOD, &next).body);
    }
    call.timeout.get_or_insert_with(|| "300m".into());
    call
}

/// Codes that every method may answer with.
pub const ANY: &[Code] = &[Code::InvalidArgument, Code::DeadlineExceeded];
/// Codes that requests and orders may answer with, depending on the server's state.
pub const STATES: &[Code] = &[
    Code::InvalidArgument,
    Code::DeadlineExceeded,
    Code::FailedPrecondition,
    Code::ResourceExhausted,
    Code::Aborted,
    Code::NotFound,
    Code::AlreadyExists,
];

/// A target with batches of the usual size and no flags.
pub fn target(name: &'static str, codes: &'static [Code], cases: u64, make: fn(&mut Dice, &Facts) -> Case) -> Target {
    Target { name, codes, cases, batch: 50, make, flags: &[] }
}

#[tokio::test]
async fn get_info() {
    target("get_info", ANY, 300, |dice, _| info(dice).into()).run().await;
}

#[tokio::test]
async fn get_status() {
    target("get_status", STATES, 300, |dice, _| beside_work(dice, status)).run().await;
}

#[tokio::test]
async fn reset_the_prefix_cache() {
    target("reset_the_prefix_cache", STATES, 300, |dice, _| beside_work(dice, reset_prefix_cache)).run().await;
}

#[tokio::test]
async fn sleep_at_any_level() {
    target("sleep_at_any_level", STATES, 200, |dice, _| beside_work(dice, sleep)).run().await;
}

#[tokio::test]
async fn wake_by_any_tags() {
    target("wake_by_any_tags", STATES, 200, |dice, _| beside_work(dice, wake)).run().await;
}

#[tokio::test]
async fn pause_in_any_mode() {
    target("pause_in_any_mode", STATES, 200, |dice, _| beside_work(dice, pause)).run().await;
}

#[tokio::test]
async fn resume_in_any_state() {
    target("resume_in_any_state", STATES, 200, |dice, _| beside_work(dice, resume)).run().await;
}

#[tokio::test]
async fn health_of_any_service() {
    const CODES: &[Code] = &[Code::InvalidArgument, Code::DeadlineExceeded, Code::NotFound];
    target("health_of_any_service", CODES, 300, |dice, _| health(dice).into()).run().await;
}

#[tokio::test]
async fn reflection_of_anything() {
    const CODES: &[Code] = &[Code::InvalidArgument, Code::DeadlineExceeded, Code::NotFound];
    target("reflection_of_anything", CODES, 300, |dice, _| reflection(dice).into()).run().await;
}
