use super::super::testing::{Random, bits};
use super::super::{Isa, Products, Rows, RowsMut};
use super::plan::AttentionPlan;
use super::*;
use crate::kv_layout::KvLayout;
use crate::reference;

const DTYPES: [StorageDtype; 2] = [StorageDtype::Bf16, StorageDtype::F32];

/// Sequences with all their queries, keys and values, in the order of positions.
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: StorageDtype,
    window: Option<usize>,
    lengths: Vec<usize>,
    /// Tokens that all rows of each sequence see; if `None`, rows see those up to their own.
    visible: Option<Vec<usize>>,
    /// The queries `[length, heads * head_dim]` of each sequence; its keys and values are
    /// `[length, kv_heads * head_dim]`.
    q: Vec<Vec<f32>>,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

fn case(random: &mut Random, lengths: Vec<usize>) -> Case {
    let head_dim = [16, 32, 64, 80, 96, 128, 256][random.below(7)];
    let dtype = DTYPES[random.below(2)];
    let window = (random.below(2) == 0).then(|| random.between(1, 150));
    Case { window, ..case_of(random, lengths, head_dim, dtype) }
}

fn case_of(random: &mut Random, lengths: Vec<usize>, head_dim: usize, dtype: StorageDtype) -> Case {
    let (kv_heads, group) = (random.between(1, 3), random.between(1, 8));
    let heads = kv_heads * group;
    let mut values = |width: usize| lengths.iter().map(|len| random.normals(len * width, 1.0)).collect();
    let (q, k, v) = (values(heads * head_dim), values(kv_heads * head_dim), values(kv_heads * head_dim));
    Case { heads, kv_heads, head_dim, dtype, window: None, lengths, visible: None, q, k, v }
}

/// A cache that holds the sequences in randomly chosen blocks, with NaN in every slot that they do not use.
fn cache(case: &Case, random: &mut Random, block_size: usize) -> (KvBlocks, Vec<Vec<u32>>) {
    let needed: usize = case.lengths.iter().map(|len| len.div_ceil(block_size)).sum();
    let blocks = needed + random.between(1, 5);
    let Case { kv_heads, head_dim, dtype, .. } = *case;
    let mut cache = KvBlocks::new(KvLayout { blocks, block_size, kv_heads, head_dim, dtype });
    let (cpu, width) = (Cpu::new(1), kv_heads * head_dim);
    let every: Vec<u32> = (0..(blocks * block_size) as u32).collect();
    let junk = vec![f32::NAN; every.len() * width];
    cache.write(&cpu, Rows::dense(&junk, width), Rows::dense(&junk, width), &every);
    let mut free: Vec<u32> = (0..blocks as u32).collect();
    random.shuffle(&mut free);
    let mut tables = vec![];
    for (s, len) in case.lengths.iter().enumerate() {
        let table = free.split_off(free.len() - len.div_ceil(block_size));
        let slot = |t: usize| table[t / block_size] * block_size as u32 + (t % block_size) as u32;
        let slots: Vec<u32> = (0..*len).map(slot).collect();
        cache.write(&cpu, Rows::dense(&case.k[s], width), Rows::dense(&case.v[s], width), &slots);
        tables.push(table);
    }
    (cache, tables)
}

