//! Spreads the blocks of a launch over threads of the machine: the stream's own, and those that `CUEMU_THREADS` asks
//! for beside it.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use super::KernelLaunch;
use super::team::{Fault, Team};
use crate::settings;

thread_local!(static TEAM: RefCell<Option<Box<Team>>> = const { RefCell::new(None) });

/// A launch that threads work on.
struct Job {
    launch: Arc<KernelLaunch>,
    /// The next block that no worker has taken.
    next: AtomicU64,
    fault: Mutex<Option<Fault>>,
    helpers: Mutex<Helpers>,
    left: Condvar,
}

#[derive(Default)]
struct Helpers {
    /// Those at work on the launch.
    active: usize,
    /// Nobody joins any more: all blocks have been given out.
    closed: bool,
}

/// The `i`-th block to be run: with a seed, another order.
fn block(i: u64, blocks: u64, seed: u64) -> u64 {
    if seed == 0 {
        return i;
    }
    let index = (i + seed) % blocks;
    if seed % 2 == 1 { blocks - 1 - index } else { index }
}

impl Job {
    fn work(&self) {
        let (blocks, seed) = (self.launch.blocks(), settings::get().seed);
        TEAM.with_borrow_mut(|team| {
            let team: *mut Team = &raw mut **team.get_or_insert_with(Team::new);
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= blocks {
                    break;
                }
                // SAFETY: the team is this thread's, which runs one block after the other.
                if let Err(fault) = unsafe { Team::run(team, &self.launch, block(i, blocks, seed)) } {
                    self.next.store(blocks, Ordering::Relaxed);
                    self.fault.lock().unwrap().get_or_insert(fault);
                }
            }
        });
    }
}

impl Job {
    /// Joins in the work, if there is some left.
    fn help(&self) {
        let mut helpers = self.helpers.lock().unwrap();
        if helpers.closed {
            return;
        }
        helpers.active += 1;
        drop(helpers);
        self.work();
        self.helpers.lock().unwrap().active -= 1;
        self.left.notify_all();
    }

    /// Waits until those that have joined have ended.
    fn close(&self) {
        let mut helpers = self.helpers.lock().unwrap();
        helpers.closed = true;
        while helpers.active > 0 {
            helpers = self.left.wait(helpers).unwrap();
        }
    }
}

/// Threads that help with launches of many blocks.
fn helpers() -> &'static [Mutex<Sender<Arc<Job>>>] {
    static HELPERS: OnceLock<Vec<Mutex<Sender<Arc<Job>>>>> = OnceLock::new();
    HELPERS.get_or_init(|| {
        let helper = |_| {
            let (sender, jobs) = channel::<Arc<Job>>();
            let work = move || {
                for job in jobs {
                    job.help();
                }
            };
            std::thread::Builder::new().name("blocks".into()).spawn(work).expect("a thread for blocks");
            Mutex::new(sender)
        };
        (1..settings::get().threads).map(helper).collect()
    })
}

/// Runs all blocks of a launch.
pub fn run(launch: &Arc<KernelLaunch>) -> Result<(), Fault> {
    let count = (settings::get().threads - 1).min(launch.blocks().saturating_sub(1) as usize);
    let job = Arc::new(Job {
        launch: launch.clone(),
        next: AtomicU64::new(0),
        fault: Mutex::default(),
        helpers: Mutex::default(),
        left: Condvar::new(),
    });
    for helper in &helpers()[..count] {
        helper.lock().unwrap().send(job.clone()).expect("helpers run as long as the process");
    }
    job.work();
    if count > 0 {
        job.close();
    }
    job.fault.lock().unwrap().take().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::block;

    #[test]
    fn each_block_comes_once_in_every_order() {
        for seed in 0..5 {
            let mut order = (0..7).map(|i| block(i, 7, seed)).collect::<Vec<_>>();
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3, 4, 5, 6], "seed {seed}");
        }
    }
}
