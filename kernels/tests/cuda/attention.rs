//! Paged attention and its cache.

use std::ops::Range;

use rollout_kernels::{AttentionSequence, AttentionShape, BlockCopy, KvCache, KvLayout, StepInput, StorageDtype};

use crate::common::{NOTHING, Random, Rank, cuda, values_of};

/// Longer than one span of positions, and than two.
const LENGTHS: [usize; 3] = [300, 30, 530];

/// Layers: KV heads, query heads of each, dimensions and the window.
const LAYERS: [(StorageDtype, usize, usize, usize, Option<usize>); 5] = [
    (StorageDtype::Bf16, 2, 3, 16, None),
    (StorageDtype::Bf16, 1, 7, 64, Some(290)),
    (StorageDtype::Bf16, 1, 1, 128, Some(40)),
    (StorageDtype::F32, 2, 2, 32, None),
    (StorageDtype::F32, 1, 20, 16, Some(40)),
];

/// One layer with its cache.
struct Layer {
    rank: Rank,
    cache: KvCache,
    shape: AttentionShape,
}

/// Queries, keys and values of a sequence, and its blocks.
struct Sequence {
    len: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    table: Vec<u32>,
}

impl Layer {
    fn new(case: usize, blocks: usize, block_size: usize) -> Self {
        let rank = cuda().unwrap();
        let (dtype, kv_heads, group, head_dim, sliding_window) = LAYERS[case];
        let mut cache = rank.device.kv_cache(KvLayout { blocks, block_size, kv_heads, head_dim, dtype });
        cache.restore().unwrap();
        let shape = AttentionShape { heads: kv_heads * group, scale: 0.3, sliding_window };
        Self { rank, cache, shape }
    }

    /// Values of a key, and of a query.
    fn widths(&self) -> (usize, usize) {
        let KvLayout { kv_heads, head_dim, .. } = *self.cache.layout();
        (kv_heads * head_dim, self.shape.heads * head_dim)
    }

    /// A sequence in the next of these blocks.
    fn sequence(&self, random: &mut Random, len: usize, free: &mut Vec<u32>) -> Sequence {
        let (kv, q) = self.widths();
        let needed = len.div_ceil(self.cache.layout().block_size);
        let table = free.split_off(free.len() - needed);
        let [k, v] = [0, 1].map(|_| random.normals(len * kv, 1.0));
        Sequence { len, q: random.normals(len * q, 1.0), k, v, table }
    }

    /// Writes keys and values of some positions.
    fn write(&mut self, sequence: &Sequence, positions: Range<usize>) {
        let (width, block_size) = (self.widths().0, self.cache.layout().block_size);
        let slot = |t: usize| sequence.table[t / block_size] * block_size as u32 + (t % block_size) as u32;
        let (tokens, slots) = (vec![0; positions.len()], positions.clone().map(slot).collect::<Vec<_>>());
        let step = self.rank.ops.prepare(StepInput { tokens: &tokens, slots: &slots, ..NOTHING }).unwrap();
        let values = positions.start * width..positions.end * width;
        let [k, v] =
            [&sequence.k, &sequence.v].map(|all| self.rank.tensor(&all[values.clone()], positions.len(), width));
        self.rank.ops.write_kv(&k, &v, &step, &mut self.cache).unwrap();
    }

    /// Attention of some positions of sequences, all in one step with a row between them that is of none.
    fn attend(&self, parts: &[(&Sequence, Range<usize>)]) -> Vec<Vec<f32>> {
        let parts: Vec<_> = parts.iter().map(|(sequence, positions)| (*sequence, positions.clone(), None)).collect();
        self.attend_visible(&parts)
    }

