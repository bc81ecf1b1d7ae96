//! Images beside token ids, as `/v1/chat/completions/render` returns them and `/inference/v1/generate` takes them.
//!
//! The pixels travel with the ids, so that nothing is kept between the two calls. A picture is the base64 of the bytes
//! that its hash covers: the number of tiles, the width and the height, 32 bits each with the lowest byte first, then
//! three bytes a pixel.

use std::io::Write as _;
use std::ops::Range;

use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderStringWriter;
use base64::{DecodeError, Engine as _};
use serde::{Deserialize, Deserializer, Serialize, de};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::openai::answers::Null;
use crate::error::{Error, Result};
use crate::pixels::PictureSize;
use crate::server::pb;
use crate::server::state::ImageRules;
use crate::types::{Picture, Prompt, PromptImage, TokenId};

/// Bytes of a picture before its pixels.
const SIZES: usize = 12;

/// The images of a prompt.
#[derive(Serialize, ToSchema)]
pub(super) struct RenderedFeatures {
    /// SHA-256 of each image's size and pixels, in hexadecimal.
    mm_hashes: OfImages<String>,
    /// The tokens of each image.
    mm_placeholders: OfImages<Placeholders>,
    /// Each image in base64; null if `mm_payload` is `none`.
    kwargs_data: Option<OfImages<String>>,
    mm_metadata: Null,
}

/// The images of token ids.
#[derive(Deserialize, ToSchema)]
pub(super) struct SentFeatures {
    mm_hashes: OfImages<String>,
    mm_placeholders: OfImages<Placeholders>,
    /// Each image, as `/v1/chat/completions/render` has returned it.
    #[schema(value_type = Option<OfImages<Option<String>>>)]
    kwargs_data: Option<OfImages<Option<SentPicture>>>,
}

/// A value for each image.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct OfImages<T> {
    #[serde(default = "Vec::new")]
    image: Vec<T>,
}

/// The tokens of an image in the prompt.
#[derive(Serialize, Deserialize, ToSchema)]
struct Placeholders {
    offset: usize,
    length: usize,
}

/// A picture that was read from base64.
struct SentPicture {
    hash: String,
    pixels: pb::Pixels,
}

impl RenderedFeatures {
    /// The images of `prompt`, with their pixels if `has_pixels`; none for a prompt of text alone.
    pub(super) fn new(prompt: &Prompt, has_pixels: bool) -> Option<Self> {
        let images = &prompt.images;
        let placeholders = |Range { start, end }: Range<usize>| Placeholders { offset: start, length: end - start };
        (!images.is_empty()).then(|| Self {
            mm_hashes: of_images(images, |image| image.picture.hash().to_string()),
            mm_placeholders: of_images(images, |image| placeholders(image.placeholders.clone())),
            kwargs_data: has_pixels.then(|| of_images(images, |image| written(&image.picture))),
            mm_metadata: Null::default(),
        })
    }

    /// Most bytes that the images of `prompt` take in base64.
    pub(super) fn bytes(prompt: &Prompt) -> u64 {
        prompt.images.iter().map(|image| written_bytes(&image.picture) as u64).sum()
    }
}

impl SentFeatures {
    /// The images of the prompt `ids`.
    ///
    /// # Errors
    /// `InvalidArgument` if the members do not belong together or to the token ids.
    pub(super) fn into_images(self, ids: &[TokenId], rules: Option<&ImageRules>) -> Result<Vec<pb::Image>> {
        let Self { mm_hashes, mm_placeholders, kwargs_data } = self;
        if mm_hashes.image.is_empty() && mm_placeholders.image.is_empty() {
            return Ok(Vec::new());
        }
        let Some(rules) = rules else {
            return Err(Error::invalid("features", "this model takes no images; leave them out"));
        };
        let missing = || {
            let message = "a picture is missing; send what render has returned, without mm_payload: none";
            Error::invalid("features.kwargs_data", message)
        };
        let pictures = kwargs_data.ok_or_else(missing)?.image;
        let counts = [mm_hashes.image.len(), mm_placeholders.image.len(), pictures.len()];
        if counts.iter().any(|count| *count != counts[0]) {
            let [hashes, placeholders, pictures] = counts;
            let message = format!(
                "has {hashes} mm_hashes, {placeholders} mm_placeholders and {pictures} kwargs_data; give as many"
            );
            return Err(Error::invalid("features", message));
        }
        let listed = pictures.into_iter().zip(mm_hashes.image).zip(mm_placeholders.image).enumerate();
        let mut end = 0;
        let image = |(i, ((picture, hash), placeholders)): (usize, ((Option<SentPicture>, String), Placeholders))| {
            let SentPicture { hash: own, pixels } = picture.ok_or_else(missing)?;
            if own != hash {
                let message = format!("is not the hash of the picture, which is {own}; send what render has returned");
                return Err(Error::invalid(format!("features.mm_hashes.image[{i}]"), message));
            }
            end = check_placeholders(i, end, &placeholders, &pixels, ids, rules)?;
            Ok(pb::Image { source: Some(pb::image::Source::Pixels(pixels)) })
        };
        listed.map(image).collect()
    }
}

