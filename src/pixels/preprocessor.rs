//! The settings by which a model's pictures are made, as `preprocessor_config.json` has them.

use serde_json::Value;

use super::resize::smart_resize;
use crate::error::{Error, Result};

/// Mean and standard deviation of CLIP's pictures: the defaults of the classes of transformers that are known here.
const CLIP_MEAN: [f64; 3] = [0.48145466, 0.4578275, 0.40821073];
const CLIP_STD: [f64; 3] = [0.26862954, 0.26130258, 0.27577711];
/// The number of the bicubic filter in Pillow, by which configurations name it.
const BICUBIC: u64 = 3;
/// Most tiles: the width of the picture that they are cut of stays within a few thousand pixels.
pub const MAX_TILES: u32 = 64;

/// The size of a picture: `tiles` parts of `width` by `height` pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureSize {
    pub width: u32,
    pub height: u32,
    pub tiles: u32,
}

impl PictureSize {
    /// Bytes of the RGB.
    pub fn bytes(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height) * u64::from(self.tiles) * 3
    }
}

/// How a model's processor chooses the size of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizing {
    /// One picture near its own aspect ratio, of an area within these bounds (Qwen2-VL, Qwen2.5-VL).
    Area { min_pixels: u64, max_pixels: u64 },
    /// From `min_tiles` to `max_tiles` squares of `side` pixels, and the whole picture as one more square after them
    /// if they are several (InternVL).
    Tiles { side: u32, min_tiles: u32, max_tiles: u32 },
}

/// The way from a picture's own size to the size that the model sees.
pub(super) struct Fit {
    /// Width and height to which the whole picture is resized.
    pub canvas: (u32, u32),
    /// Number of tiles beside each other on the canvas.
    pub columns: u32,
    /// The tiles of the canvas, and perhaps the whole picture as one more after them.
    pub size: PictureSize,
}

/// The way from a decoded picture to the model's pixels, and from those to its patches.
#[derive(Clone, Debug, PartialEq)]
pub struct Preprocessor {
    pub sizing: Sizing,
    /// Pixels of a side of a patch.
    pub patch_size: u32,
    /// Patches of a side of a merged unit, which is one token.
    pub merge_size: u32,
    /// Frames of a patch. A picture is repeated in all of them.
    pub temporal_patch_size: u32,
    /// Mean and standard deviation of red, green and blue, for values from 0 to 1.
    pub mean: [f32; 3],
    pub std: [f32; 3],
}

impl Preprocessor {
    /// Reads `preprocessor_config.json`, or `processor_config.json`, which has the same below `image_processor`. `file`
    /// is its name for errors. Absent settings have the defaults of the class in transformers. A `Config` error names a
    /// setting that is not served.
    pub fn parse(file: &str, root: &Value) -> Result<Self> {
        let settings = Settings { file, root: root.get("image_processor").unwrap_or(root) };
        settings.refuse_unserved()?;
        let class = settings.root.get("image_processor_type").and_then(Value::as_str);
        let class = class.ok_or_else(|| settings.error("image_processor_type", "is absent"))?;
        let sizing = match class.strip_suffix("Fast").unwrap_or(class) {
            "Qwen2VLImageProcessor" | "Qwen2_5_VLImageProcessor" => settings.area()?,
            "GotOcr2ImageProcessor" => settings.tiles()?,
            other => return Err(settings.error("image_processor_type", &format!("{other} is not known"))),
        };
        let frames = if matches!(sizing, Sizing::Tiles { .. }) { 1 } else { 2 };
        let preprocessor = Self {
            sizing,
            patch_size: settings.number("patch_size", 14, 256)?,
            merge_size: settings.number("merge_size", 2, 16)?,
            temporal_patch_size: settings.number("temporal_patch_size", frames, 16)?,
            mean: settings.colours("image_mean", CLIP_MEAN)?,
            std: settings.colours("image_std", CLIP_STD)?,
        };
        if let Some(channel) = preprocessor.std.iter().position(|std| *std <= 0.0) {
            return Err(settings.error("image_std", &format!("number {channel} is not above 0")));
        }
        if let Sizing::Tiles { side, .. } = sizing
            && side % preprocessor.factor() != 0
        {
            let message = format!("{side} is no multiple of {} pixels, the side of a token", preprocessor.factor());
            return Err(settings.error("size", &message));
        }
        Ok(preprocessor)
    }

    /// Pixels of a side of a merged unit: the sides of every picture are multiples of it.
    pub fn factor(&self) -> u32 {
        self.patch_size * self.merge_size
    }

