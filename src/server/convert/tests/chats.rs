//! Chats as the template gets them.

use serde_json::{Value, json};

use crate::error::Error;
use crate::server::convert::chat::{conversation, rendering_bytes};
use crate::server::pb;
use crate::text::Conversation;

fn chat(messages: Value) -> pb::Chat {
    pb::Chat { messages_json: messages.to_string(), ..Default::default() }
}

fn valid(chat: pb::Chat) -> Conversation {
    conversation("chat", chat, false).expect("valid")
}

fn message(message: Value) -> Value {
    valid(chat(json!([message]))).messages.remove(0)
}

fn refused(chat: pb::Chat) -> (String, String) {
    match conversation("chat", chat, false) {
        Err(Error::InvalidArgument { field, message }) => (field, message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn plain_messages_and_those_of_json_are_the_same() {
    let plain = pb::Chat {
        messages: vec![pb::ChatMessage { role: "user".into(), content: "Hi".into() }],
        ..Default::default()
    };
    let json = chat(json!([{ "role": "user", "content": "Hi" }]));
    assert_eq!(valid(plain.clone()).messages, valid(json.clone()).messages);
    assert_eq!(refused(pb::Chat { messages: plain.messages, ..json }).0, "chat.messages_json");
}

#[test]
fn a_message_reaches_the_template_as_it_expects_it() {
    let call = |arguments: Value| json!([{ "id": "c", "type": "function", "function": { "name": "f", "arguments": arguments } }]);
    for (given, expected) in [
        (json!({ "role": "assistant" }), json!({ "role": "assistant", "content": "" })),
        (json!({ "role": "assistant", "content": null }), json!({ "role": "assistant", "content": "" })),
        (
            json!({ "role": "user", "content": ["a", { "type": "text", "text": "b" }, { "text": "c" }] }),
            json!({ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" },
                { "type": "text", "text": "c" }] }),
        ),
        (
            json!({ "role": "assistant", "content": [{ "type": "refusal", "refusal": "no" }] }),
            json!({ "role": "assistant", "content": [{ "type": "text", "text": "no" }] }),
        ),
        (
            json!({ "content": "a", "refusal": null, "role": "assistant", "audio": null, "function_call": null,
                "tool_calls": [] }),
            json!({ "content": "a", "role": "assistant" }),
        ),
        (
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!("{\"b\": 1, \"a\": [2.5]}")) }),
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!({ "b": 1, "a": [2.5] })) }),
        ),
        (
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!(" ")) }),
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!({})) }),
        ),
        (
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!("{\"city\": \"Par")) }),
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!({})) }),
        ),
        (
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!("[1]")) }),
            json!({ "role": "assistant", "content": "", "tool_calls": call(json!({})) }),
        ),
        (
            json!({ "role": "tool", "tool_call_id": "c", "name": "f", "content": "3", "own": { "x": 1 } }),
            json!({ "role": "tool", "tool_call_id": "c", "name": "f", "content": "3", "own": { "x": 1 } }),
        ),
        (
            json!({ "role": "assistant", "content": "a", "reasoning": "r" }),
            json!({ "role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r" }),
        ),
    ] {
        // As text, because the order of members counts.
        assert_eq!(message(given.clone()).to_string(), expected.to_string(), "{given}");
    }
}

#[test]
fn the_other_fields_arrive() {
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "z": 1, "a": 2 } } });
    let given = pb::Chat {
        tools_json: json!([tool]).to_string(),
        documents_json: json!([{ "title": "t", "text": "d" }]).to_string(),
        template_arguments_json: json!({ "enable_thinking": false }).to_string(),
        ..chat(json!([{ "role": "user", "content": "Hi" }]))
    };
    let arrived = valid(given.clone());
    assert_eq!(arrived.tools.to_string(), json!([tool]).to_string());
    assert_eq!(arrived.documents, json!([{ "title": "t", "text": "d" }]));
    assert_eq!(Value::Object(arrived.arguments), json!({ "enable_thinking": false }));
    assert!(arrived.add_generation_prompt && !arrived.continue_final_message);
    let empty = pb::Chat { tools_json: "[]".into(), documents_json: "null".into(), ..given.clone() };
    let empty = valid(pb::Chat { template_arguments_json: "null".into(), ..empty });
    assert!(empty.tools.is_null() && empty.documents.is_null() && empty.arguments.is_empty());

    let continued = pb::Chat { continue_final_message: true, ..given.clone() };
    let arrived = valid(continued.clone());
    assert!(!arrived.add_generation_prompt && arrived.continue_final_message);
    assert_eq!(refused(pb::Chat { add_generation_prompt: Some(true), ..continued }).0, "chat.add_generation_prompt");
    assert!(!valid(pb::Chat { add_generation_prompt: Some(false), ..given }).add_generation_prompt);
}

