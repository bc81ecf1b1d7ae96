//! A cache of the recently used grammars.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Grammar, GrammarSource};

/// Most grammars in the cache. A trainer uses a few, and an application some dozens.
const MOST: usize = 64;
/// Most bytes that their texts and automata may take together.
const MOST_BYTES: usize = 32 << 20;
/// Most bytes that the rules take per byte of text, as measured with a chain of short rules.
const BYTES_PER_BYTE: usize = 256;

/// Compiled grammars by their texts. The least recently used one is evicted first.
#[derive(Default)]
pub(super) struct Cache {
    grammars: HashMap<GrammarSource, Entry>,
    bytes: usize,
    /// Number of requests for a grammar so far.
    clock: u64,
}

struct Entry {
    grammar: Arc<Grammar>,
    bytes: usize,
    asked: u64,
}

impl Cache {
    pub fn get(&mut self, source: &GrammarSource) -> Option<Arc<Grammar>> {
        self.clock += 1;
        let entry = self.grammars.get_mut(source)?;
        entry.asked = self.clock;
        Some(entry.grammar.clone())
    }

    /// Adds a grammar, unless it alone exceeds the limit.
    pub fn insert(&mut self, source: GrammarSource, grammar: Arc<Grammar>) {
        let bytes = source.bytes() * BYTES_PER_BYTE + grammar.bytes();
        if bytes > MOST_BYTES || self.grammars.contains_key(&source) {
            return;
        }
        while self.grammars.len() == MOST || self.bytes + bytes > MOST_BYTES {
            let oldest = self.grammars.iter().min_by_key(|(_, entry)| entry.asked).map(|(source, _)| source.clone());
            let oldest = oldest.and_then(|source| self.grammars.remove(&source)).expect("what takes bytes is an entry");
            self.bytes -= oldest.bytes;
        }
        self.bytes += bytes;
        self.grammars.insert(source, Entry { grammar, bytes, asked: self.clock });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::GrammarCompiler;
    use crate::text::Tokenizer;

    #[test]
    fn what_was_asked_for_longest_ago_goes_first() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
        let compiler = GrammarCompiler::new(Arc::new(Tokenizer::from_file(file.as_ref()).unwrap()));
        let grammar = Arc::new(compiler.compile(&GrammarSource::JsonObject, 512, &[]).unwrap());
        let source = |i: usize| GrammarSource::Lark(i.to_string());
        let mut cache = Cache::default();
        for i in 0..MOST {
            assert!(cache.get(&source(i)).is_none());
            cache.insert(source(i), grammar.clone());
        }
        assert!(cache.get(&source(0)).is_some());
        assert!(cache.get(&source(MOST)).is_none());
        cache.insert(source(MOST), grammar.clone());
        assert!(cache.get(&source(0)).is_some() && cache.get(&source(1)).is_none() && cache.get(&source(2)).is_some());
        assert_eq!(cache.grammars.len(), MOST);
        // Two texts of this size exceed the limit.
        let long = |c: &str| GrammarSource::Lark(c.repeat(MOST_BYTES / BYTES_PER_BYTE / 2));
        for c in ["a", "b"] {
            cache.get(&long(c));
            cache.insert(long(c), grammar.clone());
        }
        assert!(cache.get(&long("a")).is_none() && cache.get(&long("b")).is_some());
        assert!(cache.bytes <= MOST_BYTES);
        cache.insert(GrammarSource::Lark("c".repeat(MOST_BYTES)), grammar);
        assert!(cache.get(&long("b")).is_some(), "one that is too large drives nobody out");
    }
}
