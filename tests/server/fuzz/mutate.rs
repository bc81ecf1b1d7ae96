//! Bytes that are almost a message, and streams that are almost gRPC.

use bytes::Bytes;

use super::dice::Dice;
use super::wire::{Call, End, Leave, envelope};

/// `value` as a varint of the fewest bytes.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// `inner` wrapped several times in a field of the same number.
fn nested(dice: &mut Dice, inner: Vec<u8>) -> Vec<u8> {
    let key = (dice.below(15) as u8 + 1) << 3 | 2;
    let depth = dice.pick(&[2, 90, 101, 3_000]);
    (0..depth).fold(inner, |inner, _| [vec![key], varint(inner.len() as u64), inner].concat())
}

/// Groups that open and do not close. Decoders skip them recursively.
fn groups(dice: &mut Dice) -> Vec<u8> {
    let key = (dice.below(15) as u8 + 1) << 3 | 3;
    vec![key; dice.pick(&[1, 99, 150, 50_000])]
}

fn change(dice: &mut Dice, mut bytes: Vec<u8>) -> Vec<u8> {
    let at = dice.below(bytes.len() + 1);
    let to = at + dice.below(bytes.len() - at + 1);
    let end = bytes.len();
    match dice.below(12) {
        0 if at < end => bytes[at] ^= 1 << dice.below(8),
        1 if at < end => bytes[at] = dice.pick(&[0, 1, 0x7f, 0x80, 0xff]),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..to)),
        4 => {
            let part = bytes[at..to].to_vec();
            bytes.splice(at..at, part.repeat(dice.pick(&[1, 2, 50])));
        }
        5 => drop(bytes.splice(at..at, dice.bytes(16))),
        // Puts a wrong number, or a wrong length, before what follows.
        6 if at < end => drop(bytes.splice(at..=at, varint(dice.u64()))),
        // Changes the wire type of a byte that may be a key.
        7 if at < end => bytes[at] ^= dice.below(7) as u8 + 1,
        8 => return nested(dice, bytes),
        9 => bytes.extend(groups(dice)),
        // Appends a field with an unknown number.
        10 => bytes.extend([vec![0xfa, 0x3f], varint(dice.u64() >> 50), dice.bytes(64)].concat()),
        _ => bytes.extend_from_within(at..to),
    }
    bytes
}

/// The bytes of a message, changed in a few places.
pub fn mutated(dice: &mut Dice, mut bytes: Vec<u8>) -> Vec<u8> {
    for _ in 0..1 + dice.below(3) {
        bytes = change(dice, bytes);
    }
    bytes
}

/// A call with these bytes, with a valid gRPC envelope or a broken one.
pub fn raw_call(dice: &mut Dice, method: &'static str, message: Vec<u8>) -> Call {
    let message = if dice.one_in(4) { message } else { mutated(dice, message) };
    let mut body = envelope(&message).to_vec();
    match dice.below(12) {
        0 => body[0] = dice.pick(&[1, 2, 255]),
        1 => body[1..5].copy_from_slice(&dice.u32().to_be_bytes()),
        2 => body[4] = body[4].wrapping_add(dice.pick(&[1, 255])),
        3 => body.truncate(dice.below(body.len() + 1)),
        4 => body.extend_from_within(..),
        5 => body.extend(dice.bytes(9)),
        6 => body.clear(),
        _ => {}
    }
    let what = format!("of {} bytes of a message", message.len());
    let body = if body.is_empty() { Vec::new() } else { vec![body.into()] };
    let mut call = Call { what, is_mutated: true, ..Call::raw(method, body) };
    rough(dice, &mut call);
    // The bytes may have become a request that waits, or that takes long.
    call.timeout.get_or_insert_with(|| "250m".into());
    call
}

/// Makes the call's client cut its body and end it in ways that a good client would not.
pub fn rough(dice: &mut Dice, call: &mut Call) {
    if dice.one_in(4) {
        let whole: Bytes = call.body.concat().into();
        let mut cuts = dice.list(4, |dice| dice.below(whole.len() + 1));
        cuts.extend([0, whole.len()]);
        cuts.sort_unstable();
        // Empty frames are left out, because the server counts them over the life of a connection and then ends it.
        cuts.dedup();
        call.body = cuts.windows(2).map(|cut| whole.slice(cut[0]..cut[1])).collect();
    }
    if dice.one_in(12) {
        call.end = End::Broken;
    }
    if dice.one_in(8) {
        call.timeout = Some(timeout(dice));
    }
    if dice.one_in(12) {
        call.leave = leave(dice);
    }
}

/// A value of grpc-timeout from a nanosecond to three years, seldom malformed.
fn timeout(dice: &mut Dice) -> String {
    let good = ["1n", "1u", "50u", "300u", "999u", "2m", "3m", "20m", "150m"];
    if dice.is_hostile() {
        return dice.pick(&["", "S", "x", "-1S", "1.5S", "123456789S", "0n", "0S", "1 S", "00000000H"]).into();
    }
    dice.pick(&good).into()
}

/// When the client hangs up, early or late.
fn leave(dice: &mut Dice) -> Leave {
    let micros = dice.pick(&[0, 50, 300, 1_000, 5_000, 20_000]);
    if dice.coin() {
        Leave::After(std::time::Duration::from_micros(micros))
    } else {
        Leave::AfterMessages(1 + dice.below(4))
    }
}
