use std::collections::BTreeSet;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use super::*;
use crate::memory::Traffic;
use crate::text::{ChatTemplate, Conversation, Tokenizer};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen_v1");

fn fixture() -> TiktokenRanks {
    TiktokenRanks::read(&Path::new(FIXTURE).join("qwen.tiktoken")).unwrap()
}

/// Texts and chats with the ids that tiktoken's algorithm gives in Python.
fn expected() -> Value {
    serde_json::from_str(&std::fs::read_to_string(Path::new(FIXTURE).join("text.json")).unwrap()).unwrap()
}

fn ids(case: &Value) -> Vec<TokenId> {
    serde_json::from_value(case["ids"].clone()).unwrap()
}

/// The lines of a vocabulary: the single bytes in a random order, and random tokens of a few letters.
fn random_vocabulary(rng: &mut StdRng) -> Vec<Vec<u8>> {
    let mut tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    let mut known: BTreeSet<Vec<u8>> = tokens.iter().cloned().collect();
    for _ in 0..rng.random_range(10..120) {
        let token: Vec<u8> = (0..rng.random_range(2..7)).map(|_| rng.random_range(b'a'..=b'c')).collect();
        if known.insert(token.clone()) {
            tokens.insert(rng.random_range(0..=tokens.len()), token);
        }
    }
    tokens
}

fn written(tokens: &[Vec<u8>]) -> String {
    tokens.iter().enumerate().map(|(rank, token)| format!("{} {rank}\n", BASE64_STANDARD.encode(token))).collect()
}

/// tiktoken's algorithm for one piece.
fn encode(piece: &[u8], ranks: &HashMap<&[u8], u32>) -> Vec<TokenId> {
    let rank = |bytes: &[u8]| ranks.get(bytes).copied();
    if let Some(rank) = rank(piece) {
        return vec![rank];
    }
    let mut parts: Vec<Vec<u8>> = piece.iter().map(|byte| vec![*byte]).collect();
    while let Some((_, first)) =
        (1..parts.len()).filter_map(|i| Some((rank(&[&parts[i - 1][..], &parts[i]].concat())?, i - 1))).min()
    {
        let second = parts.remove(first + 1);
        parts[first].extend(second);
    }
    parts.iter().map(|part| rank(part).unwrap()).collect()
}

/// In random vocabularies many tokens are reached by no merges, and some by pairs of higher ranks than their own.
#[test]
fn words_have_the_tokens_of_tiktokens_algorithm_in_random_vocabularies() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let ranks = TiktokenRanks::parse(&written(&random_vocabulary(&mut rng))).unwrap();
        let (tokenizer, ranks) = (Tokenizer::from_tiktoken(&ranks).unwrap(), ranks.by_token());
        for _ in 0..50 {
            let word: Vec<u8> = (0..rng.random_range(1..24)).map(|_| rng.random_range(b'a'..=b'd')).collect();
            let text = String::from_utf8(word).unwrap();
            assert_eq!(tokenizer.encode(&text, true).unwrap(), encode(text.as_bytes(), &ranks), "{text}");
        }
    }
}

/// A vocabulary of the hub's size, of which each token is two others.
#[test]
fn a_vocabulary_of_the_hubs_size_is_built() {
    let mut rng = StdRng::seed_from_u64(7);
    let mut tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    let mut known: BTreeSet<Vec<u8>> = tokens.iter().cloned().collect();
    while tokens.len() < 151_643 {
        let [left, right] = [0; 2].map(|_| &tokens[rng.random_range(0..tokens.len())]);
        let token = [left.as_slice(), right].concat();
        if token.len() < 12 && known.insert(token.clone()) {
            tokens.push(token);
        }
    }
    let text = written(&tokens);
    let start = std::time::Instant::now();
    let ranks = TiktokenRanks::parse(&text).unwrap();
    let tokenizer = Tokenizer::from_tiktoken(&ranks).unwrap();
    let bytes: usize = tokens.iter().map(Vec::len).sum();
    println!("{} tokens of {bytes} bytes in {:.2?}", tokens.len(), start.elapsed());
    assert_eq!((tokenizer.vocab_size(), ranks.special("<|extra_204|>")), (151_851, Some(151_850)));
    for word in tokens.iter().filter(|token| token.is_ascii() && token.iter().all(u8::is_ascii_alphabetic)).take(20) {
        let text = std::str::from_utf8(word).unwrap().repeat(2);
        assert_eq!(tokenizer.encode(&text, true).unwrap(), encode(text.as_bytes(), &ranks.by_token()), "{text}");
    }
}