impl Case {
    /// Runs rows `start..start + rows` of the sequences `(s, start, rows)` in one call.
    fn run(&self, cpu: &Cpu, cache: &KvBlocks, tables: &[Vec<u32>], parts: &[(usize, usize, usize)]) -> Vec<Vec<f32>> {
        let width = self.heads * self.head_dim;
        let (mut q, mut sequences, mut first_row) = (vec![], vec![], 0);
        for (s, start_position, rows) in parts.iter().copied() {
            q.extend_from_slice(&self.q[s][start_position * width..][..rows * width]);
            let visible = self.visible.as_ref().map(|visible| visible[s]);
            sequences.push(AttentionSequence { first_row, rows, start_position, visible, block_table: &tables[s] });
            first_row += rows;
        }
        let shape = AttentionShape { heads: self.heads, scale: self.scale(), sliding_window: self.window };
        let mut out = vec![f32::NAN; q.len()];
        paged_attention(cpu, Rows::dense(&q, width), &shape, &sequences, cache, RowsMut::dense(&mut out, width));
        let rows = |s: &AttentionSequence<'_>| out[s.first_row * width..][..s.rows * width].to_vec();
        sequences.iter().map(rows).collect()
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn whole(&self) -> Vec<(usize, usize, usize)> {
        self.lengths.iter().enumerate().map(|(s, len)| (s, 0, *len)).collect()
    }

    /// The reference output of one row and head, and how far an implementation may be from each value. An
    /// implementation with bfloat16 products rounds queries (they are rounded here, too) and softmax weights (each by
    /// at most half a unit in its last place).
    fn reference(&self, s: usize, row: usize, head: usize, isa: Isa) -> Vec<(f64, f64)> {
        let rounds = self.dtype == StorageDtype::Bf16 && isa.rounds_activations();
        let (width, heads) = (self.kv_heads * self.head_dim, self.heads * self.head_dim);
        let seen = |x: &f32| if rounds { bf16::from_f32(*x).to_f32() } else { *x };
        let q: Vec<f32> = self.q[s][row * heads..][..heads].iter().map(seen).collect();
        let shape = AttentionShape { heads: self.heads, scale: self.scale(), sliding_window: self.window };
        let visible = self.visible.as_ref().map(|visible| visible[s]);
        let sequence = AttentionSequence { first_row: 0, rows: 1, start_position: row, visible, block_table: &[0] };
        let attend = |v: &[f32]| {
            let Self { kv_heads, head_dim, dtype, .. } = *self;
            let layout = KvLayout { blocks: 1, block_size: self.lengths[s], kv_heads, head_dim, dtype };
            let (mut cache, mut out) = (reference::Slots::new(layout), vec![f32::NAN; heads]);
            let slots: Vec<u32> = (0..self.lengths[s] as u32).collect();
            cache.write(Rows::dense(&self.k[s], width), Rows::dense(v, width), &slots);
            reference::attention(Rows::dense(&q, heads), &shape, &[sequence], &cache, RowsMut::dense(&mut out, heads));
            out[head * head_dim..][..head_dim].to_vec()
        };
        let magnitudes = attend(&self.v[s].iter().map(|v| v.abs()).collect::<Vec<_>>());
        let half = if rounds { f64::from(bf16::EPSILON) / 2.0 } else { 0.0 };
        let near = |(out, magnitude): (f32, f32)| {
            let (out, magnitude) = (f64::from(out), f64::from(magnitude));
            (out, 3e-6 * out.abs().max(1.0) + half * (magnitude + out.abs()))
        };
        attend(&self.v[s]).into_iter().zip(magnitudes).map(near).collect()
    }
}

/// The instruction sets that have the same bits: those whose products are the same.
fn alike() -> [Vec<Isa>; 3] {
    [Products::Widened, Products::Pairs, Products::Tiles]
        .map(|products| Isa::all().into_iter().filter(|isa| isa.products() == products).collect())
}

fn near(found: f32, (expected, distance): (f64, f64), what: &str) {
    assert!(
        (f64::from(found) - expected).abs() <= distance,
        "{found} is farther than {distance} from {expected}: {what}"
    );
}

fn lengths(random: &mut Random, sequences: usize, longest: usize) -> Vec<usize> {
    (0..sequences).map(|_| random.between(1, longest)).collect()
}

#[test]
fn attention_is_the_reference() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let lengths = lengths(&mut random, 2, 140);
        let case = case(&mut random, lengths);
        let (cache, tables) = cache(&case, &mut random, 16);
        for isa in Isa::all() {
            let out = case.run(&Cpu::with_isa(2, isa), &cache, &tables, &case.whole());
            for (s, len) in case.lengths.iter().enumerate() {
                for row in [0, len / 3, len - 1] {
                    let head = random.below(case.heads);
                    let found = &out[s][(row * case.heads + head) * case.head_dim..][..case.head_dim];
                    for (y, expected) in found.iter().zip(case.reference(s, row, head, isa)) {
                        near(*y, expected, &format!("{} seed {seed} sequence {s} row {row}", isa.name()));
                    }
                }
            }
        }
    }
}

