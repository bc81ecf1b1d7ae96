use serde_json::json;

use super::*;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer");

fn fixture() -> Tokenizer {
    Tokenizer::from_file(Path::new(&format!("{FIXTURES}/tokenizer.json"))).unwrap()
}

fn read(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(format!("{FIXTURES}/{name}")).unwrap()).unwrap()
}

/// The fixture's tokenizer as the metadata of a GGUF file.
fn gguf_metadata() -> HashMap<String, GgufValue> {
    let json = read("tokenizer.json");
    let string = |s: &str| GgufValue::String(s.to_string());
    let added = json["added_tokens"].as_array().unwrap();
    let model = json["model"]["vocab"].as_object().unwrap().iter();
    let mut ids: Vec<(u64, &str)> = model.map(|(token, id)| (id.as_u64().unwrap(), token.as_str())).collect();
    ids.extend(added.iter().map(|t| (t["id"].as_u64().unwrap(), t["content"].as_str().unwrap())));
    ids.sort();
    ids.dedup();
    let kind = |token: &str| match added.iter().find(|t| t["content"] == token) {
        Some(t) => GgufValue::I32(if t["special"] == true { 3 } else { 4 }),
        None => GgufValue::I32(1),
    };
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    let merges = merges.map(|m| string(&format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap())));
    HashMap::from([
        ("tokenizer.ggml.model".into(), string("gpt2")),
        ("tokenizer.ggml.pre".into(), string("smollm")),
        ("tokenizer.ggml.tokens".into(), GgufValue::Array(ids.iter().map(|t| string(t.1)).collect())),
        ("tokenizer.ggml.token_type".into(), GgufValue::Array(ids.iter().map(|t| kind(t.1)).collect())),
        ("tokenizer.ggml.merges".into(), GgufValue::Array(merges.collect())),
        ("tokenizer.ggml.bos_token_id".into(), GgufValue::U32(1)),
        ("tokenizer.ggml.eos_token_id".into(), GgufValue::U32(2)),
        ("tokenizer.ggml.add_bos_token".into(), GgufValue::Bool(false)),
    ])
}

/// `cases.json` has the results of the Python package; `make.py` beside it wrote the file.
#[test]
fn encodes_and_decodes_as_the_python_package() {
    for tokenizer in [fixture(), Tokenizer::from_gguf(&gguf_metadata()).unwrap()] {
        assert_eq!(tokenizer.vocab_size(), 501);
        assert_eq!(tokenizer.token_to_id("<|im_end|>"), Some(2));
        for case in read("cases.json").as_array().unwrap() {
            let ids: Vec<TokenId> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(case["text"].as_str().unwrap(), true).unwrap(), ids, "{case}");
            assert_eq!(tokenizer.decode(&ids, false), case["decoded"], "{case}");
            assert_eq!(tokenizer.decode(&ids, true), case["decoded_without_special"], "{case}");
        }
    }
}

/// Takes random tokens, so that most texts are not UTF-8.
#[test]
fn decodes_random_tokens_as_the_crate_does() {
    let tokenizer = fixture();
    let mut state = 0xDECADE_u64;
    println!("seed {state:#x}");
    for length in 0..500 {
        let ids: Vec<TokenId> = (0..length % 40)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as u32 % 510 // some ids have no token
            })
            .collect();
        for skip_special in [false, true] {
            let expected = tokenizer.inner.decode(&ids, skip_special).unwrap();
            assert_eq!(tokenizer.decode(&ids, skip_special), expected, "{ids:?}");
        }
    }
}

#[test]
fn pre_tokenizers_by_their_gguf_names() {
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
    let text = "I'VE we've 1234½  x\n\n y";
    let split = |name: &str| {
        let mut metadata = gguf_metadata();
        metadata.insert("tokenizer.ggml.pre".into(), GgufValue::String(name.into()));
        let tokenizer = Tokenizer::from_gguf(&metadata).unwrap();
        let mut pieces = PreTokenizedString::from(text);
        tokenizer.inner.get_pre_tokenizer().unwrap().pre_tokenize(&mut pieces).unwrap();
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.iter().map(|s| text[s.1.0..s.1.1].to_string()).collect::<Vec<_>>()
    };
    let gpt2 = ["I", "'", "VE", " we", "'ve", " 1234½", " ", " x", "\n\n", " y"];
    assert_eq!(split("gpt-2"), gpt2);
    assert_eq!(split("default"), gpt2);
    let smollm = ["I", "'", "VE", " we", "'ve", " ", "1", "2", "3", "4", "½", " ", " x", "\n\n", " y"];
    assert_eq!(split("smollm"), smollm);
    let qwen2 = ["I", "'VE", " we", "'ve", " ", "1", "2", "3", "4", "½", " ", " x", "\n\n", " y"];
    assert_eq!(split("qwen2"), qwen2);
    let llama3 = ["I", "'VE", " we", "'ve", " ", "123", "4½", " ", " x", "\n\n", " y"];
    assert_eq!(split("llama-bpe"), llama3);
}

