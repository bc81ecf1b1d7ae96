//! The text in a request's events, for every way in which a sample can end.

use std::path::Path;

use super::rig::*;
use crate::cache::CacheSalt;
use crate::engine::request_state::RequestState;
use crate::engine::*;
use crate::types::{FinishReason, GroupKey, RequestKey, SampleKey, SamplingParams, TokenLogprobs};

struct Told {
    /// Text of each `Event::Token`.
    pieces: Vec<Option<String>>,
    /// Text of the `Event::Text` before the completion.
    rest: Option<String>,
    completion: Completion,
}

/// Feeds a request with the stop string `stop` the tokens of `text` until its sample has ended. The last token has the
/// finish reason `finish`.
fn tell(text: &str, stop: &str, finish: Option<FinishReason>, (stream_tokens, return_text): (bool, bool)) -> Told {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(Path::new(file)).expect("the fixture is there"));
    let (mut command, asked) = ask("a", 3, 99);
    command.request.params = Arc::new(SamplingParams { stop_strings: vec![stop.into()], ..SamplingParams::default() });
    command.request.kind = RequestKind::Generate { n: 1, seed: 1, prompt_logprobs: false, stream_tokens, return_text };
    let key = RequestKey(1);
    let mut request = RequestState::new(command, &Arc::default());
    request.accept(key, CacheSalt::default(), Vec::new(), Some(&tokenizer));
    let sample = SampleKey { group: GroupKey { request: key, prompt_index: 0 }, sample_index: 0 };
    let tokens = tokenizer.encode(text, false).unwrap();
    for (i, &token) in tokens.iter().enumerate() {
        let logprobs = TokenLogprobs { token, raw: -1.0, processed: -1.0, top: Vec::new(), rank: 0, returned: None };
        if request.token(sample, logprobs, finish.filter(|_| i + 1 == tokens.len()), (0, &[]), (0, Instant::now())) {
            break;
        }
    }
    request.end(Instant::now());
    let (mut pieces, mut rest, mut completion) = (Vec::new(), None, None);
    for event in asked.events() {
        match event {
            Event::Token { text, .. } => pieces.push(text),
            Event::Text { text, .. } => rest = Some(text),
            Event::Completion(c) => completion = Some(c),
            Event::Done(_) => {}
            other => panic!("{other:?}"),
        }
    }
    Told { pieces, rest, completion: completion.expect("the sample has ended") }
}

#[test]
fn a_text_is_told_in_pieces_and_whole_however_its_sample_ends() {
    let check = |text: &str, finish: Option<FinishReason>, whole: &str, reason: FinishReason| {
        let both = tell(text, "STOP", finish, (true, true));
        let streamed: String = both.pieces.iter().flatten().chain(&both.rest).map(String::as_str).collect();
        assert_eq!((streamed.as_str(), both.completion.text.as_deref()), (whole, Some(whole)), "{text:?}");
        assert_eq!(both.pieces.len(), both.completion.tokens.len());
        let unstreamed = tell(text, "STOP", finish, (false, true));
        assert_eq!((unstreamed.pieces.len(), unstreamed.rest), (0, None));
        assert_eq!(unstreamed.completion.text.as_deref(), Some(whole));
        let untold = tell(text, "STOP", finish, (true, false));
        assert!(untold.pieces.iter().all(Option::is_none) && untold.rest.is_none());
        assert_eq!(untold.completion.text, None);
        for completion in [&both.completion, &unstreamed.completion, &untold.completion] {
            assert_eq!(completion.finish_reason, reason, "{text:?}");
        }
        both.rest
    };
    use FinishReason::{Aborted, Eos, Length, StopString, StopToken};
    assert_eq!(check("one two", Some(Length), "one two", Length), None);
    assert_eq!(check("one STOP two", Some(Length), "one ", StopString), None);
    assert_eq!(check("one STOP", Some(Length), "one ", StopString), None, "both at once");
    assert_eq!(check("one ST", Some(Length), "one ST", Length).as_deref(), Some("ST"));
    assert_eq!(check("one ST", None, "one ST", Aborted).as_deref(), Some("ST"));
    assert_eq!(check("one ST<|im_end|>", Some(Eos), "one ST", Eos).as_deref(), Some("ST"));
    // The stop token ends the sample by itself, and is not part of the text, though it completes a stop string.
    assert_eq!(check("one STOP", Some(StopToken), "one STO", StopToken).as_deref(), Some("STO"));
    assert_eq!(check("", None, "", Aborted), None);
}

#[test]
fn text_is_counted_while_it_is_held() {
    let bytes = |return_text| {
        let told = tell("one two three", "STOP", Some(FinishReason::Length), (false, return_text));
        Event::Completion(told.completion).bytes()
    };
    assert_eq!(bytes(true), bytes(false) + "one two three".len() as u64);
}
