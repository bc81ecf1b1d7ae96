//! Memory: how much there is, how much the process may take, and what it is used for.

mod backlog;
mod borrowed;
mod budget;
mod identity;
mod traffic;

pub use backlog::Backlog;
pub use borrowed::BorrowedMap;
pub use budget::{MemoryBudget, MemoryReport, MemoryUse, human_bytes};
pub use identity::Identity;
pub use rollout_kernels::host::memory::{open_files_limit, resident_bytes, share_one_heap, trim};
pub use traffic::{Charge, Level, Traffic};