/// Runs all rows in calls of random chunks of random sequences, some of one row as in decode, and compares each with
/// its bits in `expected`.
fn check_chunks(
    case: &Case,
    (cpu, random): (&Cpu, &mut Random),
    (cache, tables): &(KvBlocks, Vec<Vec<u32>>),
    expected: &[Vec<f32>],
    what: &str,
) {
    let width = case.heads * case.head_dim;
    let mut done = vec![0; case.lengths.len()];
    while done != case.lengths {
        let mut parts = vec![];
        for (s, done) in done.iter_mut().enumerate().rev() {
            let left = case.lengths[s] - *done;
            if left > 0 && random.below(3) > 0 {
                let rows = if random.below(3) == 0 { 1 } else { random.between(1, left) };
                parts.push((s, *done, rows));
                *done += rows;
            }
        }
        for (out, (s, start, rows)) in case.run(cpu, cache, tables, &parts).iter().zip(&parts) {
            let expected = &expected[*s][start * width..][..rows * width];
            assert_eq!(bits(out), bits(expected), "{what} {s} {start}");
        }
    }
}

#[test]
fn rows_without_a_causal_limit_are_the_reference_and_have_the_same_bits_in_any_chunks() {
    for seed in 300..314 {
        let mut random = Random::new(seed);
        // Windows of a vision tower, and any sequences: longer than a span, and short.
        let windows = [(80, DTYPES[0]), (80, DTYPES[1]), (64, DTYPES[0]), (64, DTYPES[1])];
        let case = match windows.get((seed - 300) as usize) {
            Some((head_dim, dtype)) => Case {
                visible: Some(vec![64, 48, 16, 4]),
                ..case_of(&mut random, vec![64, 48, 16, 4], *head_dim, *dtype)
            },
            None => {
                let lengths = lengths(&mut random, 2, if seed % 5 == 0 { 700 } else { 150 });
                let visible = Some(lengths.iter().map(|len| random.between(1, *len)).collect());
                Case { window: None, visible, ..case(&mut random, lengths) }
            }
        };
        let whole_store = cache(&case, &mut random, 16);
        for alike in alike() {
            let expected = case.run(&Cpu::with_isa(1, alike[0]), &whole_store.0, &whole_store.1, &case.whole());
            for (s, len) in case.lengths.iter().enumerate() {
                for row in [0, len / 3, len - 1] {
                    let head = random.below(case.heads);
                    let found = &expected[s][(row * case.heads + head) * case.head_dim..][..case.head_dim];
                    for (y, expected) in found.iter().zip(case.reference(s, row, head, alike[0])) {
                        near(*y, expected, &format!("{} seed {seed} sequence {s} row {row}", alike[0].name()));
                    }
                }
            }
            for (i, isa) in alike.into_iter().enumerate() {
                let block_size = [16, 1, 5, 32, 24, 64][(seed as usize + i) % 6];
                let store = cache(&case, &mut random, block_size);
                let cpu = Cpu::with_isa(random.between(1, 3), isa);
                let what = format!("{} block {block_size}", isa.name());
                check_chunks(&case, (&cpu, &mut random), &store, &expected, &what);
            }
        }
    }
}

#[test]
fn a_row_that_sees_the_tokens_up_to_its_own_has_the_bits_of_causal_attention() {
    for seed in 400..410 {
        let mut random = Random::new(seed);
        let lengths = lengths(&mut random, 4, 1100);
        let mut case = case(&mut random, lengths);
        case.window = None;
        let (cache, tables) = cache(&case, &mut random, 16);
        // The last row of each sequence, so that rows see as many tokens as there are.
        let parts: Vec<_> = case.lengths.iter().enumerate().map(|(s, len)| (s, len - 1, 1)).collect();
        for isa in Isa::all() {
            let cpu = Cpu::with_isa(random.between(1, 3), isa);
            case.visible = None;
            let causal = case.run(&cpu, &cache, &tables, &parts);
            case.visible = Some(case.lengths.clone());
            for (causal, found) in causal.iter().zip(&case.run(&cpu, &cache, &tables, &parts)) {
                assert_eq!(bits(found), bits(causal), "{} {:?}", isa.name(), case.lengths);
            }
        }
    }
}

