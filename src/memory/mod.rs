//! Memory: what there is, what the process may take of it, and what it is used for.

mod backlog;
mod borrowed;
mod budget;
mod identity;
mod probe;
mod traffic;

pub use backlog::Backlog;
pub use borrowed::BorrowedMap;
pub use budget::{MemoryBudget, MemoryReport, MemoryUse, human_bytes};
pub use identity::Identity;
pub use probe::{open_files_limit, resident_bytes, share_one_heap, total_bytes, trim};
pub use traffic::{Charge, Level, Traffic};
