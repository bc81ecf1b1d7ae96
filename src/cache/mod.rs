//! Bookkeeping of the paged KV cache: the tokens of each physical block, the sequences that share it, and its hash.
//! [`EmbeddingCache`] records which images' embeddings the device holds, and [`RoutingCache`] keeps the experts that
//! tokens took.
//!
//! Pure: nothing here touches KV bytes. A block is in one of two states:
//!
//! - *Held*: its reference count is the number of [`BlockTable`]s that contain it.
//! - *Free*: its reference count is 0, and it is in the LRU free list. A free block that is registered under a
//!   [`BlockHash`] keeps its content until it is allocated again, so that a request with the same prefix can reuse it.
//!
//! Only a block with one holder and no hash may be written. A full block is registered once its KV is computed, and is
//! never written again. A partial block that a fork shares is copied before it is written
//! ([`KvCacheManager::extend`]).
//!
//! Two blocks may have the same content, of which only the first is registered. It does not matter which one a sequence
//! reads: the kernels are batch-invariant, so cached KV and KV that is computed again have the same bits.

mod embeddings;
mod hash;
mod manager;
mod pool;
mod routing;

pub use embeddings::EmbeddingCache;
pub use hash::{BlockHash, CacheSalt, HashChain};
pub use manager::{BlockTable, KvCacheManager, PrefixMatch};
pub use pool::{BlockCounts, BlockPool};
pub use routing::RoutingCache;
