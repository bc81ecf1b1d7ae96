//! Bookkeeping of the paged KV cache: which physical block holds which tokens, who shares it, what is still findable.
//!
//! Pure: nothing here touches KV bytes. A block is in exactly one of two roles. *Held*: its reference count equals the
//! number of [`BlockTable`]s that name it. *Free*: reference count 0, a member of the LRU free list; a free block that
//! is registered under a [`BlockHash`] keeps its content until it is allocated again, and a lookup can take it back.
//!
//! What may be written: a block with one holder and no hash. Full blocks are registered once their KV is computed and
//! are never written again; a partial block that a fork shares is copied first ([`KvCacheManager::extend`]).
//!
//! Kernels are batch-invariant, so the KV of a hit and of a miss are the same bits: two blocks with the same content
//! may exist, and only the first is registered.

mod hash;
mod manager;
mod pool;

pub use hash::{BlockHash, CacheSalt, HashChain};
pub use manager::{BlockTable, KvCacheManager, PrefixMatch};
pub use pool::{BlockCounts, BlockPool};
