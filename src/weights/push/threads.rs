//! Work on many tensors of a push by a few threads.

use std::cmp::Reverse;
use std::thread::ScopedJoinHandle;

use crate::error::{Error, Result};

/// Most threads that work on a push: they copy and hash, and memory does not feed more.
pub(super) const MAX_THREADS: usize = 4;

/// Does `work` for every item, on up to [`MAX_THREADS`] threads. Items are `(cost, item)`: the most expensive are given
/// out first, each to the thread that has least to do.
///
/// # Errors
/// That of an item whose work failed.
pub(super) fn in_parallel<T: Send>(items: Vec<(usize, T)>, work: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    in_parallel_with(items, &mut [(); MAX_THREADS], |(), item| work(item))
}

/// Does `work` for every item as [`in_parallel`], with one of `with` for each thread.
pub(super) fn in_parallel_with<T: Send, S: Send>(
    mut items: Vec<(usize, T)>,
    with: &mut [S; MAX_THREADS],
    work: impl Fn(&mut S, T) -> Result<()> + Sync,
) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    items.sort_by_key(|(cost, _)| Reverse(*cost));
    let mut shares: Vec<(usize, Vec<T>)> = (0..threads).map(|_| (0, Vec::new())).collect();
    for (cost, item) in items {
        let share = shares.iter_mut().min_by_key(|(load, _)| *load).expect("there is a thread");
        share.0 += cost;
        share.1.push(item);
    }
    // The first share is done by the calling thread, so that a single item starts no other.
    let own = shares.swap_remove(0).1;
    let (own_with, with) = with.split_last_mut().expect("there is a thread");
    let do_all = &|with: &mut S, items: Vec<T>| items.into_iter().try_for_each(|item| work(with, item));
    std::thread::scope(|scope| {
        let others: Vec<_> = shares
            .into_iter()
            .zip(with)
            .filter(|((_, items), _)| !items.is_empty())
            .map(|((_, items), with)| scope.spawn(move || do_all(with, items)))
            .collect();
        let own = do_all(own_with, own);
        let join = |thread: ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(Error::Internal("a thread that read tensors panicked".into())))
        };
        // Every thread is joined, also after one has failed.
        others.into_iter().map(join).fold(own, |all, result| all.and(result))
    })
}
