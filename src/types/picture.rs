//! A picture as a model sees it: pixels that have their final size.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// SHA-256 of a picture's tiles, width, height and pixels. It is the picture's identity: equal hashes mean equal
/// embeddings and equal rotary positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PictureHash(pub [u8; 32]);

/// 8-bit RGB pixels after the resize. A clone shares the pixels.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    hash: PictureHash,
    width: u32,
    height: u32,
    tiles: u32,
    rgb: Arc<[u8]>,
}

impl Picture {
    /// A picture of `tiles` parts of `width` by `height` pixels, one below the other; one tile is the whole picture.
    /// `rgb` has three bytes a pixel, row by row. `field` names the picture in errors.
    ///
    /// # Errors
    /// `InvalidArgument` if a size is 0, or `rgb` has another number of bytes than the sizes say.
    pub fn new(field: &str, width: u32, height: u32, tiles: u32, rgb: impl Into<Arc<[u8]>>) -> Result<Self> {
        let rgb = rgb.into();
        let sizes = [("width", width), ("height", height), ("tiles", tiles)];
        if let Some((name, _)) = sizes.into_iter().find(|&(_, size)| size == 0) {
            return Err(Error::invalid(format!("{field}.{name}"), "is 0; it must be at least 1"));
        }
        let expected = [width, height, tiles].into_iter().fold(3_u128, |bytes, size| bytes * u128::from(size));
        if rgb.len() as u128 != expected {
            let given = rgb.len();
            return Err(Error::invalid(
                format!("{field}.rgb"),
                format!("has {given} bytes; {tiles} x {width} x {height} pixels of RGB are {expected}"),
            ));
        }
        let mut sha = Sha256::new();
        [tiles, width, height].into_iter().for_each(|size| sha.update(size.to_le_bytes()));
        sha.update(&rgb);
        Ok(Self { hash: PictureHash(sha.finalize().into()), width, height, tiles, rgb })
    }

    pub fn hash(&self) -> PictureHash {
        self.hash
    }

    /// Pixels of a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows of pixels of one tile.
    pub fn height(&self) -> u32 {
        self.height
    }

    pub fn tiles(&self) -> u32 {
        self.tiles
    }

    /// Three bytes a pixel, row by row, tile by tile.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hash, width, height, tiles, .. } = self;
        write!(f, "Picture({hash}, {tiles} x {width} x {height})")
    }
}

impl fmt::Display for PictureHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_depends_on_sizes_tiles_and_pixels() {
        let picture = |width, height, tiles, first| {
            let mut rgb = vec![7; 36];
            rgb[0] = first;
            Picture::new("images[0]", width, height, tiles, rgb).unwrap().hash()
        };
        let variants =
            [picture(3, 4, 1, 7), picture(4, 3, 1, 7), picture(3, 2, 2, 7), picture(2, 3, 2, 7), picture(3, 4, 1, 8)];
        for (i, a) in variants.iter().enumerate() {
            for (j, b) in variants.iter().enumerate() {
                assert_eq!(a == b, i == j, "variants {i} and {j}");
            }
        }
    }

    #[test]
    fn pixels_that_do_not_match_the_size_are_rejected() {
        let error = |width, height, tiles, bytes| {
            Picture::new("images[1]", width, height, tiles, vec![0; bytes]).unwrap_err().to_string()
        };
        assert_eq!(error(0, 2, 1, 0), "images[1].width: is 0; it must be at least 1");
        assert_eq!(error(2, 2, 1, 11), "images[1].rgb: has 11 bytes; 1 x 2 x 2 pixels of RGB are 12");
        assert!(error(u32::MAX, u32::MAX, u32::MAX, 3).starts_with("images[1].rgb: has 3 bytes"));
    }
}
