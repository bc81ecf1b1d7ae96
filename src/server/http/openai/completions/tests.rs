use super::*;
use crate::memory::Traffic;
use crate::server::http::request_body::{parse, parsed_bytes};
use crate::server::http::tests::heap::peak_of;
use crate::server::security::Caller;

/// `part` repeated to a list that is about a megabyte long.
fn list_of(part: &str) -> String {
    let parts = vec![part; (1 << 20) / (part.len() + 1)];
    format!("[{}]", parts.join(","))
}

#[test]
fn parsing_takes_no_more_than_is_counted_for_it() {
    let members = |each: &dyn Fn(usize) -> String| (0..40_000).map(each).collect::<Vec<_>>().join(",");
    let long = "x".repeat(1 << 20);
    for text in [
        list_of("1"),
        list_of("151643"),
        list_of("\"\""),
        list_of("\"a\""),
        list_of("\"\\ud83e\\udd80\""),
        list_of("\"0123456789012345678901234567890\""),
        list_of("[]"),
        list_of("[1]"),
        list_of("[1,2,3,4,5]"),
        format!("\"{long}\""),
        format!("\"\\n{long}\""),
        format!("\"{}\"", "\\ud83e\\udd80".repeat(90_000)),
        format!("\"a\", \"stop\": {}", list_of("\"s\"")),
        format!("\"a\", \"stop\": \"\\t{long}\""),
        format!("\"a\", \"logit_bias\": {{{}}}", members(&|i| format!("\"{i}\":1"))),
        format!("\"a\", \"allowed_token_ids\": {}", list_of("1")),
        format!("\"a\", \"best_of\": {}", list_of("{}")),
        format!("\"a\", \"{long}\": 1"),
        format!("\"a\", {}", members(&|i| format!("\"x{i}\":{{\"y\":[]}}"))),
        format!("\"a\", \"x\": {}", list_of("{}")),
        format!("\"a\", \"x\": {}", "[".repeat(1 << 20)),
        format!("\"a\", \"seed\": {}", "1".repeat(1 << 20)),
        format!("[\"a\", {}]", "1".repeat(1 << 20)),
    ] {
        let body = format!("{{\"prompt\": {text}}}");
        let charge = Traffic::new(1 << 40).charge_always(0);
        let (most, _) =
            peak_of(|| parse::<CompletionRequest>(body.as_bytes(), charge, Caller::default()).map(|body| body.value));
        let counted = parsed_bytes(body.as_bytes());
        let start: String = body.chars().take(60).collect();
        println!("{:.1} bytes for a byte, {:.1} counted: {start}", ratio(most, &body), ratio(counted, &body));
        assert!(most <= counted + 4096, "{most} bytes of {counted} counted for {start}");
    }
}

fn ratio(bytes: u64, body: &str) -> f64 {
    bytes as f64 / body.len() as f64
}

/// A prompt that is turned into a message is there twice for a moment.
#[test]
fn a_message_of_prompts_takes_no_more_than_is_counted_for_it() {
    for part in ["\"a\"", "[1]"] {
        let body = format!("{{\"prompt\": {}}}", list_of(part));
        let (most, _) = peak_of(|| {
            let charge = Traffic::new(1 << 40).charge_always(0);
            let parsed = parse::<CompletionRequest>(body.as_bytes(), charge, Caller::default()).expect("valid");
            messages(parsed.value.prompt.expect("there are some").0, None)
        });
        let counted = parsed_bytes(body.as_bytes());
        assert!(most <= counted, "{most} bytes of {counted} counted for prompts of {part}");
    }
}

#[test]
fn a_wrong_member_is_named_by_its_path() {
    for (members, path, says) in [
        (r#""logit_bias": {"7": 1, "seven": 1}"#, "logit_bias", r#""seven" is not a token id"#),
        (r#""logit_bias": {"-1": 1}"#, "logit_bias", r#""-1" is not a token id"#),
        (r#""logit_bias": {"7": "x"}"#, "logit_bias.7", "expected f32"),
        (r#""logit_bias": [1]"#, "logit_bias", "expected an object of numbers by token id"),
        (r#""best_of": 2"#, "best_of", "is not supported; leave it out"),
        (r#""suffix": "x""#, "suffix", "is not supported; leave it out"),
        (r#""stream_options": {"include_usage": 3}"#, "stream_options.include_usage", "expected a boolean"),
    ] {
        let charge = Traffic::new(1 << 20).charge_always(0);
        let body = format!("{{\"prompt\": \"a\", {members}}}");
        match parse::<CompletionRequest>(body.as_bytes(), charge, Caller::default()).map(|body| body.bytes) {
            Err(Error::InvalidArgument { field, message }) => {
                assert_eq!(field, path, "{message}");
                assert!(message.contains(says), "{message}");
            }
            other => panic!("{members}: {other:?}"),
        }
    }
}
