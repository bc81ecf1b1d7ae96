//! From the bytes that a client sends to the pixels that the model sees: a [`Picture`](crate::types::Picture).
//!
//! ```text
//! PNG or JPEG ─ Header::read ─ the caller reserves decoded_bytes ─ Header::decode ─┐
//! pixels as the trainer's processor made them ─────────────────── Picture::new ────┴─> Picture
//! ```
//!
//! The pixels of a PNG are those of transformers' image processors over torchvision, bit for bit. Those of a JPEG are
//! near them (at most 5 of 255), because no decoder in Rust has the inverse transform and the chroma filter of
//! libjpeg-turbo. A trainer that wants its own pixels sends them.

mod decode;
mod header;
mod preprocessor;
mod resize;
mod slots;
#[cfg(test)]
mod tests;

pub use header::Header;
pub use preprocessor::{MAX_TILES, PictureSize, Preprocessor, Sizing};
pub use resize::smart_resize;
pub use slots::DecodeSlots;
