use serde_json::json;

use super::{ModelFacts, generate, pb, score};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::model::config::ModelConfig;
use crate::pixels::DecodeSlots;
use crate::server::{HeldPictures, ImageRules};
use crate::types::Prompt;

/// The placeholder of an image, and that of a video.
const PAD: u32 = 90;
const VIDEO: u32 = 91;

/// A model for at most two images of at most six tokens, each of 28 x 28 pixels.
fn model() -> ModelFacts {
    let config = json!({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vocab_size": 100, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "image_token_id": PAD, "video_token_id": VIDEO,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64,
                          "fullatt_block_indexes": [1]}
    });
    let preprocessor = json!({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 784});
    let vision = ModelConfig::parse(&config, None, Some(&preprocessor)).unwrap().vision.unwrap();
    let preprocessor = vision.preprocessor.clone();
    let (decode_slots, held) = (DecodeSlots::new(1), HeldPictures::new(1 << 20));
    let images = ImageRules { vision, most_per_prompt: 2, most_tokens: 6, preprocessor, decode_slots, held };
    ModelFacts { images: Some(images), ..super::model_of(32) }
}

fn image(rows: u32, columns: u32) -> pb::Image {
    pixels(28 * columns, 28 * rows, (3 * 28 * 28 * rows * columns) as usize)
}

fn pixels(width: u32, height: u32, bytes: usize) -> pb::Image {
    pb::Image {
        source: Some(pb::image::Source::Pixels(pb::Pixels { width, height, rgb: vec![9; bytes], tiles: None })),
    }
}

fn prompt(ids: &[u32], images: &[pb::Image]) -> pb::Prompt {
    let tokens = pb::TokenIds { ids: ids.to_vec() };
    pb::Prompt { kind: Some(pb::prompt::Kind::Tokens(tokens)), images: images.to_vec(), ..Default::default() }
}

fn converted(prompt: pb::Prompt) -> Result<Prompt> {
    let request = pb::GenerateRequest { prompts: vec![prompt], ..Default::default() };
    // Decoding a file takes more memory than other requests of these tests.
    let mut charge = Traffic::new(1 << 24).charge_always(0);
    Ok(super::super::generate(request, &model(), &mut charge)?.prompts.remove(0))
}

/// First token and end of each image.
fn placed(prompt: &Prompt) -> Vec<[usize; 2]> {
    prompt.images.iter().map(|image| [image.placeholders.start, image.placeholders.end]).collect()
}

