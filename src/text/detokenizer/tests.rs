use std::path::Path;

use super::*;

#[test]
fn pieces_of_random_tokens_make_the_whole_text_and_no_half_character() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(Path::new(file)).unwrap());
    let mut state = 0xFACADE_u64;
    println!("seed {state:#x}");
    let mut below = move |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let real = tokenizer.encode("日本語 🙂🙃 naïve — 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 <|im_end|> text", false).unwrap();
    for round in 0..500 {
        let tokens: Vec<TokenId> = match round % 2 {
            0 => (0..below(60)).map(|_| below(501) as TokenId).collect(),
            _ => real[..below(real.len() as u64 + 1) as usize].to_vec(),
        };
        let skip_special = below(2) == 0;
        let mut detokenizer = IncrementalDetokenizer::new(tokenizer.clone(), skip_special);
        let mut text = String::new();
        for (i, &token) in tokens.iter().enumerate() {
            let before = text.len();
            detokenizer.push(token, &mut text);
            assert!(detokenizer.stream.pending.len() <= 3);
            if round % 2 == 1 {
                assert!(!text[before..].contains(char::REPLACEMENT_CHARACTER), "{i} of {tokens:?}");
            }
        }
        detokenizer.finish(&mut text);
        assert_eq!(text, tokenizer.decode(&tokens, skip_special), "{tokens:?}");
        detokenizer.finish(&mut text);
        assert_eq!(text, tokenizer.decode(&tokens, skip_special), "finished twice");
    }
}
