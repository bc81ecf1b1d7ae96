use serde_json::{Value, json};

use super::request::MessagesRequest;
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::server::http::openai::chat::ChatRequest;
use crate::server::http::request_body::{parse, parsed_bytes};
use crate::server::http::tests::heap::peak_of;
use crate::server::security::Caller;

fn chat_of(body: &Value, takes_later_system: bool) -> Result<ChatRequest> {
    let charge = Traffic::new(1 << 40).charge_always(0);
    let body = parse::<MessagesRequest>(body.to_string().as_bytes(), charge, Caller::default())?;
    body.value.into_chat(|| takes_later_system)
}

/// The messages of the chat that a conversation becomes.
fn messages(system: Value, messages: Value, takes_later_system: bool) -> Value {
    let body = json!({ "max_tokens": 1, "system": system, "messages": messages });
    let chat = chat_of(&body, takes_later_system).expect("valid");
    serde_json::from_str(chat.prompt.messages.expect("given").get()).expect("is JSON")
}

fn read(json: Option<&serde_json::value::RawValue>) -> Value {
    json.map_or(Value::Null, |json| serde_json::from_str(json.get()).expect("is JSON"))
}

#[test]
fn a_conversation_is_that_of_a_chat() {
    let system = json!([{ "type": "text", "text": "Be " }, { "type": "text", "text": "brief." },
        { "type": "text", "text": "x-anthropic-billing-header: 12" }]);
    let given = json!([
        { "role": "user", "content": "Add." },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Hm.", "signature": "s" },
            { "type": "text", "text": "I add." },
            { "type": "tool_use", "id": "t1", "name": "add", "input": { "b": 1, "a": 2 } },
            { "type": "tool_use", "id": "t2", "name": "f" },
        ] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "t1", "content": [{ "type": "text", "text": "3" },
                { "type": "text", "text": "4" }] },
            { "type": "tool_result", "tool_use_id": "t2" },
            { "type": "text", "text": "One?" },
            { "type": "text", "text": "Two?", "cache_control": { "type": "ephemeral" } },
        ] },
    ]);
    let call = |id: &str, name: &str, arguments: Value| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
    assert_eq!(
        messages(system, given, true),
        json!([
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "Add." },
            { "role": "assistant", "content": "I add.", "reasoning_content": "Hm.",
                "tool_calls": [call("t1", "add", json!({ "b": 1, "a": 2 })), call("t2", "f", json!({}))] },
            { "role": "tool", "content": "3\n4", "tool_call_id": "t1" },
            { "role": "tool", "content": "", "tool_call_id": "t2" },
            { "role": "user", "content": [{ "type": "text", "text": "One?" }, { "type": "text", "text": "Two?" }] },
        ])
    );
}

#[test]
fn messages_of_the_system_stay_in_their_place_if_the_template_takes_them_there() {
    let given = json!([{ "role": "user", "content": "Hi." }, { "role": "system", "content": "Now." }]);
    let (hi, system) =
        (json!({ "role": "user", "content": "Hi." }), |text| json!({ "role": "system", "content": text }));
    assert_eq!(messages(json!("First."), given.clone(), true), json!([system("First."), hi, system("Now.")]));
    assert_eq!(messages(json!("First."), given, false), json!([system("First.Now."), hi]));
}

#[test]
fn members_have_the_names_of_a_chats() {
    let body = json!({
        "max_tokens": 9, "temperature": 0.5, "stop_sequences": ["a"], "stop": "b", "stream": true,
        "messages": [{ "role": "user", "content": "Hi." }],
        "tools": [{ "name": "add", "description": "Adds.", "input_schema": { "type": "object" } }],
        "thinking": { "type": "disabled" }, "output_config": { "format": { "type": "json_schema", "schema": {} } },
    });
    for (choice, expected) in [
        (json!({ "type": "auto" }), json!("auto")),
        (json!({ "type": "any" }), json!("required")),
        (json!({ "type": "none" }), json!("none")),
        (json!({ "type": "tool", "name": "add" }), json!({ "type": "function", "function": { "name": "add" } })),
    ] {
        let mut body = body.clone();
        body["tool_choice"] = choice;
        let chat = chat_of(&body, true).expect("valid");
        assert_eq!(read(chat.tool_choice.as_deref()), expected);
        let function = json!({ "name": "add", "description": "Adds.", "parameters": { "type": "object" } });
        assert_eq!(read(chat.prompt.tools.as_deref()), json!([{ "type": "function", "function": function }]));
        let variables = json!({ "reasoning_effort": "none", "enable_thinking": false });
        assert_eq!(read(chat.prompt.chat_template_kwargs.as_deref()), variables);
        let format = json!({ "type": "json_schema", "json_schema": { "schema": {} } });
        assert_eq!(read(chat.sampling.response_format.as_deref()), format);
        assert_eq!((chat.max_completion_tokens, chat.sampling.temperature), (Some(9), Some(0.5)));
        assert_eq!((chat.sampling.stop_strings(), chat.sampling.stream), (vec!["b".into(), "a".into()], Some(true)));
    }
}

