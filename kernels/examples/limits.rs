//! Measures the limits of this machine on all its cores and prints them as one line of JSON:
//! `{"threads", "instructions", "f32_fma_gflops", "bf16_dot_gflops" and "bf16_tile_gflops" (null without the instruction),
//! "read_gb_per_s"}`.
//!
//! The benches put their figures beside these. Each figure is the best of a few runs, since other processes can only
//! slow a run down.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

#[cfg(target_arch = "x86_64")]
use rollout_kernels::cpu::Isa;

/// Independent accumulators: they cover latency times throughput (4 or 5 cycles, 2 a cycle) on every core in question.
const ACCUMULATORS: usize = 12;
/// Rounds over the accumulators in one timed run, which takes some tens of milliseconds.
const ROUNDS: usize = 8 << 20;
const COMPUTE_RUNS: usize = 15;
/// Bytes that each thread reads, far more than any last-level cache holds, so that reads come from memory.
const READ_BYTES_PER_THREAD: usize = 256 << 20;
const READ_RUNS: usize = 12;

/// A loop of floating-point instructions: runs `ROUNDS` rounds and returns a value that depends on all of them.
struct Burner {
    instructions: &'static str,
    /// FLOPs of one round: accumulators x lanes x 2.
    flops_per_round: usize,
    run: fn() -> f32,
}

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let fma = f32_fma();
    let gflops = |burner: &Burner| {
        let flops = (burner.flops_per_round * ROUNDS * threads) as f64;
        flops / best(COMPUTE_RUNS, threads, |_| _ = black_box((burner.run)())).as_secs_f64() / 1e9
    };
    let f32_fma_gflops = gflops(&fma);
    let or_null =
        |burner: Option<Burner>| burner.map_or("null".to_string(), |burner| format!("{:.1}", gflops(&burner)));
    let (bf16_dot_gflops, bf16_tile_gflops) = (or_null(bf16_dot()), or_null(bf16_tile()));
    println!(
        "{{\"threads\": {threads}, \"instructions\": \"{}\", \"f32_fma_gflops\": {f32_fma_gflops:.1}, \
         \"bf16_dot_gflops\": {bf16_dot_gflops}, \"bf16_tile_gflops\": {bf16_tile_gflops}, \
         \"read_gb_per_s\": {:.1}}}",
        fma.instructions,
        read_gb_per_s(threads)
    );
}

/// The shortest time in which `threads` threads, started together, all finish `work(thread)`.
fn best(runs: usize, threads: usize, work: impl Fn(usize) + Sync) -> Duration {
    let barrier = Barrier::new(threads);
    let timed = |thread| {
        barrier.wait();
        let start = Instant::now();
        work(thread);
        (start, Instant::now())
    };
    let timed = &timed;
    let run = || {
        let times: Vec<_> = std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads).map(|thread| scope.spawn(move || timed(thread))).collect();
            handles.into_iter().map(|h| h.join().expect("a measuring thread panicked")).collect()
        });
        let start = times.iter().map(|t| t.0).min().expect("at least one thread");
        times.iter().map(|t| t.1).max().expect("at least one thread") - start
    };
    (0..runs).map(|_| run()).min().expect("at least one run")
}

fn read_gb_per_s(threads: usize) -> f64 {
    let words = READ_BYTES_PER_THREAD / 8;
    // Each buffer is filled by a thread of its own, so that its pages are near that thread's core.
    let buffers: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(|| vec![1_u64; words])).collect();
        handles.into_iter().map(|h| h.join().expect("a filling thread panicked")).collect()
    });
    let time = best(READ_RUNS, threads, |thread| _ = black_box(sum(&buffers[thread])));
    (READ_BYTES_PER_THREAD * threads) as f64 / time.as_secs_f64() / 1e9
}

/// The sum of all words in 8 interleaved accumulators, which every compiler turns into vector loads.
fn sum(words: &[u64]) -> u64 {
    let mut lanes = [0_u64; 8];
    for chunk in words.chunks_exact(8) {
        for (lane, &word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(word);
        }
    }
    lanes.iter().fold(0, |a, &b| a.wrapping_add(b))
}

/// The loop of the widest fused multiply-adds of this machine.
fn f32_fma() -> Burner {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature has just been detected.
            return x86::burner("avx512f", 16 * 2, || unsafe { x86::fma_avx512f() });
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features have just been detected.
            return x86::burner("avx2", 8 * 2, || unsafe { x86::fma_avx2() });
        }
    }
    Burner { instructions: "portable", flops_per_round: ACCUMULATORS * 8 * 2, run: multiply_add_portable }
}

