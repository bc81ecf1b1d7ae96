//! Finds the keys and values of a unit in the paged cache.

use super::task::NextKeys;
use super::units::{UNIT, VECTORS};
use super::{AttentionCall, AttentionSequence};
use crate::cpu::lanes::LANES;
use crate::cpu::tile::TileElement;
use crate::kv_layout::KvLayout;
use std::ops::Range;

/// Where the keys and values of a unit are. For each vector of 16 positions there are `head_dim` lines of 16 keys and
/// 16 lines of `head_dim` values.
#[derive(Clone, Copy)]
pub(super) struct KvUnit<E> {
    /// The first position of the unit.
    pub base: usize,
    pub keys: [*const E; VECTORS],
    /// Elements from one line of keys to the next.
    pub key_step: usize,
    pub values: [*const E; VECTORS],
}

/// Cache lines that a tile prefetches while it processes a unit: from each address on, `head_dim` lines `step` bytes
/// apart.
#[derive(Clone, Copy)]
pub(super) struct PrefetchLines {
    pub at: [*const u8; VECTORS],
    pub step: usize,
}

/// Stands in for the prefetch lines of a kernel that prefetches nothing.
pub(super) const NO_LINES: PrefetchLines = PrefetchLines { at: [std::ptr::null(); VECTORS], step: 0 };

/// The cached keys and values of one KV head.
pub(super) struct Blocks<'a, E> {
    layout: &'a KvLayout,
    pub kv_head: usize,
    keys: &'a [E],
    values: &'a [E],
    /// Copies of a unit's keys `[vector][head_dim][16]` and values `[position][head_dim]`, for block sizes that are not
    /// whole vectors.
    gathered: (&'a mut [E], &'a mut [E]),
}

/// Float32 values of scratch that [`Blocks`] needs.
pub(super) fn gathered_len(layout: &KvLayout) -> usize {
    if layout.block_size.is_multiple_of(LANES) { 0 } else { 2 * UNIT * layout.head_dim }
}

impl<'a, E: TileElement> Blocks<'a, E> {
    /// Starts to read the keys and values of `kv_head`. `gathered` has [`gathered_len`] float32 values.
    pub fn new(call: &AttentionCall<'a>, kv_head: usize, gathered: &'a mut [f32]) -> Blocks<'a, E> {
        // SAFETY: E is no larger than float32, no more aligned, and any bits are a value of it.
        let gathered = unsafe { gathered.align_to_mut::<E>().1 };
        let half = gathered.len() / 2;
        let (keys, values) = (call.cache.keys().as_slice(), call.cache.values().as_slice());
        Blocks { layout: call.cache.layout(), kv_head, keys, values, gathered: gathered.split_at_mut(half) }
    }

    /// Finds the keys and values of the unit at `base`. `positions` count from `base`; vectors that contain none of
    /// them get pointers that must not be read.
    pub fn find(&mut self, sequence: &AttentionSequence<'_>, base: usize, positions: Range<usize>) -> KvUnit<E> {
        let Range { start: from, end: to } = positions;
        let KvLayout { head_dim, block_size, .. } = *self.layout;
        let whole = gathered_len(self.layout) == 0;
        let key_step = if whole { block_size } else { LANES };
        let (keys, values) = ([self.keys.as_ptr(); VECTORS], [self.values.as_ptr(); VECTORS]);
        let mut found = KvUnit { base, keys, key_step, values };
        for vector in from / LANES..to.div_ceil(LANES) {
            if !whole {
                self.gather(sequence, base, from.max(vector * LANES)..to.min((vector + 1) * LANES));
                found.keys[vector] = self.gathered.0[vector * LANES * head_dim..].as_ptr();
                found.values[vector] = self.gathered.1[vector * LANES * head_dim..].as_ptr();
                continue;
            }
            let (start, offset) = self.slot(sequence, self.kv_head, base + vector * LANES);
            found.keys[vector] = self.keys[start..][..self.layout.head_len()][offset..].as_ptr();
            found.values[vector] = self.values[start..][..self.layout.head_len()][offset * head_dim..].as_ptr();
        }
        found
    }

    /// Where the keys of a unit begin, vector by vector, to prefetch them. Vectors beyond the end of the sequence get
    /// some address in the cache.
    pub fn keys_of(&self, next: NextKeys<'_>) -> [*const E; VECTORS] {
        let NextKeys { sequence, kv_head, position } = next;
        let base = position / UNIT * UNIT;
        let has = sequence.end().saturating_sub(base);
        std::array::from_fn(|vector| {
            if vector * LANES >= has {
                return self.keys.as_ptr();
            }
            let (start, offset) = self.slot(sequence, kv_head, base + vector * LANES);
            self.keys[start..][offset..].as_ptr()
        })
    }

    /// Where the part of a KV head in a position's block starts, and the position's offset in the block.
    fn slot(&self, sequence: &AttentionSequence<'_>, kv_head: usize, position: usize) -> (usize, usize) {
        let block = sequence.block_table[position / self.layout.block_size] as usize;
        let start = (block * self.layout.kv_heads + kv_head) * self.layout.head_len();
        (start, position % self.layout.block_size)
    }

    /// Copies the positions of one vector from their blocks to adjacent lines.
    fn gather(&mut self, sequence: &AttentionSequence<'_>, base: usize, positions: Range<usize>) {
        let KvLayout { head_dim, block_size, .. } = *self.layout;
        for t in positions {
            let (start, offset) = self.slot(sequence, self.kv_head, base + t);
            let keys = &mut self.gathered.0[t / LANES * LANES * head_dim..][..LANES * head_dim];
            let source = self.keys[start..][..head_dim * block_size][offset..].iter().step_by(block_size);
            keys[t % LANES..].iter_mut().step_by(LANES).zip(source).for_each(|(to, from)| *to = *from);
            let source = &self.values[start + offset * head_dim..][..head_dim];
            self.gathered.1[t * head_dim..][..head_dim].copy_from_slice(source);
        }
    }
}
