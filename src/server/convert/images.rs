//! Images of prompts: their pixels are checked, and each gets the placeholder tokens that stand for it.

use std::ops::Range;

use super::pb::image::Source;
use super::{check_most, pb};
use crate::error::{Error, Result};
use crate::memory::Charge;
use crate::pixels::Header;
use crate::server::state::{ImageRules, ModelFacts};
use crate::types::{Picture, PictureHash, Prompt, TokenId};

/// A picture with the rows and columns of its tokens.
type SizedPicture = (Picture, [usize; 2]);
/// A picture with its placeholders, and the rows and columns of its tokens.
type PlacedPicture = (Picture, Range<usize>, [usize; 2]);

/// An image of a request that is not checked yet.
pub(super) struct GivenImage {
    /// Where the request has it.
    pub path: String,
    pub source: Option<Source>,
}

/// The images at `path`, in their order.
pub(super) fn given(path: &str, images: Vec<pb::Image>) -> Vec<GivenImage> {
    let given = |(i, image): (usize, pb::Image)| {
        let member = match &image.source {
            None => "",
            Some(Source::Pixels(_)) => ".pixels",
            Some(Source::Encoded(_)) => ".encoded",
            Some(Source::Hash(_)) => ".hash",
        };
        GivenImage { path: format!("{path}[{i}]{member}"), source: image.source }
    };
    images.into_iter().enumerate().map(given).collect()
}

/// The prompt of these token ids with these images. `path` is the path of the token ids.
///
/// # Errors
/// `InvalidArgument` if the model takes no images or not as many, if an image has a wrong size, or if the placeholders
/// are not those of the images: of each in turn either one, which is expanded, or as many as it has tokens.
pub(super) fn place(
    path: &str,
    tokens: Vec<TokenId>,
    images: Vec<GivenImage>,
    model: &ModelFacts,
    charge: &mut Charge,
) -> Result<Prompt> {
    let Some(rules) = &model.images else {
        if let Some(image) = images.into_iter().next() {
            return Err(Error::invalid(image.path, "this model takes no images; send text alone"));
        }
        return Ok(Prompt::from_tokens(tokens));
    };
    if let Some(image) = images.get(rules.most_per_prompt) {
        check_most(&image.path, images.len(), "images", rules.most_per_prompt, "raise --limit-mm-per-prompt")?;
    }
    let sized = |image| picture(image, rules, charge);
    let pictures = images.into_iter().map(sized).collect::<Result<Vec<SizedPicture>>>()?;
    check_placeholders(path, &tokens, &pictures, rules)?;
    let (tokens, placed) = expand(path, tokens, pictures, rules)?;
    charge.grow(size_of_val(&tokens[..]) as u64)?;
    Ok(Prompt::with_images(tokens, placed))
}

fn picture(image: GivenImage, rules: &ImageRules, charge: &mut Charge) -> Result<SizedPicture> {
    let GivenImage { path, source } = image;
    let picture = match source {
        None => return Err(Error::invalid(path, "has no source; give pixels, or an encoded file")),
        Some(Source::Pixels(pb::Pixels { width, height, rgb, tiles })) => {
            charge.grow(rgb.len() as u64)?;
            Picture::new(&path, width, height, tiles.unwrap_or(1), rgb)?
        }
        Some(Source::Encoded(file)) => {
            let header = Header::read(&path, &file)?;
            let bytes = header.decoded_bytes(&rules.preprocessor)?;
            let decode = || charge.hold(bytes, || header.decode(&file, &rules.preprocessor));
            let picture = rules.decode_slots.run(decode)??;
            charge.grow(picture.rgb().len() as u64)?;
            picture
        }
        Some(Source::Hash(hash)) => {
            let bytes = <[u8; 32]>::try_from(&hash[..]);
            let hash = bytes.map_err(|_| Error::invalid(&path, format!("has {} bytes; SHA-256 has 32", hash.len())))?;
            let hash = PictureHash(hash);
            let not_held =
                || Error::NotFound(format!("{path}: the server does not hold the image {hash}; send its pixels"));
            let picture = rules.held.find(hash).ok_or_else(not_held)?;
            charge.grow(picture.rgb().len() as u64)?;
            picture
        }
    };
    let grid = rules.vision.grid(&path, &picture)?;
    let (tokens, most) = (grid[0] * grid[1], rules.most_tokens);
    let tiles = if picture.tiles() > 1 { format!("{} x ", picture.tiles()) } else { String::new() };
    let size = format!("{tiles}{} x {} pixels", picture.width(), picture.height());
    let advice = match most < rules.vision.most_tokens() {
        true => "send a smaller image, or raise --max-image-tokens",
        false => "send a smaller image: the model's processor makes none of more",
    };
    ensure!(tokens <= most, path, "{size} are {tokens} tokens, more than {most}; {advice}");
    rules.held.hold(&picture);
    Ok((picture, grid))
}

