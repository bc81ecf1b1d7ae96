use super::super::isa::Isa;
use super::super::testing::Random;
use super::*;

fn cache(random: &mut Random, dtype: StorageDtype) -> KvBlocks {
    let (kv_heads, block_size) = (random.between(1, 3), random.between(1, 20));
    KvBlocks::new(KvLayout { blocks: random.between(2, 6), block_size, kv_heads, head_dim: 32, dtype })
}

/// Reads the key and the value of a slot, element by element.
fn read(cache: &KvBlocks, slot: usize) -> Vec<(f32, f32)> {
    let l = cache.layout;
    let (block, offset) = (slot / l.block_size, slot % l.block_size);
    let at = |i: usize, of: &Mapping| match l.dtype {
        StorageDtype::Bf16 => of.as_slice::<bf16>()[i].to_f32(),
        StorageDtype::F32 => of.as_slice::<f32>()[i],
    };
    let cell = |head: usize, d: usize| {
        let start = (block * l.kv_heads + head) * l.head_len();
        let (key, value) = (start + d * l.block_size + offset, start + offset * l.head_dim + d);
        (at(key, &cache.keys), at(value, &cache.values))
    };
    (0..l.kv_heads).flat_map(|h| (0..l.head_dim).map(move |d| (h, d))).map(|(h, d)| cell(h, d)).collect()
}

#[test]
fn slots_hold_what_was_written_last_and_copies_move_whole_tokens() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let dtype = [StorageDtype::Bf16, StorageDtype::F32][seed as usize % 2];
        let mut cache = cache(&mut random, dtype);
        let l = cache.layout;
        let width = l.kv_heads * l.head_dim;
        let mut expected = vec![vec![(0.0, 0.0); width]; l.blocks * l.block_size];
        for _ in 0..10 {
            let rows = random.between(1, 150);
            let (k, v) = (random.normals(rows * width, 1.0), random.normals(rows * width, 1.0));
            let slots: Vec<u32> = (0..rows).map(|_| random.below(expected.len()) as u32).collect();
            cache.write(&Cpu::new(2), Rows::dense(&k, width), Rows::dense(&v, width), &slots);
            let rounded = |x: f32| if dtype == StorageDtype::Bf16 { bf16::from_f32(x).to_f32() } else { x };
            for (row, slot) in slots.iter().enumerate() {
                let cell = |i| (rounded(k[row * width + i]), rounded(v[row * width + i]));
                expected[*slot as usize] = (0..width).map(cell).collect();
            }
            let (src, dst) = (random.below(l.blocks), random.below(l.blocks));
            let tokens = random.between(0, l.block_size);
            cache.copy_blocks(&[BlockCopy { src: src as u32, dst: dst as u32, tokens }]);
            for t in 0..tokens {
                expected[dst * l.block_size + t] = expected[src * l.block_size + t].clone();
            }
        }
        for (slot, expected) in expected.iter().enumerate() {
            assert_eq!(&read(&cache, slot), expected, "slot {slot}, seed {seed}");
        }
    }
}

/// Random slots as a prompt, a decode step or a draft has them: runs of neighbours, from any slot or from one that
/// begins a vector, some of them a second time.
fn random_slots(random: &mut Random, end: usize) -> Vec<u32> {
    let mut slots: Vec<u32> = vec![];
    for _ in 0..random.between(1, 6) {
        let start = match random.below(4) {
            0 => random.below(end),
            1 if !slots.is_empty() => slots[random.below(slots.len())] as usize,
            _ => random.below(end) / 16 * 16,
        };
        let len = [1, random.between(1, 15), 16, random.between(17, 100)][random.below(4)];
        slots.extend((start..end.min(start + len)).map(|slot| slot as u32));
    }
    slots
}

/// Random values of every kind: also denormals, infinities, both zeros, ties, and NaN with bits that rounding drops.
fn random_values(random: &mut Random, len: usize) -> Vec<f32> {
    let mut values = random.normals(len, 1.0);
    for _ in 0..len / 8 {
        let odd =
            [1e-40, -1e-41, f32::INFINITY, f32::MAX, -0.0, f32::from_bits(0x7f80_0001), f32::from_bits(0x3f80_8000)];
        values[random.below(len)] = odd[random.below(odd.len())];
    }
    values
}

#[test]
fn every_instruction_set_stores_the_bits_of_rounding_each_value() {
    for seed in 0..120 {
        let mut random = Random::new(seed);
        let block_size = [random.between(1, 48), 16, 32, 48][random.below(4)];
        let layout = KvLayout {
            blocks: random.between(1, 8),
            block_size,
            kv_heads: random.between(1, 3),
            head_dim: [16, 32, 48, 64, 80, 128][random.below(6)],
            dtype: [StorageDtype::Bf16, StorageDtype::F32][random.below(2)],
        };
        let slots = random_slots(&mut random, layout.blocks * block_size);
        let width = layout.kv_heads * layout.head_dim;
        let strides = [width + random.below(40), width];
        let [k, v] = strides.map(|stride| random_values(&mut random, (slots.len() - 1) * stride + width));
        let stored = |x: f32| match layout.dtype {
            StorageDtype::Bf16 => u32::from(bf16::from_f32(x).to_bits()),
            StorageDtype::F32 => x.to_bits(),
        };
        let cells = layout.blocks * layout.block_len();
        let (mut keys, mut values) = (vec![0; cells], vec![0; cells]);
        for (row, slot) in slots.iter().enumerate() {
            let (block, offset) = (*slot as usize / block_size, *slot as usize % block_size);
            for (head, d) in (0..layout.kv_heads).flat_map(|head| (0..layout.head_dim).map(move |d| (head, d))) {
                let (start, column) =
                    ((block * layout.kv_heads + head) * layout.head_len(), head * layout.head_dim + d);
                keys[start + d * block_size + offset] = stored(k[row * strides[0] + column]);
                values[start + offset * layout.head_dim + d] = stored(v[row * strides[1] + column]);
            }
        }
        let found = |of: &Mapping| -> Vec<u32> {
            match layout.dtype {
                StorageDtype::Bf16 => of.as_slice::<u16>()[..cells].iter().map(|bits| u32::from(*bits)).collect(),
                StorageDtype::F32 => of.as_slice::<u32>()[..cells].to_vec(),
            }
        };
        for (isa, threads) in Isa::all().into_iter().flat_map(|isa| [1, 2, 7].map(|threads| (isa, threads))) {
            let mut cache = KvBlocks::new(layout);
            let rows = |data, stride| Rows::new(data, slots.len(), width, stride);
            cache.write(&Cpu::with_isa(threads, isa), rows(&k, strides[0]), rows(&v, strides[1]), &slots);
            let what = format!("{layout:?} on {} with {threads} threads, seed {seed}", isa.name());
            assert!(found(&cache.keys) == keys, "keys: {what}");
            assert!(found(&cache.values) == values, "values: {what}");
        }
    }
}
