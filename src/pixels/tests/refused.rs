//! Files that are refused, and that none of them ends the process.

use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::super::{Header, Preprocessor};
use super::files::{chunk, decoded, exif, jpeg, named, plain, png, segment, with};
use crate::error::Error;

/// Where chunks and segments are inserted: after IHDR, and after the start of a JPEG file.
const AFTER_IHDR: usize = 33;
const AFTER_START: usize = 2;

/// The message of the error that `file` gets before it is decoded.
fn refused(file: &[u8]) -> String {
    let error = Header::read("images[0]", file).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
    let message = error.to_string();
    assert!(message.starts_with("images[0]: "), "{message}");
    message
}

#[test]
fn other_formats_are_named() {
    for (file, name) in [
        (&b"GIF89a\x01\0"[..], "a GIF file"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "a WebP file"),
        (b"BM......", "a BMP file"),
        (b"II*\0....", "a TIFF file"),
        (b"\0\0\0\x1cftypavif", "an AVIF file"),
        (b"\0\0\0\x1cftypheic", "a HEIC file"),
        (b"", "no bytes"),
        (b"\x89PNG", "an unknown format, which starts with [89, 50, 4e, 47]"),
        (b"\xff\xd8", "an unknown format"),
    ] {
        let message = refused(file);
        assert!(message.contains(name) && message.contains("PNG or JPEG"), "{message}");
    }
}

#[test]
fn pictures_beyond_a_limit_are_refused_by_their_header() {
    let empty = [chunk(b"IDAT", b"")];
    for (width, height, part) in [
        (16000, 16000, "at most 67108864 in all"),
        (16385, 100, "at most 16384"),
        (100, u32::MAX, "at most 16384"),
        (0, 5, "at least 1"),
        (5, 0, "at least 1"),
        (20, 4001, "200 times"),
    ] {
        let message = refused(&png(width, height, 8, 2, &empty));
        assert!(message.contains(part), "{message}");
    }
    assert!(Header::read("image", &png(8192, 8192, 8, 2, &empty)).is_ok());
    assert!(refused(&jpeg(0xc0, 8, 65535, 65535, 3)).contains("at most 16384"));
    assert!(refused(&jpeg(0xc0, 8, 100, 0, 3)).contains("at least 1"));
}

#[test]
fn kinds_of_png_that_are_not_read_are_named() {
    let pixels = chunk(b"IDAT", b"");
    for colour in [0, 2, 4, 6] {
        assert!(refused(&png(9, 9, 16, colour, std::slice::from_ref(&pixels))).contains("16 bits a channel"));
    }
    assert!(refused(&png(9, 9, 8, 5, std::slice::from_ref(&pixels))).contains("unknown colour type 5"));
    let animation = chunk(b"acTL", &[0, 0, 0, 2, 0, 0, 0, 0]);
    assert!(refused(&png(9, 9, 8, 2, &[animation, pixels.clone()])).contains("APNG"));
    assert!(refused(&png(9, 9, 8, 2, &[])).contains("no IDAT"));
    for kind in [b"tEXt", b"zTXt", b"iTXt"] {
        let text = chunk(kind, &[b'x'; 40 << 10]);
        assert!(Header::read("image", &png(9, 9, 8, 2, &[text.clone(), pixels.clone()])).is_ok());
        assert!(refused(&png(9, 9, 8, 2, &[text.clone(), pixels.clone(), text])).contains("81920 bytes of text"));
    }
    for length in [0, 4, 771] {
        let palette = chunk(b"PLTE", &vec![0; length]);
        assert!(refused(&png(9, 9, 8, 3, &[palette, pixels.clone()])).contains("a palette of"));
    }
    let profile = chunk(b"iCCP", &vec![0; (1 << 20) + 1]);
    assert!(refused(&png(9, 9, 8, 2, &[profile, pixels.clone()])).contains("of metadata"));
    let unknown = chunk(b"caBX", &vec![0; 2 << 20]);
    assert!(Header::read("image", &png(9, 9, 8, 2, &[unknown, pixels])).is_ok());
}

#[test]
fn kinds_of_jpeg_that_are_not_read_are_named() {
    assert!(refused(&jpeg(0xc0, 8, 9, 9, 4)).contains("CMYK"));
    assert!(refused(&jpeg(0xc0, 8, 9, 9, 2)).contains("2 components"));
    assert!(refused(&jpeg(0xc1, 12, 9, 9, 3)).contains("12 bits a channel"));
    for marker in [0xc3, 0xc9, 0xca] {
        assert!(refused(&jpeg(marker, 8, 9, 9, 3)).contains("arithmetically coded"));
    }
    let file = jpeg(0xc2, 8, 9, 9, 3);
    let (start, scan) = (&file[..file.len() - 16], &file[file.len() - 16..file.len() - 2]);
    let scans = |n: usize| [start, &scan.repeat(n), &[0xff, 0xd9]].concat();
    assert!(Header::read("image", &scans(100)).is_ok());
    assert!(refused(&scans(101)).contains("101 scans"));
    assert!(refused(&[&file[..2], scan, &[0xff, 0xd9]].concat()).contains("no frame before it"));
    assert!(refused(&[start, &[0xff, 0xd9]].concat()).contains("no scan"));
    assert!(refused(&with(&file, 2, &[0xff, 0xe0, 0, 1])).contains("a segment of 1 bytes"));
}

