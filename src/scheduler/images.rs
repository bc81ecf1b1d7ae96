//! Images of prompts: which picture the vision tower encodes in a step, and whose embeddings are there.

use std::ops::Range;

use super::Sequence;
use super::schedule::PlanBuilder;
use crate::cache::EmbeddingCache;
use crate::types::{EmbeddingRows, PictureEncode, PictureHash, PromptImage};

/// How pictures are encoded. All 0 for a model of text alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageScheduling {
    /// Tokens whose embeddings are held at once: at least those of one picture.
    pub embedding_rows: usize,
    /// Blocks of the vision tower.
    pub tower_blocks: usize,
    /// How many blocks of the tower a step runs, times the tokens of the picture: a bound on how long other samples
    /// wait for it. At least one block runs.
    pub token_blocks: usize,
}

/// The pictures that are encoded, one at a time, and the embeddings that are held.
#[derive(Debug)]
pub(super) struct Images {
    config: ImageScheduling,
    cache: EmbeddingCache,
    /// The picture whose encoding has begun, and how many of its blocks have run.
    current: Option<(PictureHash, usize)>,
    /// Number of pictures encoded so far.
    pub encoded: u64,
    /// Number of images whose embeddings prompts have needed so far.
    pub queried: u64,
    /// How many of those another prompt had needed before.
    pub reused: u64,
}

impl Images {
    pub fn new(config: ImageScheduling) -> Self {
        let cache = EmbeddingCache::new(config.embedding_rows);
        Self { config, cache, current: None, encoded: 0, queried: 0, reused: 0 }
    }

    /// Most tokens of an image, and of all images whose embeddings are held at once.
    pub fn most_tokens(&self) -> usize {
        self.cache.capacity()
    }

    /// Pictures whose embeddings are held or being made.
    pub fn held(&self) -> usize {
        self.cache.len()
    }

    /// Tokens of those pictures.
    pub fn held_tokens(&self) -> usize {
        self.cache.held_rows()
    }

    /// Where a chunk of the sequence from its first token to be computed must end, at most at `end`: before the first
    /// image whose embeddings are not there before the step. The plan then runs the next blocks for that picture,
    /// unless it encodes another one or has no room for it: after the last ones the prefill begins in the next step, so
    /// that running samples do not wait for both in one. The oldest running sequence comes first: it may drop all
    /// pictures that the plan does not need, so that it always advances or its picture does.
    pub fn chunk_end(&mut self, sequence: &Sequence, end: usize, builder: &mut PlanBuilder) -> usize {
        let start = sequence.num_computed;
        for image in overlapping(&sequence.prompt.images, start..end) {
            let picture = image.picture.hash();
            if !builder.pictures.contains(&picture) {
                builder.pictures.push(picture);
            }
            if !self.is_ready(picture, builder) {
                self.encode(image, builder);
                return image.placeholders.start.max(start);
            }
        }
        end
    }

    /// The embeddings of the sequence's tokens in `chunk`, all of which are there.
    pub fn embeddings(&mut self, sequence: &Sequence, chunk: Range<usize>) -> Vec<EmbeddingRows> {
        let mut found = Vec::new();
        for image in overlapping(&sequence.prompt.images, chunk.clone()) {
            let (picture, Range { start, end }) = (image.picture.hash(), image.placeholders.clone());
            let first = self.cache.find(picture).expect("the chunk ends before images without").start;
            if chunk.contains(&start) {
                self.queried += 1;
                self.reused += u64::from(!self.cache.is_first_use(picture));
            }
            let tokens = start.max(chunk.start)..end.min(chunk.end);
            let rows = first + tokens.start - start..first + tokens.end - start;
            found.push(EmbeddingRows { offset: tokens.start - chunk.start, rows });
        }
        found
    }

    /// Forgets a picture that no sequence of the plan has asked for while it was being encoded.
    pub fn finish_plan(&mut self, builder: &PlanBuilder) {
        if builder.plan.encode.is_none() {
            self.abandon();
        }
    }

    /// Forgets all embeddings, because the tower or the memory of the buffer has changed.
    pub fn clear(&mut self) {
        self.cache.clear();
        self.current = None;
    }

    pub fn check_integrity(&self) {
        self.cache.check_integrity();
        assert!(self.current.is_none_or(|(_, blocks)| blocks < self.config.tower_blocks), "{:?}", self.current);
    }

    /// Whether the embeddings of a picture are there before the step.
    fn is_ready(&mut self, picture: PictureHash, builder: &PlanBuilder) -> bool {
        let of_plan = builder.plan.encode.as_ref().map(|encode| encode.picture.hash());
        let of_later = self.current.map(|(current, _)| current);
        ![of_plan, of_later].contains(&Some(picture)) && self.cache.find(picture).is_some()
    }

    /// Lets the plan run the next blocks for an image, unless it encodes another one or has no room for it.
    fn encode(&mut self, image: &PromptImage, builder: &mut PlanBuilder) {
        let (picture, tokens) = (image.picture.hash(), image.placeholders.len());
        if builder.plan.encode.is_some() {
            return;
        }
        let first = match self.current {
            Some((current, blocks)) if current == picture => blocks,
            _ => {
                self.abandon();
                if self.cache.allocate(picture, tokens, |other| builder.pictures.contains(&other)).is_none() {
                    return;
                }
                0
            }
        };
        let blocks = (self.config.token_blocks / tokens).max(1);
        let end = self.config.tower_blocks.min(first + blocks);
        let rows = self.cache.find(picture).expect("the picture has its rows");
        builder.plan.encode = Some(PictureEncode { picture: image.picture.clone(), blocks: first..end, rows });
        let is_done = end == self.config.tower_blocks;
        self.current = (!is_done).then_some((picture, end));
        self.encoded += u64::from(is_done);
    }

    fn abandon(&mut self) {
        if let Some((current, _)) = self.current.take() {
            self.cache.remove(current);
        }
    }
}

/// The images that have placeholders in `chunk`.
fn overlapping(images: &[PromptImage], chunk: Range<usize>) -> impl Iterator<Item = &PromptImage> {
    let first = images.partition_point(|image| image.placeholders.end <= chunk.start);
    images[first..].iter().take_while(move |image| image.placeholders.start < chunk.end)
}
