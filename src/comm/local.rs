//! Tensor-parallel ranks as threads of one process on the CPU, which read and write one another's buffers between
//! barriers.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Barrier};

use candle_core::Tensor;
use rollout_kernels::HostCollective;
use rollout_kernels::host::{with_f32, with_f32_mut};
use tracing::trace_span;

use super::Communicator;
use super::host::HostGroup;
use crate::error::Result;

/// The state that the ranks of one group share.
struct LocalShared {
    barrier: Barrier,
    /// Each rank's buffer of the current operation; valid between the two barriers of that operation.
    buffers: Vec<AtomicPtr<f32>>,
}

/// The communicator of one rank in a group of threads.
pub struct LocalGroup {
    rank: usize,
    shared: Arc<LocalShared>,
    host: HostGroup,
}

impl LocalGroup {
    /// The communicators of a group of `world` ranks, to be moved to one thread each.
    pub fn create(world: usize) -> Vec<Self> {
        let shared = Arc::new(LocalShared {
            barrier: Barrier::new(world),
            buffers: (0..world).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect(),
        });
        let ranks = HostGroup::create(world).into_iter().enumerate();
        ranks.map(|(rank, host)| Self { rank, shared: shared.clone(), host }).collect()
    }

    /// Shows `buffer` to all ranks, runs `body` when every rank has shown its own, and returns when every rank has run
    /// `body`.
    fn exchange(&self, buffer: *mut f32, body: impl FnOnce(&[*mut f32])) {
        let _span = trace_span!("exchange").entered();
        self.shared.buffers[self.rank].store(buffer, Ordering::Release);
        self.shared.barrier.wait();
        let buffers: Vec<_> = self.shared.buffers.iter().map(|b| b.load(Ordering::Acquire)).collect();
        body(&buffers);
        self.shared.barrier.wait();
    }
}

impl HostCollective for LocalGroup {
    fn world(&self) -> usize {
        self.shared.buffers.len()
    }

    fn all_reduce_min(&self, mine: u32) -> u32 {
        self.host.all_reduce_min(mine)
    }
}

impl Communicator for LocalGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn all_reduce_sum(&self, x: &Tensor) -> Result<()> {
        let world = self.world();
        with_f32_mut(x, |x| {
            let part = x.len().div_ceil(world);
            let mine = (self.rank * part).min(x.len())..((self.rank + 1) * part).min(x.len());
            self.exchange(x.as_mut_ptr(), |buffers| {
                let mut terms = vec![0.0; world];
                for i in mine {
                    for (term, buffer) in terms.iter_mut().zip(buffers) {
                        // SAFETY: every rank's buffer has the length of `x` (same shape on all ranks), lives until the
                        // closing barrier, and element `i` is touched by this rank alone.
                        *term = unsafe { *buffer.add(i) };
                    }
                    let sum = tree_sum(&terms);
                    for buffer in buffers {
                        // SAFETY: as above.
                        unsafe { *buffer.add(i) = sum };
                    }
                }
            });
        })?;
        Ok(())
    }

    fn all_gather_columns(&self, local: &Tensor, out: &Tensor) -> Result<()> {
        let ((rows, columns), world) = (local.dims2()?, self.world());
        let (out_rows, width) = out.dims2()?;
        assert!(out_rows == rows && width > columns * (world - 1) && width <= columns * world, "{width} columns");
        with_f32(local, |local| {
            with_f32_mut(out, |out| {
                self.exchange(local.as_ptr().cast_mut(), |buffers| {
                    for (r, row) in out.chunks_exact_mut(width).enumerate() {
                        for (part, buffer) in row.chunks_mut(columns).zip(buffers) {
                            // SAFETY: every rank shows a `[rows, columns]` buffer, which lives until the closing
                            // barrier and which no rank writes before that.
                            part.copy_from_slice(unsafe {
                                std::slice::from_raw_parts(buffer.add(r * columns).cast_const(), part.len())
                            });
                        }
                    }
                });
            })
        })??;
        Ok(())
    }
}

/// The sum of a balanced binary tree: the sum of the first half plus the sum of the second half.
fn tree_sum(terms: &[f32]) -> f32 {
    match terms {
        [one] => *one,
        _ => {
            let (a, b) = terms.split_at(terms.len() / 2);
            tree_sum(a) + tree_sum(b)
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn on_ranks<T: Send>(world: usize, f: impl Fn(LocalGroup) -> T + Sync) -> Vec<T> {
        std::thread::scope(|s| {
            let threads: Vec<_> = LocalGroup::create(world).into_iter().map(|g| s.spawn(|| f(g))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_the_same_tree_sum() {
        for world in [2, 3, 4] {
            // The sum of these values depends on the order, so that another tree would give another result.
            let value = |rank: usize, i: usize| [1e8_f32, 1.0, -1e8, 0.3][(rank + i) % 4];
            let sums = on_ranks(world, |group| {
                // Several operations in a row: a rank must not run ahead into the buffers of the next one.
                let reduced = (0..3).map(|_| {
                    let x: Vec<f32> = (0..7).map(|i| value(group.rank(), i)).collect();
                    let x = Tensor::from_vec(x, 7, &Device::Cpu).unwrap();
                    group.all_reduce_sum(&x).unwrap();
                    x.to_vec1::<f32>().unwrap()
                });
                reduced.collect::<Vec<_>>()
            });
            for sum in sums.into_iter().flatten() {
                let expected: Vec<f32> =
                    (0..7).map(|i| tree_sum(&(0..world).map(|r| value(r, i)).collect::<Vec<_>>())).collect();
                assert_eq!(sum, expected, "world {world}");
            }
        }
    }

    #[test]
    fn columns_come_in_the_order_of_ranks() {
        let outs = on_ranks(2, |group| {
            let base = 10.0 * group.rank() as f32;
            let local = Tensor::from_vec(vec![base, base + 1.0, base + 2.0, base + 3.0], (2, 2), &Device::Cpu).unwrap();
            let out = Tensor::zeros((2, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
            group.all_gather_columns(&local, &out).unwrap();
            out.to_vec2::<f32>().unwrap()
        });
        for out in outs {
            assert_eq!(out, [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]);
        }
    }

    #[test]
    fn columns_beyond_the_gathered_tensor_are_left_out() {
        let outs = on_ranks(2, |group| {
            let base = 10.0 * group.rank() as f32;
            let local: Vec<f32> = (0..6).map(|i| base + i as f32).collect();
            let local = Tensor::from_vec(local, (2, 3), &Device::Cpu).unwrap();
            let out = Tensor::zeros((2, 5), candle_core::DType::F32, &Device::Cpu).unwrap();
            group.all_gather_columns(&local, &out).unwrap();
            out.to_vec2::<f32>().unwrap()
        });
        for out in outs {
            assert_eq!(out, [[0.0, 1.0, 2.0, 10.0, 11.0], [3.0, 4.0, 5.0, 13.0, 14.0]]);
        }
    }
}
