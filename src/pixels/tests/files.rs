//! Files of the fixtures, and files made by hand.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use super::super::{Header, Preprocessor, Sizing};
use crate::error::Result;
use crate::types::Picture;

pub fn fixture() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pixels.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn number(value: &Value) -> u32 {
    value.as_u64().unwrap().try_into().unwrap()
}

/// The bytes of the file that `case` has in base64.
pub fn file_of(case: &Value, name: &str) -> Vec<u8> {
    BASE64_STANDARD.decode(case[name].as_str().unwrap()).unwrap()
}

/// The file of the fixtures' PNG or JPEG with this name.
pub fn named(list: &str, name: &str) -> Vec<u8> {
    let fixture = fixture();
    let case = fixture[list].as_array().unwrap().iter().find(|case| case["name"] == name);
    file_of(case.unwrap_or_else(|| panic!("no {name} in {list}")), "file")
}

/// A preprocessor that leaves pictures as they are whose sides are multiples of 28.
pub fn plain() -> Preprocessor {
    let sizing = Sizing::Area { min_pixels: 1, max_pixels: 1 << 40 };
    let (mean, std) = ([0.5; 3], [0.5; 3]);
    Preprocessor { sizing, patch_size: 14, merge_size: 2, temporal_patch_size: 2, mean, std }
}

pub fn decoded(bytes: &[u8], preprocessor: &Preprocessor) -> Result<Picture> {
    Header::read("image", bytes)?.decode(bytes, preprocessor)
}

/// A PNG chunk with its checksum.
pub fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut chunk = (data.len() as u32).to_be_bytes().to_vec();
    chunk.extend(kind);
    chunk.extend(data);
    let checksum = crc32(&chunk[4..]);
    chunk.extend(checksum.to_be_bytes());
    chunk
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

/// A PNG file of these chunks after IHDR and before IEND.
pub fn png(width: u32, height: u32, depth: u8, colour: u8, chunks: &[Vec<u8>]) -> Vec<u8> {
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    header.extend([depth, colour, 0, 0, 0]);
    let start = [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(b"IHDR", &header)].concat();
    [start, chunks.concat(), chunk(b"IEND", b"")].concat()
}

/// A JPEG segment.
pub fn segment(marker: u8, data: &[u8]) -> Vec<u8> {
    [&[0xff, marker], &(data.len() as u16 + 2).to_be_bytes()[..], data].concat()
}

/// A JPEG file of a frame with this marker and these components, and a scan without data.
pub fn jpeg(marker: u8, bits: u8, width: u16, height: u16, components: u8) -> Vec<u8> {
    let mut frame = vec![bits];
    frame.extend(height.to_be_bytes());
    frame.extend(width.to_be_bytes());
    frame.push(components);
    frame.extend((1..=components).flat_map(|id| [id, 0x11, 0]));
    let mut scan = vec![components];
    scan.extend((1..=components).flat_map(|id| [id, 0]));
    scan.extend([0, 63, 0]);
    [vec![0xff, 0xd8], segment(marker, &frame), segment(0xda, &scan), vec![0xff, 0xd9]].concat()
}

/// `file` with `insert` after its first `at` bytes.
pub fn with(file: &[u8], at: usize, insert: &[u8]) -> Vec<u8> {
    [&file[..at], insert, &file[at..]].concat()
}

/// EXIF that says `orientation` and nothing else.
pub fn exif(orientation: u8) -> Vec<u8> {
    let entry = [1, 0x12, 0, 3, 0, 0, 0, 1, 0, orientation, 0, 0];
    [b"MM\0*\0\0\0\x08\0\x01", &entry[..], &[0; 4]].concat()
}