#[test]
fn beginning_and_end_of_sequence_as_the_gguf_file_says() {
    let encode = |changes: &[(&str, GgufValue)], add_special| {
        let mut metadata = gguf_metadata();
        metadata.extend(changes.iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value.clone())));
        let ids = Tokenizer::from_gguf(&metadata).unwrap().encode("a", add_special).unwrap();
        ids.iter().map(|&id| if id > 2 { 'a' } else { char::from_digit(id, 10).unwrap() }).collect::<String>()
    };
    let yes = GgufValue::Bool(true);
    assert_eq!(encode(&[], true), "a");
    assert_eq!(encode(&[("add_bos_token", yes.clone())], true), "1a");
    assert_eq!(encode(&[("add_bos_token", yes.clone())], false), "a");
    assert_eq!(encode(&[("add_bos_token", yes.clone()), ("add_eos_token", yes)], true), "1a2");
    assert_eq!(encode(&[("pre", GgufValue::String("llama-bpe".into()))], true), "a");
    let mut llama3 = gguf_metadata();
    llama3.remove("tokenizer.ggml.add_bos_token");
    llama3.insert("tokenizer.ggml.pre".into(), GgufValue::String("llama-bpe".into()));
    assert_eq!(Tokenizer::from_gguf(&llama3).unwrap().encode("", true).unwrap(), [1]);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let refuse = |key: &str, value: Option<GgufValue>, says: &str| {
        let mut metadata = gguf_metadata();
        match value {
            Some(value) => metadata.insert(key.into(), value),
            None => metadata.remove(key),
        };
        match Tokenizer::from_gguf(&metadata).map(|_| ()) {
            Err(Error::Config(message)) => assert!(message.contains(says), "{message} does not say {says}"),
            other => panic!("{other:?}"),
        }
    };
    let string = |s: &str| Some(GgufValue::String(s.into()));
    refuse("tokenizer.ggml.model", string("llama"), "\"llama\"");
    refuse("tokenizer.ggml.model", None, "tokenizer.ggml.model");
    refuse("tokenizer.ggml.pre", string("tekken"), "\"tekken\"");
    refuse("tokenizer.ggml.merges", Some(GgufValue::Array(vec![string("ab").unwrap()])), "\"ab\"");
    refuse("tokenizer.ggml.tokens", Some(GgufValue::U32(1)), "tokenizer.ggml.tokens");
    refuse("tokenizer.ggml.add_bos_token", string("yes"), "tokenizer.ggml.add_bos_token");
    assert!(matches!(Tokenizer::from_file(Path::new("/nonexistent.json")), Err(Error::Config(_))));
}

/// A tokenizer with SentencePiece's spelling and the decoders that such tokenizers have.
fn sentence_piece(strips_space: bool) -> Result<Tokenizer> {
    let mut vocab: serde_json::Map<String, Value> =
        (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte))).collect();
    for (i, piece) in ["▁", "▁Paris", "▁is", "x", "<s>"].iter().enumerate() {
        vocab.insert(piece.to_string(), json!(256 + i));
    }
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if strips_space {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let special = json!({ "id": 260, "content": "<s>", "special": true, "normalized": false, "lstrip": false,
        "rstrip": false, "single_word": false });
    let tokenizer = json!({ "version": "1.0", "added_tokens": [special],
        "model": { "type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true },
        "decoder": { "type": "Sequence", "decoders": decoders } });
    Tokenizer::new(serde_json::from_value(tokenizer).unwrap())
}

#[test]
fn sentence_piece_spelling() {
    for strips_space in [false, true] {
        let tokenizer = sentence_piece(strips_space).unwrap();
        // Only valid runs of bytes, because the crate looks back and turns every byte of an invalid run into U+FFFD.
        for ids in
            [&[257, 258][..], &[260, 257, 0xE6, 0x97, 0xA5, 258], &[256, 256, 259], &[0x20, 257], &[259, 256], &[]]
        {
            for skip_special in [false, true] {
                let expected = tokenizer.inner.decode(ids, skip_special).unwrap();
                assert_eq!(tokenizer.decode(ids, skip_special), expected, "{ids:?}");
            }
        }
        assert_eq!(tokenizer.decode(&[0xE6, 0x97, 259, 0xFF], true), "\u{FFFD}x\u{FFFD}");
    }
}

#[test]
fn a_decoder_that_is_not_known_is_refused() {
    let mut tokenizer = sentence_piece(false).unwrap().inner;
    tokenizer.with_decoder(Some(tokenizers::decoders::wordpiece::WordPiece::default()));
    assert!(matches!(Tokenizer::new(tokenizer), Err(Error::Config(m)) if m.contains("WordPiece")));
}
