//! The checks on a file before its first pixel is decoded.

mod jpeg;
mod layout;
mod png;

use image::metadata::Orientation;

use self::layout::Layout;
pub use self::png::MAX_DECODER_BYTES;
use super::resize::MAX_ASPECT_RATIO;
use crate::error::{Error, Result};

/// Most pixels of a side.
const MAX_SIDE: u32 = 16384;
/// Most pixels.
const MAX_PIXELS: u64 = 64 << 20;

/// Formats that are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureFormat {
    Png,
    Jpeg,
}

/// A PNG or JPEG file whose headers are within all limits, and which ends where its format says. Nothing of it is
/// decoded yet.
#[derive(Clone, Debug)]
pub struct Header {
    field: String,
    format: PictureFormat,
    layout: Layout,
    orientation: Orientation,
}

impl Header {
    /// Reads the headers of the file `bytes`, and walks over the rest of it. An `InvalidArgument` for `field` if this
    /// is neither a PNG nor a JPEG file, is animated, is truncated, has other than 8 bits a channel, is CMYK, or is
    /// larger than the limits.
    pub fn read(field: &str, bytes: &[u8]) -> Result<Self> {
        let (format, layout) = if bytes.starts_with(png::MAGIC) {
            (PictureFormat::Png, png::read(bytes))
        } else if bytes.starts_with(jpeg::MAGIC) {
            (PictureFormat::Jpeg, jpeg::read(bytes))
        } else {
            let found = format_name(bytes);
            return Err(Error::invalid(field, format!("{found}; a picture is sent as PNG or JPEG, or as its pixels")));
        };
        let layout = layout.map_err(|message| Error::invalid(field, message))?;
        check_size(layout.width, layout.height).map_err(|message| Error::invalid(field, message))?;
        let exif = layout.exif.clone().and_then(|range| Orientation::from_exif_chunk(&bytes[range]));
        let orientation = exif.unwrap_or(Orientation::NoTransforms);
        Ok(Self { field: field.into(), format, layout, orientation })
    }

    /// The field of the request that errors name.
    pub fn field(&self) -> &str {
        &self.field
    }

    pub fn format(&self) -> PictureFormat {
        self.format
    }

    /// Width and height as the file stores them.
    pub fn stored_size(&self) -> (u32, u32) {
        (self.layout.width, self.layout.height)
    }

    /// Width and height of the upright picture.
    pub fn size(&self) -> (u32, u32) {
        use Orientation as O;
        let (width, height) = self.stored_size();
        match self.orientation {
            O::NoTransforms | O::Rotate180 | O::FlipHorizontal | O::FlipVertical => (width, height),
            O::Rotate90 | O::Rotate270 | O::Rotate90FlipH | O::Rotate270FlipH => (height, width),
        }
    }

    pub fn orientation(&self) -> Orientation {
        self.orientation
    }

    /// Bytes of a decoded pixel: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.
    pub fn channels(&self) -> u32 {
        self.layout.channels
    }

    /// Bytes that the decoder takes beside the decoded pixels.
    pub fn scratch_bytes(&self) -> u64 {
        self.layout.scratch
    }
}

fn check_size(width: u32, height: u32) -> std::result::Result<(), String> {
    let (longer, shorter) = (width.max(height), width.min(height));
    let size = format!("a picture of {width} by {height} pixels");
    if shorter == 0 {
        Err(format!("{size}; each side must have at least 1"))
    } else if longer > MAX_SIDE {
        Err(format!("{size}; a side has at most {MAX_SIDE}"))
    } else if u64::from(width) * u64::from(height) > MAX_PIXELS {
        Err(format!("{size}; at most {MAX_PIXELS} in all"))
    } else if longer > shorter * MAX_ASPECT_RATIO {
        Err(format!("{size}; the longer side is at most {MAX_ASPECT_RATIO} times the shorter one"))
    } else {
        Ok(())
    }
}

/// The name of the format that `bytes` are in.
fn format_name(bytes: &[u8]) -> String {
    let known: &[(usize, &[u8], &str)] = &[
        (0, b"GIF8", "a GIF file"),
        (8, b"WEBP", "a WebP file"),
        (0, b"BM", "a BMP file"),
        (0, b"II*\0", "a TIFF file"),
        (0, b"MM\0*", "a TIFF file"),
        (4, b"ftypavif", "an AVIF file"),
        (4, b"ftyphei", "a HEIC file"),
        (4, b"ftypmif1", "a HEIF file"),
        (0, b"\xff\x0a", "a JPEG XL file"),
        (4, b"JXL ", "a JPEG XL file"),
        (4, b"jP  ", "a JPEG 2000 file"),
        (0, b"%PDF", "a PDF file"),
        (0, b"<svg", "an SVG file"),
        (0, b"<?xml", "an XML file"),
    ];
    let found = known.iter().find(|(at, magic, _)| bytes.get(*at..).is_some_and(|rest| rest.starts_with(magic)));
    match (found, bytes) {
        (Some((_, _, name)), _) => (*name).into(),
        (None, []) => "no bytes".into(),
        (None, _) => format!("a file of an unknown format, which starts with {:02x?}", &bytes[..bytes.len().min(8)]),
    }
}
