//! Pictures of transformers and Pillow (tests/fixtures/make_pixels.py), damaged files, and bombs.

mod files;
mod refused;
mod settings;
mod truth;
