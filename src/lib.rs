pub mod engine;
pub mod error;
pub mod executor;
pub mod text;
pub mod types;
