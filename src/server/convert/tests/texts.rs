//! Requests and replies with text, with the tokenizer of the fixtures.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use super::super::{ReplyWriter, Writer as _};
use super::generate;
use crate::engine::{Completion, Event};
use crate::error::Error;
use crate::memory::Traffic;
use crate::server::pb::{self, generate_response::Event as Message, prompt::Kind};
use crate::server::{ModelFacts, TextCodec};
use crate::text::Tokenizer;
use crate::types::{FinishReason, Prompt, TokenId, TokenLogprobs};

fn model() -> ModelFacts {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    let tokenizer = Tokenizer::from_file(Path::new(file)).expect("the fixture is there");
    let text = TextCodec::new(Arc::new(tokenizer), None);
    ModelFacts { vocab_size: 513, max_model_len: 16, eos_token_ids: vec![2], text: Some(Arc::new(text)) }
}

fn text_request(prompt: &str, stop: &[&str]) -> pb::GenerateRequest {
    pb::GenerateRequest {
        prompts: vec![pb::Prompt { kind: Some(Kind::Text(prompt.into())) }],
        sampling: Some(pb::SamplingParams { stop: stop.iter().map(|s| s.to_string()).collect(), ..Default::default() }),
        return_text: true,
        stream_tokens: true,
        ..Default::default()
    }
}

fn ids(model: &ModelFacts, text: &str) -> Vec<TokenId> {
    let mut charge = Traffic::new(1 << 20).charge_always(0);
    model.text.as_ref().expect("has one").encode_text("text", text, 1000, &mut charge).expect("encodes")
}

fn refused(request: pb::GenerateRequest) -> (String, String) {
    match generate(request, &model()) {
        Err(Error::InvalidArgument { field, message }) => (field, message),
        Err(other) => panic!("not InvalidArgument: {other}"),
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn a_text_prompt_arrives_as_its_tokens() {
    let valid = generate(text_request("The capital of France is", &["\n"]), &model()).expect("valid");
    assert_eq!(valid.prompts, [Prompt::from_tokens(ids(&model(), "The capital of France is"))]);
    assert_eq!((valid.params.stop_strings.as_slice(), valid.return_text), (["\n".to_owned()].as_slice(), true));
}

#[test]
fn a_text_that_cannot_fit_or_be_encoded_now_is_refused_unencoded() {
    let model = model();
    let longest = model.text.as_ref().expect("has one").max_bytes_per_token().expect("every byte has a token");
    let (field, message) = refused(text_request(&" ".repeat(17 * longest), &[]));
    assert_eq!(field, "prompts[0].text");
    assert!(message.contains(&format!("{} bytes", 17 * longest)) && message.contains("16 tokens"), "{message}");
    let traffic = Traffic::new(1 << 10);
    let mut charge = traffic.charge(100).expect("fits");
    let error = super::super::generate(text_request("ten bytes.", &[]), &model, &mut charge).err();
    assert!(matches!(error, Some(Error::ResourceExhausted(_))), "{error:?}");
    assert_eq!(traffic.used(), 100);
}

#[test]
fn wrong_texts_are_refused() {
    assert_eq!(refused(text_request("", &[])), ("prompts[0].text".into(), "is empty; give at least one token".into()));
    let (field, message) = refused(text_request(&"1".repeat(16), &[]));
    assert_eq!(field, "prompts[0].text");
    assert!(message.contains("16 tokens leave no room"), "{message}");
    assert_eq!(refused(text_request("Hi", &["a", ""])).0, "sampling.stop[1]");
    assert_eq!(refused(text_request("Hi", &["a"; 65])).0, "sampling.stop");
    assert_eq!(refused(text_request("Hi", &[&"a".repeat(1025)])).0, "sampling.stop[0]");

    let message = |role: &str| pb::ChatMessage { role: role.into(), content: "Hi".into() };
    let chat = |messages| pb::GenerateRequest {
        prompts: vec![pb::Prompt { kind: Some(Kind::Chat(pb::Chat { messages })) }],
        ..Default::default()
    };
    assert_eq!(refused(chat(vec![])).0, "prompts[0].chat.messages");
    assert_eq!(refused(chat(vec![message("user"), message("")])).0, "prompts[0].chat.messages[1].role");
    assert_eq!(refused(chat(vec![message("user")])).0, "prompts[0].chat");
}

/// The texts of the deltas, and the completion, of a sample that `text`'s tokens make.
fn streamed(text: &str, stop: &[&str], text_len: Option<usize>) -> (Vec<String>, pb::Completion) {
    let model = model();
    let request = generate(text_request("Hi", stop), &model).expect("valid");
    let mut writer = ReplyWriter::new(&request, &model);
    let mut out = VecDeque::new();
    let tokens: Vec<_> = ids(&model, text)
        .into_iter()
        .map(|token| TokenLogprobs { token, raw: -1.0, processed: -1.0, top: Vec::new() })
        .collect();
    for logprobs in tokens.iter().cloned() {
        writer.write(Event::Token { prompt_index: 0, sample_index: 0, logprobs }, &mut out);
    }
    let completion = Completion {
        prompt_index: 0,
        sample_index: 0,
        tokens,
        finish_reason: if text_len.is_some() { FinishReason::StopString } else { FinishReason::Length },
        text_len,
        weight_versions: Vec::new(),
        seed: 0,
        cached_tokens: 0,
    };
    writer.write(Event::Completion(completion), &mut out);
    let Some(Message::Completion(completion)) = out.pop_back().and_then(|m| m.event) else { panic!("no completion") };
    let delta = |m: pb::GenerateResponse| match m.event {
        Some(Message::Delta(delta)) => delta.text.expect("text was asked"),
        other => panic!("not a delta: {other:?}"),
    };
    (out.into_iter().map(delta).collect(), completion)
}

#[test]
fn deltas_add_up_to_the_text_of_the_completion() {
    let check = |text: &str, stop: &[&str], text_len: Option<usize>| {
        let (deltas, completion) = streamed(text, stop, text_len);
        let expected = &text[..text_len.unwrap_or(text.len())];
        assert_eq!(completion.text.as_deref(), Some(expected));
        assert_eq!(deltas.concat(), expected);
        deltas
    };
    assert!(check("The capital of France is Paris", &[], None).len() > 3, "several deltas");
    check("日本 🙂", &[], None);
    check("wait for it: STOP and more", &["STOP"], Some(13));
    // Held back as the beginning of a stop string, and given when the sample ends otherwise.
    let deltas = check("wait for it: ST", &["STOP"], None);
    assert_eq!(deltas.last().map(String::as_str), Some("ST"));
}

#[test]
fn special_tokens_are_not_text() {
    let (deltas, completion) = streamed("Hi<|im_end|>", &[], None);
    assert_eq!((deltas.concat().as_str(), completion.text.as_deref()), ("Hi", Some("Hi")));
    assert_eq!(completion.token_ids.last(), Some(&2));
}
