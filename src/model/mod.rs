//! The model: one decoder, whose families differ by configuration.

pub mod config;
