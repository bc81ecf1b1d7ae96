pub mod engine;
pub mod error;
pub mod executor;
pub mod server;
pub mod text;
pub mod types;