/// Checks that there are placeholders exactly if there are images, and none of videos.
fn check_placeholders(path: &str, tokens: &[TokenId], pictures: &[SizedPicture], rules: &ImageRules) -> Result<()> {
    let image_token = rules.vision.image_token;
    let is_other = |token: &TokenId| *token != image_token && rules.vision.forbidden_tokens.contains(token);
    if let Some(at) = tokens.iter().position(is_other) {
        let message = format!("{} stands for a video, which this server does not take", tokens[at]);
        return Err(Error::invalid(format!("{path}[{at}]"), message));
    }
    let has_placeholders = tokens.contains(&image_token);
    ensure!(
        !has_placeholders || !pictures.is_empty(),
        path,
        "has placeholders of images ({image_token}), but the prompt has no images"
    );
    Ok(())
}

/// Expands the placeholders of each picture, and says where they are. Images may follow each other without a token
/// between, so a run of placeholders may be that of several.
fn expand(
    path: &str,
    tokens: Vec<TokenId>,
    pictures: Vec<SizedPicture>,
    rules: &ImageRules,
) -> Result<(Vec<TokenId>, Vec<PlacedPicture>)> {
    let (image_token, count) = (rules.vision.image_token, pictures.len());
    let mut expanded = Vec::with_capacity(tokens.len());
    let mut placed = Vec::with_capacity(count);
    let mut pictures = pictures.into_iter();
    for run in tokens.chunk_by(|a, b| (*a == image_token) == (*b == image_token)) {
        if run[0] != image_token {
            expanded.extend_from_slice(run);
            continue;
        }
        let Some(of_run) = images_of_run(run.len(), pictures.as_slice()) else {
            return Err(Error::invalid(path, wrong_run(run.len(), count, pictures.as_slice(), image_token)));
        };
        for (picture, grid) in pictures.by_ref().take(of_run) {
            let start = expanded.len();
            expanded.resize(start + grid[0] * grid[1], image_token);
            placed.push((picture, start..expanded.len(), grid));
        }
    }
    let left = pictures.len();
    ensure!(left == 0, path, "has placeholders of {} images, but the prompt has {count}", count - left);
    Ok((expanded, placed))
}

/// How many of the next pictures a run of placeholders is of: all of their tokens, or one for each.
fn images_of_run(run: usize, pictures: &[SizedPicture]) -> Option<usize> {
    let mut tokens = 0;
    for (index, (_, [rows, columns])) in pictures.iter().enumerate() {
        tokens += rows * columns;
        if tokens == run {
            return Some(index + 1);
        }
    }
    (run <= pictures.len()).then_some(run)
}

/// Why a run of placeholders does not belong to the next of `pictures`, the last of `count`.
fn wrong_run(run: usize, count: usize, pictures: &[SizedPicture], image_token: TokenId) -> String {
    let Some((_, [rows, columns])) = pictures.first() else {
        return format!("has placeholders of more than the prompt's {count} images");
    };
    let (index, expected) = (count - pictures.len(), rows * columns);
    format!(
        "image {index} has {run} placeholders, but {rows} x {columns} tokens: give it {expected} of {image_token}, or 1"
    )
}
