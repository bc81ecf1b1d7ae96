//! Requests with text, with the tokenizer of the fixtures.

use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::generate;
use crate::engine::RequestKind;
use crate::error::Error;
use crate::grammar::Grammar;
use crate::memory::Traffic;
use crate::server::pb::{self, prompt::Kind};
use crate::server::{ModelFacts, PromptEncoder, RequestTemplates};
use crate::text::{ChatTemplate, Tokenizer};
use crate::types::{Prompt, TokenId};

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");

fn model() -> ModelFacts {
    model_with(Tokenizer::from_file(Path::new(TOKENIZER)).expect("the fixture is there"), None)
}

fn model_with(tokenizer: Tokenizer, template: Option<ChatTemplate>) -> ModelFacts {
    let encoder = PromptEncoder::new(Arc::new(tokenizer), template, None, None);
    ModelFacts {
        vocab_size: 513,
        max_model_len: 16,
        eos_token_ids: vec![2],
        encoder: Some(Arc::new(encoder)),
        ..Default::default()
    }
}

fn text_request(prompt: &str, stop: &[&str]) -> pb::GenerateRequest {
    pb::GenerateRequest {
        prompts: vec![pb::Prompt { kind: Some(Kind::Text(prompt.into())), ..Default::default() }],
        sampling: Some(pb::SamplingParams { stop: stop.iter().map(|s| s.to_string()).collect(), ..Default::default() }),
        return_text: true,
        stream_tokens: true,
        ..Default::default()
    }
}

fn ids(model: &ModelFacts, text: &str, special: bool) -> Vec<TokenId> {
    let mut charge = Traffic::new(1 << 20).charge_always(0);
    model.encoder.as_ref().expect("has one").encode_text("text", text, special, 1000, &mut charge).expect("encodes")
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
    assert_eq!(valid.prompts, [Prompt::from_tokens(ids(&model(), "The capital of France is", true))]);
    assert_eq!(valid.params.stop_strings, ["\n"]);
    assert!(matches!(valid.kind, RequestKind::Generate { stream_tokens: true, return_text: true, .. }));
}

/// The tokenizer of the fixtures, which here puts token 1 before a text.
fn beginning_with_1() -> Tokenizer {
    let json = std::fs::read_to_string(TOKENIZER).expect("the fixture is there");
    let mut json: serde_json::Value = serde_json::from_str(&json).expect("is JSON");
    let (begin, text) =
        (json!({"SpecialToken": {"id": "b", "type_id": 0}}), json!({"Sequence": {"id": "A", "type_id": 0}}));
    json["post_processor"] = json!({"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text],
        "special_tokens": {"b": {"id": "b", "ids": [1], "tokens": ["b"]}}});
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), json.to_string()).expect("is written");
    Tokenizer::from_file(file.path()).expect("is a tokenizer")
}

#[test]
fn special_tokens_come_with_a_text_and_not_with_a_chat_unless_asked() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = ChatTemplate::new(template.into(), Default::default()).expect("a template");
    let model = model_with(beginning_with_1(), Some(template));
    let (with, without) = (ids(&model, "Hi", true), ids(&model, "Hi", false));
    assert_eq!((with[0], &with[1..]), (1, &without[..]));
    let message = pb::ChatMessage { role: "user".into(), content: "Hi".into() };
    let chat = Kind::Chat(pb::Chat { messages: vec![message], ..Default::default() });
    for (kind, asked, expected) in [
        (Kind::Text("Hi".into()), None, &with),
        (Kind::Text("Hi".into()), Some(true), &with),
        (Kind::Text("Hi".into()), Some(false), &without),
        (chat.clone(), None, &without),
        (chat.clone(), Some(true), &with),
        (chat, Some(false), &without),
        (Kind::Tokens(pb::TokenIds { ids: without.clone() }), Some(true), &without),
    ] {
        let prompts = vec![pb::Prompt { kind: Some(kind.clone()), add_special_tokens: asked, ..Default::default() }];
        let valid = generate(pb::GenerateRequest { prompts, ..Default::default() }, &model).expect("valid");
        assert_eq!(valid.prompts[0].tokens[..], expected[..], "{kind:?}, {asked:?}");
    }
}

