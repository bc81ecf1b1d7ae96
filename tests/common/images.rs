//! Prompts with images, with what transformers makes of them.

use rollout_server::types::{Picture, TokenId};
use safetensors::SafeTensors;

use super::{PlacedPicture, Request, fixture};

/// Pixels of the side of an image's token.
pub const SIDE: usize = 28;

/// A prompt with its images.
#[derive(Clone)]
pub struct Case {
    pub tokens: Vec<TokenId>,
    pub images: Vec<PlacedPicture>,
}

/// A case with transformers' log-probabilities.
pub struct ScoredCase {
    pub case: Case,
    pub float32: Vec<f32>,
    pub bfloat16: Vec<f32>,
}

/// The results of transformers for a fixture.
pub struct Reference {
    pub cases: Vec<ScoredCase>,
    pub greedy_prompt: Case,
    pub greedy_tokens: Vec<TokenId>,
}

pub fn config(model: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(fixture(model).join("config.json")).unwrap()).unwrap()
}

/// The token that stands for images: that of the configuration, or of the tokenizer if that names none.
pub fn image_token(model: &str) -> TokenId {
    if let Some(token) = config(model)["image_token_id"].as_u64() {
        return token as TokenId;
    }
    let tokenizer = std::fs::read(fixture(model).join("tokenizer.json")).unwrap();
    let tokenizer: serde_json::Value = serde_json::from_slice(&tokenizer).unwrap();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    added.iter().find(|token| token["content"] == "<IMG_CONTEXT>").unwrap()["id"].as_u64().unwrap() as TokenId
}

/// Pixels of the side of a model's tiles, if it has some.
pub fn tile_side(model: &str) -> Option<usize> {
    let config = config(model);
    let side = [&config["force_image_size"], &config["vision_config"]["image_size"][0]];
    side.into_iter().find_map(serde_json::Value::as_u64).map(|side| side as usize)
}

pub fn grid(picture: &Picture) -> [usize; 2] {
    [(picture.tiles() * picture.height()) as usize / SIDE, picture.width() as usize / SIDE]
}

impl Case {
    /// Finds the placeholders of the pictures, which come in order.
    pub fn new(tokens: Vec<TokenId>, pictures: Vec<Picture>, image_token: TokenId) -> Self {
        let mut at = 0;
        let place = |picture: Picture| {
            let [rows, columns] = grid(&picture);
            let start = at + tokens[at..].iter().position(|token| *token == image_token).unwrap();
            at = start + rows * columns;
            assert!(tokens[start..at].iter().all(|token| *token == image_token));
            (picture, start..at, [rows, columns])
        };
        Self { images: pictures.into_iter().map(place).collect(), tokens }
    }
}

impl Reference {
    pub fn read(model: &str) -> Self {
        let file = std::fs::read(fixture(model).join("reference.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let words = |name: &str| tensors.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let ids = |name: &str| words(name).into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
        let floats = |name: &str| words(name).into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
        let pictures = |prefix: String| -> Vec<Picture> {
            let named = |index: usize| tensors.tensor(&format!("{prefix}_{index}")).ok();
            let picture = |rgb: safetensors::tensor::TensorView<'_>| {
                // The first axis is that of tiles, if there are some.
                let (tiles, sides) = rgb.shape().split_at(rgb.shape().len() - 3);
                let tiles = tiles.first().map_or(1, |tiles| *tiles as u32);
                Picture::new("image", sides[1] as u32, sides[0] as u32, tiles, rgb.data()).unwrap()
            };
            (0..).map_while(named).map(picture).collect()
        };
        let case = |tokens: String, rgb: String| Case::new(ids(&tokens), pictures(rgb), image_token(model));
        let count = tensors.names().iter().filter(|name| name.starts_with("tokens_")).count();
        let scored = |index: usize| ScoredCase {
            case: case(format!("tokens_{index}"), format!("rgb_{index}")),
            float32: floats(&format!("logprobs_f32_{index}")),
            bfloat16: floats(&format!("logprobs_bf16_{index}")),
        };
        Self {
            cases: (0..count).map(scored).collect(),
            greedy_prompt: case("greedy_prompt".into(), "greedy_rgb".into()),
            greedy_tokens: ids("greedy_tokens"),
        }
    }
}

pub fn with_images(request: impl Fn(Vec<Vec<TokenId>>) -> Request, cases: &[Case]) -> Request {
    let images = cases.iter().map(|case| case.images.clone()).collect();
    Request { images, ..request(cases.iter().map(|case| case.tokens.clone()).collect()) }
}
