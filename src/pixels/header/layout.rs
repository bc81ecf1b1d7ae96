//! The facts about a file that are known before its first pixel is decoded.

use std::ops::Range;

/// The contents of a file, read from its headers alone.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Size in pixels as the file stores it, before its orientation is applied.
    pub width: u32,
    pub height: u32,
    /// Bytes of a decoded pixel: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.
    pub channels: u32,
    /// The bytes of the file's EXIF block, which may have an orientation.
    pub exif: Option<Range<usize>>,
    /// Bytes that the decoder takes beside the decoded pixels.
    pub scratch: u64,
}

/// `N` bytes of `bytes` from `at` on, if they are there.
pub fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
