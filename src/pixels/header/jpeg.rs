//! The segments of a JPEG file.

use super::layout::{Layout, bytes_at};

pub const MAGIC: &[u8] = b"\xff\xd8\xff";
/// Most scans: a progressive file can ask for all of its pixels to be worked through in each.
const MAX_SCANS: usize = 100;
const EXIF: &[u8] = b"Exif\0\0";

const START_OF_IMAGE: u8 = 0xd8;
const END_OF_IMAGE: u8 = 0xd9;
const START_OF_SCAN: u8 = 0xda;
const APP1: u8 = 0xe1;

/// A frame: all that a start-of-frame segment describes.
struct Frame {
    width: u32,
    height: u32,
    is_progressive: bool,
    /// Horizontal and vertical sampling factor of each component.
    sampling: Vec<(u64, u64)>,
}

/// Walks over all segments up to the end of the image without decoding any.
pub fn read(bytes: &[u8]) -> Result<Layout, String> {
    let truncated = || format!("a truncated JPEG file: it ends after {} bytes, before its end marker", bytes.len());
    let mut frame: Option<Frame> = None;
    let (mut exif, mut scans, mut is_buffered) = (None, 0, false);
    let mut at = 0;
    loop {
        at = next_marker(bytes, at).ok_or_else(truncated)?;
        let marker = bytes[at + 1];
        at += 2;
        match marker {
            END_OF_IMAGE => break,
            START_OF_IMAGE => continue,
            _ => {}
        }
        let length = usize::from(u16::from_be_bytes(bytes_at(bytes, at).ok_or_else(truncated)?));
        let data = at + 2..at + length;
        if length < 2 {
            return Err(format!("a JPEG file with a segment of {length} bytes at byte {at}"));
        }
        let segment = bytes.get(data.clone()).ok_or_else(truncated)?;
        match (marker, &frame) {
            (0xc0..=0xc2, None) => frame = Some(start(marker, segment)?),
            (0xc0..=0xc2, Some(_)) => return Err("a JPEG file with two frames".into()),
            (0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf, _) => {
                return Err("a lossless, hierarchical or arithmetically coded JPEG file; save it as baseline".into());
            }
            (APP1, _) if exif.is_none() && segment.starts_with(EXIF) => {
                exif = Some(data.start + EXIF.len()..data.end);
            }
            (START_OF_SCAN, None) => return Err("a JPEG file whose scan has no frame before it".into()),
            (START_OF_SCAN, Some(frame)) => {
                scans += 1;
                let components = segment.first().map_or(0, |n| usize::from(*n));
                is_buffered |= frame.is_progressive || components < frame.sampling.len();
            }
            _ => {}
        }
        at = data.end;
    }
    if scans > MAX_SCANS {
        return Err(format!("a JPEG file of {scans} scans; at most {MAX_SCANS}"));
    }
    let frame = frame.filter(|_| scans > 0).ok_or("a JPEG file without pixels: it has no scan")?;
    let channels = frame.sampling.len() as u32;
    let buffered = if is_buffered { frame.coefficient_bytes() } else { 0 };
    // A copy of the file, its metadata, and the rows of a component before and after they are brought to full size.
    let scratch = buffered + 2 * bytes.len() as u64 + (512 << 10) + u64::from(frame.width) * 512;
    Ok(Layout { width: frame.width, height: frame.height, channels, exif, scratch })
}

/// Where the next marker is, at `from` or later. A zero after 0xff, or a restart marker, is part of a scan's data.
fn next_marker(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xff)?;
        match bytes.get(at + 1)? {
            0xff => at += 1,
            0 | 1 | 0xd0..=0xd7 => at += 2,
            _ => return Some(at),
        }
    }
}

/// The frame that a start-of-frame segment describes.
fn start(marker: u8, segment: &[u8]) -> Result<Frame, String> {
    let [bits, h0, h1, w0, w1, components] =
        bytes_at(segment, 0).ok_or("a JPEG file with a frame header that is too short")?;
    if bits != 8 {
        return Err(format!("a JPEG file with {bits} bits a channel; save it with 8"));
    }
    match components {
        1 | 3 => {}
        4 => return Err("a JPEG file in CMYK; save it in RGB".into()),
        other => return Err(format!("a JPEG file of {other} components; those of 1 (grey) and 3 (RGB) are read")),
    }
    let sampling = (0..usize::from(components)).map(|i| segment.get(7 + 3 * i).map(|s| (s >> 4, s & 15)));
    let sampling: Option<Vec<_>> = sampling.map(|s| s.map(|(h, v)| (u64::from(h), u64::from(v)))).collect();
    let sampling = sampling.ok_or("a JPEG file with a frame header that is too short")?;
    if let Some((h, v)) = sampling.iter().find(|(h, v)| !(1..=4).contains(h) || !(1..=4).contains(v)) {
        return Err(format!("a JPEG file with the sampling factors {h} and {v}; each must be 1 to 4"));
    }
    let (width, height) = (u16::from_be_bytes([w0, w1]), u16::from_be_bytes([h0, h1]));
    Ok(Frame { width: width.into(), height: height.into(), is_progressive: marker == 0xc2, sampling })
}

impl Frame {
    /// Bytes of all coefficients, 64 16-bit numbers a block. A decoder keeps them until the last scan if no scan has
    /// all components.
    fn coefficient_bytes(&self) -> u64 {
        let most = |part: fn(&(u64, u64)) -> u64| self.sampling.iter().map(part).max().unwrap_or(1);
        // A component alone has no other to be sampled against.
        let (h, v) = if self.sampling.len() == 1 { (1, 1) } else { (most(|s| s.0), most(|s| s.1)) };
        let units = u64::from(self.width).div_ceil(8 * h) * u64::from(self.height).div_ceil(8 * v);
        units * self.sampling.iter().map(|(h, v)| h * v).sum::<u64>() * 64 * 2
    }
}