#[test]
fn truncated_files_are_refused_wherever_they_end() {
    for (list, name) in
        [("pictures", "mode RGBA"), ("pictures", "rgb 28 by 28"), ("jpegs", "4:2:0"), ("jpegs", "progressive")]
    {
        let file = named(list, name);
        decoded(&file, &plain()).unwrap();
        for length in 8..file.len() {
            let message = refused(&file[..length]);
            assert!(message.contains("truncated"), "{name} cut after {length} bytes: {message}");
        }
    }
}

#[test]
fn a_png_whose_data_end_early_is_refused() {
    let file = named("pictures", "rgb 28 by 28");
    let at = file.windows(4).position(|kind| kind == b"IDAT").unwrap();
    let length = u32::from_be_bytes(file[at - 4..at].try_into().unwrap()) as usize;
    for kept in (0..length).step_by(7) {
        let shorter =
            [&file[..at - 4], &chunk(b"IDAT", &file[at + 4..at + 4 + kept])[..], &chunk(b"IEND", b"")].concat();
        let error = decoded(&shorter, &plain()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{kept} of {length} bytes: {error:?}");
    }
}

#[test]
fn damaged_files_give_an_error_or_a_picture() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut files: Vec<Vec<u8>> = ["rgb 28 by 28", "mode RGBA", "mode L", "palette of 4 colours", "orientation 6"]
        .map(|name| named("pictures", name))
        .into();
    files.extend(["4:2:0", "4:4:4", "progressive", "grey"].map(|name| named("jpegs", name)));
    let mut made = 0;
    for case in 0..3000 {
        let mut file = files.choose(&mut rng).unwrap().clone();
        for _ in 0..rng.random_range(1..6) {
            let at = rng.random_range(0..file.len());
            match rng.random_range(0..4) {
                0 => file[at] = rng.random(),
                1 => file[at] ^= 1 << rng.random_range(0..8),
                2 => drop(file.drain(at..(at + rng.random_range(0..40)).min(file.len() - 1))),
                _ => drop(file.splice(at..at, (0..rng.random_range(0..9)).map(|_| 0xff).collect::<Vec<u8>>())),
            }
        }
        match decoded(&file, &small()) {
            Ok(picture) => {
                made += 1;
                assert_eq!(picture.width() % 28 + picture.height() % 28, 0);
            }
            Err(Error::InvalidArgument { .. }) => {}
            Err(error) => panic!("seed {seed}, case {case}: {error:?}"),
        }
    }
    assert!(made > 100, "only {made} files gave a picture");
}

#[test]
fn random_bytes_after_a_magic_are_refused() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..3000 {
        let mut file = [&b"\x89PNG\r\n\x1a\n"[..], b"\xff\xd8\xff", b""].choose(&mut rng).unwrap().to_vec();
        file.extend((0..rng.random_range(0..200)).map(|_| rng.random::<u8>()));
        assert!(matches!(decoded(&file, &small()), Err(Error::InvalidArgument { .. })), "{file:02x?}");
    }
}

#[test]
fn the_orientation_of_either_format_is_applied() {
    // The truth has those of PNG; a JPEG turned is the same pixels elsewhere.
    let file = named("jpegs", "4:4:4");
    let turned = with(&file, AFTER_START, &segment(0xe1, &[b"Exif\0\0", &exif(6)[..]].concat()));
    let [upright, turned] = [file, turned].map(|file| decoded(&file, &plain()).unwrap());
    let side = upright.width() as usize;
    for (x, y) in (0..side).flat_map(|x| (0..side).map(move |y| (x, y))) {
        let pixel = |rgb: &[u8], x: usize, y: usize| rgb[(y * side + x) * 3..][..3].to_vec();
        assert_eq!(pixel(turned.rgb(), side - 1 - y, x), pixel(upright.rgb(), x, y));
    }
    let file = named("pictures", "rgb 56 by 84");
    for (orientation, size) in [(1, (56, 84)), (3, (56, 84)), (5, (84, 56)), (8, (84, 56)), (9, (56, 84))] {
        let turned = with(&file, AFTER_IHDR, &chunk(b"eXIf", &exif(orientation)));
        let header = Header::read("image", &turned).unwrap();
        let picture = header.decode(&turned, &plain()).unwrap();
        assert_eq!((header.size(), (picture.width(), picture.height())), (size, size), "{orientation}");
    }
}

/// A preprocessor that makes small pictures.
fn small() -> Preprocessor {
    plain().with_max_tokens(4)
}
