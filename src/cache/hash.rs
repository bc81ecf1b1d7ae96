//! Hashes of full blocks: a SHA-256 chain over token ids, images and forced experts, so that equal hashes mean equal
//! prefixes.

use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::types::{PolicyWeights, Prompt, PromptImage, TokenId};

/// The policy and those of its weights that computed KV: its bits depend on them, besides the tokens. The hash
/// chain of a sequence starts from its salt, so cached blocks of one policy can never be found by another. A policy is
/// named by an epoch and not by its version, since a trainer that starts again may use a version twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt {
    /// Number of the policy in this process. No number is used twice.
    pub epoch: u64,
    /// No generation of an adapter is used twice.
    pub weights: PolicyWeights,
}

/// SHA-256 by which a full block is found in the prefix cache. It covers the block's tokens, images and forced
/// experts, and all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// Parent of a sequence's first block.
    pub fn root(salt: CacheSalt) -> Self {
        let mut sha = Sha256::new();
        sha.update(salt.epoch.to_le_bytes());
        match salt.weights {
            PolicyWeights::Serving => {}
            PolicyWeights::Adapter(generation) => sha.update(generation.to_le_bytes()),
            PolicyWeights::Base => sha.update(b"base"),
        }
        Self(sha.finalize().into())
    }

    /// Hash of the block of `tokens` that follows the block with the hash `self`. `images` are those whose
    /// placeholders are among these tokens: KV depends on them, and placeholder tokens are the same for all images.
    /// All blocks of a cache have the same number of tokens, so tokens and images cannot be mistaken for each other.
    pub fn child<'a>(&self, tokens: &[TokenId], images: impl Iterator<Item = &'a PromptImage>) -> Self {
        let mut sha = Sha256::new();
        sha.update(self.0);
        for token in tokens {
            sha.update(token.to_le_bytes());
        }
        for PromptImage { picture, placeholders, .. } in images {
            sha.update(picture.hash().0);
            sha.update((placeholders.start as u64).to_le_bytes());
            sha.update((placeholders.end as u64).to_le_bytes());
        }
        Self(sha.finalize().into())
    }

    /// Hash of the block with the hash `self` whose `tokens`, by their indices in the sequence, were forced to the
    /// experts `rows`. KV depends on them.
    fn forced(&self, tokens: Range<usize>, rows: &[u8]) -> Self {
        let mut sha = Sha256::new();
        sha.update(self.0);
        // The hash of a block that follows `self` has a token id here, which is lower.
        sha.update(TokenId::MAX.to_le_bytes());
        sha.update((tokens.start as u64).to_le_bytes());
        sha.update((tokens.end as u64).to_le_bytes());
        sha.update(rows);
        Self(sha.finalize().into())
    }
}

/// Hashes of a sequence's full blocks, from its first block on. It grows with the sequence.
#[derive(Clone, Debug)]
pub struct HashChain {
    root: BlockHash,
    blocks: Vec<BlockHash>,
}

impl HashChain {
    pub fn new(salt: CacheSalt) -> Self {
        Self { root: BlockHash::root(salt), blocks: Vec::new() }
    }

    /// The chain of all full blocks of `tokens`, a sequence that begins with `prompt`.
    pub fn of(salt: CacheSalt, tokens: &[TokenId], prompt: &Prompt, block_size: usize) -> Self {
        let mut chain = Self::new(salt);
        tokens.chunks_exact(block_size).for_each(|block| chain.push(block, prompt));
        chain
    }

    /// Appends the next full block of a sequence that begins with `prompt`. `tokens` are the `block_size` tokens of the
    /// block.
    pub fn push(&mut self, tokens: &[TokenId], prompt: &Prompt) {
        let start = self.len() * tokens.len();
        let end = start + tokens.len();
        let is_inside = |image: &&PromptImage| image.placeholders.start < end && start < image.placeholders.end;
        let parent = self.blocks.last().unwrap_or(&self.root);
        let child = parent.child(tokens, prompt.images.iter().filter(is_inside));
        let forced = prompt.routing.as_ref().and_then(|routing| routing.within(start..end));
        self.blocks.push(forced.map_or(child, |(tokens, rows)| child.forced(tokens, rows)));
    }

    /// Number of blocks hashed so far.
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
    use crate::types::PolicyWeights::{Adapter, Base, Serving};
    use crate::types::{ForcedRouting, Picture};

