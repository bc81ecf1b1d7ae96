//! cuRAND. Its numbers are those of another generator than NVIDIA's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::entry_points::{entry_points, missing};
use crate::error::{ErrorCode, Result};
use crate::handles::{Handle, Handles};
use crate::memory;
use crate::stream::{Operation, OperationKind, stream};

/// `CURAND_STATUS_LAUNCH_FAILURE` and `CURAND_STATUS_INTERNAL_ERROR`
const LAUNCH_FAILURE: i32 = 201;
const INTERNAL_ERROR: i32 = 999;

/// The library's status for a code, which may be one already.
fn status_of(code: ErrorCode) -> i32 {
    if matches!(code, 100..=106 | 201..=204 | INTERNAL_ERROR) { code } else { LAUNCH_FAILURE }
}

static GENERATORS: Handles<Generator> = Handles::new();

struct Generator {
    stream: AtomicUsize,
    state: AtomicU64,
}

impl Generator {
    /// A number in (0, 1], uniform.
    fn uniform(&self) -> f64 {
        // SplitMix64 (Steele, Lea and Flood, 2014).
        let mut z = self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ z >> 31) >> 40) + 1) as f64 / (1u64 << 24) as f64
    }

    /// A number of the standard normal distribution (Box and Muller, 1958).
    fn normal(&self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

fn generate<T: Copy + Send + Sync + 'static>(handle: Handle, at: u64, n: usize, f: impl Fn(&Generator) -> T) -> Result {
    let generator = GENERATORS.get(handle)?;
    let values = (0..n).map(|_| f(&generator)).collect::<Vec<_>>();
    stream(generator.stream.load(Ordering::Relaxed))?.push(Operation::new(OperationKind::Kernel, move || {
        let bytes = size_of_val(&values[..]);
        let to = memory::get().bytes_at_run(at, bytes)?;
        // SAFETY: the device's memory is checked.
        unsafe { to.copy_from(values.as_ptr().cast(), bytes) };
        Ok(())
    }))
}

entry_points! {
    status status_of;
    fn curandCreateGenerator(out: *mut Handle, _kind: i32) {
        *out = GENERATORS.add(Arc::new(Generator { stream: AtomicUsize::new(0), state: AtomicU64::new(1) }));
        Ok(())
    }
    fn curandDestroyGenerator(generator: Handle) { GENERATORS.remove(generator).map(drop) }
    fn curandSetStream(generator: Handle, on: Handle) {
        GENERATORS.get(generator)?.stream.store(on, Ordering::Relaxed);
        Ok(())
    }
    fn curandSetPseudoRandomGeneratorSeed(generator: Handle, seed: u64) {
        GENERATORS.get(generator)?.state.store(seed << 20 | 1, Ordering::Relaxed);
        Ok(())
    }
    fn curandSetGeneratorOffset(generator: Handle, offset: u64) {
        GENERATORS.get(generator)?.state.fetch_add(offset.wrapping_mul(0x9e37_79b9_7f4a_7c15), Ordering::Relaxed);
        Ok(())
    }
    fn curandGenerateUniform(generator: Handle, at: u64, n: usize) {
        generate(generator, at, n, |g| g.uniform() as f32)
    }
    fn curandGenerateUniformDouble(generator: Handle, at: u64, n: usize) {
        generate(generator, at, n, Generator::uniform)
    }
    fn curandGenerateNormal(generator: Handle, at: u64, n: usize, mean: f32, deviation: f32) {
        generate(generator, at, n, move |g| mean + deviation * g.normal() as f32)
    }
    fn curandGenerateNormalDouble(generator: Handle, at: u64, n: usize, mean: f64, deviation: f64) {
        generate(generator, at, n, move |g| mean + deviation * g.normal())
    }
}

missing! {
    status INTERNAL_ERROR;
    curandGenerate curandGenerateLogNormal curandGenerateLogNormalDouble curandGenerateLongLong curandGeneratePoisson
}
