pub mod engine;
pub mod error;
pub mod model;
pub mod types;
pub mod weights;
