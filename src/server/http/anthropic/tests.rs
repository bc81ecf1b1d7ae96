use serde_json::{Value, json};

use super::request::MessagesRequest;
use crate::error::Result;
use crate::server::http::openai::chat::ChatRequest;
use crate::server::http::request_body::parsed_bytes;
use crate::server::http::tests::bodies::{assert_counted, assert_named, parsed, value_of};
use crate::server::http::tests::heap::peak_of;

fn chat_of(body: &Value, takes_later_system: bool) -> Result<ChatRequest> {
    parsed::<MessagesRequest>(&body.to_string())?.value.into_chat(|| takes_later_system)
}

/// The messages of the chat that a conversation becomes.
fn messages(system: Value, messages: Value, takes_later_system: bool) -> Value {
    let body = json!({ "max_tokens": 1, "system": system, "messages": messages });
    let chat = chat_of(&body, takes_later_system).expect("valid");
    value_of(chat.prompt.messages.as_ref().map(|messages| &*messages.json))
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
        assert_eq!(value_of(chat.tool_choice.as_deref()), expected);
        let function = json!({ "name": "add", "description": "Adds.", "parameters": { "type": "object" } });
        assert_eq!(value_of(chat.prompt.tools.as_deref()), json!([{ "type": "function", "function": function }]));
        let variables = json!({ "reasoning_effort": "none", "enable_thinking": false });
        assert_eq!(value_of(chat.prompt.chat_template_kwargs.as_deref()), variables);
        let format = json!({ "type": "json_schema", "json_schema": { "schema": {} } });
        assert_eq!(value_of(chat.sampling.response_format.as_deref()), format);
        assert_eq!((chat.max_completion_tokens, chat.sampling.temperature), (Some(9), Some(0.5)));
        assert_eq!((chat.sampling.stop_strings(), chat.sampling.stream), (vec!["b".into(), "a".into()], Some(true)));
    }
}

#[test]
fn thinking_is_a_variable_of_the_template_and_a_budget() {
    for (thinking, effort, variables, budget) in [
        (Value::Null, Value::Null, Value::Null, None),
        (json!({ "type": "adaptive" }), Value::Null, Value::Null, None),
        (
            json!({ "type": "adaptive" }),
            json!("low"),
            json!({ "enable_thinking": true, "reasoning_effort": "low" }),
            None,
        ),
        (
            json!({ "type": "disabled" }),
            json!("low"),
            json!({ "enable_thinking": false, "reasoning_effort": "none" }),
            None,
        ),
        (
            json!({ "type": "enabled", "budget_tokens": 1024 }),
            Value::Null,
            json!({ "enable_thinking": true }),
            Some(1024),
        ),
        (
            json!({ "type": "enabled", "budget_tokens": 1999 }),
            json!("max"),
            json!({ "enable_thinking": true, "reasoning_effort": "max" }),
            Some(1999),
        ),
    ] {
        let body = json!({
            "max_tokens": 2000, "messages": [{ "role": "user", "content": "Hi." }], "thinking": thinking,
            "output_config": { "effort": effort },
        });
        let chat = chat_of(&body, true).expect("valid");
        assert_eq!(value_of(chat.prompt.chat_template_kwargs.as_deref()), variables, "{body}");
        assert_eq!(chat.sampling.thinking_token_budget, budget, "{body}");
    }
}

#[test]
fn a_wrong_member_is_named() {
    let user = |content: Value| json!([{ "role": "user", "content": content }]);
    let block = |members: Value| user(json!([members]));
    let body = json!({
        "max_tokens": 2000, "messages": user(json!("Hi.")), "output_config": { "effort": "low" },
        "thinking": { "type": "enabled", "budget_tokens": 1999 },
    });
    let wrong = [
        ("max_tokens", json!(0), "max_tokens"),
        ("max_tokens", Value::Null, "max_tokens"),
        ("messages", Value::Null, "messages"),
        ("messages", json!([{ "role": "bot", "content": "" }]), "messages[0].role"),
        ("messages", user(json!(3)), "messages[0].content"),
        ("messages", block(json!({ "text": "a" })), "messages[0].content[0].type"),
        ("messages", block(json!({ "type": "text" })), "messages[0].content[0].text"),
        ("messages", block(json!({ "type": "text", "text": 1 })), "messages[0].content[0].text"),
        ("messages", block(json!({ "type": "image", "source": {} })), "messages[0].content[0].source.type"),
        ("messages", block(json!({ "type": "tool_use", "id": "a", "name": "b" })), "messages[0].content[0].type"),
        ("messages", block(json!({ "type": "tool_result" })), "messages[0].content[0].tool_use_id"),
        (
            "messages",
            block(json!({ "type": "tool_result", "tool_use_id": "a", "content": [{ "type": "image" }] })),
            "messages[0].content[0].content[0].source",
        ),
        ("system", json!([{ "type": "document" }]), "system[0].type"),
        ("tools", json!([{ "name": "a" }]), "tools[0].input_schema"),
        ("tools", json!([{ "name": "a", "type": "web_search_20250305" }]), "tools[0].type"),
        ("tool_choice", json!({ "type": "tool" }), "tool_choice.name"),
        ("tool_choice", json!({ "type": "some" }), "tool_choice.type"),
        ("thinking", json!({ "type": "enabled" }), "thinking.budget_tokens"),
        ("thinking", json!({ "type": "enabled", "budget_tokens": 1023 }), "thinking.budget_tokens"),
        ("thinking", json!({ "type": "enabled", "budget_tokens": 2000 }), "thinking.budget_tokens"),
        ("thinking_token_budget", json!(3), "thinking_token_budget"),
        ("thinking", json!({ "type": "often" }), "thinking.type"),
        ("output_config", json!({ "format": { "type": "xml", "schema": {} } }), "output_config.format.type"),
        ("n", json!(2), "n"),
        ("return_token_ids", json!(true), "return_token_ids"),
        ("chat_template_kwargs", json!(3), "chat_template_kwargs"),
    ];
    assert_named(&body, wrong, |body| chat_of(body, true));
}

#[test]
fn parsing_takes_no_more_than_is_counted_for_it() {
    assert_counted("messages", 0, |body| parsed::<MessagesRequest>(body).map(|body| body.value));
}

#[test]
fn a_chat_is_written_in_what_is_counted_for_it() {
    for content in [json!("\u{1}".repeat(1 << 18)), json!(vec![json!({ "type": "text", "text": "a" }); 1 << 13])] {
        let body = json!({ "max_tokens": 1, "messages": [{ "role": "user", "content": content }] }).to_string();
        let parsed = parsed::<MessagesRequest>(&body).expect("valid");
        let (most, chat) = peak_of(|| parsed.value.into_chat(|| true));
        chat.expect("valid");
        let counted = parsed_bytes(body.as_bytes()) + 2 * body.len() as u64;
        assert!(most <= counted, "{most} bytes of {counted} counted");
    }
}
