use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::*;
use crate::memory::Traffic;

fn encoder() -> PromptEncoder {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    let tokenizer = Tokenizer::from_file(Path::new(file)).expect("the fixture is there");
    let template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\
                    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let template = ChatTemplate::new(template.into(), BTreeMap::new()).expect("a template");
    PromptEncoder::new(Arc::new(tokenizer), Some(template), None, None)
}

fn encode_text(encoder: &PromptEncoder, text: &str) -> Result<Vec<TokenId>> {
    encoder.encode_text("text", text, true, 1000, &mut Traffic::new(1 << 20).charge_always(0))
}

fn encode_chat(encoder: &PromptEncoder, path: &str, messages: &[(&str, &str)]) -> Result<Vec<TokenId>> {
    let messages = messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
    let conversation = Conversation { messages, add_generation_prompt: true, ..Default::default() };
    encode_text(encoder, &encoder.render(path, None, conversation, &Traffic::new(1 << 20))?.0)
}

#[test]
fn a_chat_is_rendered_up_to_the_answer() {
    let encoder = encoder();
    let ids = encode_chat(&encoder, "prompts[0].chat", &[("system", "Be brief."), ("user", "Hi")]).expect("encodes");
    let text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(ids, encode_text(&encoder, text).expect("encodes"));
    assert_eq!(encoder.tokenizer.decode(&ids, true), "system\nBe brief.\nuser\nHi\nassistant\n");
}

#[test]
fn refusals_name_the_path_that_was_given() {
    let refused = encode_chat(&encoder(), "prompts[4].chat", &[("tool", "42")]).expect_err("the template refuses");
    let text = refused.to_string();
    assert!(text.starts_with("prompts[4].chat: ") && text.contains("no tools"), "{text}");

    let bare = PromptEncoder { chat_template: None, ..encoder() };
    let text = encode_chat(&bare, "prompts[0].chat", &[("user", "Hi")]).expect_err("no template").to_string();
    assert_eq!(text, "prompts[0].chat: this model has no chat template; give text or token ids");
}

fn trusting() -> PromptEncoder {
    let special_tokens = BTreeMap::from([("bos_token".into(), "<s>".into())]);
    let request_templates = Some(RequestTemplates { special_tokens, finds_reasoning: true });
    PromptEncoder { request_templates, reasoning: Some(ReasoningFormat::Qwen3), ..encoder() }
}

fn render_by(encoder: &PromptEncoder, source: &str) -> Result<String> {
    let messages = vec![json!({ "role": "user", "content": "Hi" })];
    let conversation = Conversation { messages, ..Default::default() };
    let room = Traffic::new(1 << 20);
    encoder.render("prompts[0].chat", Some(source.into()), conversation, &room).map(|(text, _)| text)
}

#[test]
fn a_trusted_request_brings_its_own_template() {
    let encoder = trusting();
    let text = render_by(&encoder, "{{ bos_token }}{{ messages[0].content }}").expect("renders");
    assert_eq!(text, "<s>Hi");
    let bare = PromptEncoder { chat_template: None, ..trusting() };
    assert_eq!(render_by(&bare, "{{ messages[0].content }}!").expect("renders"), "Hi!");
    let wrong = render_by(&encoder, "{% if %}").expect_err("is no template").to_string();
    assert!(wrong.starts_with("prompts[0].chat.chat_template: the chat template cannot be compiled: "), "{wrong}");
    let refused = render_by(&encoder, "{{ raise_exception('no') }}").expect_err("refuses").to_string();
    assert_eq!(refused, "prompts[0].chat: the chat template refuses them: no");
    let large = encoder.compiling_bytes("path", &"a".repeat((1 << 20) + 1)).expect_err("is too large").to_string();
    assert!(large.starts_with("path: the chat template has 1048577 bytes"), "{large}");
}

#[test]
fn an_untrusted_template_is_refused_with_the_flag_that_trusts_it() {
    let encoder = encoder();
    let refused = encoder.compiling_bytes("prompts[0].chat.chat_template", "Hi").expect_err("is refused").to_string();
    assert!(refused.starts_with("prompts[0].chat.chat_template: "), "{refused}");
    assert!(refused.ends_with("start the server with --trust-request-chat-template"), "{refused}");
    assert_eq!(render_by(&encoder, "Hi").expect_err("is refused").to_string(), refused);
}

#[test]
fn answers_are_read_as_their_template_says() {
    let encoder = trusting();
    let (calls, thinks) = (Some("{# <tool_call> #}"), Some("{# </think> #}"));
    assert_eq!((encoder.tool_format(None), encoder.tool_format(calls)), (None, Some(ToolFormat::Hermes)));
    assert_eq!((encoder.reasoning(None), encoder.reasoning(calls)), (Some(ReasoningFormat::Qwen3), None));
    assert_eq!(encoder.reasoning(thinks), Some(ReasoningFormat::Marked));
    // A flag says how answers are read, whatever the template.
    let request_templates = Some(RequestTemplates { special_tokens: BTreeMap::new(), finds_reasoning: false });
    let told = PromptEncoder { request_templates, ..encoder };
    assert_eq!(told.reasoning(calls), Some(ReasoningFormat::Qwen3));
}
