//! Names of full blocks: a SHA-256 chain over token ids, so that equal hashes mean equal prefixes.

use sha2::{Digest, Sha256};

use crate::types::TokenId;

/// What besides the tokens decides the bits of KV. Every chain starts from it, so KV of one policy can be found only
/// by that policy. Its version does not name a policy: a trainer that starts again may use a number twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt {
    /// Counts the policies of this process: an epoch is never used twice.
    pub epoch: u64,
    /// Generation of the resident adapter (a number never used twice), if the request chose one.
    pub adapter: Option<u64>,
}

/// Name of one full block: of its tokens and of all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// Where a chain starts.
    pub fn root(salt: CacheSalt) -> Self {
        let mut sha = Sha256::new();
        sha.update(salt.epoch.to_le_bytes());
        if let Some(generation) = salt.adapter {
            sha.update(generation.to_le_bytes());
        }
        Self(sha.finalize().into())
    }

    /// The block of `tokens` after the block `self`.
    pub fn child(&self, tokens: &[TokenId]) -> Self {
        let mut sha = Sha256::new();
        sha.update(self.0);
        for token in tokens {
            sha.update(token.to_le_bytes());
        }
        Self(sha.finalize().into())
    }
}

/// Hashes of a sequence's full blocks from its start; grows with the sequence.
#[derive(Clone, Debug)]
pub struct HashChain {
    root: BlockHash,
    blocks: Vec<BlockHash>,
}

impl HashChain {
    pub fn new(salt: CacheSalt) -> Self {
        Self { root: BlockHash::root(salt), blocks: Vec::new() }
    }

    /// The chain of all full blocks of `tokens`.
    pub fn of(salt: CacheSalt, tokens: &[TokenId], block_size: usize) -> Self {
        let mut chain = Self::new(salt);
        tokens.chunks_exact(block_size).for_each(|block| chain.push(block));
        chain
    }

    /// Appends the next full block. `tokens`: the block's own, `block_size` of them.
    pub fn push(&mut self, tokens: &[TokenId]) {
        let parent = self.blocks.last().unwrap_or(&self.root);
        self.blocks.push(parent.child(tokens));
    }

    /// Full blocks named so far.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub fn as_slice(&self) -> &[BlockHash] {
        &self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_depends_on_salt_parent_tokens_and_their_order() {
        let chain = |epoch, adapter, blocks: &[[TokenId; 2]]| {
            let mut chain = HashChain::new(CacheSalt { epoch, adapter });
            blocks.iter().for_each(|b| chain.push(b));
            *chain.as_slice().last().expect("blocks were pushed")
        };
        let variants = [
            chain(1, None, &[[1, 2]]),
            chain(2, None, &[[1, 2]]),
            chain(1, Some(0), &[[1, 2]]),
            chain(1, Some(1), &[[1, 2]]),
            chain(1, None, &[[2, 1]]),
            chain(1, None, &[[1, 2], [1, 2]]),
            chain(1, None, &[[2, 1], [1, 2]]),
        ];
        for (i, a) in variants.iter().enumerate() {
            for (j, b) in variants.iter().enumerate() {
                assert_eq!(a == b, i == j, "variants {i} and {j}");
            }
        }
        assert_eq!(variants[0], chain(1, None, &[[1, 2]]));
    }
}