#[track_caller]
fn refused(prompt: pb::Prompt, field: &str, says: &str) {
    match converted(prompt) {
        Err(Error::InvalidArgument { field: found, message }) => {
            assert!(found == field && message.contains(says), "{found}: {message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn placeholders_are_taken_as_they_are_or_expanded() {
    let (small, large) = (image(1, 2), image(2, 3));
    let pads = |count: usize| vec![PAD; count];
    let whole = [vec![1], pads(2), vec![2], pads(6), vec![3]].concat();
    for given in [whole.clone(), vec![1, PAD, 2, PAD, 3], [vec![1, PAD, 2], pads(6), vec![3]].concat()] {
        let prompt = converted(prompt(&given, &[small.clone(), large.clone()])).unwrap();
        assert_eq!((&prompt.tokens[..], placed(&prompt)), (&whole[..], vec![[1, 3], [4, 10]]), "{given:?}");
    }
    // Adjacent images, at both ends of the prompt: the tokens of both, or a placeholder for each.
    for given in [pads(8), pads(2)] {
        let prompt = converted(prompt(&given, &[large.clone(), small.clone()])).unwrap();
        assert_eq!((&prompt.tokens[..], placed(&prompt)), (&pads(8)[..], vec![[0, 6], [6, 8]]), "{given:?}");
    }
    let one = converted(prompt(&[1, PAD], &[image(1, 1)])).unwrap();
    assert_eq!((&one.tokens[..], placed(&one)), (&[1, PAD][..], vec![[1, 2]]));
    assert!(converted(prompt(&[1, 2], &[])).unwrap().images.is_empty());
}

#[test]
fn placeholders_that_do_not_belong_to_the_images_are_rejected() {
    let (small, large) = (image(1, 2), image(2, 3));
    let tokens = "prompts[0].tokens";
    refused(
        prompt(&[1, PAD, PAD, PAD], std::slice::from_ref(&small)),
        tokens,
        "image 0 has 3 placeholders, but 1 x 2 tokens",
    );
    let second = [1, PAD, PAD, 2, PAD, PAD, PAD];
    refused(prompt(&second, &[small.clone(), large.clone()]), tokens, "image 1 has 3 placeholders, but 2 x 3 tokens");
    refused(
        prompt(&[PAD, 1, PAD], std::slice::from_ref(&small)),
        tokens,
        "has placeholders of more than the prompt's 1 images",
    );
    refused(
        prompt(&[PAD, 1], &[small.clone(), large.clone()]),
        tokens,
        "has placeholders of 1 images, but the prompt has 2",
    );
    refused(prompt(&[1], std::slice::from_ref(&small)), tokens, "has placeholders of 0 images, but the prompt has 1");
    refused(prompt(&[1, PAD], &[]), tokens, "has placeholders of images (90), but the prompt has no images");
    refused(prompt(&[1, VIDEO], &[]), "prompts[0].tokens[1]", "91 stands for a video");
    refused(
        prompt(&[PAD, 1, PAD, 2, PAD], &[small.clone(), small.clone(), small.clone()]),
        "prompts[0].images[2].pixels",
        "3 images are more than 2",
    );
    let cut = pb::Prompt { keep_tokens: Some(3), ..prompt(&[PAD, 1], &[small]) };
    refused(cut, "prompts[0].images[0].pixels", "a prompt with images cannot be cut");
    let most = [vec![PAD; 6], vec![1; 26]].concat();
    refused(prompt(&most, &[large]), tokens, "32 tokens leave no room");
}

#[test]
fn pixels_of_a_wrong_size_are_rejected() {
    let pixels_of = |image| prompt(&[PAD], &[image]);
    refused(
        pixels_of(pixels(28, 30, 3 * 28 * 30)),
        "prompts[0].images[0].pixels",
        "28 x 30 pixels are not multiples of 28",
    );
    refused(pixels_of(pixels(28, 28, 5)), "prompts[0].images[0].pixels.rgb", "has 5 bytes");
    refused(pixels_of(pixels(0, 28, 0)), "prompts[0].images[0].pixels.width", "is 0");
    refused(pixels_of(image(1, 7)), "prompts[0].images[0].pixels", "196 x 28 pixels are 7 tokens, more than 6");
    refused(pixels_of(pb::Image::default()), "prompts[0].images[0]", "has no source");
    let text_model = super::model();
    let request = pb::GenerateRequest { prompts: vec![pixels_of(image(1, 1))], ..Default::default() };
    let error = generate(request, &text_model).err().unwrap().to_string();
    assert_eq!(error, "prompts[0].images[0].pixels: this model takes no images; send text alone");
}

#[test]
fn files_are_decoded_and_resized() {
    let mut png = Vec::new();
    let pixels = image::RgbImage::from_pixel(60, 30, image::Rgb([1, 2, 3]));
    pixels.write_to(&mut std::io::Cursor::new(&mut png), image::ImageFormat::Png).unwrap();
    let file = |bytes: &[u8]| pb::Image { source: Some(pb::image::Source::Encoded(bytes.to_vec())) };
    let found = converted(prompt(&[PAD], &[file(&png)])).unwrap();
    let picture = &found.images[0].picture;
    assert_eq!((picture.width(), picture.height(), placed(&found)), (56, 28, vec![[0, 2]]));
    assert!(picture.rgb().chunks_exact(3).all(|pixel| pixel == [1, 2, 3]));
    refused(prompt(&[PAD], &[file(b"GIF89a")]), "prompts[0].images[0].encoded", "GIF");
    refused(prompt(&[PAD], &[file(&png[..png.len() / 2])]), "prompts[0].images[0].encoded", "");
}

#[test]
fn scored_sequences_have_images_too() {
    let request = |lists: usize| pb::ScoreRequest {
        sequences: vec![pb::TokenIds { ids: vec![1, PAD, 2] }, pb::TokenIds { ids: vec![1, 2] }],
        images: vec![pb::ImageList { images: vec![image(1, 2)] }, pb::ImageList::default()][..lists].to_vec(),
        ..Default::default()
    };
    let valid = score(request(2), &model()).unwrap();
    assert_eq!((&valid.prompts[0].tokens[..], placed(&valid.prompts[0])), (&[1, PAD, PAD, 2][..], vec![[1, 3]]));
    let error = score(request(1), &model()).err().unwrap().to_string();
    assert_eq!(error, "images: 1 lists for 2 sequences; give one for each, or none");
}

#[test]
fn placeholders_cannot_be_sampled_for() {
    let biased = |token, value| pb::SamplingParams { logit_bias: [(token, value)].into(), ..Default::default() };
    let request = |sampling| pb::GenerateRequest {
        prompts: vec![prompt(&[1], &[])],
        sampling: Some(sampling),
        ..Default::default()
    };
    let error = generate(request(biased(PAD, 100.0)), &model()).err().unwrap().to_string();
    assert!(error.starts_with("sampling.logit_bias[90]: no sample has this placeholder"), "{error}");
    assert!(generate(request(biased(1, 100.0)), &model()).is_ok());
    let only = pb::SamplingParams { allowed_token_ids: vec![PAD, VIDEO], ..Default::default() };
    assert!(generate(request(only), &model()).is_err(), "no token is possible");
}
