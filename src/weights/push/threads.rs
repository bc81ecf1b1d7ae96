//! Work on many tensors of a push by a few threads.

use std::cmp::Reverse;

use crate::error::{Error, Result};

/// Most threads that work on a push: they copy and hash, and memory does not feed more.
const MAX_THREADS: usize = 4;

/// Does `work` for every item, on up to [`MAX_THREADS`] threads. Items are `(cost, item)`: the most expensive are given
/// out first, each to the thread that has least to do.
///
/// # Errors
/// That of an item whose work failed.
pub(super) fn in_parallel<T: Send>(mut items: Vec<(usize, T)>, work: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    items.sort_by_key(|(cost, _)| Reverse(*cost));
    let mut shares: Vec<(usize, Vec<T>)> = (0..threads).map(|_| (0, Vec::new())).collect();
    for (cost, item) in items {
        let share = shares.iter_mut().min_by_key(|(load, _)| *load).expect("there is a thread");
        share.0 += cost;
        share.1.push(item);
    }
    let do_all = &|items: Vec<T>| items.into_iter().try_for_each(&work);
    // The calling thread does the first share, so that a single item starts no other thread.
    let (_, first) = shares.swap_remove(0);
    std::thread::scope(|scope| {
        let others = shares.into_iter().filter(|(_, items)| !items.is_empty());
        let others: Vec<_> = others.map(|(_, items)| scope.spawn(move || do_all(items))).collect();
        let result = do_all(first);
        // Every thread is joined, also after one has failed.
        others.into_iter().fold(result, |result, thread| {
            let joined = thread.join();
            result.and(joined.unwrap_or_else(|_| Err(Error::Internal("a thread that read tensors panicked".into()))))
        })
    })
}
