//! The size and the resampling of pictures as transformers and torchvision have them.

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

use crate::error::{Error, Result};

/// Most that the longer side may be as a multiple of the shorter one, as transformers has it.
pub const MAX_ASPECT_RATIO: u32 = 200;

/// The size (width, height) to which Qwen's processor brings a picture: both sides multiples of `factor`, the area from
/// `min_pixels` to `max_pixels`, the aspect ratio kept as near as that allows. An `InvalidArgument` for `field` if a
/// side is zero, or is longer than 200 times the other.
pub fn smart_resize(
    field: &str,
    (width, height): (u32, u32),
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
) -> Result<(u32, u32)> {
    if width == 0 || height == 0 || width.max(height) > width.min(height).saturating_mul(MAX_ASPECT_RATIO) {
        let message = format!(
            "a picture of {width} by {height} pixels; the longer side is at most {MAX_ASPECT_RATIO} times the shorter one"
        );
        return Err(Error::invalid(field, message));
    }
    let (w, h, factor) = (f64::from(width), f64::from(height), f64::from(factor));
    let (min, max) = (min_pixels as f64, max_pixels as f64);
    // Python's round: half to even.
    let near = |side: f64| (side / factor).round_ties_even() * factor;
    let (mut to_w, mut to_h) = (near(w), near(h));
    if to_w * to_h > max {
        let beta = (w * h / max).sqrt();
        let down = |side: f64| factor.max((side / beta / factor).floor() * factor);
        (to_w, to_h) = (down(w), down(h));
    } else if to_w * to_h < min {
        let beta = (min / (w * h)).sqrt();
        let up = |side: f64| (side * beta / factor).ceil() * factor;
        (to_w, to_h) = (up(w), up(h));
    }
    Ok((to_w as u32, to_h as u32))
}

/// `rgb`, `[height, width, 3]` of the size `from`, brought to the size `to` (both width, height) with the bits of
/// torchvision's antialiased bicubic filter on the CPU: the rows first, rounded to 8 bits, then the columns. Two calls,
/// because in one call the crate would take the columns first. Returns a description of the error if memory is short or
/// a size is zero.
pub fn resize(rgb: &[u8], from: (u32, u32), to: (u32, u32)) -> std::result::Result<Vec<u8>, String> {
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::CatmullRom)).use_alpha(false);
    let mut resizer = Resizer::new();
    let mut pass = |rgb: &[u8], from: (u32, u32), to: (u32, u32)| {
        let source = ImageRef::new(from.0, from.1, rgb, PixelType::U8x3).map_err(|e| e.to_string())?;
        let mut result = Image::new(to.0, to.1, PixelType::U8x3);
        resizer.resize(&source, &mut result, &options).map_err(|e| e.to_string())?;
        Ok(result.into_vec())
    };
    let between = (to.0, from.1);
    match (between == from, between == to) {
        (true, true) => Ok(rgb.to_vec()),
        (true, false) | (false, true) => pass(rgb, from, to),
        (false, false) => {
            let rows = pass(rgb, from, between)?;
            pass(&rows, between, to)
        }
    }
}
