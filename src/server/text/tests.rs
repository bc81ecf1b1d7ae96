use std::collections::BTreeMap;
use std::path::Path;

use super::*;
use crate::memory::Traffic;

fn codec() -> TextCodec {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
    let tokenizer = Tokenizer::from_file(Path::new(file)).expect("the fixture is there");
    let template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\
                    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let template = ChatTemplate::new(template.into(), BTreeMap::new()).expect("a template");
    TextCodec::new(Arc::new(tokenizer), Some(template))
}

fn encode_text(codec: &TextCodec, text: &str) -> Result<Vec<TokenId>> {
    codec.encode_text("text", text, 1000, &mut Traffic::new(1 << 20).charge_always(0))
}

fn encode_chat(codec: &TextCodec, path: &str, messages: &[(&str, &str)]) -> Result<Vec<TokenId>> {
    codec.encode_chat(path, messages, 1000, &mut Traffic::new(1 << 20).charge_always(0))
}

fn text_len(text: &str, stop: &[&str]) -> Option<usize> {
    (1..=text.len()).find_map(|end| {
        let ended = stop.iter().filter(|s| text.as_bytes()[..end].ends_with(s.as_bytes()));
        ended.map(|s| s.len()).max().map(|longest| end - longest)
    })
}

/// What a stream gives for `text`'s tokens is a prefix of the text before the stop string, at every token.
fn check(codec: &TextCodec, text: &str, stop: &[&str]) -> String {
    let tokens = encode_text(codec, text).expect("encodes");
    let whole = &text[..text_len(text, stop).unwrap_or(text.len())];
    let mut stream = codec.stream(&Arc::new(StopStrings::new(stop)));
    let mut given = String::new();
    for &token in &tokens {
        given.push_str(&stream.push(token));
        assert_eq!(stream.emitted(), given.len());
        assert!(whole.starts_with(&given), "{given:?} is not the beginning of {whole:?} (stop {stop:?})");
    }
    given
}

#[test]
fn a_stream_gives_the_text_and_nothing_of_a_stop_string() {
    let codec = codec();
    assert_eq!(check(&codec, "The capital of France is Paris", &[]), "The capital of France is Paris");
    assert_eq!(check(&codec, "one STOP two", &["STOP"]), "one ");
    // What may still become a stop string waits for the completion.
    assert_eq!(check(&codec, "one ST", &["STOP"]), "one ");
    assert_eq!(check(&codec, "one STO two", &["STOP"]), "one STO two");
    assert_eq!(check(&codec, "naïve 日本語 🙂 END", &["本", "END"]), "naïve 日");
}

#[test]
fn random_texts_and_stop_strings_agree_with_a_search_of_the_whole() {
    let codec = codec();
    let mut state = 0x5EED_u64;
    println!("seed {state:#x}");
    let mut below = move |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut stopped = 0;
    for _ in 0..3000 {
        let mut word = |n: u64| -> String { (0..=below(n)).map(|_| ['a', 'b', '語'][below(3) as usize]).collect() };
        let (text, stop) = (word(20), [word(3), word(5)]);
        let stop: Vec<&str> = stop.iter().map(String::as_str).collect();
        let given = check(&codec, &text, &stop);
        if let Some(len) = text_len(&text, &stop) {
            assert_eq!(given, text[..len], "{text:?} {stop:?}");
            stopped += 1;
        }
    }
    assert!((500..2950).contains(&stopped), "{stopped} of 3000 were stopped");
}

#[test]
fn a_chat_is_rendered_up_to_the_answer() {
    let codec = codec();
    let ids = encode_chat(&codec, "prompts[0].chat", &[("system", "Be brief."), ("user", "Hi")]).expect("encodes");
    let text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(ids, encode_text(&codec, text).expect("encodes"));
    assert_eq!(codec.decode(&ids), "system\nBe brief.\nuser\nHi\nassistant\n");
}

#[test]
fn refusals_name_the_path_that_was_given() {
    let refused = encode_chat(&codec(), "prompts[4].chat", &[("tool", "42")]).expect_err("the template refuses");
    let text = refused.to_string();
    assert!(text.starts_with("prompts[4].chat: ") && text.contains("no tools"), "{text}");

    let bare = TextCodec { chat_template: None, ..codec() };
    let text = encode_chat(&bare, "prompts[0].chat", &[("user", "Hi")]).expect_err("no template").to_string();
    assert_eq!(text, "prompts[0].chat: this model has no chat template; give text or token ids");
}
