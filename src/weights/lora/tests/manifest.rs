//! What a manifest can have wrong, and what each is told.
