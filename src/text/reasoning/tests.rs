use std::path::Path;

use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;

const CALL: &str = "<tool_call>";

/// The reasoning and the content that a parser finds in `pieces`.
fn parsed(is_open: bool, call: Option<&'static str>, pieces: &[&str]) -> (String, String) {
    let mut parser = ReasoningParser::new(is_open, call);
    let mut out = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(&mut out);
    let (mut reasoning, mut content) = (String::new(), String::new());
    for piece in out {
        match piece {
            Piece::Reasoning(text) => {
                assert!(content.is_empty() && !text.is_empty(), "{pieces:?}: reasoning comes first");
                reasoning.push_str(&text);
            }
            Piece::Content(text) => {
                assert!(!text.is_empty(), "{pieces:?}");
                content.push_str(&text);
            }
            Piece::Call(call) => panic!("{call:?}"),
        }
    }
    (reasoning, content)
}

#[test]
fn reasoning_ends_at_its_mark() {
    for (is_open, text, reasoning, content) in [
        (true, "Hm.\n</think>\n\n4", "Hm.\n", "\n\n4"),
        (true, "\n<think>\nHm.</think>4</think>", "\nHm.", "4</think>"),
        (true, "cut </thi", "cut </thi", ""),
        (true, "</think>4", "", "4"),
        (true, "<thin", "<thin", ""),
        (true, "\n\n", "\n\n", ""),
        (false, "<think>\n\n</think>\n\n4", "\n\n", "\n\n4"),
        (false, " \n<think>Hm", "Hm", ""),
        (false, "4 <think>no</think>", "", "4 <think>no</think>"),
        (false, "4</think>", "", "4</think>"),
        (false, "<thin", "", "<thin"),
        (false, "\n", "", "\n"),
        (false, "", "", ""),
    ] {
        assert_eq!(parsed(is_open, None, &[text]), (reasoning.into(), content.into()), "{is_open} {text:?}");
    }
    let space = " ".repeat(1000);
    assert_eq!(parsed(false, None, &[&space, "<think>a"]), (String::new(), format!("{space}<think>a")));
}

#[test]
fn a_call_ends_the_reasoning_only_where_it_may() {
    let text = "Add. <tool_call>{}</tool_call></think>";
    assert_eq!(parsed(true, Some(CALL), &[text]), ("Add. ".into(), text[5..].into()));
    assert_eq!(parsed(true, None, &[text]), ("Add. <tool_call>{}</tool_call>".into(), String::new()));
    assert_eq!(parsed(true, Some(CALL), &["a</think>b<tool_call>"]), ("a".into(), "b<tool_call>".into()));
}

/// However the text is cut into pieces, its parts are the same, and nothing is lost but marks.
#[test]
fn pieces_of_any_length_give_the_same_parts() {
    const PARTS: &[&str] =
        &["<think>", "</think>", "<tool_call>", "<", "</", "think>", "\n", " ", "Où?", "<thi", "\u{1f980}", "</tool_"];
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut both = 0;
    for _ in 0..20_000 {
        let (is_open, call) = (rng.random(), rng.random::<bool>().then_some(CALL));
        let text: String = (0..rng.random_range(0..9)).map(|_| *PARTS.choose(&mut rng).unwrap()).collect();
        let whole = parsed(is_open, call, &[&text]);
        let (mut pieces, mut rest) = (Vec::new(), &text[..]);
        while !rest.is_empty() {
            let at = rest.char_indices().map(|(at, c)| at + c.len_utf8()).take(rng.random_range(1..6)).last().unwrap();
            pieces.push(&rest[..at]);
            rest = &rest[at..];
        }
        assert_eq!(parsed(is_open, call, &pieces), whole, "{is_open} {call:?}: {pieces:?}");
        let (reasoning, content) = &whole;
        let lost = text.len() - reasoning.len() - content.len();
        assert!(text.starts_with(&**reasoning) || lost > 0, "{text:?}: {whole:?}");
        assert!(text.ends_with(&**content) && text.contains(&**reasoning), "{text:?}: {whole:?}");
        both += usize::from(!reasoning.is_empty() && !content.is_empty());
    }
    assert!(both > 1000, "only {both} texts have both");
}

#[test]
fn the_prompt_says_how_the_text_begins() {
    use ReasoningStart::{Closed, Open, Possible};
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    let tokenizer = Tokenizer::from_file(Path::new(file)).expect("the fixture is there");
    let asked = "<|im_start|>user\nIs <think> a tag?<|im_end|>\n<|im_start|>assistant\n";
    for (rest, expected) in [
        ("", [Possible, Open, Open]),
        ("<think>\n", [Open; 3]),
        ("<think>\n\n</think>\n\n", [Closed; 3]),
        ("<think>\nHm, it is a", [Open; 3]),
        ("<think>\nHm.\n</think>\n\nYes", [Closed; 3]),
        ("Hm.\n</think>\n\nYes", [Closed; 3]),
    ] {
        let prompt = tokenizer.encode(&format!("{asked}{rest}"), false).expect("a text");
        let formats = [ReasoningFormat::Marked, ReasoningFormat::DeepSeekR1, ReasoningFormat::Qwen3];
        assert_eq!(formats.map(|format| format.start_after(&prompt, &tokenizer)), expected, "{rest:?}");
    }
    assert!(ReasoningFormat::has_marks(&tokenizer));
}

#[test]
fn the_tokens_between_the_marks_are_found() {
    const OPEN: TokenId = 8;
    const CLOSE: TokenId = 9;
    const CALL: TokenId = 10;
    for (is_open, tokens, expected) in [
        (false, &[OPEN, 1, 2, CLOSE, 3][..], 2),
        (false, &[1, OPEN, 2, CLOSE, 3], 1),
        (false, &[1, 2, CLOSE, 3], 0),
        (true, &[1, 2, CLOSE, 3], 2),
        (true, &[OPEN, 1, CLOSE, OPEN, 3], 1),
        (false, &[OPEN, 1, CALL, 2, CLOSE], 1),
        (false, &[OPEN, 1, 2], 2),
        (true, &[], 0),
    ] {
        let mut reasoning = ReasoningTokens::new(OPEN, vec![CLOSE, CALL], is_open);
        let found = tokens.iter().filter(|token| reasoning.takes(**token)).count();
        assert_eq!(found, expected, "{is_open} {tokens:?}");
    }
}

#[test]
fn the_format_is_found_in_the_template() {
    let file = |name: &str| {
        let path = format!("{}/tests/fixtures/chat_template/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).expect("the fixture is there")
    };
    assert_eq!(ReasoningFormat::of_template(&file("qwen3")), Some(ReasoningFormat::Marked));
    assert_eq!(ReasoningFormat::of_template(&file("qwen2.5_tools")), None);
}