    /// The same with pictures of at most `tokens` tokens, as far as the sizing leaves that open: tiles keep their size.
    pub fn with_max_tokens(mut self, tokens: u32) -> Self {
        let area = u64::from(self.factor()).pow(2);
        match &mut self.sizing {
            Sizing::Area { min_pixels, max_pixels } => {
                *max_pixels = (*max_pixels).min(u64::from(tokens.max(1)) * area);
                *min_pixels = (*min_pixels).min(*max_pixels);
            }
            Sizing::Tiles { side, min_tiles, max_tiles } => {
                let squares = u64::from(tokens) * area / u64::from(*side).pow(2);
                // Several tiles have one more after them.
                let tiles = if squares > 2 { squares - 1 } else { 1 };
                *max_tiles = (*max_tiles).min(tiles as u32);
                *min_tiles = (*min_tiles).min(*max_tiles);
            }
        }
        self
    }

    /// The size to which a picture of `width` by `height` pixels is brought. An `InvalidArgument` for `field` if one
    /// side is too long for the other.
    pub fn size(&self, field: &str, (width, height): (u32, u32)) -> Result<PictureSize> {
        Ok(self.fit(field, (width, height))?.size)
    }

    /// How a picture of `width` by `height` pixels is resized and cut.
    pub(super) fn fit(&self, field: &str, (width, height): (u32, u32)) -> Result<Fit> {
        match self.sizing {
            Sizing::Area { min_pixels, max_pixels } => {
                let canvas = smart_resize(field, (width, height), self.factor(), min_pixels, max_pixels)?;
                Ok(Fit { canvas, columns: 1, size: PictureSize { width: canvas.0, height: canvas.1, tiles: 1 } })
            }
            Sizing::Tiles { side, min_tiles, max_tiles } => {
                let (columns, rows) = tile_grid((width, height), side, min_tiles, max_tiles);
                let thumbnail = u32::from(columns * rows > 1);
                let size = PictureSize { width: side, height: side, tiles: columns * rows + thumbnail };
                Ok(Fit { canvas: (columns * side, rows * side), columns, size })
            }
        }
    }

    /// Tokens that stand for a picture of this size in a prompt. An `InvalidArgument` for `field` if no picture of this
    /// model has this size.
    pub fn tokens(&self, field: &str, size: PictureSize) -> Result<usize> {
        let factor = self.factor();
        let PictureSize { width, height, tiles } = size;
        let fits = match self.sizing {
            Sizing::Area { .. } => tiles == 1 && width > 0 && height > 0 && width % factor == 0 && height % factor == 0,
            Sizing::Tiles { side, .. } => width == side && height == side && (1..=self.most_tiles()).contains(&tiles),
        };
        if !fits {
            let message = match self.sizing {
                Sizing::Area { .. } if tiles != 1 => format!("{tiles} tiles; this model's pictures are whole: 1"),
                Sizing::Area { .. } => format!(
                    "{width} x {height} pixels are not multiples of {factor}; send the pixels that the model's \
                     processor makes"
                ),
                Sizing::Tiles { side, max_tiles, .. } => format!(
                    "{tiles} tiles of {width} x {height} pixels; this model's pictures have at most {max_tiles} tiles \
                     of {side} x {side}, and one of the whole picture after them"
                ),
            };
            return Err(Error::invalid(field, message));
        }
        Ok((width / factor) as usize * (height / factor) as usize * tiles as usize)
    }

    /// Most tiles of a picture, with that of the whole picture.
    pub fn most_tiles(&self) -> u32 {
        match self.sizing {
            Sizing::Area { .. } => 1,
            Sizing::Tiles { max_tiles: 1, .. } => 1,
            Sizing::Tiles { max_tiles, .. } => max_tiles + 1,
        }
    }

    /// The mean as 8-bit values have it: a product in float32, which the reference has too.
    pub fn mean_times_255(&self) -> [f32; 3] {
        self.mean.map(|mean| mean * 255.0)
    }

    /// The standard deviation as 8-bit values have it: a product in float32, which the reference has too.
    pub fn std_times_255(&self) -> [f32; 3] {
        self.std.map(|std| std * 255.0)
    }
}

/// Columns and rows of the tiles of a picture: of all grids with as many tiles as allowed, the one with the nearest
/// aspect ratio. Of equally near ones it is the one of more tiles, unless they have more than twice the picture's area.
fn tile_grid((width, height): (u32, u32), side: u32, min_tiles: u32, max_tiles: u32) -> (u32, u32) {
    let pairs = (1..=max_tiles).flat_map(|columns| (1..=max_tiles).map(move |rows| (columns, rows)));
    let mut grids: Vec<_> =
        pairs.filter(|(columns, rows)| (min_tiles..=max_tiles).contains(&(columns * rows))).collect();
    grids.sort_by_key(|(columns, rows)| columns * rows);
    let (ratio, area) = (f64::from(width) / f64::from(height), f64::from(width) * f64::from(height));
    let (mut best, mut least) = ((1, 1), f64::INFINITY);
    for (columns, rows) in grids {
        let difference = (ratio - f64::from(columns) / f64::from(rows)).abs();
        let tiles_area = f64::from(side).powi(2) * f64::from(columns * rows);
        if difference < least || (difference == least && area > 0.5 * tiles_area) {
            (best, least) = ((columns, rows), difference);
        }
    }
    best
}

