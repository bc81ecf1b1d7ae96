//! What ranks that are threads of one process agree on without their devices.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};

/// One rank's end of an agreement. All ranks say the same number of times what they have to say.
pub struct Accord {
    rank: usize,
    /// Which of the two rounds is next.
    next: Cell<usize>,
    shared: Arc<Shared>,
}

struct Shared {
    barrier: Barrier,
    /// What each rank says, in two rounds in turn: that of the last may still be read when the next begins.
    said: [Vec<AtomicU32>; 2],
}

impl Accord {
    /// The ends of `world` ranks, to be moved to one thread each.
    pub fn create(world: usize) -> Vec<Self> {
        let said = [(); 2].map(|()| (0..world).map(|_| AtomicU32::new(0)).collect());
        let shared = Arc::new(Shared { barrier: Barrier::new(world), said });
        (0..world).map(|rank| Self { rank, next: Cell::new(0), shared: shared.clone() }).collect()
    }

    /// The least of what all ranks say, when all have. A rank that never comes holds the others, so that one that fails
    /// must end the process.
    pub fn least(&self, mine: u32) -> u32 {
        let said = &self.shared.said[self.next.get()];
        self.next.set(1 - self.next.get());
        said[self.rank].store(mine, Ordering::Release);
        self.shared.barrier.wait();
        said.iter().map(|said| said.load(Ordering::Acquire)).fold(mine, u32::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_get_the_least_of_each_round() {
        for world in [1, 2, 3, 8] {
            // Another rank says the least in each round, and others are quicker.
            let said = |rank: usize, round: usize| 1 + ((rank + 5 * round) % world + round % 3) as u32;
            let expected: Vec<u32> = (0..500).map(|round| (0..world).map(|r| said(r, round)).min().unwrap()).collect();
            std::thread::scope(|scope| {
                for (rank, accord) in Accord::create(world).into_iter().enumerate() {
                    let expected = &expected;
                    scope.spawn(move || {
                        let heard: Vec<u32> = (0..500).map(|round| accord.least(said(rank, round))).collect();
                        assert_eq!(heard, *expected, "rank {rank} of {world}");
                    });
                }
            });
        }
    }
}
