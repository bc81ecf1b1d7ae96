//! The vision tower's configuration, and how the model takes images in prompts.

use serde_json::Value;

use super::bad;
use crate::error::Result;
use crate::pixels::{PictureSize, Preprocessor, Sizing};
use crate::types::{Picture, TokenId};

/// A vision tower, and the tokens that stand for images.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    pub kind: TowerKind,
    pub depth: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub intermediate_size: usize,
    /// How pictures are resized, cut into patches and normalised.
    pub preprocessor: Preprocessor,
    /// Width of an embedding: the decoder's hidden size.
    pub output_size: usize,
    /// The token that stands for one token of an image.
    pub image_token: TokenId,
    /// Tokens that no sample may have, because they stand for content that a trainer would look for: ascending.
    pub forbidden_tokens: Vec<TokenId>,
}

/// By what the supported towers differ.
#[derive(Clone, Debug, PartialEq)]
pub enum TowerKind {
    /// That of Qwen2.5-VL, which takes a picture whole.
    Windowed {
        /// Tokens of a window's side.
        window: usize,
        /// The blocks whose attention sees the whole image; that of all others sees a window.
        full_attention: Vec<usize>,
    },
    /// InternViT, which takes each tile of a picture alone.
    Tiled {
        /// Pixels of a tile's side.
        tile_side: usize,
        /// Epsilon of the blocks' norms.
        norm_eps: f32,
        /// Whether queries, keys and values have biases.
        qkv_bias: bool,
    },
}

impl VisionConfig {
    /// # Errors
    /// `Config`: a size that no tower can have.
    pub(super) fn check(&self) -> Result<()> {
        let positive = [
            ("the number of blocks", self.depth),
            ("hidden_size", self.hidden_size),
            ("the number of heads", self.num_heads),
            ("intermediate_size", self.intermediate_size),
        ];
        if let Some((name, _)) = positive.into_iter().find(|&(_, n)| n == 0) {
            return Err(bad(format!("config.json: vision_config: {name} is 0")));
        }
        if !self.hidden_size.is_multiple_of(4 * self.num_heads) {
            let (hidden, heads) = (self.hidden_size, self.num_heads);
            return Err(bad(format!(
                "config.json: vision_config has {heads} heads for a hidden size of {hidden}; a head's width must be a \
                 multiple of 4"
            )));
        }
        Ok(())
    }

    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Patches of a token.
    pub fn unit(&self) -> usize {
        self.merge_size() * self.merge_size()
    }

    /// Patches of a token's side.
    pub fn merge_size(&self) -> usize {
        self.preprocessor.merge_size as usize
    }

    /// The dimensions of a patch, which are the input features of the tower: channels, frames, rows and columns.
    pub fn patch(&self) -> [usize; 4] {
        let Preprocessor { patch_size, temporal_patch_size, .. } = self.preprocessor;
        [3, temporal_patch_size as usize, patch_size as usize, patch_size as usize]
    }

    /// Pixels of a tile's side; `None` for a tower that takes pictures whole.
    pub fn tile_side(&self) -> Option<usize> {
        match self.kind {
            TowerKind::Windowed { .. } => None,
            TowerKind::Tiled { tile_side, .. } => Some(tile_side),
        }
    }

    /// Fewest tokens of a picture: those of a tile, where there are tiles.
    pub fn fewest_tokens(&self) -> usize {
        self.tile_side().map_or(1, |side| (side / self.token_side()).pow(2))
    }

    /// Rows of a tile in the tower that takes tiles alone: its patches, and the class token.
    pub fn tile_rows(&self) -> usize {
        self.fewest_tokens() * self.unit() + 1
    }

    /// Most tokens of a picture that the preprocessor makes.
    pub fn most_tokens(&self) -> usize {
        match self.preprocessor.sizing {
            Sizing::Area { max_pixels, .. } => {
                usize::try_from(max_pixels).unwrap_or(usize::MAX) / self.token_side().pow(2)
            }
            Sizing::Tiles { .. } => self.preprocessor.most_tiles() as usize * self.fewest_tokens(),
        }
    }

    /// Pixels of a token's side, of which a picture's sides must be multiples.
    pub fn token_side(&self) -> usize {
        self.preprocessor.factor() as usize
    }

    /// Rows and columns of the tokens of a picture, whose tiles are one below the other.
    ///
    /// # Errors
    /// `InvalidArgument` for `field` if no picture of this model has its size.
    pub fn grid(&self, field: &str, picture: &Picture) -> Result<[usize; 2]> {
        let (width, height, tiles) = (picture.width(), picture.height(), picture.tiles());
        let tokens = self.preprocessor.tokens(field, PictureSize { width, height, tiles })?;
        let columns = width as usize / self.token_side();
        Ok([tokens / columns, columns])
    }
}

/// The file of a model's preprocessor.
pub(super) fn preprocessor(config: Option<&Value>) -> Result<Preprocessor> {
    let missing = || bad("the model has a vision tower, but no preprocessor_config.json; download it again".into());
    Preprocessor::parse("preprocessor_config.json", config.ok_or_else(missing)?)
}

/// The token of this number in the field `name` of `config.json`, or `default` where the field is absent.
pub(super) fn token(config: &Value, name: &str, default: Option<u64>, vocab_size: usize) -> Result<TokenId> {
    let Some(token) = config[name].as_u64().or(default) else {
        return Err(bad(format!("config.json: {name} is missing, the token that stands for images in prompts")));
    };
    if token >= vocab_size as u64 {
        return Err(bad(format!("config.json: {name} {token} is not below vocab_size {vocab_size}")));
    }
    Ok(token as TokenId)
}
