use std::path::Path;

use super::*;

fn tokenizer() -> Arc<Tokenizer> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    Arc::new(Tokenizer::from_file(Path::new(file)).expect("the fixture is there"))
}

/// The byte length of `text` before the stop string that ends first; if several end there, before the longest.
fn text_len(text: &str, stop: &[&str]) -> Option<usize> {
    (1..=text.len()).find_map(|end| {
        let ended = stop.iter().filter(|s| text.as_bytes()[..end].ends_with(s.as_bytes()));
        ended.map(|s| s.len()).max().map(|longest| end - longest)
    })
}

/// Streams the tokens of `text`, up to the one that completes a stop string, and returns the pieces and the finished
/// text. Asserts at every token that the pieces so far are the beginning of the text before the stop string.
fn stream(tokenizer: &Arc<Tokenizer>, text: &str, stop: &[&str]) -> (String, FinishedText) {
    let whole = &text[..text_len(text, stop).unwrap_or(text.len())];
    let stop_strings: Vec<String> = stop.iter().map(ToString::to_string).collect();
    let params = SamplingParams { stop_strings, ..SamplingParams::default() };
    let mut sample = SampleText::new(tokenizer, &params, true);
    let mut searched = SampleText::new(tokenizer, &params, false);
    let (mut pieces, mut stopped) = (String::new(), false);
    for token in tokenizer.encode(text, false).expect("encodes") {
        stopped = sample.push(token);
        assert_eq!((searched.push(token), searched.next_piece(), searched.bytes()), (stopped, None, 0));
        pieces.push_str(&sample.next_piece().expect("the text is returned"));
        assert!(whole.starts_with(&pieces), "{pieces:?} is not the beginning of {whole:?} (stop {stop:?})");
        if stopped {
            break;
        }
    }
    assert_eq!(stopped, whole.len() < text.len() || text_len(text, stop).is_some());
    assert_eq!(searched.finish(stopped), None);
    let finished = sample.finish(stopped).expect("the text is returned");
    assert_eq!((finished.whole.as_str(), format!("{pieces}{}", finished.rest())), (whole, whole.to_owned()));
    (pieces, finished)
}

#[test]
fn pieces_add_up_to_the_text_and_have_nothing_of_a_stop_string() {
    let tokenizer = tokenizer();
    let check = |text: &str, stop: &[&str], pieces: &str, rest: &str| {
        let (streamed, finished) = stream(&tokenizer, text, stop);
        assert_eq!((streamed.as_str(), finished.rest()), (pieces, rest), "{text:?} {stop:?}");
    };
    check("The capital of France is Paris", &[], "The capital of France is Paris", "");
    check("one STOP two", &["STOP"], "one ", "");
    check("one ST", &["STOP"], "one ", "ST");
    check("one STO two", &["STOP"], "one STO two", "");
    check("naïve 日本語 🙂 END", &["本", "END"], "naïve 日", "");
}

#[test]
fn random_texts_and_stop_strings_agree_with_a_search_of_the_whole() {
    let tokenizer = tokenizer();
    let mut state = 0x5EED_u64;
    println!("seed {state:#x}");
    let mut below = move |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut stopped = 0;
    for _ in 0..3000 {
        let mut word = |n: u64| -> String { (0..=below(n)).map(|_| ['a', 'b', '語'][below(3) as usize]).collect() };
        let (text, stop) = (word(20), [word(3), word(5)]);
        let stop: Vec<&str> = stop.iter().map(String::as_str).collect();
        stream(&tokenizer, &text, &stop);
        stopped += usize::from(text_len(&text, &stop).is_some());
    }
    assert!((500..2950).contains(&stopped), "{stopped} of 3000 were stopped");
}

#[test]
fn special_tokens_are_not_text() {
    let (pieces, finished) = {
        let tokenizer = tokenizer();
        let mut sample = SampleText::new(&tokenizer, &SamplingParams::default(), true);
        let tokens = tokenizer.encode("Hi<|im_end|>", false).expect("encodes");
        assert_eq!(tokens.last(), Some(&2));
        tokens.into_iter().for_each(|token| assert!(!sample.push(token)));
        (sample.next_piece(), sample.finish(false))
    };
    assert_eq!(pieces.as_deref(), Some("Hi"));
    let finished = finished.expect("the text is returned");
    assert_eq!((finished.whole.as_str(), finished.rest()), ("Hi", ""));
}

#[test]
fn special_tokens_are_text_where_they_are_not_skipped() {
    let tokenizer = tokenizer();
    let (stop_strings, skip_special_tokens) = (vec!["|im_end|>!".into()], false);
    let params = SamplingParams { stop_strings, skip_special_tokens, ..SamplingParams::default() };
    let mut sample = SampleText::new(&tokenizer, &params, true);
    let tokens = tokenizer.encode("Hi<|im_start|><|im_end|>!", false).expect("encodes");
    let stopped: Vec<bool> = tokens.into_iter().map(|token| sample.push(token)).collect();
    assert_eq!(stopped.iter().position(|&stopped| stopped), Some(stopped.len() - 1));
    assert_eq!(sample.finish(true).expect("the text is returned").whole, "Hi<|im_start|><");
}

#[test]
fn a_character_that_is_cut_off_becomes_the_replacement_character_at_the_end() {
    let tokenizer = tokenizer();
    let mut sample = SampleText::new(&tokenizer, &SamplingParams::default(), true);
    let tokens = tokenizer.encode("a𝄞", false).expect("encodes");
    assert!(tokens.len() > 2, "the fixture has no token for this character");
    tokens[..tokens.len() - 1].iter().for_each(|&token| assert!(!sample.push(token)));
    assert_eq!(sample.next_piece().as_deref(), Some("a"));
    let finished = sample.finish(false).expect("the text is returned");
    assert_eq!((finished.whole.as_str(), finished.rest()), ("a\u{fffd}", "\u{fffd}"));
}
