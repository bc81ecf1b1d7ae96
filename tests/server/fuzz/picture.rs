//! Files of pictures with changed bytes: each becomes a picture, or an error that says why not.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rollout_server::error::Error;
use rollout_server::pixels::{Header, Preprocessor, Sizing};
use rollout_server::types::Picture;

use super::dice::Dice;
use super::run::Options;

/// Cases between two looks at the clock.
const BATCH: u64 = 100;

/// The files of tests/fixtures/pixels.json.
pub fn files() -> Vec<Vec<u8>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pixels.json");
    let fixture: serde_json::Value = serde_json::from_slice(&std::fs::read(path).expect("the fixture")).expect("JSON");
    let cases = ["pictures", "jpegs", "jpegs", "jpegs"].map(|list| fixture[list].as_array().expect("a list"));
    cases
        .into_iter()
        .flatten()
        .map(|case| BASE64_STANDARD.decode(case["file"].as_str().expect("a file")).unwrap())
        .collect()
}

/// A PNG chunk with its checksum, so that the decoder looks at what is in it.
fn chunk(kind: &[u8], data: &[u8]) -> Vec<u8> {
    let step = |crc: u32| (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    let mut chunk = [&(data.len() as u32).to_be_bytes(), kind, data].concat();
    let crc = !chunk[4..].iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)));
    chunk.extend(crc.to_be_bytes());
    chunk
}

/// The chunks of a PNG file: type and data.
fn chunks(file: &[u8]) -> Vec<([u8; 4], Vec<u8>)> {
    let (mut at, mut found) = (8, Vec::new());
    while at + 8 <= file.len() {
        let length = u32::from_be_bytes(file[at..at + 4].try_into().unwrap()) as usize;
        let kind = file[at + 4..at + 8].try_into().unwrap();
        found.push((kind, file[at + 8..at + 8 + length].to_vec()));
        at += length + 12;
    }
    found
}

/// Changes some bytes, cuts some out, or puts some in.
fn change(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len() + 1);
        let end = (at + dice.below(30)).min(bytes.len());
        match (dice.below(5), bytes.get_mut(at)) {
            (0 | 1, Some(byte)) => *byte = dice.u32() as u8,
            (2, Some(byte)) => *byte ^= 1 << dice.below(8),
            (3, _) => drop(bytes.drain(at..end)),
            _ => drop(bytes.splice(at..at, (0..dice.below(6)).map(|_| dice.u32() as u8).collect::<Vec<u8>>())),
        }
    }
}

/// A PNG file with changed chunks, whose checksums are right again; some chunks are left out, repeated or made up.
fn changed_png(dice: &mut Dice, file: &[u8]) -> Vec<u8> {
    const KINDS: &[&[u8]] = &[
        b"tRNS", b"PLTE", b"eXIf", b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"gAMA", b"cICP", b"sBIT", b"bKGD", b"IDAT",
        b"IHDR", b"acTL", b"abcD", b"IEND",
    ];
    let mut made = file[..8].to_vec();
    for (kind, mut data) in chunks(file) {
        if dice.one_in(6) {
            let data: Vec<u8> = (0..dice.below(60)).map(|_| dice.u32() as u8).collect();
            made.extend(chunk(dice.pick(KINDS), &data));
        }
        if dice.one_in(3) {
            change(dice, &mut data);
        }
        if kind == *b"IHDR" && data.len() == 13 {
            // Sizes stay small, so that many cases are decoded; limits have tests of their own.
            (data[0], data[1], data[4], data[5]) = (0, 0, 0, 0);
        }
        let times = if dice.one_in(20) { dice.below(3) } else { 1 };
        made.extend(chunk(&kind, &data).repeat(times));
    }
    made
}

/// One of `files`, mostly changed.
pub fn file_of(dice: &mut Dice, files: &[Vec<u8>]) -> Vec<u8> {
    let mut file = files[dice.below(files.len())].clone();
    match dice.below(8) {
        0 => {}
        1..=5 if file[0] == 0x89 => file = changed_png(dice, &file),
        _ => change(dice, &mut file),
    }
    file
}

fn made(file: &[u8], preprocessor: &Preprocessor) -> Result<Picture, Error> {
    let header = Header::read("images[0]", file)?;
    header.decoded_bytes(preprocessor)?;
    header.decode(file, preprocessor)
}

#[test]
fn picture_files() {
    let options = Options::read(3000);
    let files = files();
    let sizings = [
        Sizing::Area { min_pixels: 3136, max_pixels: 28 * 28 * 8 },
        Sizing::Tiles { side: 28, min_tiles: 1, max_tiles: 6 },
    ];
    let mut tally = BTreeMap::<&str, u64>::new();
    let mut from = options.cases.start;
    while options.goes_on(from) {
        let to = options.cases.end.min(from + BATCH);
        for case in from..to {
            let mut dice = Dice::of(options.seed, "picture_files", case);
            let file = file_of(&mut dice, &files);
            let sizing = dice.pick(&sizings);
            let (mean, std) = ([0.5; 3], [0.5; 3]);
            let preprocessor =
                Preprocessor { sizing, patch_size: 14, merge_size: 2, temporal_patch_size: 2, mean, std };
            let end = match made(&file, &preprocessor) {
                Ok(_) => "pictures",
                Err(Error::InvalidArgument { .. }) => "refused",
                Err(error) => panic!("{}: {error:?}", options.again(&case.to_string())),
            };
            *tally.entry(end).or_default() += 1;
        }
        from = to;
    }
    println!("fuzz picture_files: {} cases: {tally:?}", from - options.cases.start);
    let cases: u64 = tally.values().sum();
    assert!(cases < 100 || tally.values().all(|count| count * 10 > cases), "cases that test little: {tally:?}");
}