#[test]
fn a_template_of_a_request_is_charged_while_it_is_compiled() {
    let tokenizer = Tokenizer::from_file(Path::new(TOKENIZER)).expect("the fixture is there");
    let trusted = RequestTemplates { special_tokens: Default::default(), finds_reasoning: true };
    let encoder = PromptEncoder::new(Arc::new(tokenizer), None, None, Some(trusted));
    let model = ModelFacts { encoder: Some(Arc::new(encoder)), ..model() };
    let message = pb::ChatMessage { role: "user".into(), content: "Hi".into() };
    let chat_template = format!("{}{{{{ messages[0].content }}}}", "{% if x %}{% endif %}".repeat(200));
    let chat = pb::Chat { messages: vec![message], chat_template, ..Default::default() };
    let prompts = vec![pb::Prompt { kind: Some(Kind::Chat(chat)), ..Default::default() }];
    let request = pb::GenerateRequest { prompts, ..Default::default() };
    let traffic = Traffic::new(64 << 20);
    let mut charge = traffic.charge(100).expect("fits");
    let valid = super::super::generate(request.clone(), &model, &mut charge).expect("valid");
    assert_eq!(valid.prompts, [Prompt::from_tokens(ids(&model, "Hi", false))]);
    assert!(traffic.take_high_water() > 8 << 20, "401 tags take stack and memory");
    assert!(traffic.used() < 1 << 10, "{} bytes are still charged", traffic.used());
    let error = super::super::generate(request, &model, &mut Traffic::new(1 << 20).charge_always(0)).err();
    assert!(matches!(error, Some(Error::ResourceExhausted(_))), "{error:?}");
}

#[test]
fn a_text_that_cannot_fit_or_be_encoded_now_is_refused_unencoded() {
    let model = model();
    let longest =
        model.encoder.as_ref().expect("has one").tokenizer.max_bytes_per_token().expect("every byte has a token");
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
        prompts: vec![pb::Prompt {
            kind: Some(Kind::Chat(pb::Chat { messages, ..Default::default() })),
            ..Default::default()
        }],
        ..Default::default()
    };
    assert_eq!(refused(chat(vec![])).0, "prompts[0].chat.messages");
    assert_eq!(refused(chat(vec![message("user"), message("")])).0, "prompts[0].chat.messages[1].role");
    assert_eq!(refused(chat(vec![message("user")])).0, "prompts[0].chat");
}

#[test]
fn prompts_that_ask_for_the_same_grammar_share_it_and_there_is_a_limit() {
    let asking = |regexes: Vec<String>| {
        let prompt = |regex| {
            let kind = Some(pb::structured_outputs::Kind::Regex(regex));
            let structured_outputs = Some(pb::StructuredOutputs { kind });
            let sampling = pb::SamplingParams { structured_outputs, ..Default::default() };
            pb::Prompt { kind: Some(Kind::Text("a".into())), sampling: Some(Box::new(sampling)), ..Default::default() }
        };
        pb::GenerateRequest { prompts: regexes.into_iter().map(prompt).collect(), ..Default::default() }
    };
    let valid = generate(asking(vec!["a+".into(), "b+".into(), "a+".into()]), &model()).expect("valid");
    let grammar = |index| valid.prompt_sampling[&index].grammar.as_ref().expect("it was asked for");
    assert!(Arc::ptr_eq(grammar(0), grammar(2)) && !Arc::ptr_eq(grammar(0), grammar(1)));
    let bytes = |regexes| generate(asking(regexes), &model()).expect("valid").bytes();
    let (one, nine) = (bytes(vec!["a+".into()]), bytes(vec!["a+".into(); 9]));
    assert!(nine < 9 * one && nine > 9 * Grammar::SAMPLE_BYTES as u64, "{nine}, and {one} for one");
    let mut two = asking(vec!["a+".into(); 2]);
    two.prompts[1].sampling = None;
    two.n = Some(100);
    let two = generate(two, &model()).expect("valid").bytes();
    assert!((100..150).contains(&(two / Grammar::SAMPLE_BYTES as u64)), "{two}: only some samples have a grammar");
    let (field, message) = refused(asking((0..65).map(|i| format!("a{{{i}}}b")).collect()));
    assert_eq!(field, "prompts[64].sampling.structured_outputs.regex");
    assert!(message.contains("at most 64"), "{message}");
}

#[test]
fn stop_strings_of_each_prompt_are_counted_as_what_they_become() {
    let stop = vec!["abcdefgh".repeat(128); 64];
    let own = |own: usize, prompts: usize| {
        let sampling = pb::SamplingParams { stop: stop.clone(), ..Default::default() };
        let mut request = text_request("a", &[]);
        request.prompts = vec![request.prompts.remove(0); prompts];
        request.prompts[..own].iter_mut().for_each(|prompt| prompt.sampling = Some(Box::new(sampling.clone())));
        request.n = Some(10);
        generate(request, &model()).expect("valid").bytes()
    };
    let each = (own(30, 40) - own(10, 40)) / 20;
    let least = 64 * 1024 * (2 + size_of::<usize>() as u64) + 10 * 64 * 8;
    assert!((least..least * 5 / 4).contains(&each), "{each} bytes for each, which takes {least}");
}
