use serde_json::json;

use super::*;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chat_template");

fn nothing() -> Conversation {
    Conversation::default()
}

/// The conversation of one of the cases that `make.py` made.
fn conversation(case: &Json) -> Conversation {
    let is_set = |name: &str| case[name].as_bool().unwrap_or_default();
    Conversation {
        messages: case["messages"].as_array().unwrap().clone(),
        tools: case["tools"].clone(),
        documents: case["documents"].clone(),
        arguments: case["variables"].as_object().unwrap().clone(),
        add_generation_prompt: is_set("add_generation_prompt"),
        continue_final_message: is_set("continue_final_message"),
    }
}

fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.into_iter().map(|(name, token)| (name.to_string(), token.to_string())).collect();
    ChatTemplate::new(source.into(), tokens).unwrap()
}

/// Room for everything that a render makes.
fn room() -> Traffic {
    Traffic::new(1 << 40)
}

fn render(template: &ChatTemplate, conversation: Conversation) -> Result<String> {
    template.render(conversation, &room()).map(|(text, _)| text)
}

/// `cases.json` has the texts that transformers renders; `make.py` beside it wrote the file.
#[test]
fn renders_as_transformers_does() {
    let cases: Vec<Json> = serde_json::from_str(&read(Path::new(&format!("{FIXTURES}/cases.json"))).unwrap()).unwrap();
    assert!(cases.len() > 120);
    for case in &cases {
        let source = read(Path::new(&format!("{FIXTURES}/{}", case["template"].as_str().unwrap()))).unwrap();
        match (render(&template(&source), conversation(case)), case["error"].as_str()) {
            (Ok(text), None) => assert_eq!(text, case["text"], "{case}"),
            (Err(Error::InvalidArgument { field, message }), Some(error)) => {
                assert_eq!(field, "messages");
                assert!(message.contains(error), "{message} does not say {error}");
            }
            (result, error) => panic!("{result:?} instead of {error:?}: {case}"),
        }
    }
}