#[test]
fn what_is_wrong_is_named() {
    let image = json!({ "type": "image_url", "image_url": { "url": "data:" } });
    let text = json!({ "type": "text", "text": "a" });
    let call = |call: Value| json!([{ "role": "assistant", "tool_calls": [call] }]);
    for (messages, field, says) in [
        (json!("Hi"), "", "is not a list"),
        (json!([]), "", "is empty"),
        (json!(["Hi"]), "[0]", "is not an object"),
        (json!([{ "content": "x" }]), "[0].role", "is not given"),
        (json!([{ "role": "", "content": "x" }]), "[0].role", "is not given"),
        (json!([{ "role": 3, "content": "x" }]), "[0].role", "is not given"),
        (json!([{ "role": "user", "content": null }]), "[0].content", "is null"),
        (json!([{ "role": "user", "content": 5 }]), "[0].content", "neither text"),
        (
            json!([{ "role": "user", "content": [text, image] }]),
            "[0].content[1].type",
            "image_url: this model takes text",
        ),
        (json!([{ "role": "user", "content": [{ "type": 5 }] }]), "[0].content[0].type", "this model takes text"),
        (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "[0].content[0].text", "is not a text"),
        (json!([{ "role": "user", "content": [[]] }]), "[0].content[0]", "is not a part"),
        (json!([{ "role": "assistant", "audio": { "id": "a" } }]), "[0].audio", "takes text"),
        (json!([{ "role": "assistant", "function_call": {} }]), "[0].function_call", "tool_calls"),
        (json!([{ "role": "assistant", "tool_calls": {} }]), "[0].tool_calls", "is not a list"),
        (call(json!("f")), "[0].tool_calls[0]", "is not a call"),
    ] {
        let (path, message) = refused(chat(messages.clone()));
        assert_eq!(path, format!("chat.messages_json{field}"), "{messages}");
        assert!(message.contains(says), "{messages}: {message}");
    }
    let user = chat(json!([{ "role": "user", "content": "Hi" }]));
    for (given, field) in [
        (pb::Chat { messages_json: "[".into(), ..Default::default() }, "messages_json"),
        (pb::Chat::default(), "messages"),
        (pb::Chat { tools_json: "{}".into(), ..user.clone() }, "tools_json"),
        (pb::Chat { tools_json: "[{}, 1]".into(), ..user.clone() }, "tools_json[1]"),
        (pb::Chat { documents_json: "3".into(), ..user.clone() }, "documents_json"),
        (pb::Chat { template_arguments_json: "[]".into(), ..user.clone() }, "template_arguments_json"),
        (
            pb::Chat { template_arguments_json: r#"{"chat_template": "x"}"#.into(), ..user },
            "template_arguments_json.chat_template",
        ),
    ] {
        assert_eq!(refused(given).0, format!("chat.{field}"));
    }
}

#[test]
fn deep_and_dense_json_is_refused_or_counted() {
    let deep = pb::Chat { messages_json: "[".repeat(100_000), ..Default::default() };
    assert!(refused(deep).1.contains("recursion limit"));
    let dense = pb::Chat { messages_json: format!("[{}{{}}]", "{},".repeat(1000)), ..Default::default() };
    assert!(rendering_bytes(&dense) > 2000 * 512, "{}", rendering_bytes(&dense));
}
