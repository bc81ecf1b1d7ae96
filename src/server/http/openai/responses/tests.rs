use serde_json::{Value, json};

use super::request::ResponseRequest;
use crate::error::Result;
use crate::server::http::openai::chat::ChatRequest;
use crate::server::http::tests::bodies::{assert_counted, assert_named, parsed, value_of};

fn chat_of(body: &Value) -> Result<(ChatRequest, Value)> {
    let (chat, echo) = parsed::<ResponseRequest>(&body.to_string())?.value.into_chat()?;
    Ok((chat, serde_json::to_value(&echo).expect("is JSON")))
}

fn messages(instructions: Value, input: Value) -> Value {
    let (chat, _) = chat_of(&json!({ "instructions": instructions, "input": input })).expect("valid");
    value_of(chat.prompt.messages.as_ref().map(|messages| &*messages.json))
}

#[test]
fn an_input_is_the_messages_of_a_chat() {
    assert_eq!(messages(Value::Null, json!("Hi.")), json!([{ "role": "user", "content": "Hi." }]));
    let text = |kind: &str, text: &str| json!({ "type": kind, "text": text });
    let given = json!([
        { "role": "developer", "content": "Add." },
        { "type": "message", "role": "user", "content": [text("input_text", "1"), text("input_text", "2")] },
        { "type": "reasoning", "id": "r", "summary": [text("summary_text", "Hm.")] },
        { "type": "message", "role": "assistant", "id": "m", "status": "completed",
            "content": [{ "type": "output_text", "text": "I add.", "annotations": [] }] },
        { "type": "function_call", "call_id": "t1", "name": "add", "arguments": "{\"a\": 1}" },
        { "type": "function_call", "call_id": "t2", "name": "f", "arguments": "" },
        { "type": "function_call_output", "call_id": "t1", "output": "3" },
        { "type": "function_call_output", "call_id": "t2", "output": [text("input_text", "a"), text("input_text", "b")] },
        { "role": "assistant", "content": [{ "type": "refusal", "refusal": "No." }] },
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
    assert_eq!(
        messages(json!("Be brief."), given),
        json!([
            { "role": "system", "content": "Be brief." },
            { "role": "system", "content": "Add." },
            { "role": "user", "content": [text("text", "1"), text("text", "2")] },
            { "role": "assistant", "content": "I add.", "reasoning_content": "Hm.",
                "tool_calls": [call("t1", "add", "{\"a\": 1}"), call("t2", "f", "")] },
            { "role": "tool", "content": "3", "tool_call_id": "t1" },
            { "role": "tool", "content": "a\nb", "tool_call_id": "t2" },
            { "role": "assistant", "content": "No." },
        ])
    );
}

#[test]
fn an_unfinished_message_at_the_end_is_continued() {
    let continues = |item: Value| {
        let (chat, _) = chat_of(&json!({ "input": [{ "role": "user", "content": "Hi." }, item] })).expect("valid");
        chat.prompt.continue_final_message == Some(true)
    };
    let message = |role: &str, status: Value| json!({ "role": role, "content": "I", "status": status });
    assert!(continues(message("assistant", json!("in_progress"))));
    assert!(continues(message("assistant", json!("incomplete"))));
    assert!(!continues(message("assistant", json!("completed"))));
    assert!(!continues(message("assistant", Value::Null)));
    assert!(!continues(message("user", json!("incomplete"))));
    let call = json!({ "type": "function_call", "call_id": "t", "name": "f", "arguments": "", "status": "incomplete" });
    assert!(!continues(call));
}

#[test]
fn members_have_the_names_of_a_chats() {
    let tool = json!({ "type": "function", "name": "add", "description": "Adds.", "parameters": {}, "strict": true });
    let (chat, echo) = chat_of(&json!({
        "input": "Hi.", "max_output_tokens": 9, "temperature": 0.5, "seed": 3, "tools": [tool],
        "tool_choice": { "type": "function", "name": "add" }, "reasoning": { "effort": "low" },
        "text": { "format": { "type": "json_schema", "name": "x", "schema": { "type": "object" } } },
        "metadata": { "a": "b" }, "include_reasoning": false, "truncation": "disabled", "previous_response_id": null, "background": false,
    }))
    .expect("valid");
    let function = json!({ "name": "add", "description": "Adds.", "parameters": {} });
    assert_eq!(value_of(chat.prompt.tools.as_deref()), json!([{ "type": "function", "function": function }]));
    assert_eq!(value_of(chat.tool_choice.as_deref()), json!({ "type": "function", "function": { "name": "add" } }));
    let variables = json!({ "reasoning_effort": "low", "enable_thinking": true });
    assert_eq!(value_of(chat.prompt.chat_template_kwargs.as_deref()), variables);
    let format = json!({ "type": "json_schema", "json_schema": { "schema": { "type": "object" } } });
    assert_eq!(value_of(chat.sampling.response_format.as_deref()), format);
    assert_eq!((chat.max_completion_tokens, chat.sampling.temperature), (Some(9), Some(0.5)));
    assert_eq!(chat.include_reasoning, Some(false));
    assert_eq!((&echo["tools"], &echo["metadata"]), (&json!([tool]), &json!({ "a": "b" })));
    assert_eq!((&echo["temperature"], &echo["top_p"]), (&json!(0.5), &json!(1.0)));
}

#[test]
fn a_wrong_member_is_named() {
    let wrong = [
        ("input", Value::Null, "input"),
        ("input", json!(3), "input"),
        ("input", json!([{ "role": "bot", "content": "a" }]), "input[0].role"),
        ("input", json!([{ "role": "user" }]), "input[0].content"),
        ("input", json!([{ "role": "user", "content": [{ "type": "input_image" }] }]), "input[0].content[0].image_url"),
        ("input", json!([{ "type": "item_reference", "id": "a" }]), "input[0].type"),
        ("input", json!([{ "type": "function_call", "call_id": "a" }]), "input[0].name"),
        ("input", json!([{ "type": "reasoning", "encrypted_content": "x" }]), "input[0].encrypted_content"),
        ("input", json!([{ "type": "function_call_output", "output": "a" }]), "input[0].call_id"),
        ("previous_response_id", json!("resp_1"), "previous_response_id"),
        ("background", json!(true), "background"),
        ("truncation", json!("auto"), "truncation"),
        ("include", json!(["message.output_text.logprobs"]), "include"),
        ("tools", json!([{ "type": "web_search" }]), "tools[0].type"),
        ("tools", json!([{ "type": "function" }]), "tools[0].name"),
        ("tools", json!({}), "tools"),
        ("tool_choice", json!({ "type": "web_search" }), "tool_choice"),
        ("text", json!({ "format": { "type": "xml" } }), "text.format.type"),
        ("text", json!({ "format": { "type": "json_schema" } }), "text.format.schema"),
        ("reasoning", json!({ "effort": 3 }), "reasoning.effort"),
        ("n", json!(2), "n"),
    ];
    assert_named(&json!({ "input": "Hi." }), wrong, chat_of);
}

#[test]
fn reading_takes_no_more_than_is_counted_for_it() {
    assert_counted("input", 4, |body| parsed::<ResponseRequest>(body)?.value.into_chat());
}
