//! From a file to the pixels that a preprocessor makes of it.

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::codecs::{jpeg::JpegDecoder, png::PngDecoder};
use image::{DynamicImage, ImageDecoder as _, ImageResult, Limits};

use super::header::{Header, MAX_DECODER_BYTES, PictureFormat};
use super::preprocessor::{Fit, Preprocessor};
use super::resize::resize;
use crate::error::{Error, Result, panic_message};
use crate::types::Picture;

/// Bytes of an RGB pixel.
const RGB: u64 = 3;

impl Header {
    /// Most bytes that are allocated at one time while the file is decoded and resized, the picture included.
    pub fn decoded_bytes(&self, preprocessor: &Preprocessor) -> Result<u64> {
        let Fit { canvas, size, .. } = preprocessor.fit(self.field(), self.size())?;
        let pixels = |(width, height): (u32, u32)| u64::from(width) * u64::from(height);
        let stored = pixels(self.stored_size());
        let as_stored = stored * u64::from(self.channels());
        // Turning a picture, and making RGB of it, takes both pictures at one time; grey with alpha becomes RGBA first.
        let turned = if self.is_upright() { as_stored } else { 2 * as_stored };
        let converted = match self.channels() {
            3 => as_stored,
            2 => (2 + 4 + RGB) * stored,
            channels => (u64::from(channels) + RGB) * stored,
        };
        // The RGB, its rows after the first pass (or those of the whole picture as a tile), the canvas and the tiles.
        let resized = RGB * (stored + pixels((canvas.0, self.size().1)) + pixels(canvas));
        let cut = if size.tiles == 1 { 0 } else { size.bytes() };
        let most = (self.scratch_bytes() + as_stored).max(turned).max(converted);
        let most = most.max(resized + cut).max(2 * size.bytes());
        // The weights of the filter, of which each pixel of a side has a few.
        let sides = [self.size().0, self.size().1, canvas.0, canvas.1];
        Ok(most + (64 << 10) + sides.map(|side| 64 * u64::from(side)).iter().sum::<u64>())
    }

    /// Decodes the file `bytes`, of which this is the header, and resizes it as `preprocessor` says. An
    /// `InvalidArgument` for the header's field if the file is damaged.
    pub fn decode(&self, bytes: &[u8], preprocessor: &Preprocessor) -> Result<Picture> {
        let fit = preprocessor.fit(self.field(), self.size())?;
        let rgb = caught(self.field(), || {
            let image = self.decoded(bytes).map_err(|e| Error::invalid(self.field(), e.to_string()))?;
            let rgb =
                if image.color().has_alpha() { on_white(&image.into_rgba8()) } else { image.into_rgb8().into_raw() };
            fitted(&rgb, self.size(), &fit).map_err(|e| Error::Internal(format!("{}: {e}", self.field())))
        })?;
        Picture::new(self.field(), fit.size.width, fit.size.height, fit.size.tiles, rgb)
    }

    /// The upright picture in the colours of the file.
    fn decoded(&self, bytes: &[u8]) -> ImageResult<DynamicImage> {
        let mut limits = Limits::no_limits();
        let (width, height) = self.stored_size();
        (limits.max_image_width, limits.max_image_height) = (Some(width), Some(height));
        limits.max_alloc = Some(MAX_DECODER_BYTES);
        let file = Cursor::new(bytes);
        let mut image = match self.format() {
            PictureFormat::Png => DynamicImage::from_decoder(PngDecoder::with_limits(file, limits)?)?,
            PictureFormat::Jpeg => {
                // This decoder allocates nothing that its limits would count.
                limits.max_alloc = None;
                let mut decoder = JpegDecoder::new(file)?;
                decoder.set_limits(limits)?;
                DynamicImage::from_decoder(decoder)?
            }
        };
        image.apply_orientation(self.orientation());
        Ok(image)
    }

    fn is_upright(&self) -> bool {
        self.orientation() == image::metadata::Orientation::NoTransforms
    }
}

/// The result of `work`, or an error that names `field` if it panics.
fn caught<T>(field: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic_message(&*panic);
        Err(Error::Internal(format!("{field}: a decoder failed on this picture: {message}; send its pixels instead")))
    })
}

/// `rgba` (`[pixels, 4]`) over white as `[pixels, 3]`, in the integers of Pillow's `alpha_composite`.
fn on_white(rgba: &[u8]) -> Vec<u8> {
    let over = |value: u8, alpha: u8| {
        let (value, alpha) = (u32::from(value), u32::from(alpha));
        let sum = 64 * (value * alpha + 255 * (255 - alpha)) + (0x80 << 6);
        ((((sum >> 8) + sum) >> 8) >> 6) as u8
    };
    let mut rgb = Vec::with_capacity(rgba.len() / 4 * 3);
    for [r, g, b, alpha] in rgba.as_chunks().0 {
        rgb.extend([*r, *g, *b].map(|value| over(value, *alpha)));
    }
    rgb
}

/// `rgb` of the size `from`, resized and cut into tiles as `fit` says.
fn fitted(rgb: &[u8], from: (u32, u32), fit: &Fit) -> std::result::Result<Vec<u8>, String> {
    let Fit { canvas, columns, size } = fit;
    let whole = resize(rgb, from, *canvas)?;
    if size.tiles == 1 {
        return Ok(whole);
    }
    let tile_row = size.width as usize * 3;
    let row = tile_row * *columns as usize;
    let mut tiles = Vec::with_capacity(size.bytes() as usize);
    for band in whole.chunks_exact(row * size.height as usize) {
        for column in (0..row).step_by(tile_row) {
            tiles.extend(band.chunks_exact(row).flat_map(|row| &row[column..column + tile_row]));
        }
    }
    drop(whole); // its memory is that of the resize below: `decoded_bytes` counts it once
    tiles.extend(resize(rgb, from, (size.width, size.height))?);
    Ok(tiles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_decoder_is_an_error() {
        let error = caught::<()>("images[3]", || panic!("index 7 of 5")).unwrap_err();
        assert!(matches!(error, Error::Internal(_)));
        assert!(error.to_string().contains("images[3]: ") && error.to_string().contains("index 7 of 5"), "{error}");
    }
}
