//! The prompts of a completion: a text, texts, token ids, or lists of token ids.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
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
        let kind = match self {
            Self::Text(text) => pb::prompt::Kind::Text(text),
            Self::Tokens(ids) => pb::prompt::Kind::Tokens(pb::TokenIds { ids }),
        };
        pb::Prompt { kind: Some(kind), add_special_tokens, ..Default::default() }
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
        Ok(Prompts(match list.next_element()? {
            None => Vec::new(),
            Some(Element::Token(first)) => vec![PromptInput::Tokens(all(first, list, |token| token)?)],
            Some(Element::Text(first)) => all(first, list, PromptInput::Text)?,
            Some(Element::Tokens(first)) => all(first, list, PromptInput::Tokens)?,
        }))
    }
}

/// `first` and the elements of the list after it.
fn all<'de, T: Deserialize<'de>, U, A: SeqAccess<'de>>(
    first: T,
    mut rest: A,
    convert: impl Fn(T) -> U,
) -> Result<Vec<U>, A::Error> {
    let mut all = vec![convert(first)];
    while let Some(element) = rest.next_element()? {
        all.push(convert(element));
    }
    Ok(all)
}

/// The first element of a list, which decides the type of all.
enum Element {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
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
        Ok(Element::Text(text.to_owned()))
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
        u32::try_from(id).map(Element::Token).map_err(|_| E::custom(format_args!("{id} is not a token id")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Element, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(Element::Tokens)
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
