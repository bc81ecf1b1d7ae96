//! Words that one thread writes and others read as a whole, without a lock.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// How often a reader retries while a write is in progress. A write takes nanoseconds unless the system suspends its
/// thread.
const TRIES: usize = 64;

/// `N` words with a count of writes that is odd during a write (a seqlock). The writer never waits; a reader retries if
/// it meets a write.
#[derive(Debug)]
pub(super) struct Cell<const N: usize> {
    writes: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Cell<N> {
    pub fn new(words: [u64; N]) -> Self {
        Self { writes: AtomicU64::new(0), words: words.map(AtomicU64::new) }
    }

    /// Replaces all words. Only one thread may write.
    pub fn write(&self, words: &[u64; N]) {
        let before = self.writes.load(Ordering::Relaxed);
        self.writes.store(before + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (to, word) in self.words.iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
        self.writes.store(before + 2, Ordering::Release);
    }

    /// The words of the last write; `None` if the system suspended the writer in the middle of one.
    pub fn read(&self) -> Option<[u64; N]> {
        for _ in 0..TRIES {
            let before = self.writes.load(Ordering::Acquire);
            if before.is_multiple_of(2) {
                let words = std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
                fence(Ordering::Acquire);
                if self.writes.load(Ordering::Relaxed) == before {
                    return Some(words);
                }
            }
            std::thread::yield_now();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_reader_never_sees_half_a_write() {
        let (cell, done) = (Arc::new(Cell::new([0; 8])), Arc::new(AtomicBool::new(false)));
        let reader = std::thread::spawn({
            let (cell, done) = (cell.clone(), done.clone());
            move || {
                let mut seen = 0;
                while !done.load(Ordering::Relaxed) {
                    let Some(words) = cell.read() else { continue };
                    assert!(words.iter().all(|&word| word == words[0]), "{words:?}");
                    assert!(words[0] >= seen, "{} after {seen}", words[0]);
                    seen = words[0];
                }
                cell.read().expect("nobody writes")[0]
            }
        });
        (1..=200_000).for_each(|i| cell.write(&[i; 8]));
        done.store(true, Ordering::Relaxed);
        assert_eq!(reader.join().expect("no panic"), 200_000);
    }
}
