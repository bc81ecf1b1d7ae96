//! Memory: how much there is, how much the process may take, and what it is used for.

mod backlog;
mod borrowed;
mod budget;
mod identity;
mod ledger;
mod traffic;

pub use backlog::Backlog;
pub use borrowed::BorrowedMap;
pub use budget::MemoryBudget;
pub use identity::Identity;
pub use ledger::{MemoryReport, MemoryUse, human_bytes};
pub use rollout_kernels::host::memory::{open_files_limit, resident_bytes, share_one_heap, total_bytes, trim};
pub use traffic::{Charge, Level, Traffic};
