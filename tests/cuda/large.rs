//! A checkpoint whose weights fill pages of a device's memory, which the fixtures' do not.

use crate::common::{Engine, fixture, random_weights, write_checkpoint};

/// The fixture `qwen2` with a larger vocabulary and other weights. Each entry takes 256 bytes in bfloat16.
pub fn checkpoint(vocabulary: usize) -> tempfile::TempDir {
    let mut weights = {
        let engine = Engine::start("qwen2", &["--dtype", "bfloat16"]);
        random_weights(engine.parameters(), 3)
    };
    let (shape, values) = weights.get_mut("model.embed_tokens.weight").expect("it has an embedding");
    let width = shape[1];
    *shape = vec![vocabulary, width];
    *values = (0..vocabulary * width).map(|i| values[i % values.len()] * [1.0, -0.5, 0.25][i / width % 3]).collect();
    let dir = write_checkpoint("qwen2", &weights);
    let config = std::fs::read_to_string(fixture("qwen2").join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["vocab_size"] = vocabulary.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}