    /// As [`Layer::attend`], each with the tokens that all of its rows see, if they are not those up to a row's own.
    fn attend_visible(&self, parts: &[(&Sequence, Range<usize>, Option<usize>)]) -> Vec<Vec<f32>> {
        let width = self.widths().1;
        let mut q = vec![f32::NAN; width];
        let mut sequences = Vec::new();
        for (sequence, positions, visible) in parts {
            let (first_row, start_position) = (q.len() / width, positions.start);
            let block_table = &sequence.table[..];
            let (rows, visible) = (positions.len(), *visible);
            sequences.push(AttentionSequence { first_row, rows, start_position, visible, block_table });
            q.extend(&sequence.q[positions.start * width..positions.end * width]);
            q.extend(vec![f32::NAN; width]);
        }
        let rows = q.len() / width;
        let tokens = vec![0; rows];
        let step = self.rank.ops.prepare(StepInput { tokens: &tokens, sequences: &sequences, ..NOTHING }).unwrap();
        let (q, out) = (self.rank.tensor(&q, rows, width), self.rank.tensor(&vec![7.0; rows * width], rows, width));
        self.rank.ops.paged_attention(&q, &self.shape, &step, &self.cache, &out).unwrap();
        let out = values_of(&out);
        let of_none = |row: &usize| !sequences.iter().any(|s| (s.first_row..s.first_row + s.rows).contains(row));
        for row in (0..rows).filter(of_none) {
            assert!(out[row * width..(row + 1) * width].iter().all(|x| *x == 7.0), "row {row} is of no sequence");
        }
        sequences.iter().map(|s| out[s.first_row * width..(s.first_row + s.rows) * width].to_vec()).collect()
    }

    /// Attention of all positions of a sequence that are written and computed in chunks, each ending before one of
    /// these.
    fn in_chunks(&mut self, sequence: &Sequence, ends: impl IntoIterator<Item = usize>) -> Vec<f32> {
        let mut start = 0;
        let mut out = Vec::new();
        for end in ends {
            self.write(sequence, start..end);
            out.extend(self.attend(&[(sequence, start..end)]).remove(0));
            start = end;
        }
        out
    }
}

/// All blocks, in any order.
fn shuffled(random: &mut Random, blocks: usize) -> Vec<u32> {
    let mut free: Vec<u32> = (0..blocks as u32).collect();
    random.shuffle(&mut free);
    free
}

#[test]
fn chunks_and_single_tokens_have_the_bits_of_the_whole() {
    for (case, len) in (0..LAYERS.len()).zip([300, 300, 70, 290, 100]) {
        let mut random = Random::new(case as u64);
        let mut layer = Layer::new(case, 400, [16, 5, 1][case % 3]);
        let mut free = shuffled(&mut random, 400);
        let sequence = layer.sequence(&mut random, len, &mut free);
        let whole = layer.in_chunks(&sequence, [len]);
        let mut ends = vec![0];
        while ends[ends.len() - 1] < len {
            ends.push(len.min(ends[ends.len() - 1] + random.between(1, 90)));
        }
        // In other blocks, where other values were.
        random.shuffle(&mut free);
        let other = Sequence { table: free[..sequence.table.len()].to_vec(), ..sequence };
        assert!(layer.in_chunks(&other, ends[1..].iter().copied()) == whole, "{:?}: chunks", LAYERS[case]);
        layer.write(&other, 0..len);
        let tokens: Vec<_> = (0..len).flat_map(|t| layer.attend(&[(&other, t..t + 1)]).remove(0)).collect();
        assert!(tokens == whole, "{:?}: single tokens", LAYERS[case]);
    }
}

