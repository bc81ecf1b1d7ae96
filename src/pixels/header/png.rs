//! The chunks of a PNG file.

use super::layout::{Layout, bytes_at};

pub const MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";
/// Most bytes of all text chunks together.
const MAX_TEXT: u64 = 64 << 10;
/// Most bytes of all other chunks that the decoder keeps.
const MAX_METADATA: u64 = 1 << 20;
/// Most bytes that the decoder may allocate for chunks, an unpacked colour profile among them.
pub const MAX_DECODER_BYTES: u64 = 8 << 20;
/// Chunks beside IDAT and texts that the decoder keeps. It skips all others.
const KEPT: &[&[u8; 4]] = &[
    b"IHDR", b"PLTE", b"tRNS", b"iCCP", b"eXIf", b"gAMA", b"cHRM", b"sRGB", b"cICP", b"mDCV", b"cLLI", b"bKGD",
    b"sBIT", b"pHYs",
];

/// Walks over all chunks up to IEND without unpacking any.
pub fn read(bytes: &[u8]) -> Result<Layout, String> {
    let mut at = MAGIC.len();
    let mut layout: Option<Layout> = None;
    let (mut text, mut metadata, mut has_profile, mut has_pixels) = (0, 0, false, false);
    loop {
        let (length, kind) = chunk(bytes, at)?;
        let data = at + 8..at + 8 + length;
        match (&mut layout, &kind) {
            (None, b"IHDR") => layout = Some(start(&bytes[data.clone()])?),
            (None, _) => return Err("a PNG file without a header: its first chunk is not IHDR".into()),
            (Some(_), b"acTL" | b"fcTL" | b"fdAT") => {
                return Err("an animated PNG (APNG); send one frame as a PNG without animation".into());
            }
            // The decoder would panic.
            (Some(_), b"PLTE") if length == 0 || length % 3 != 0 || length > 3 * 256 => {
                return Err(format!(
                    "a PNG file with a palette of {length} bytes; it has 3 for each of 1 to 256 colours"
                ));
            }
            (Some(_), b"tEXt" | b"zTXt" | b"iTXt") => text += length as u64,
            (Some(layout), b"eXIf") => layout.exif = Some(data.clone()),
            (Some(layout), b"tRNS") if layout.channels % 2 == 1 => layout.channels += 1,
            (Some(_), b"iCCP") => has_profile = true,
            (Some(_), b"IDAT") => has_pixels = true,
            (Some(_), b"IEND") => break,
            _ => {}
        }
        if KEPT.contains(&&kind) {
            metadata += length as u64;
        }
        at = data.end + 4;
    }
    if text > MAX_TEXT {
        return Err(format!("{text} bytes of text chunks; at most {MAX_TEXT}. Save the PNG without its texts"));
    }
    if metadata > MAX_METADATA {
        return Err(format!("{metadata} bytes of metadata; at most {MAX_METADATA}. Save the PNG without them"));
    }
    let mut layout = layout.filter(|_| has_pixels).ok_or("a PNG file without pixels: it has no IDAT chunk")?;
    // The decoder keeps each of these twice while it reads them, and some rows of pixels before and after their filter.
    layout.scratch = if has_profile { MAX_DECODER_BYTES } else { 2 * (text + metadata) };
    layout.scratch += (512 << 10) + u64::from(layout.width) * 64;
    Ok(layout)
}

/// Length and type of the chunk that starts at `at`, all of which is in `bytes`.
fn chunk(bytes: &[u8], at: usize) -> Result<(usize, [u8; 4]), String> {
    let truncated = || format!("a truncated PNG file: it ends after {} bytes, before its IEND chunk", bytes.len());
    let length = u32::from_be_bytes(bytes_at(bytes, at).ok_or_else(truncated)?) as usize;
    let kind = bytes_at(bytes, at + 4).ok_or_else(truncated)?;
    // Type, data and the checksum after it.
    if bytes.len() - at < length.saturating_add(12) {
        return Err(truncated());
    }
    Ok((length, kind))
}

/// The layout that IHDR describes.
fn start(data: &[u8]) -> Result<Layout, String> {
    let short = || format!("a PNG file with {} bytes in its header chunk instead of 13", data.len());
    let [w0, w1, w2, w3, h0, h1, h2, h3, depth, colour, _, _, _] = *<&[u8; 13]>::try_from(data).map_err(|_| short())?;
    if depth > 8 {
        return Err(format!("a PNG file with {depth} bits a channel; save it with 8"));
    }
    let channels = match colour {
        0 => 1,
        2 | 3 => 3,
        4 => 2,
        6 => 4,
        other => return Err(format!("a PNG file of the unknown colour type {other}")),
    };
    let (width, height) = (u32::from_be_bytes([w0, w1, w2, w3]), u32::from_be_bytes([h0, h1, h2, h3]));
    Ok(Layout { width, height, channels, exif: None, scratch: 0 })
}