#[test]
fn date_of_today_and_json_arguments() {
    let text = render(&template("{{ strftime_now('%Y') }}"), nothing()).unwrap();
    assert!((2025..3000).contains(&text.parse::<i32>().unwrap()), "{text}");
    let variables = json!({ "x": { "a": "<é>'\"", "b": [1, 0.5, true, null], "c": {} } });
    let arguments = variables.as_object().unwrap();
    let render =
        |source| render(&template(source), Conversation { arguments: arguments.clone(), ..nothing() }).unwrap();
    assert_eq!(render("{{ x | tojson }}"), r#"{"a": "<é>'\"", "b": [1, 0.5, true, null], "c": {}}"#);
    assert_eq!(render("{{ x.b | tojson(indent=1, ensure_ascii=false) }}"), "[\n 1,\n 0.5,\n true,\n null\n]");
}

#[test]
fn a_template_gives_its_source_back_when_it_is_dropped() {
    for _ in 0..3 {
        let source: Arc<str> = "{% block a %}{{ bos_token }} and text{% endblock %}".into();
        let kept = Arc::downgrade(&source);
        let template = ChatTemplate::new(source, BTreeMap::new()).unwrap();
        assert_eq!(render(&template, nothing()).unwrap(), " and text");
        assert!(kept.strong_count() > 0);
        drop(template);
        assert_eq!(kept.strong_count(), 0);
    }
}

#[test]
fn dates_are_formatted_as_by_c() {
    let at = |format: &str, seconds| strftime(format, OffsetDateTime::from_unix_timestamp(seconds).unwrap());
    let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %h %y %e %I %p %F %T %Z %z %%Z %%%Z %j";
    let first =
        "1970-01-01 00:00:00 Thu Thursday Jan January Jan 70  1 12 AM 1970-01-01 00:00:00 UTC +0000 %Z %UTC 001";
    assert_eq!(at(all, 0).unwrap(), first);
    let leap =
        "2024-02-29 23:59:59 Thu Thursday Feb February Feb 24 29 11 PM 2024-02-29 23:59:59 UTC +0000 %Z %UTC 060";
    assert_eq!(at(all, 1_709_251_199).unwrap(), leap);
    let next = "2024-03-01 00:00:00 Fri Friday Mar March Mar 24  1 12 AM 2024-03-01 00:00:00 UTC +0000 %Z %UTC 061";
    assert_eq!(at(all, 1_709_251_200).unwrap(), next);
    assert_eq!(at("%d %b %Y", 4_102_444_800).unwrap(), "01 Jan 2100");
    for wrong in ["%Q", "%", "%-", "%\u{e9}"] {
        assert!(at(wrong, 0).is_err(), "{wrong}");
    }
}

#[test]
fn failures_say_what_the_template_says() {
    let error = ChatTemplate::new("{% if %}".into(), BTreeMap::new()).unwrap_err();
    assert!(matches!(&error, Error::Config(e) if e.contains("line 1") || e.contains("chat_template:1")), "{error}");
    for source in
        ["{{ raise_exception('no ' ~ 1) }}", "{% macro f() %}{{ raise_exception('no 1') }}{% endmacro %}{{ f() }}"]
    {
        let error = render(&template(source), nothing()).unwrap_err();
        assert_eq!(error.to_string(), "messages: the chat template refuses them: no 1");
    }
    for source in [
        "{{ messages[3].content }}",
        "{{ nothing() }}",
        "{{ x.y }}",
        "{{ strftime_now('%Q') }}",
        "{{ strftime_now('%' * 2000) }}",
    ] {
        assert!(matches!(render(&template(source), nothing()), Err(Error::InvalidArgument { .. })), "{source}");
    }
}

#[test]
fn sources_and_their_precedence() {
    let dir = std::env::temp_dir().join(format!("chat-template-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let write = |name: &str, text: &str| {
        std::fs::write(dir.join(name), text).unwrap();
        dir.join(name)
    };
    let load = |config: Json, jinja: Option<&Path>| {
        let config = write("tokenizer_config.json", &config.to_string());
        ChatTemplate::from_files(&read_tokenizer_config(Some(&config))?, jinja)
    };
    let text = |template: Result<Option<ChatTemplate>>| render(&template.unwrap().unwrap(), nothing()).unwrap();
    let plain = json!({ "chat_template": "{{ bos_token }} config {{ eos_token }}{{ pad_token }}", "bos_token": "<b>",
        "eos_token": { "content": "<e>", "lstrip": false }, "pad_token": null, "add_bos_token": true });
    assert_eq!(text(load(plain.clone(), None)), "<b> config <e>");
    let jinja = write("chat_template.jinja", "{{ bos_token }} file\n");
    assert_eq!(text(load(plain, Some(&jinja))), "<b> file");
    assert_eq!(text(ChatTemplate::from_files(&Json::Null, Some(&jinja))), " file");
    let named =
        json!({ "chat_template": [{ "name": "tool_use", "template": "t" }, { "name": "default", "template": "d" }] });
    assert_eq!(text(load(named, None)), "d");
    assert!(load(json!({}), None).unwrap().is_none());
    assert!(ChatTemplate::from_files(&Json::Null, None).unwrap().is_none());
    for unusable in [json!({ "chat_template": [{ "name": "rag", "template": "r" }] }), json!({ "chat_template": 3 })] {
        assert!(matches!(load(unusable, None), Err(Error::Config(_))));
    }
    assert!(matches!(read_tokenizer_config(Some(&dir)), Err(Error::Config(_))));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn gguf_metadata_names_the_template_and_its_tokens() {
    let string = |s: &str| GgufValue::String(s.to_string());
    let mut metadata = HashMap::from([
        ("tokenizer.ggml.tokens".to_string(), GgufValue::Array(vec![string("<b>"), string("<e>")])),
        ("tokenizer.ggml.bos_token_id".to_string(), GgufValue::U32(0)),
        ("tokenizer.ggml.eos_token_id".to_string(), GgufValue::U32(1)),
        ("tokenizer.ggml.padding_token_id".to_string(), GgufValue::U32(7)),
    ]);
    assert!(ChatTemplate::from_gguf(&metadata, None).unwrap().is_none());
    metadata.insert("tokenizer.chat_template".to_string(), string("{{ bos_token }}{{ pad_token }}{{ eos_token }}"));
    let template = ChatTemplate::from_gguf(&metadata, None).unwrap().unwrap();
    assert_eq!(render(&template, nothing()).unwrap(), "<b><e>");
}

mod limits;
