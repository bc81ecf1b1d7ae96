//! Which pictures' embeddings are on the device, and in which rows of their buffer.

use std::collections::HashMap;
use std::ops::Range;

use crate::types::PictureHash;

/// The rows of a buffer of embeddings, by picture. The least recently used picture is replaced first.
#[derive(Clone, Debug)]
pub struct EmbeddingCache {
    rows: usize,
    entries: HashMap<PictureHash, CachedEmbeddings>,
    /// Number of uses so far, which orders them.
    uses: u64,
}

#[derive(Clone, Debug)]
struct CachedEmbeddings {
    rows: Range<usize>,
    last_use: u64,
    /// Whether no prompt has used them yet.
    is_new: bool,
}

impl EmbeddingCache {
    /// A buffer of `rows` rows, one for each token of a picture.
    pub fn new(rows: usize) -> Self {
        Self { rows, entries: HashMap::new(), uses: 0 }
    }

    /// The number of rows of the buffer.
    pub fn capacity(&self) -> usize {
        self.rows
    }

    /// The rows of a picture, which count as used now.
    pub fn find(&mut self, picture: PictureHash) -> Option<Range<usize>> {
        self.uses += 1;
        let entry = self.entries.get_mut(&picture)?;
        entry.last_use = self.uses;
        Some(entry.rows.clone())
    }

    /// Whether a picture that has rows is used for the first time. The next call counts as a later use.
    pub fn is_first_use(&mut self, picture: PictureHash) -> bool {
        self.entries.get_mut(&picture).is_some_and(|entry| std::mem::take(&mut entry.is_new))
    }

    /// Gives `tokens` rows to a picture that has none. Drops the least recently used pictures until as many rows are
    /// free in one run, but no picture that `is_protected`. If that is not enough, nothing changes.
    pub fn allocate(
        &mut self,
        picture: PictureHash,
        tokens: usize,
        is_protected: impl Fn(PictureHash) -> bool,
    ) -> Option<Range<usize>> {
        assert!(!self.entries.contains_key(&picture), "{picture} has rows already");
        let mut by_age: Vec<PictureHash> = self.entries.keys().copied().filter(|other| !is_protected(*other)).collect();
        by_age.sort_unstable_by_key(|other| self.entries[other].last_use);
        let rows = (0..=by_age.len()).find_map(|dropped| Some((dropped, self.gap(tokens, &by_age[..dropped])?)));
        let (dropped, rows) = rows?;
        by_age[..dropped].iter().for_each(|other| {
            self.entries.remove(other);
        });
        self.uses += 1;
        self.entries.insert(picture, CachedEmbeddings { rows: rows.clone(), last_use: self.uses, is_new: true });
        Some(rows)
    }

    /// Frees the rows of a picture.
    pub fn remove(&mut self, picture: PictureHash) {
        self.entries.remove(&picture);
    }

    /// Frees all rows.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Number of pictures that have rows.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of rows that pictures have.
    pub fn held_rows(&self) -> usize {
        self.entries.values().map(|entry| entry.rows.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Asserts that no two pictures share rows, and that all rows are in the buffer.
    pub fn check_integrity(&self) {
        let mut taken: Vec<&Range<usize>> = self.entries.values().map(|entry| &entry.rows).collect();
        taken.sort_unstable_by_key(|rows| rows.start);
        assert!(taken.windows(2).all(|pair| pair[0].end <= pair[1].start), "{taken:?} overlap");
        assert!(taken.iter().all(|rows| rows.start < rows.end && rows.end <= self.rows), "{taken:?} of {}", self.rows);
    }

    /// The first run of `tokens` rows that are free if the pictures of `without` are dropped.
    fn gap(&self, tokens: usize, without: &[PictureHash]) -> Option<Range<usize>> {
        let kept = self.entries.iter().filter(|(picture, _)| !without.contains(picture));
        let mut taken: Vec<Range<usize>> = kept.map(|(_, entry)| entry.rows.clone()).collect();
        taken.push(self.rows..self.rows);
        taken.sort_unstable_by_key(|rows| rows.start);
        let mut free = 0;
        for rows in taken {
            if free + tokens <= rows.start {
                return Some(free..free + tokens);
            }
            free = rows.end;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(number: u8) -> PictureHash {
        PictureHash([number; 32])
    }

    #[test]
    fn the_least_recently_used_picture_is_replaced() {
        let mut cache = EmbeddingCache::new(10);
        assert_eq!(cache.allocate(picture(1), 4, |_| false), Some(0..4));
        assert_eq!(cache.allocate(picture(2), 4, |_| false), Some(4..8));
        assert_eq!(cache.find(picture(1)), Some(0..4));
        assert_eq!((cache.is_first_use(picture(1)), cache.is_first_use(picture(1))), (true, false));
        assert_eq!(cache.allocate(picture(3), 3, |_| false), Some(4..7), "the second has not been used since");
        assert_eq!((cache.find(picture(2)), cache.len(), cache.held_rows()), (None, 2, 7));
        assert_eq!(cache.allocate(picture(4), 3, |_| false), Some(7..10), "nothing needs to go");
        cache.check_integrity();
    }

    #[test]
    fn protected_pictures_stay_and_what_does_not_fit_changes_nothing() {
        let mut cache = EmbeddingCache::new(10);
        for number in [1, 2, 3] {
            cache.allocate(picture(number), 3, |_| false).unwrap();
        }
        let second = |other| other == picture(2);
        assert_eq!(cache.allocate(picture(4), 5, second), None, "the second is in the middle");
        assert_eq!(cache.len(), 3);
        assert_eq!(cache.allocate(picture(4), 4, second), Some(6..10));
        assert_eq!((cache.find(picture(1)), cache.find(picture(2))), (None, Some(3..6)));
        assert_eq!(cache.allocate(picture(5), 11, |_| false), None);
        cache.remove(picture(4));
        assert_eq!(cache.find(picture(4)), None);
        cache.clear();
        assert!(cache.is_empty());
    }
}
