//! Stub until src/text is merged.
use crate::error::Result;
use crate::types::TokenId;
pub struct TextCodec;
pub struct TextStream;
impl TextCodec {
    pub fn encode_text(&self, _path: &str, text: &str) -> Result<Vec<TokenId>> {
        Ok(text.bytes().map(u32::from).collect())
    }
    pub fn encode_chat(&self, path: &str, messages: &[(&str, &str)]) -> Result<Vec<TokenId>> {
        self.encode_text(path, messages[0].1)
    }
    pub fn decode(&self, ids: &[TokenId]) -> Result<String> {
        Ok(ids.iter().map(|&i| i as u8 as char).collect())
    }
    pub fn stream(&self, _stop: &[String]) -> TextStream {
        TextStream
    }
    pub fn has_chat_template(&self) -> bool {
        false
    }
}
impl TextStream {
    pub fn push(&mut self, id: TokenId) -> Result<String> {
        Ok((id as u8 as char).to_string())
    }
    pub fn emitted(&self) -> usize {
        0
    }
}
