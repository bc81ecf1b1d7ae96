//! The policies that serve, told twice: by the orders that the executor was given, and by the answers that clients got.
//! At every step both must be the same.

use sha2::{Digest, Sha256};

use super::catalog::{Catalog, ContentId, PARAMETERS};
use super::model::mix;

/// The content of every parameter, and the adapter that is merged into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The base of each parameter.
    pub base: [u64; PARAMETERS],
    /// 0 for none.
    pub merged: ContentId,
}

impl Policy {
    pub const CHECKPOINT: Self = Self { base: [0; PARAMETERS], merged: 0 };

    /// What each parameter serves with.
    pub fn values(&self, catalog: &Catalog) -> [u64; PARAMETERS] {
        std::array::from_fn(|p| match catalog.touches(self.merged, p) {
            true => mix(self.base[p], u64::from(self.merged)),
            false => self.base[p],
        })
    }

    /// Every parameter gets a value of a FULL push.
    pub fn replace(&mut self, id: ContentId) {
        *self = Self { base: [u64::from(id); PARAMETERS], merged: 0 };
    }

    /// Single elements change, and what is merged becomes part of the base.
    pub fn patch(&mut self, (id, touches): (ContentId, [bool; PARAMETERS]), catalog: &Catalog) {
        let values = self.values(catalog);
        self.base = std::array::from_fn(|p| if touches[p] { mix(values[p], u64::from(id)) } else { values[p] });
        self.merged = 0;
    }
}

/// The bytes of one row of a parameter.
pub fn row_bytes(value: u64, row: usize) -> [u8; 12] {
    let word = mix(value, row as u64).to_le_bytes();
    std::array::from_fn(|i| word[i % 8])
}

/// The checksum of a parameter of five rows.
pub fn checksum(value: u64) -> [u8; 32] {
    let mut sha = Sha256::new();
    (0..5).for_each(|row| sha.update(row_bytes(value, row)));
    sha.finalize().into()
}

/// One number for what all parameters serve with.
pub fn fingerprint(values: [u64; PARAMETERS]) -> u64 {
    values.into_iter().fold(1, mix)
}
