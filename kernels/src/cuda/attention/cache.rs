//! Writes to the cache of keys and values.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use crate::cuda::context::Context;
use crate::cuda::kv::CudaKv;
use crate::cuda::launch::{Launch, grid, rows_grid};
use crate::cuda::module::{Module, fat_binary};
use crate::cuda::staging::Staging;
use crate::cuda::tensor::TensorRows;
use crate::kv_layout::{BlockCopy, KvLayout};
use crate::values::StorageDtype;

/// Bytes that a thread copies at once.
const CHUNK_BYTES: usize = 16;
const COPY_THREADS: u32 = 128;

/// The kernels that write keys and values.
pub(super) struct CacheWrites {
    context: Arc<Context>,
    write_bf16: CudaFunction,
    write_f32: CudaFunction,
    copy: CudaFunction,
}

impl CacheWrites {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("kv"))?;
        Ok(Self {
            context: context.clone(),
            write_bf16: module.function("write_kv_bf16")?,
            write_f32: module.function("write_kv_f32")?,
            copy: module.function("copy_blocks")?,
        })
    }

    /// `slots` is the address of the slot of each row.
    pub fn write(&self, k: TensorRows, v: TensorRows, slots: u64, cache: &CudaKv) -> Result<()> {
        let KvLayout { block_size, kv_heads, head_dim, dtype, .. } = cache.layout;
        assert_eq!((k.rows, k.width, v.width), (v.rows, kv_heads * head_dim, k.width), "{k:?} and {v:?} of a cache");
        let function = match dtype {
            StorageDtype::Bf16 => &self.write_bf16,
            StorageDtype::F32 => &self.write_f32,
        };
        let mut launch = Launch::of(&self.context.stream, function);
        launch.rows(k).rows(v).pointer(slots).pointer(cache.keys()).pointer(cache.values());
        launch.int(kv_heads).int(head_dim).int(block_size);
        // SAFETY: the rows are of tensors, and the step has a slot of the cache for each.
        unsafe { launch.start(rows_grid(k.rows)) }
    }

    /// Does the copies in order.
    ///
    /// # Panics
    /// If a block is outside the cache, or `tokens` exceeds the block size.
    pub fn copy_blocks(&self, staging: &Staging, cache: &CudaKv, copies: &[BlockCopy]) -> Result<()> {
        let KvLayout { blocks, block_size, .. } = cache.layout;
        let fits = |copy: &BlockCopy| copy.src.max(copy.dst) < blocks as u32 && copy.tokens <= block_size;
        assert!(copies.iter().all(fits), "{copies:?} of {blocks} blocks of {block_size} tokens");
        let moves: Vec<BlockCopy> = copies.iter().copied().filter(|copy| copy.src != copy.dst).collect();
        if moves.is_empty() {
            return Ok(());
        }
        let words: Vec<u32> = moves.iter().flat_map(|copy| [copy.src, copy.dst, copy.tokens as u32]).collect();
        let memory = self.context.upload(staging, &words)?;
        let mut done = 0;
        for count in independent_runs(&moves) {
            let first = memory.pointer + (done * size_of::<[u32; 3]>()) as u64;
            self.copy_at_once(cache, first, count)?;
            done += count;
        }
        Ok(())
    }

    /// Starts `count` copies at an address that do not depend on each other.
    fn copy_at_once(&self, cache: &CudaKv, copies: u64, count: usize) -> Result<()> {
        let KvLayout { blocks, block_size, kv_heads, head_dim, dtype } = cache.layout;
        let keys = blocks * cache.layout.bytes_per_block() / 2;
        let mut launch = Launch::of(&self.context.stream, &self.copy);
        launch.pointer(cache.keys()).pointer(copies).int(kv_heads).int(block_size);
        launch.int(head_dim * dtype.size() / CHUNK_BYTES).long(keys / CHUNK_BYTES);
        let [count, heads] = [count, kv_heads].map(|n| u32::try_from(n).expect("blocks of a cache"));
        // SAFETY: the blocks were checked, and the values lie behind the keys.
        unsafe { launch.start(grid((count, heads, 2), COPY_THREADS, 0)) }
    }
}

/// Lengths of the runs of `copies` that may be done at once: no block that one writes is read or written by another.
fn independent_runs(copies: &[BlockCopy]) -> Vec<usize> {
    let mut runs = Vec::new();
    let (mut read, mut written) = (HashSet::new(), HashSet::new());
    let mut first = 0;
    for (i, copy) in copies.iter().enumerate() {
        if written.contains(&copy.src) || written.contains(&copy.dst) || read.contains(&copy.dst) {
            runs.push(i - first);
            first = i;
            read.clear();
            written.clear();
        }
        read.insert(copy.src);
        written.insert(copy.dst);
    }
    runs.push(copies.len() - first);
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_depend_on_each_other_are_not_done_at_once() {
        let runs = |blocks: &[(u32, u32)]| {
            let copy = |(src, dst): &(u32, u32)| BlockCopy { src: *src, dst: *dst, tokens: 1 };
            independent_runs(&blocks.iter().map(copy).collect::<Vec<_>>())
        };
        assert_eq!(runs(&[(0, 1), (0, 2), (3, 4)]), [3]);
        assert_eq!(runs(&[(0, 1), (1, 2)]), [1, 1], "what was written is read");
        assert_eq!(runs(&[(0, 1), (2, 3), (4, 0)]), [2, 1], "what was read is written");
        assert_eq!(runs(&[(0, 1), (2, 1), (3, 4)]), [1, 2], "what was written is written again");
    }
}
