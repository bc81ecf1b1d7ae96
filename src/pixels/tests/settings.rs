//! Settings of preprocessors.

use serde_json::{Value, json};

use super::super::{PictureSize, Preprocessor, Sizing};
use crate::error::Error;

fn parsed(value: &Value) -> Preprocessor {
    Preprocessor::parse("preprocessor_config.json", value).unwrap()
}

/// Qwen2.5-VL's file on the hub.
fn hub() -> Value {
    json!({
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
    })
}

#[test]
fn all_forms_of_a_file_are_read() {
    let old = parsed(&hub());
    assert_eq!(old.sizing, Sizing::Area { min_pixels: 3136, max_pixels: 12_845_056 });
    assert_eq!((old.patch_size, old.merge_size, old.temporal_patch_size, old.factor()), (14, 2, 2, 28));
    // transformers 5 saves float32 digits, areas in `size`, and the class with another name.
    let new = json!({
        "size": {"shortest_edge": 3136, "longest_edge": 12845056}, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.48145467042922974, 0.4578275084495544, 0.40821072459220886],
        "image_std": [0.2686295509338379, 0.2613025903701782, 0.2757771015167236], "do_convert_rgb": true,
        "do_resize": true, "do_rescale": true, "do_normalize": true, "resample": 3,
        "rescale_factor": 0.00392156862745098, "image_processor_type": "Qwen2VLImageProcessorFast",
    });
    assert_eq!(parsed(&new), old);
    assert_eq!(parsed(&json!({ "image_processor": new })), old);
    let defaults = parsed(&json!({"image_processor_type": "Qwen2VLImageProcessor"}));
    assert_eq!(defaults.sizing, Sizing::Area { min_pixels: 3136, max_pixels: 1_003_520 });
    assert_eq!(Preprocessor { sizing: old.sizing, ..defaults }, old);
    let tiles = json!({"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}});
    assert_eq!(parsed(&tiles).sizing, Sizing::Tiles { side: 448, min_tiles: 1, max_tiles: 12 });
}

#[test]
fn normalisation_is_that_of_the_reference() {
    let preprocessor = parsed(&hub());
    // torch.tensor(image_mean) * (1 / rescale_factor), and the same of image_std.
    assert_eq!(preprocessor.mean_times_255(), [122.770_94, 116.746_02, 104.093_735]);
    assert_eq!(preprocessor.std_times_255(), [68.500_534, 66.632_164, 70.323_16]);
}

#[test]
fn settings_that_are_not_served_are_refused_by_name() {
    for (name, value) in [
        ("do_resize", json!(false)),
        ("do_normalize", json!(false)),
        ("do_convert_rgb", json!(false)),
        ("do_center_crop", json!(true)),
        ("do_pad", json!(true)),
        ("resample", json!(2)),
        ("rescale_factor", json!(0.5)),
        ("patch_size", json!(0)),
        ("merge_size", json!("2")),
        ("temporal_patch_size", json!(2.5)),
        ("image_mean", json!([0.5, 0.5])),
        ("image_mean", json!(0.5)),
        ("image_std", json!([0.5, 0, 0.5])),
        ("image_processor_type", json!("CLIPImageProcessor")),
        ("image_processor_type", Value::Null),
        ("min_pixels", json!(-1)),
        ("max_pixels", json!(0)),
    ] {
        let mut file = hub();
        file[name] = value.clone();
        let error = Preprocessor::parse("preprocessor_config.json", &file).unwrap_err();
        assert!(matches!(error, Error::Config(_)), "{error:?}");
        let message = error.to_string();
        assert!(
            message.starts_with("preprocessor_config.json: ") && message.contains(name),
            "{name} {value}: {message}"
        );
    }
    let mut file = hub();
    file["min_pixels"] = json!(12_845_057);
    assert!(Preprocessor::parse("p.json", &file).unwrap_err().to_string().contains("at most 12845056"));
    let no_square = json!({"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 224}});
    assert!(Preprocessor::parse("p.json", &no_square).unwrap_err().to_string().contains("no square"));
    let uneven = json!({"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 450, "width": 450}});
    assert!(Preprocessor::parse("p.json", &uneven).unwrap_err().to_string().contains("no multiple of 28"));
}

#[test]
fn tokens_are_counted_and_bounded() {
    let preprocessor = parsed(&hub());
    let tokens = |width, height, tiles| preprocessor.tokens("images[0]", PictureSize { width, height, tiles });
    assert_eq!(tokens(28, 56, 1).unwrap(), 2);
    assert_eq!(tokens(1148, 868, 1).unwrap(), 41 * 31);
    for (width, height, tiles) in [(28, 57, 1), (30, 56, 1), (28, 28, 2), (0, 28, 1), (28, 28, 0)] {
        let error = tokens(width, height, tiles).unwrap_err().to_string();
        let reason = if tiles == 1 { "multiples of 28" } else { "pictures are whole" };
        assert!(error.starts_with("images[0]: ") && error.contains(reason), "{error}");
    }
    let limited = preprocessor.with_max_tokens(1280);
    for size in [(4000, 3000), (100, 16000), (16000, 100), (28, 28)] {
        let size = limited.size("image", size).unwrap();
        assert!(limited.tokens("image", size).unwrap() <= 1280, "{size:?}");
    }
    let tiles = json!({"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}});
    let tiles = parsed(&tiles);
    for (most, expected) in [(3328, 12), (3327, 11), (1280, 4), (767, 1), (256, 1), (10_000, 12)] {
        let Sizing::Tiles { max_tiles, .. } = tiles.clone().with_max_tokens(most).sizing else { unreachable!() };
        assert_eq!(max_tiles, expected, "{most} tokens");
    }
    let of = |width, tiles| PictureSize { width, height: 448, tiles };
    assert_eq!(tiles.tokens("image", of(448, 13)).unwrap(), 13 * 256);
    for wrong in [of(448, 14), of(448, 0), of(476, 1)] {
        assert!(tiles.tokens("image", wrong).unwrap_err().to_string().contains("at most 12 tiles"));
    }
}
