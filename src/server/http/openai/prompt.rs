//! The prompts of a completion: a text, texts, token ids, or lists of token ids.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use utoipa::ToSchema;

use crate::server::pb;

/// One or several prompts.
#[derive(Clone, Debug, Default, PartialEq, ToSchema)]
#[schema(value_type = serde_json::Value)]
pub(in crate::server::http) struct Prompts(pub(super) Vec<PromptInput>);

/// One prompt.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::server::http) enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

impl PromptInput {
    /// The prompt as a gRPC client would send it. `add_special_tokens` is for texts.
    pub(super) fn into_message(self, add_special_tokens: Option<bool>) -> pb::Prompt {
        let (kind, add_special_tokens) = match self {
            Self::Text(text) => (pb::prompt::Kind::Text(text), add_special_tokens),
            Self::Tokens(ids) => (pb::prompt::Kind::Tokens(pb::TokenIds { ids }), None),
        };
        pb::Prompt { kind: Some(kind), add_special_tokens, sampling: None }
    }

    /// The text, if that is what the prompt is.
    pub(super) fn text(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Tokens(_) => None,
        }
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a list of texts, a list of token ids, or a list of such lists")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![PromptInput::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
        let mut prompts = Vec::new();
        match list.next_element()? {
            None => return Ok(Prompts(prompts)),
            Some(Element::Token(first)) => {
                let mut tokens = vec![first];
                while let Some(token) = list.next_element()? {
                    tokens.push(token);
                }
                prompts.push(PromptInput::Tokens(tokens));
            }
            Some(Element::Prompt(first @ PromptInput::Text(_))) => {
                prompts.push(first);
                while let Some(text) = list.next_element()? {
                    prompts.push(PromptInput::Text(text));
                }
            }
            Some(Element::Prompt(first @ PromptInput::Tokens(_))) => {
                prompts.push(first);
                while let Some(tokens) = list.next_element()? {
                    prompts.push(PromptInput::Tokens(tokens));
                }
            }
        }
        Ok(Prompts(prompts))
    }
}

/// The first element of a list, which decides the type of all.
enum Element {
    Token(u32),
    Prompt(PromptInput),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor)
    }
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token id, or a list of token ids")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Prompt(PromptInput::Text(text.to_owned())))
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
        let id = u32::try_from(id).map_err(|_| de::Error::custom(format_args!("{id} is not a token id")))?;
        Ok(Element::Token(id))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = list.next_element()? {
            tokens.push(token);
        }
        Ok(Element::Prompt(PromptInput::Tokens(tokens)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_of_prompts_is_read_and_mixed_ones_are_refused() {
        let read = |text: &str| serde_json::from_str::<Prompts>(text).map(|prompts| prompts.0);
        let (text, tokens) = (|t: &str| PromptInput::Text(t.into()), |t: &[u32]| PromptInput::Tokens(t.to_vec()));
        assert_eq!(read(r#""a""#).unwrap(), [text("a")]);
        assert_eq!(read(r#"["a", "b"]"#).unwrap(), [text("a"), text("b")]);
        assert_eq!(read("[1, 2]").unwrap(), [tokens(&[1, 2])]);
        assert_eq!(read("[[1], [2, 3], []]").unwrap(), [tokens(&[1]), tokens(&[2, 3]), tokens(&[])]);
        assert_eq!(read("[]").unwrap(), []);
        for wrong in ["5", "null", r#"[1, "a"]"#, r#"["a", [1]]"#, "[[1], 2]", "[1.5]", "[-1]", "[4294967296]", "{}"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
