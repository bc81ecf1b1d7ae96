//! Freed memory goes back to the system, whichever thread took it. The measured process must have no other threads and
//! must start as the server does, so this file has a `main` of its own instead of the test harness.

use rollout_server::memory::{resident_bytes, share_one_heap, trim};

const KEPT_BYTES: usize = 16 << 20;
const BLOCK_BYTES: usize = 64 << 10;

fn main() {
    share_one_heap();
    // Freeing a large block raises the amount that glibc keeps at the end of a heap, as in a server that has been
    // serving.
    drop(std::hint::black_box(vec![1_u8; KEPT_BYTES]));
    let before = resident_bytes();
    let held = std::thread::spawn(|| {
        let blocks: Vec<Vec<u8>> = (0..KEPT_BYTES / BLOCK_BYTES).map(|_| vec![1; BLOCK_BYTES]).collect();
        let held = resident_bytes();
        drop(blocks);
        held
    });
    let held = held.join().expect("the thread ends") - before;
    trim();
    let left = resident_bytes().saturating_sub(before);
    println!("a thread took {held} bytes; after it freed them {left} are left");
    assert!(held > KEPT_BYTES as u64 * 9 / 10, "{held} bytes were taken");
    if cfg!(target_env = "gnu") {
        assert!(left < KEPT_BYTES as u64 / 8, "{left} of {held} bytes did not go back");
    }
}
