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
    PromptEncoder::new(Arc::new(tokenizer), Some(template), None)
}

fn encode_text(encoder: &PromptEncoder, text: &str) -> Result<Vec<TokenId>> {
    encoder.encode_text("text", text, true, 1000, &mut Traffic::new(1 << 20).charge_always(0))
}

fn encode_chat(encoder: &PromptEncoder, path: &str, messages: &[(&str, &str)]) -> Result<Vec<TokenId>> {
    let messages = messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
    let conversation = Conversation { messages, add_generation_prompt: true, ..Default::default() };
    encode_text(encoder, &encoder.render(path, conversation, &Traffic::new(1 << 20))?.0)
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