/// Checks that the tokens of an image are placeholders, as many as the image has tokens, and that they begin at `first`
/// or later. Returns where they end.
fn check_placeholders(
    index: usize,
    first: usize,
    Placeholders { offset, length }: &Placeholders,
    pixels: &pb::Pixels,
    ids: &[TokenId],
    rules: &ImageRules,
) -> Result<usize> {
    let path = format!("features.mm_placeholders.image[{index}]");
    let image_token = rules.vision.image_token;
    let found = offset.checked_add(*length).and_then(|end| ids.get(*offset..end));
    if !found.is_some_and(|found| found.iter().all(|id| *id == image_token)) {
        let message = format!("the {length} tokens from {offset} on are not all placeholders ({image_token})");
        return Err(Error::invalid(path, message));
    }
    if *offset < first {
        let message = format!("begins at token {offset}, before {first}, where the image before it ends");
        return Err(Error::invalid(path, message));
    }
    // A size that the model does not take is rejected when the message is checked.
    let (width, height, tiles) = (pixels.width, pixels.height, pixels.tiles.unwrap_or(1));
    match rules.preprocessor.tokens(&path, PictureSize { width, height, tiles }) {
        Ok(tokens) if tokens != *length => {
            Err(Error::invalid(path, format!("has {length} tokens; the picture has {tokens}")))
        }
        _ => Ok(offset + length),
    }
}

fn of_images<T>(images: &[PromptImage], of: impl Fn(&PromptImage) -> T) -> OfImages<T> {
    OfImages { image: images.iter().map(of).collect() }
}

/// The picture in base64.
fn written(picture: &Picture) -> String {
    let mut text = String::with_capacity(written_bytes(picture));
    let mut writer = EncoderStringWriter::from_consumer(&mut text, &STANDARD);
    let sizes = [picture.tiles(), picture.width(), picture.height()].map(u32::to_le_bytes);
    let written = writer.write_all(sizes.as_flattened()).and_then(|()| writer.write_all(picture.rgb()));
    written.expect("a string takes all bytes");
    writer.into_inner();
    text
}

fn written_bytes(picture: &Picture) -> usize {
    (SIZES + picture.rgb().len()).div_ceil(3) * 4
}

impl<'de> Deserialize<'de> for SentPicture {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Base64;

        impl de::Visitor<'_> for Base64 {
            type Value = Vec<u8>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a picture in base64")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<Vec<u8>, E> {
                STANDARD.decode(text).map_err(|error: DecodeError| E::custom(format!("is not base64: {error}")))
            }
        }

        let mut rgb = deserializer.deserialize_str(Base64)?;
        let hash = format!("{:x}", Sha256::digest(&rgb));
        let Some((sizes, _)) = rgb.split_first_chunk::<SIZES>() else {
            return Err(de::Error::custom("is not a picture; send what render has returned"));
        };
        let size = |i: usize| u32::from_le_bytes([sizes[i], sizes[i + 1], sizes[i + 2], sizes[i + 3]]);
        let (tiles, width, height) = (size(0), size(4), size(8));
        rgb.drain(..SIZES);
        Ok(Self { hash, pixels: pb::Pixels { width, height, rgb, tiles: Some(tiles) } })
    }
}
