//! The configuration of the tokenizer, as clients ask for it.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json};

/// `tokenizer_config.json` with tokens as texts, without paths of files, and with the chat template that is in use.
pub fn tokenizer_info(config: Json, chat_template: Option<&str>) -> String {
    serde_json::to_string(&WholeNumbers(&members(config, chat_template))).expect("JSON can be written")
}

fn members(config: Json, chat_template: Option<&str>) -> Json {
    let mut members = match plain(config) {
        Json::Object(members) => members,
        _ => Map::new(),
    };
    members.retain(|name, _| !["vocab_file", "merges_file"].contains(&name.as_str()));
    members.entry("tokenizer_class").or_insert_with(|| "PreTrainedTokenizerFast".into());
    if let Some(source) = chat_template {
        members.insert("chat_template".into(), source.into());
    }
    Json::Object(members)
}

/// `value` with the content of each token that is described by an object.
fn plain(value: Json) -> Json {
    match value {
        Json::Object(mut members) => match members.get_mut("content").map(Json::take) {
            Some(Json::String(content)) => Json::String(content),
            content => {
                members.extend(content.map(|content| ("content".into(), content)));
                members.into_iter().map(|(name, value)| (name, plain(value))).collect()
            }
        },
        Json::Array(values) => values.into_iter().map(plain).collect(),
        other => other,
    }
}

/// Writes whole numbers without an exponent: transformers stands for no limit with 10³⁰ in `model_max_length`, which
/// [`Json`] keeps as a float.
struct WholeNumbers<'a>(&'a Json);

impl Serialize for WholeNumbers<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Json::Object(members) => serializer.collect_map(members.iter().map(|(name, value)| (name, Self(value)))),
            Json::Array(values) => serializer.collect_seq(values.iter().map(Self)),
            Json::Number(number) if number.is_f64() => match number.as_f64() {
                Some(float) if float >= 2f64.powi(64) && float < 2f64.powi(127) => {
                    serializer.serialize_u128(float as u128)
                }
                _ => number.serialize(serializer),
            },
            other => other.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_are_texts_and_the_template_is_the_one_in_use() {
        let config = json!({
            "bos_token": { "content": "<s>", "lstrip": false }, "eos_token": "</s>",
            "added_tokens_decoder": { "0": { "content": "<s>", "special": true }, "1": { "id": 1 } },
            "vocab_file": "/a", "merges_file": "/b", "tokenizer_class": "LlamaTokenizer", "chat_template": "old",
            "model_max_length": 8,
        });
        assert_eq!(
            members(config, Some("new")),
            json!({
                "bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": { "0": "<s>", "1": { "id": 1 } },
                "tokenizer_class": "LlamaTokenizer", "chat_template": "new", "model_max_length": 8,
            })
        );
        assert_eq!(tokenizer_info(Json::Null, None), r#"{"tokenizer_class":"PreTrainedTokenizerFast"}"#);
    }

    #[test]
    fn whole_numbers_have_no_exponent() {
        let config =
            r#"{"model_max_length":1000000000000000019884624838656,"a":[0.5,-1,1e+300],"tokenizer_class":"T"}"#;
        assert_eq!(tokenizer_info(serde_json::from_str(config).unwrap(), None), config);
    }
}