#[test]
fn every_way_to_cut_batch_and_store_gives_the_same_bits() {
    for seed in 100..120 {
        let mut random = Random::new(seed);
        let lengths = lengths(&mut random, 3, 150);
        let case = case(&mut random, lengths);
        let (whole_cache, whole_tables) = cache(&case, &mut random, 16);
        let whole = |isa| case.run(&Cpu::with_isa(1, isa), &whole_cache, &whole_tables, &case.whole());
        let each = alike().into_iter().flat_map(|alike| {
            let expected = whole(alike[0]);
            alike.into_iter().map(move |isa| (isa, expected.clone()))
        });
        for (i, (isa, expected)) in each.enumerate() {
            let block_size = [16, 1, 5, 32, 24, 64][(seed as usize + i) % 6];
            let store = cache(&case, &mut random, block_size);
            let cpu = Cpu::with_isa(random.between(1, 3), isa);
            let what = format!("{} block {block_size}", isa.name());
            check_chunks(&case, (&cpu, &mut random), &store, &expected, &what);
        }
    }
}

#[test]
fn a_long_context_decodes_as_it_prefills_on_any_number_of_threads() {
    let mut random = Random::new(5);
    for window in [None, Some(65), Some(600)] {
        let mut case = case(&mut random, vec![1100]);
        case.window = window;
        let (cache, tables) = cache(&case, &mut random, 16);
        let width = case.heads * case.head_dim;
        let wholes = alike().map(|alike| {
            let whole = case.run(&Cpu::with_isa(1, alike[0]), &cache, &tables, &case.whole()).remove(0);
            // Equalities alone would pass if all implementations left out the same span.
            for row in [511, 512, 1023, 1099] {
                for (y, expected) in whole[row * width..].iter().zip(case.reference(0, row, 0, alike[0])) {
                    near(*y, expected, &format!("window {window:?}, row {row}, {}", alike[0].name()));
                }
            }
            whole
        });
        for (isa, threads) in Isa::all().into_iter().zip([3, 2, 4, 5, 1].into_iter().cycle()) {
            let whole = &wholes[isa.products() as usize];
            let cpu = Cpu::with_isa(threads, isa);
            for position in [0, 63, 64, 511, 512, 700, 1023, 1024, 1099] {
                // One row is one task and six rows are several tiles; in both cases threads share the spans.
                for rows in [1, 6] {
                    let (start, rows) = (position + 1 - rows.min(position + 1), rows.min(position + 1));
                    let out = &case.run(&cpu, &cache, &tables, &[(0, start, rows)])[0];
                    let expected = &whole[start * width..][..rows * width];
                    let what = format!("window {window:?}, {rows} rows to {position}, {threads} threads");
                    assert_eq!(bits(out), bits(expected), "{what}, {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn sequences_that_share_blocks_have_the_bits_they_have_alone() {
    for seed in 200..240 {
        let mut random = Random::new(seed);
        let longest = if seed % 4 == 0 { 1200 } else { 400 };
        let shared = random.between(1, longest);
        // The first sequence has all the shared blocks; some of the others end inside them.
        let mut lengths = lengths(&mut random, 9, longest + 50);
        lengths[0] = shared + random.between(1, 100);
        let mut case = case(&mut random, lengths);
        let width = case.kv_heads * case.head_dim;
        // NaN values must spoil the sequences that see them and no others.
        let spoilt = seed % 2 == 0;
        if spoilt {
            let unseen_by_second = case.lengths[1].min(shared - 1);
            case.v[0][unseen_by_second * width..][..width].fill(f32::NAN);
        }
        for of in [&mut case.k, &mut case.v] {
            let (first, others) = of.split_at_mut(1);
            for other in others {
                let same = other.len().min(shared * width);
                other[..same].copy_from_slice(&first[0][..same]);
            }
        }
        let block_size = [16, 16, 32, 24, 64, 5][seed as usize % 6];
        let (cache, separate) = cache(&case, &mut random, block_size);
        let share = |table: &Vec<u32>| {
            let mut table = table.clone();
            let same = table.len().min(shared / block_size);
            table[..same].copy_from_slice(&separate[0][..same]);
            table
        };
        let tables: Vec<Vec<u32>> = separate.iter().map(share).collect();
        // Most sequences have one row, as in decode, and some have two; their order is random.
        let last = |(s, len): (usize, &usize)| {
            let rows = if spoilt { 1 } else { random.between(1, 4).saturating_sub(2).clamp(1, *len) };
            (s, len - rows, rows)
        };
        let mut parts: Vec<(usize, usize, usize)> = case.lengths.iter().enumerate().map(last).collect();
        random.shuffle(&mut parts);
        let alone = alike().map(|alike| {
            let cpu = Cpu::with_isa(1, alike[0]);
            let alone = |part: &(usize, usize, usize)| case.run(&cpu, &cache, &separate, &[*part]).remove(0);
            parts.iter().map(alone).collect::<Vec<_>>()
        });
        for isa in Isa::all() {
            let expected = &alone[isa.products() as usize];
            let cpu = Cpu::with_isa(random.between(1, 3), isa);
            let found = case.run(&cpu, &cache, &tables, &parts);
            for ((found, expected), part) in found.iter().zip(expected).zip(&parts) {
                let what = format!("{} block {block_size} shared {shared} {part:?}", isa.name());
                let one_nan = |y: &[f32]| y.iter().map(|y| if y.is_nan() { f32::NAN } else { *y }).collect::<Vec<_>>();
                assert_eq!(bits(&one_nan(found)), bits(&one_nan(expected)), "{what}");
            }
        }
    }
}

#[test]
fn samples_take_their_prompt_together_and_long_contexts_are_shared_among_threads() {
    let tile = TileSize { alone: 12, beside: 6 };
    let layout = KvLayout { blocks: 1000, block_size: 16, kv_heads: 3, head_dim: 64, dtype: StorageDtype::Bf16 };
    let plan = |shape: &AttentionShape, sequences: &[AttentionSequence<'_>], threads: usize| {
        let mut plan = AttentionPlan::default();
        Planner { shape, sequences, layout: &layout, tile, threads }.plan(&mut plan);
        plan
    };
    let table = |sample: u32| (0..64).chain([100 + sample]).collect::<Vec<u32>>();
    let tables: Vec<Vec<u32>> = (0..16).map(table).collect();
    let samples: Vec<AttentionSequence<'_>> = (0..16)
        .map(|s| AttentionSequence {
            first_row: s,
            rows: 1,
            start_position: 1030 + s % 5,
            visible: None,
            block_table: &tables[s],
        })
        .collect();
    for (group, threads, together) in [(3, 1, 16), (3, 4, 8), (3, 64, 4), (8, 1, 15), (8, 16, 2), (8, 64, 1)] {
        let shape = AttentionShape { heads: 3 * group, scale: 1.0, sliding_window: None };
        let found = plan(&shape, &samples, threads);
        let largest = found.tasks.iter().map(|t| (t.sequences, t.queries, t.shared_units)).max();
        let expected = (together as u32, (together * group) as u32, if together > 1 { 16 } else { 0 });
        assert_eq!(largest, Some(expected), "groups of {group}, {threads} threads: {:?}", found.tasks);
    }

    let shape = AttentionShape { heads: 9, scale: 1.0, sliding_window: None };
    let long: Vec<u32> = (0..300).collect();
    let one = [AttentionSequence { first_row: 0, rows: 1, start_position: 4500, visible: None, block_table: &long }];
    assert_eq!(plan(&shape, &one, 1).tasks.len(), 3);
    let found = plan(&shape, &one, 2);
    let (tasks, spans) = (found.tasks.len(), found.splits.iter().map(|s| s.spans).collect::<Vec<_>>());
    assert_eq!((tasks, spans, found.partials), (3 * 9, vec![9; 3], 3 * 3 * 9));

    let prompt =
        AttentionSequence { first_row: 0, rows: 1024, start_position: 0, visible: None, block_table: &tables[0] };
    let found = plan(&shape, &[prompt], 2);
    assert_eq!((found.tasks.len(), found.splits.len()), (26 * 3, 0));
    assert!(found.tasks.iter().all(|t| (t.sequences, t.queries.min(72), t.shared_units) == (1, 72, 0)));
}
