pub mod cache;
pub mod engine;
pub mod error;
pub mod scheduler;
pub mod types;