#[test]
fn a_wrong_member_is_named() {
    let user = |content: Value| json!([{ "role": "user", "content": content }]);
    let block = |members: Value| user(json!([members]));
    for (member, value, named) in [
        ("max_tokens", json!(0), "max_tokens"),
        ("max_tokens", Value::Null, "max_tokens"),
        ("messages", Value::Null, "messages"),
        ("messages", json!([{ "role": "bot", "content": "" }]), "messages[0].role"),
        ("messages", user(json!(3)), "messages[0].content"),
        ("messages", block(json!({ "text": "a" })), "messages[0].content[0].type"),
        ("messages", block(json!({ "type": "text" })), "messages[0].content[0].text"),
        ("messages", block(json!({ "type": "text", "text": 1 })), "messages[0].content[0].text"),
        ("messages", block(json!({ "type": "image", "source": {} })), "messages[0].content[0].type"),
        ("messages", block(json!({ "type": "tool_use", "id": "a", "name": "b" })), "messages[0].content[0].type"),
        ("messages", block(json!({ "type": "tool_result" })), "messages[0].content[0].tool_use_id"),
        (
            "messages",
            block(json!({ "type": "tool_result", "tool_use_id": "a", "content": [{ "type": "image" }] })),
            "messages[0].content[0].content[0].type",
        ),
        ("system", json!([{ "type": "document" }]), "system[0].type"),
        ("tools", json!([{ "name": "a" }]), "tools[0].input_schema"),
        ("tools", json!([{ "name": "a", "type": "web_search_20250305" }]), "tools[0].type"),
        ("tool_choice", json!({ "type": "tool" }), "tool_choice.name"),
        ("tool_choice", json!({ "type": "some" }), "tool_choice.type"),
        ("thinking", json!({ "type": "enabled", "budget_tokens": 1024 }), "thinking.type"),
        ("thinking", json!({ "type": "often" }), "thinking.type"),
        ("output_config", json!({ "format": { "type": "xml", "schema": {} } }), "output_config.format.type"),
        ("n", json!(2), "n"),
        ("return_token_ids", json!(true), "return_token_ids"),
        ("chat_template_kwargs", json!(3), "chat_template_kwargs"),
    ] {
        let mut body = json!({ "max_tokens": 1, "messages": user(json!("Hi.")), "output_config": { "effort": "low" } });
        body[member] = value;
        match chat_of(&body, true).err() {
            Some(Error::InvalidArgument { field, .. }) => assert_eq!(field.replace(".?", ""), named, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}

#[test]
fn parsing_takes_no_more_than_is_counted_for_it() {
    for part in [
        "{}",
        "{\"role\":\"user\",\"content\":\"\"}",
        "{\"role\":\"user\",\"content\":[{\"type\":\"\"}]}",
        "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"\"},{\"type\":\"text\",\"text\":\"\"}]}",
    ] {
        let parts = vec![part; (1 << 19) / (part.len() + 1)].join(",");
        let body = format!("{{\"messages\": [{parts}]}}");
        let charge = Traffic::new(1 << 40).charge_always(0);
        let (most, _) =
            peak_of(|| parse::<MessagesRequest>(body.as_bytes(), charge, Caller::default()).map(|body| body.value));
        let counted = parsed_bytes(body.as_bytes());
        assert!(most <= counted + 4096, "{most} bytes of {counted} counted for {part}");
    }
}

#[test]
fn a_chat_is_written_in_what_is_counted_for_it() {
    for content in [json!("\u{1}".repeat(1 << 18)), json!(vec![json!({ "type": "text", "text": "a" }); 1 << 13])] {
        let body = json!({ "max_tokens": 1, "messages": [{ "role": "user", "content": content }] }).to_string();
        let charge = Traffic::new(1 << 40).charge_always(0);
        let parsed = parse::<MessagesRequest>(body.as_bytes(), charge, Caller::default()).expect("valid");
        let (most, chat) = peak_of(|| parsed.value.into_chat(|| true));
        chat.expect("valid");
        let counted = parsed_bytes(body.as_bytes()) + 2 * body.len() as u64;
        assert!(most <= counted, "{most} bytes of {counted} counted");
    }
}