#[test]
fn texts_have_the_ids_of_tiktokens_algorithm() {
    let tokenizer = Tokenizer::from_tiktoken(&fixture()).unwrap();
    let expected = expected();
    let texts = expected["texts"].as_array().unwrap();
    assert!(texts.len() > 300);
    for case in texts {
        assert_eq!(tokenizer.encode(case["text"].as_str().unwrap(), true).unwrap(), ids(case), "{case}");
    }
    assert_eq!(tokenizer.vocab_size(), 720);
    assert!(tokenizer.max_bytes_per_token().is_some(), "every byte has a token");
}

#[test]
fn chats_have_the_default_system_message_if_they_have_none() {
    let tokenizer = Tokenizer::from_tiktoken(&fixture()).unwrap();
    let template = ChatTemplate::of_qwen_v1(&Value::Null).unwrap();
    for case in expected()["chats"].as_array().unwrap() {
        let messages = case["messages"].as_array().unwrap().clone();
        let chat = Conversation { messages, add_generation_prompt: true, ..Conversation::default() };
        let (prompt, _) = template.render(chat, &Traffic::new(1 << 40)).unwrap();
        assert_eq!(prompt, case["prompt"]);
        assert_eq!(tokenizer.encode(&prompt, false).unwrap(), ids(case));
    }
}

#[test]
fn special_tokens_follow_the_ranks_and_are_found_after_normalization() {
    let (ranks, endings) = (fixture(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>"]);
    let tokenizer = Tokenizer::from_tiktoken(&ranks).unwrap();
    for (token, id) in endings.into_iter().zip([512, 513, 514, 515, 719]) {
        assert_eq!((ranks.special(token), tokenizer.token_to_id(token)), (Some(id), Some(id)), "{token}");
        assert_eq!(tokenizer.encode(&format!("a{token}"), true).unwrap()[1..], [id], "{token}");
        assert!(tokenizer.is_special(id) && tokenizer.bytes(id) == token.as_bytes());
    }
    assert_eq!(ranks.special("<|extra_205|>"), None);
    let overlaid = tokenizer.encode("<|im_end|>\u{338}", true).unwrap();
    assert!(!overlaid.contains(&514), "its last character is another, the composed one");
    assert_eq!(tokenizer.decode(&overlaid, false), "<|im_end|\u{226f}");
}

#[test]
fn a_vocabulary_that_is_not_whole_is_refused_with_the_line() {
    let tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).chain([b"ab".to_vec()]).collect();
    let whole = written(&tokens);
    assert!(TiktokenRanks::parse(&whole).is_ok());
    for (text, says) in [
        (whole.replace(" 7\n", " 8\n"), "line 8 is not a token in base64 and the rank 7"),
        (whole.replace(" 7\n", "\n"), "line 8 is not"),
        (whole.replace("BQ== 5\n", "B! 5\n"), "line 6 is not"),
        (whole.replace("BQ== 5\n", " 5\n"), "line 6 is not"),
        (whole.replace("BQ== 5\n", "YWI= 5\n"), "the token of line 6 is there twice"),
        (written(&tokens[..200]), "no token is the byte 0xc8 alone"),
        (String::new(), "no token is the byte 0x00 alone"),
    ] {
        assert!(TiktokenRanks::parse(&text).err().unwrap().contains(says), "{says}");
    }
    let missing = TiktokenRanks::read(Path::new("/nonexistent/qwen.tiktoken")).err().unwrap();
    assert!(missing.to_string().contains("/nonexistent/qwen.tiktoken"));
}