/// The loop of dot products of bfloat16 pairs, if this machine has the instruction.
fn bf16_dot() -> Option<Burner> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f") {
        // SAFETY: the features have just been detected.
        return Some(x86::burner("avx512_bf16", 32 * 2, || unsafe { x86::dot_avx512_bf16() }));
    }
    None
}

/// The loop of products of bfloat16 tiles, if this machine has AMX.
fn bf16_tile() -> Option<Burner> {
    #[cfg(target_arch = "x86_64")]
    if Isa::from_name("amx").is_some() {
        let flops = x86::TILES * 16 * 16 * 32 * 2;
        return Some(Burner { instructions: "amx", flops_per_round: flops / x86::TILE_ROUNDS, run: x86::tile_amx });
    }
    None
}

/// Separate multiplications and additions: without a guaranteed FMA instruction, `mul_add` would call a library
/// function.
fn multiply_add_portable() -> f32 {
    let (x, y) = (black_box(0.999_f32), black_box(0.001_f32));
    let mut accumulators = [[1.0_f32; 8]; ACCUMULATORS];
    for _ in 0..ROUNDS {
        for lane in accumulators.as_flattened_mut() {
            *lane = *lane * x + y;
        }
    }
    accumulators.as_flattened().iter().sum()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{ACCUMULATORS, Burner, ROUNDS};

    pub fn burner(instructions: &'static str, flops_per_instruction: usize, run: fn() -> f32) -> Burner {
        Burner { instructions, flops_per_round: ACCUMULATORS * flops_per_instruction, run }
    }

    #[target_feature(enable = "avx512f")]
    pub fn fma_avx512f() -> f32 {
        let (x, y) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
        let mut accumulators = [_mm512_set1_ps(1.0); ACCUMULATORS];
        for _ in 0..ROUNDS {
            for a in &mut accumulators {
                *a = _mm512_fmadd_ps(*a, x, y);
            }
        }
        accumulators.iter().map(|&a| _mm512_reduce_add_ps(a)).sum()
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn fma_avx2() -> f32 {
        let (x, y) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(0.001)));
        let mut accumulators = [_mm256_set1_ps(1.0); ACCUMULATORS];
        for _ in 0..ROUNDS {
            for a in &mut accumulators {
                *a = _mm256_fmadd_ps(*a, x, y);
            }
        }
        accumulators.iter().map(|&a| _mm256_cvtss_f32(a)).sum()
    }

    /// Products of one round of the loop in [`tile_amx`].
    pub const TILES: usize = 4;
    /// A product of tiles takes as long as some dozens of other instructions, so there are fewer of them.
    pub const TILE_ROUNDS: usize = 8;

    /// Needs a processor with AMX, which this process may use.
    pub fn tile_amx() -> f32 {
        #[repr(C, align(64))]
        struct Aligned([u8; 1024]);
        let mut config = Aligned([0; 1024]);
        config.0[0] = 1;
        for tile in 0..8 {
            (config.0[16 + 2 * tile], config.0[48 + tile]) = (64, 16);
        }
        // Pairs of small numbers: tiles of zeros may be multiplied in less time.
        let (mut tile, small) = (Aligned([0; 1024]), black_box(0x3a83_u16).to_le_bytes());
        tile.0.as_chunks_mut::<2>().0.fill(small);
        // SAFETY: the caller has found AMX. The configuration has its 64 bytes, and the tiles 1024.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tileloadd tmm4, [{tile} + {line}*1]",
                "tileloadd tmm5, [{tile} + {line}*1]",
                "tileloadd tmm6, [{tile} + {line}*1]",
                "tileloadd tmm7, [{tile} + {line}*1]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilestored [{tile} + {line}*1], tmm3",
                "tilerelease",
                config = in(reg) &raw const config,
                tile = in(reg) &raw mut tile,
                line = in(reg) 64_usize,
                rounds = inout(reg) ROUNDS / TILE_ROUNDS => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        f32::from(tile.0[7])
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn dot_avx512_bf16() -> f32 {
        let one = _mm512_set1_ps(black_box(1e-3));
        let (x, y) = (_mm512_cvtne2ps_pbh(one, one), _mm512_cvtne2ps_pbh(one, one));
        let mut accumulators = [_mm512_set1_ps(1.0); ACCUMULATORS];
        for _ in 0..ROUNDS {
            for a in &mut accumulators {
                *a = _mm512_dpbf16_ps(*a, x, y);
            }
        }
        accumulators.iter().map(|&a| _mm512_reduce_add_ps(a)).sum()
    }
}
