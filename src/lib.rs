pub mod engine;
pub mod error;
pub mod server;
pub mod types;
