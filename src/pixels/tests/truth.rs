//! Pixels and sizes that transformers and Pillow have, recorded in tests/fixtures/pixels.json.

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::super::{Header, PictureSize, Preprocessor, Sizing, smart_resize};
use super::files::{decoded, file_of, fixture, number, plain};
use crate::types::Picture;

#[test]
fn pictures_are_those_of_transformers_bit_for_bit() {
    let fixture = fixture();
    let pictures = fixture["pictures"].as_array().unwrap();
    assert!(pictures.len() > 40);
    let mut different = Vec::new();
    for case in pictures {
        let preprocessor = Preprocessor::parse("preprocessor_config.json", &case["preprocessor"]).unwrap();
        let picture = decoded(&file_of(case, "file"), &preprocessor).unwrap();
        let expected = ["width", "height", "tiles"].map(|name| number(&case[name]));
        let digest: String = Sha256::digest(picture.rgb()).iter().map(|byte| format!("{byte:02x}")).collect();
        if [picture.width(), picture.height(), picture.tiles()] != expected || case["sha256"] != *digest {
            different.push(case["name"].clone());
        }
    }
    assert!(different.is_empty(), "other pixels than transformers: {different:?}");
}

#[test]
fn jpegs_are_near_to_those_of_libjpeg_turbo() {
    let fixture = fixture();
    for case in fixture["jpegs"].as_array().unwrap() {
        let [ours, theirs] = ["file", "png"].map(|name| decoded(&file_of(case, name), &plain()).unwrap());
        let size = |picture: &Picture| (picture.width(), picture.height());
        assert_eq!(size(&ours), size(&theirs));
        let differences = ours.rgb().iter().zip(theirs.rgb().iter()).map(|(a, b)| a.abs_diff(*b));
        let (most, sum) = differences.fold((0, 0), |(most, sum), d| (d.max(most), sum + u64::from(d)));
        let mean = sum as f64 / ours.rgb().len() as f64;
        println!("{}: at most {most}, mean {mean:.3}", case["name"]);
        assert!(most <= 5 && mean <= 0.4, "{}: at most {most}, mean {mean}", case["name"]);
    }
}

#[test]
fn sizes_are_those_of_qwens_processor() {
    let fixture = fixture();
    let sizes = fixture["sizes"].as_array().unwrap();
    assert!(sizes.len() > 200);
    for case in sizes {
        let [width, height, min, max, to_width, to_height] = numbers(case);
        let size = smart_resize("image", (width, height), 28, min.into(), max.into()).unwrap();
        assert_eq!(size, (to_width, to_height), "{width} by {height} within {min} and {max}");
    }
    for (width, height) in [(1, 201), (201, 1), (0, 1), (1, 0), (u32::MAX, 3)] {
        let error = smart_resize("images[2]", (width, height), 28, 3136, 1_003_520).unwrap_err().to_string();
        assert!(error.starts_with("images[2]: ") && error.contains("200 times"), "{error}");
    }
}

#[test]
fn grids_of_tiles_are_those_of_internvls_processor() {
    let fixture = fixture();
    let sizing = Sizing::Tiles { side: 448, min_tiles: 1, max_tiles: 12 };
    let preprocessor = Preprocessor { sizing, ..plain() };
    for case in fixture["grids"].as_array().unwrap() {
        let [width, height, columns, rows] = numbers(case);
        let fit = preprocessor.fit("image", (width, height)).unwrap();
        assert_eq!((fit.columns, fit.canvas), (columns, (448 * columns, 448 * rows)), "{width} by {height}");
        let tiles = if columns * rows == 1 { 1 } else { columns * rows + 1 };
        assert_eq!(fit.size, PictureSize { width: 448, height: 448, tiles });
        assert_eq!(preprocessor.tokens("image", fit.size).unwrap(), 256 * tiles as usize);
    }
}

#[test]
fn the_size_is_known_before_anything_is_decoded() {
    for case in fixture()["pictures"].as_array().unwrap() {
        let preprocessor = Preprocessor::parse("preprocessor_config.json", &case["preprocessor"]).unwrap();
        let file = file_of(case, "file");
        let header = Header::read("image", &file).unwrap();
        let size = preprocessor.size(header.field(), header.size()).unwrap();
        assert_eq!([size.width, size.height, size.tiles], ["width", "height", "tiles"].map(|name| number(&case[name])));
        assert!(header.decoded_bytes(&preprocessor).unwrap() >= size.bytes());
    }
}

fn numbers<const N: usize>(list: &Value) -> [u32; N] {
    let numbers: Vec<u32> = list.as_array().unwrap().iter().map(number).collect();
    numbers.try_into().unwrap()
}