/// The members of a configuration, with its file for errors.
struct Settings<'a> {
    file: &'a str,
    root: &'a Value,
}

impl Settings<'_> {
    fn error(&self, name: &str, message: &str) -> Error {
        Error::Config(format!("{}: {name}: {message}", self.file))
    }

    /// The value of `name`, if it is there and not null.
    fn value(&self, name: &str) -> Option<&Value> {
        self.root.get(name).filter(|value| !value.is_null())
    }

    /// Refuses all values that would make other pixels than those of this module.
    fn refuse_unserved(&self) -> Result<()> {
        let flags = [("do_resize", true), ("do_rescale", true), ("do_normalize", true), ("do_convert_rgb", true)];
        for (name, served) in flags.into_iter().chain([("do_center_crop", false), ("do_pad", false)]) {
            if let Some(value) = self.value(name)
                && value.as_bool() != Some(served)
            {
                return Err(self.error(name, &format!("{value} is not served; {served} is")));
            }
        }
        if let Some(value) = self.value("resample")
            && value.as_u64() != Some(BICUBIC)
        {
            return Err(self.error("resample", &format!("{value} is not served; {BICUBIC} (bicubic) is")));
        }
        if let Some(value) = self.value("rescale_factor")
            && value.as_f64() != Some(1.0 / 255.0)
        {
            return Err(self.error("rescale_factor", &format!("{value} is not served; 1/255 is")));
        }
        Ok(())
    }

    /// A whole number from 1 to `most`.
    fn number(&self, name: &str, default: u32, most: u32) -> Result<u32> {
        let Some(value) = self.value(name) else { return Ok(default) };
        let number = value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=most).contains(n));
        number.ok_or_else(|| self.error(name, &format!("{value} is no whole number from 1 to {most}")))
    }

    /// Three numbers, one a colour, as float32.
    fn colours(&self, name: &str, default: [f64; 3]) -> Result<[f32; 3]> {
        let Some(value) = self.value(name) else { return Ok(default.map(|v| v as f32)) };
        let list: Option<Vec<f32>> =
            value.as_array().and_then(|list| list.iter().map(|v| v.as_f64().map(|v| v as f32)).collect());
        let colours: Option<[f32; 3]> = list.and_then(|list| list.try_into().ok());
        colours.ok_or_else(|| self.error(name, &format!("{value} are not three numbers, for red, green and blue")))
    }

    /// The sizes of Qwen's processors: `min_pixels` and `max_pixels`, or in newer files `size` with `shortest_edge` and
    /// `longest_edge`, which are areas too, for all their names.
    fn area(&self) -> Result<Sizing> {
        let pixels = |old: &str, new: &str, default: u64| {
            let in_size = self.value("size").map(|size| size.get(new).cloned().unwrap_or(Value::Null));
            let value = self.value(old).cloned().or(in_size);
            let Some(value) = value else { return Ok(default) };
            let number = value.as_u64().filter(|pixels| *pixels > 0);
            number
                .ok_or_else(|| self.error(&format!("{old} or size.{new}"), &format!("{value} is no number of pixels")))
        };
        let min_pixels = pixels("min_pixels", "shortest_edge", 56 * 56)?;
        let max_pixels = pixels("max_pixels", "longest_edge", 28 * 28 * 1280)?;
        if min_pixels > max_pixels {
            return Err(self.error("size", &format!("at least {min_pixels} pixels, but at most {max_pixels}")));
        }
        Ok(Sizing::Area { min_pixels, max_pixels })
    }

    /// The sizes of InternVL's processor. It always makes tiles, whatever `crop_to_patches` says: that is for uses of
    /// the image processor alone.
    fn tiles(&self) -> Result<Sizing> {
        let size = self.root.get("size").cloned().unwrap_or(Value::Null);
        let side = |name: &str| size.get(name).and_then(Value::as_u64).and_then(|side| u32::try_from(side).ok());
        let (Some(side), Some(height)) = (side("width"), side("height")) else {
            return Err(self.error("size", &format!("{size} has no width and height")));
        };
        if side != height || !(1..=4096).contains(&side) {
            return Err(self.error("size", &format!("{side} by {height} is no square of at most 4096 pixels a side")));
        }
        let min_tiles = self.number("min_patches", 1, MAX_TILES)?;
        let max_tiles = self.number("max_patches", 12, MAX_TILES)?;
        if min_tiles > max_tiles {
            return Err(self.error("min_patches", &format!("{min_tiles} is more than max_patches, {max_tiles}")));
        }
        Ok(Sizing::Tiles { side, min_tiles, max_tiles })
    }
}