    #[test]
    fn a_hash_depends_on_salt_parent_tokens_and_their_order() {
        let chain = |epoch, weights, blocks: &[[TokenId; 2]]| {
            let mut chain = HashChain::new(CacheSalt { epoch, weights });
            blocks.iter().for_each(|b| chain.push(b, &Prompt::default()));
            *chain.as_slice().last().expect("blocks were pushed")
        };
        let variants = [
            chain(1, Serving, &[[1, 2]]),
            chain(2, Serving, &[[1, 2]]),
            chain(1, Adapter(0), &[[1, 2]]),
            chain(1, Adapter(1), &[[1, 2]]),
            chain(1, Base, &[[1, 2]]),
            chain(1, Serving, &[[2, 1]]),
            chain(1, Serving, &[[1, 2], [1, 2]]),
            chain(1, Serving, &[[2, 1], [1, 2]]),
        ];
        for (i, a) in variants.iter().enumerate() {
            for (j, b) in variants.iter().enumerate() {
                assert_eq!(a == b, i == j, "variants {i} and {j}");
            }
        }
        assert_eq!(variants[0], chain(1, Serving, &[[1, 2]]));
    }

    const SALT: CacheSalt = CacheSalt { epoch: 3, weights: Serving };

    /// Hashes of a prompt with pictures of these gray levels behind these placeholders.
    fn hashes(images: &[(u8, std::ops::Range<usize>)]) -> Vec<BlockHash> {
        let picture = |gray| Picture::new("image", 1, 1, 1, vec![gray; 3]).unwrap();
        let images = images.iter().map(|(gray, range)| (picture(*gray), range.clone(), [1, range.len()]));
        let prompt = Prompt::with_images(vec![7; 12], images);
        HashChain::of(SALT, &prompt.tokens, &prompt, 4).as_slice().to_vec()
    }

    #[test]
    fn text_alone_is_hashed_as_its_parent_and_its_tokens() {
        let mut parent: [u8; 32] = Sha256::digest(3_u64.to_le_bytes()).into();
        for block in hashes(&[]) {
            let bytes: Vec<u8> = parent.into_iter().chain([7, 0, 0, 0].repeat(4)).collect();
            parent = Sha256::digest(bytes).into();
            assert_eq!(block, BlockHash(parent));
        }
    }

    #[test]
    fn the_same_tokens_with_other_images_share_no_block_from_the_first_placeholder_on() {
        // The first block comes before every placeholder.
        let variants = [
            vec![],
            vec![(1, 5..6)],
            vec![(2, 5..6)],
            vec![(1, 6..7)],
            vec![(1, 5..7)],
            vec![(1, 5..6), (1, 6..7)],
            vec![(1, 7..9)],
        ];
        for (i, a) in variants.iter().enumerate() {
            for (j, b) in variants.iter().enumerate() {
                let (a, b) = (hashes(a), hashes(b));
                assert_eq!(a[0], b[0]);
                assert_eq!((a[1] == b[1], a[2] == b[2]), (i == j, i == j), "variants {i} and {j}");
            }
        }
        let across = hashes(&[(1, 2..10)]);
        assert!(across.iter().zip(hashes(&[(2, 2..10)])).all(|(a, b)| *a != b), "every block has a part of it");
        assert_eq!(hashes(&[(1, 8..9)])[..2], hashes(&[(2, 8..9)])[..2], "only the last has a part of it");
    }

    #[test]
    fn the_same_tokens_under_other_experts_share_no_block_from_the_first_forced_row_on() {
        let hashes = |routing: Option<(usize, &[u8])>| {
            let routing = routing.map(|(first, rows)| ForcedRouting::new(first, 2, rows));
            let prompt = Prompt { routing, ..Prompt::from_tokens(vec![7; 12]) };
            HashChain::of(SALT, &prompt.tokens, &prompt, 4).as_slice().to_vec()
        };
        // The first block comes before every row.
        let variants = [
            None,
            Some((5, &[0, 1][..])),
            Some((5, &[1, 0])),
            Some((6, &[0, 1])),
            Some((5, &[0, 1, 0, 1])),
            Some((7, &[0, 1, 2, 3])),
        ];
        for (i, a) in variants.iter().enumerate() {
            for (j, b) in variants.iter().enumerate() {
                let (a, b) = (hashes(*a), hashes(*b));
                assert_eq!(a[0], b[0]);
                assert_eq!((a[1] == b[1], a[2] == b[2]), (i == j, i == j), "variants {i} and {j}");
            }
        }
        let [last, other] = [[0, 1], [2, 3]].map(|row| hashes(Some((8, &row))));
        assert_eq!(last[..2], other[..2], "only the last has a row");
        assert_ne!(last[2], other[2]);
    }
}
