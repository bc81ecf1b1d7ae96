//! candle-flash-attn beside our own kernels.

use super::plan::is_of_flash;
use super::*;
use crate::cpu::testing::Random;
use crate::cuda::attention::PagedAttention;
use crate::cuda::attention::tests::cache;

/// Rounding of probabilities and of results to bfloat16, by half a unit in the last of 8 bits each.
const ROUNDING: f32 = 1.0 / 256.0;

/// `(rows, start)` of sequences behind each other.
const PARTS: [(usize, usize); 6] = [(1, 99), (70, 131), (2, 0), (1, 40), (1, 63), (33, 300)];

#[test]
fn rows_of_prompts_are_near_our_own_and_others_are_ours() {
    let context = Arc::new(Context::open(0).unwrap());
    let load = |kernel| PagedAttention::load(&context, kernel).unwrap();
    let (ours, flash, staging) =
        (load(AttentionKernel::Invariant), load(AttentionKernel::Flash), Staging::new(&context.stream));
    let layers =
        [(32, 3, None), (64, 1, Some(50)), (80, 2, None), (128, 4, Some(1000)), (128, 1, Some(100)), (256, 1, None)];
    for (seed, (head_dim, group, sliding_window)) in layers.into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let layout = KvLayout { blocks: 60, block_size: 32, kv_heads: 2, head_dim, dtype: StorageDtype::Bf16 };
        let cache = cache(&context, layout, &mut random);
        let (blocks, mut first_row, mut first_block): (Vec<u32>, _, _) = ((0..60).rev().collect(), 0, 0);
        let sequences = PARTS.map(|(rows, start_position)| {
            let block_table = &blocks[first_block..][..(start_position + rows).div_ceil(32)];
            (first_row, first_block) = (first_row + rows, first_block + block_table.len());
            AttentionSequence { first_row: first_row - rows, rows, start_position, visible: None, block_table }
        });
        let (rows, width) = (first_row, 2 * group * head_dim);
        let tokens = vec![0; rows];
        let input = StepInput {
            tokens: &tokens,
            positions: &[],
            axes: 1,
            slots: &[],
            sequences: &sequences,
            logits: &[],
            tasks: &[],
        };
        let shape = AttentionShape { heads: 2 * group, scale: 0.1, sliding_window };
        let queries = random.normals(rows * width, 1.0);
        // Rows of the output are further apart than they are wide.
        let run = |by: &PagedAttention| {
            let memory = |values: &[f32], stride| {
                let memory = context.scratch.allocate(size_of_val(values)).unwrap();
                context.copies.write(memory.pointer, values).unwrap();
                (TensorRows { pointer: memory.pointer, rows, width, stride }, memory)
            };
            let (q, _q) = memory(&queries, width);
            let (out, held) = memory(&vec![f32::NAN; rows * (width + 16)], width + 16);
            let step = CudaStep::upload(&context, &staging, &input, by.kernel()).unwrap();
            by.attend(q, &shape, &step, &cache, out).unwrap();
            let mut values = vec![0_f32; rows * (width + 16)];
            context.copies.read(held.pointer, &mut values).unwrap();
            values
        };
        let (expected, given) = (run(&ours), run(&flash));
        let mut furthest = 0.0_f32;
        for sequence in &sequences {
            for row in sequence.first_row..sequence.first_row + sequence.rows {
                let [expected, given] = [&expected, &given].map(|values| &values[row * (width + 16)..][..width + 16]);
                assert!(given[width..].iter().all(|value| value.is_nan()), "behind row {row}");
                for (a, b) in expected[..width].iter().zip(&given[..width]) {
                    let most = if is_of_flash(sequence) { ROUNDING * (1.0 + a.abs()) } else { 0.0 };
                    furthest = furthest.max((a - b).abs());
                    assert!((a - b).abs() <= most, "seed {seed}, row {row} of {sequence:?}: {a} and {b}");
                }
            }
        }
        println!("heads of {head_dim}, window {sliding_window:?}: at most {furthest} apart");
        assert!(furthest > 0.0, "it was another kernel");
    }
}

#[test]
fn it_is_tried_out_and_refuses_what_it_cannot_read() {
    let context = Arc::new(Context::open(0).unwrap());
    let model = |head_dim, block_size, kv| {
        let (weights, experts) = (crate::StorageDtype::Bf16, None);
        ModelShape { head_dim, block_size, weights, kv, experts }
    };
    for head_dim in [16, 64, 128, 256] {
        check(&context, &model(head_dim, 32, StorageDtype::Bf16)).unwrap();
    }
    let refused = |model| check(&context, &model).unwrap_err().to_string();
    assert!(refused(model(64, 48, StorageDtype::Bf16)).contains("--block-size 48 is not a multiple of 32"));
    assert!(refused(model(64, 32, StorageDtype::F32)).contains("--dtype"));
}
