//! The storage of one layer's paged KV cache. Keys are stored as `[block][kv_head][head_dim][block_size]`, so that 16
//! tokens are one vector, and values as `[block][kv_head][block_size][head_dim]`.

use super::pool::Cpu;
use super::rows::Rows;
use super::storage::Mapping;
use crate::kv_layout::{BlockCopy, KvLayout};
use crate::values::StorageDtype;
use half::bf16;

mod write;
use write::KvElement;

/// Keys and values of one layer, in blocks of tokens. Pages of memory are taken as blocks are first written.
pub struct KvBlocks {
    layout: KvLayout,
    keys: Mapping,
    values: Mapping,
}

impl KvBlocks {
    /// # Panics
    /// As for [`KvBlocks::try_new`], and if the system cannot map the memory.
    pub fn new(layout: KvLayout) -> KvBlocks {
        KvBlocks::try_new(layout).unwrap_or_else(|e| panic!("cannot map memory: {e}"))
    }

    /// # Errors
    /// If the system cannot map the memory.
    ///
    /// # Panics
    /// If a dimension is 0, or `head_dim` is not a multiple of 16.
    pub fn try_new(layout: KvLayout) -> std::io::Result<KvBlocks> {
        let KvLayout { blocks, block_size, kv_heads, head_dim, .. } = layout;
        assert!(blocks * block_size * kv_heads * head_dim > 0, "{layout:?} has an empty dimension");
        assert!(head_dim.is_multiple_of(16), "head_dim {head_dim} is not a multiple of 16");
        let bytes = blocks * layout.bytes_per_block() / 2;
        Ok(KvBlocks { layout, keys: Mapping::try_zeroed(bytes)?, values: Mapping::try_zeroed(bytes)? })
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The memory in bytes that the cache takes once every block has been written.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    pub(crate) fn keys(&self) -> &Mapping {
        &self.keys
    }

    pub(crate) fn values(&self) -> &Mapping {
        &self.values
    }

    /// Stores row `i` of `k` and `v`, each `[rows, kv_heads * head_dim]`, in slot `slots[i]`, which is
    /// `block * block_size + offset`. A bfloat16 cache rounds to nearest even.
    ///
    /// # Panics
    /// If shapes do not agree, or a slot is outside the cache.
    pub fn write(&mut self, cpu: &Cpu, k: Rows<'_>, v: Rows<'_>, slots: &[u32]) {
        let KvLayout { blocks, block_size, kv_heads, head_dim, dtype } = self.layout;
        let shape = (slots.len(), kv_heads * head_dim);
        assert_eq!((k.rows(), k.width()), shape, "rows and width of the keys");
        assert_eq!((v.rows(), v.width()), shape, "rows and width of the values");
        let end = blocks * block_size;
        assert!(slots.iter().all(|s| (*s as usize) < end), "a slot of {slots:?} is outside a cache of {end}");
        match dtype {
            StorageDtype::Bf16 => self.write_as::<bf16>(cpu, k, v, slots),
            StorageDtype::F32 => self.write_as::<f32>(cpu, k, v, slots),
        }
    }

    fn write_as<E: KvElement>(&mut self, cpu: &Cpu, k: Rows<'_>, v: Rows<'_>, slots: &[u32]) {
        let (keys, values) = (self.keys.as_mut_slice::<E>(), self.values.as_mut_slice::<E>());
        write::write(cpu, self.layout, (k, keys), (v, values), slots);
    }

    /// Copies the first tokens of blocks to other blocks, one copy after the other.
    ///
    /// # Panics
    /// If a block is outside the cache, or `tokens` exceeds the block size.
    pub fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        match self.layout.dtype {
            StorageDtype::Bf16 => self.copy_as::<bf16>(copies),
            StorageDtype::F32 => self.copy_as::<f32>(copies),
        }
    }

    fn copy_as<E: KvElement>(&mut self, copies: &[BlockCopy]) {
        let layout = self.layout;
        let (block_len, head_len) = (layout.block_len(), layout.head_len());
        let (keys, values) = (self.keys.as_mut_slice::<E>(), self.values.as_mut_slice::<E>());
        for copy in copies {
            let BlockCopy { src, dst, tokens } = *copy;
            assert!((src.max(dst) as usize) < layout.blocks && tokens <= layout.block_size, "{copy:?} of {layout:?}");
            for head in 0..layout.kv_heads {
                let at = |block: u32| block as usize * block_len + head * head_len;
                for d in 0..layout.head_dim {
                    let from = at(src) + d * layout.block_size;
                    keys.copy_within(from..from + tokens, at(dst) + d * layout.block_size);
                }
                values.copy_within(at(src)..at(src) + tokens * layout.head_dim, at(dst));
            }
        }
    }
}

#[cfg(test)]
mod tests;
