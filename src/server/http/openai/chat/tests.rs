use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::memory::Traffic;
use crate::server::convert::unlimited;
use crate::server::http::openai::sampling::UsageEvents;
use crate::server::http::request_body::{parse, parsed_bytes};
use crate::server::http::tests::heap::peak_of;
use crate::server::security::Caller;
use crate::server::{ModelFacts, PromptEncoder};
use crate::text::{ChatTemplate, Tokenizer};

/// `part` repeated to a list that is about a megabyte long.
fn list_of(part: &str) -> String {
    let parts = vec![part; (1 << 20) / (part.len() + 1)];
    format!("[{}]", parts.join(","))
}

#[test]
fn parsing_takes_no_more_than_is_counted_for_it() {
    for member in
        ["messages", "tools", "documents", "chat_template_kwargs", "tool_choice", "functions", "response_format"]
    {
        for text in
            [list_of("{}"), list_of("1"), list_of("{\"role\":\"user\"}"), format!("\"{}\"", "\\n".repeat(1 << 19))]
        {
            let body = format!("{{\"{member}\": {text}}}");
            let charge = Traffic::new(1 << 40).charge_always(0);
            let parsed = || parse::<ChatRequest>(body.as_bytes(), charge, Caller::default()).map(|body| body.value);
            let (most, _) = peak_of(parsed);
            let counted = parsed_bytes(body.as_bytes());
            assert!(most <= counted + 4096, "{most} bytes of {counted} counted for {member} of {}", &text[..20]);
        }
    }
}

#[test]
fn flags_are_booleans_or_0_and_1() {
    let read = |text: &str| is_true(Some(&RawValue::from_string(text.into()).expect("is JSON"))).ok();
    assert_eq!((read("true"), read("1"), read("false"), read("0")), (Some(true), Some(true), Some(false), Some(false)));
    for wrong in ["5", "-1", "\"true\"", "1.0", "[]"] {
        assert_eq!(read(wrong), None, "{wrong}");
    }
}

/// The memory that a thread takes to turn a chat into token ids is charged before, whatever the template does.
#[test]
fn a_chat_is_charged_at_its_peak() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(Path::new(file)).expect("the fixture is there"));
    let content = "words ".repeat(100_000);
    for source in [
        "{{ messages[0].content }}",
        "{{ messages[0].content ~ messages[0].content ~ messages[0].content }}",
        "{% set x %}{{ messages[0].content }}{{ messages[0].content }}{% endset %}{{ x }}{{ x }}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ f(messages[0].content) }}",
        "{% set c = messages[0].content %}{% set c = c ~ c ~ c ~ c ~ c ~ c ~ c ~ c %}{{ c ~ c }}",
        "{{ messages | tojson(indent=4) }}",
        "{{ messages[0].content.split(' ') | join('-') }}",
        "{{ messages[0].content.replace(' ', '        ') }}",
    ] {
        // Encoding, which is charged by far more, would hide what rendering takes.
        let refusing = format!("{source}{{{{ raise_exception('no') }}}}");
        let template = ChatTemplate::new(refusing.into(), BTreeMap::new()).expect("a template");
        let encoder = Some(Arc::new(PromptEncoder::new(tokenizer.clone(), Some(template), None, None)));
        let model =
            ModelFacts { vocab_size: 513, max_model_len: 16, eos_token_ids: vec![2], encoder, ..Default::default() };
        let messages_json = json!([{ "role": "user", "content": content }]).to_string();
        let chat = pb::Chat { messages_json, ..Default::default() };
        let prompt = pb::Prompt { kind: Some(pb::prompt::Kind::Chat(chat)), ..Default::default() };
        let traffic = Traffic::new(1 << 40);
        let mut charge = traffic.charge_always(0);
        let (peak, refused) = peak_of(|| unlimited(prompt, &model, &mut charge));
        let charged = traffic.take_high_water();
        assert!(refused.expect_err("the template refuses").to_string().contains("no"), "{source}");
        assert!(peak <= charged, "{source}: {peak} bytes are held, and {charged} are charged");
    }
}

#[test]
fn a_time_limit_arrives_as_grpcs() {
    let limit = |body: &str| {
        let sampling = serde_json::from_str::<Sampling>(body).expect("a body");
        sampling.into_message(Vec::new(), None, 0, &ModelFacts::default()).expect("valid").time_limit_seconds
    };
    assert_eq!(limit(r#"{"min_weight_version": 3, "time_limit_seconds": 0.5}"#), Some(0.5));
    assert_eq!((limit(r#"{"time_limit_seconds": null}"#), limit("{}")), (None, None));
}

#[test]
fn continuous_usage_needs_usage_at_the_end() {
    let events = |options: &str| UsageEvents::requested(Some(&serde_json::from_str(options).expect("options")));
    assert_eq!(events(r#"{"include_usage": true, "continuous_usage_stats": true}"#), UsageEvents::All);
    assert_eq!(events(r#"{"include_usage": true, "continuous_usage_stats": null}"#), UsageEvents::Last);
    assert_eq!(events(r#"{"include_usage": false, "continuous_usage_stats": true}"#), UsageEvents::None);
    assert_eq!((events("{}"), UsageEvents::requested(None)), (UsageEvents::None, UsageEvents::None));
}