#[test]
fn rows_without_a_causal_limit_have_the_same_bits_in_any_chunks() {
    for (case, len) in [(0, 300), (3, 290)] {
        let mut random = Random::new(case as u64);
        let mut layer = Layer::new(case, 100, [16, 5][case % 2]);
        let mut free = shuffled(&mut random, 100);
        let sequence = layer.sequence(&mut random, len, &mut free);
        layer.write(&sequence, 0..len);
        for visible in [len, 257, 256, 40, 1] {
            let whole = layer.attend_visible(&[(&sequence, 0..len, Some(visible))]).remove(0);
            let (mut start, mut chunks) = (0, Vec::new());
            while start < len {
                let end = len.min(start + [1, random.between(1, 90)][random.below(2)]);
                // Beside a causal chunk of the same rows.
                let parts = [(&sequence, start..end, None), (&sequence, start..end, Some(visible))];
                chunks.extend(layer.attend_visible(&parts).remove(1));
                start = end;
            }
            assert!(chunks == whole, "{:?}: {visible} of {len} tokens", LAYERS[case]);
            let last = visible - 1..visible;
            let causal = layer.attend(&[(&sequence, last.clone())]).remove(0);
            let width = layer.widths().1;
            assert!(whole[last.start * width..last.end * width] == causal, "{:?}: row {last:?}", LAYERS[case]);
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_any_batch() {
    for (case, shape) in LAYERS.iter().enumerate() {
        let mut random = Random::new(case as u64);
        let mut layer = Layer::new(case, 120, 16);
        let mut free = shuffled(&mut random, 120);
        let sequences = LENGTHS.map(|len| layer.sequence(&mut random, len, &mut free));
        sequences.iter().for_each(|sequence| layer.write(sequence, 0..sequence.len));
        let last_rows = |sequence: &Sequence, rows: usize| sequence.len - rows.min(sequence.len)..sequence.len;
        for rows in [[1, 1, 1], [1, 20, 3], [40, 1, 64]] {
            let parts: Vec<_> = sequences.iter().zip(rows).map(|(s, rows)| (s, last_rows(s, rows))).collect();
            let together = layer.attend(&parts);
            for (part, together) in parts.iter().zip(&together) {
                let alone = layer.attend(std::slice::from_ref(part)).remove(0);
                assert!(alone == *together, "{:?}: rows {:?} of {rows:?}", shape, part.1);
            }
            // More sequences than one block of the search for them has threads.
            let many: Vec<_> = (0..45).map(|i| parts[i % 3].clone()).collect();
            let all_same = layer.attend(&many).iter().enumerate().all(|(i, found)| *found == together[i % 3]);
            assert!(all_same, "{:?}: {rows:?} fifteen times", shape);
        }
    }
}

#[test]
fn a_shared_prefix_has_the_bits_of_its_copy() {
    for (case, shape) in LAYERS.iter().enumerate() {
        let mut random = Random::new(case as u64);
        let mut layer = Layer::new(case, 60, 16);
        let mut free = shuffled(&mut random, 60);
        let first = layer.sequence(&mut random, 290, &mut free);
        let mut second = layer.sequence(&mut random, 300, &mut free);
        let (shared, (kv, _)) = (280, layer.widths());
        second.k[..shared * kv].copy_from_slice(&first.k[..shared * kv]);
        second.v[..shared * kv].copy_from_slice(&first.v[..shared * kv]);
        layer.write(&first, 0..first.len);
        layer.write(&second, 0..second.len);
        let alone = layer.attend(&[(&second, shared..second.len)]);
        // Full blocks are shared, the last one is copied.
        let (full, rest) = (shared / 16, shared % 16);
        let copy = BlockCopy { src: first.table[full], dst: second.table[full], tokens: rest };
        second.table[..full].copy_from_slice(&first.table[..full]);
        layer.rank.ops.copy_blocks(&mut layer.cache, &[copy]).unwrap();
        let together = layer.attend(&[(&first, 0..first.len), (&second, shared..second.len)]);
        assert!(together[1] == alone[0], "{:?}", shape);
    }
}

#[test]
fn blocks_below_every_window_may_hold_anything() {
    for case in [1, 2, 4] {
        let mut random = Random::new(case as u64);
        let mut layer = Layer::new(case, 60, 16);
        let mut free = shuffled(&mut random, 60);
        let mut sequence = layer.sequence(&mut random, 400, &mut free);
        layer.write(&sequence, 0..400);
        let rows = 395..400;
        let expected = layer.attend(&[(&sequence, rows.clone())]);
        let below = (rows.start + 1 - LAYERS[case].4.unwrap()) / 16;
        assert!(below > 0, "blocks are below the window");
        for values in [&mut sequence.k, &mut sequence.v] {
            values.fill(f32::NAN);
        }
        layer.write(&sequence, 0..below * 16);
        assert!(layer.attend(&[(&sequence, rows)]) == expected, "{:?}", LAYERS[case]);
    }
}

#[test]
fn copies_are_done_in_order() {
    for case in [0, 3] {
        let mut random = Random::new(case as u64);
        let blocks = 8;
        let copies: Vec<BlockCopy> = (0..30)
            .map(|_| {
                let [src, dst] = [0, 1].map(|_| random.below(blocks) as u32);
                BlockCopy { src, dst, tokens: random.between(0, 16) }
            })
            .collect();
        let run = |at_once: usize| {
            let mut random = Random::new(9);
            let mut layer = Layer::new(case, blocks, 16);
            let sequence = layer.sequence(&mut random, blocks * 16, &mut (0..blocks as u32).collect());
            layer.write(&sequence, 0..sequence.len);
            for copies in copies.chunks(at_once) {
                layer.rank.ops.copy_blocks(&mut layer.cache, copies).unwrap();
            }
            layer.attend(&[(&sequence, 0..sequence.len)])
        };
        assert!(run(copies.len()) == run(1), "{:?}", LAYERS[case]);
    }
}
