//! A collective of ranks that are threads of one process, without their devices.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};

/// One rank's end of a group of threads. All ranks make the same number of calls.
pub struct HostGroup {
    rank: usize,
    /// Which of the two rounds is next.
    next: Cell<usize>,
    shared: Arc<HostShared>,
}

struct HostShared {
    barrier: Barrier,
    /// The value of each rank, in two alternating rounds: values of the last round may still be read when the next
    /// begins.
    values: [Vec<AtomicU32>; 2],
}

impl HostGroup {
    /// The ends of `world` ranks, to be moved to one thread each.
    pub fn create(world: usize) -> Vec<Self> {
        let values = [(); 2].map(|()| (0..world).map(|_| AtomicU32::new(0)).collect());
        let shared = Arc::new(HostShared { barrier: Barrier::new(world), values });
        (0..world).map(|rank| Self { rank, next: Cell::new(0), shared: shared.clone() }).collect()
    }

    /// The minimum of the values of all ranks, once all have called it. A rank that never calls blocks the others, so a
    /// rank that fails must end the process.
    pub fn all_reduce_min(&self, mine: u32) -> u32 {
        let values = &self.shared.values[self.next.get()];
        self.next.set(1 - self.next.get());
        values[self.rank].store(mine, Ordering::Release);
        self.shared.barrier.wait();
        values.iter().map(|value| value.load(Ordering::Acquire)).fold(mine, u32::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_get_the_minimum_of_each_round() {
        for world in [1, 2, 3, 8] {
            // Another rank has the minimum in each round, and others are quicker.
            let value = |rank: usize, round: usize| 1 + ((rank + 5 * round) % world + round % 3) as u32;
            let expected: Vec<u32> = (0..500).map(|round| (0..world).map(|r| value(r, round)).min().unwrap()).collect();
            std::thread::scope(|scope| {
                for (rank, group) in HostGroup::create(world).into_iter().enumerate() {
                    let expected = &expected;
                    scope.spawn(move || {
                        let found: Vec<u32> = (0..500).map(|round| group.all_reduce_min(value(rank, round))).collect();
                        assert_eq!(found, *expected, "rank {rank} of {world}");
                    });
                }
            });
        }
    }
}
