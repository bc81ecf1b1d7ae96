//! Collectives, of threads and of processes.

use std::time::Duration;

use cuda::libraries::nccl::*;

use crate::device::*;
use crate::processes::{Actor, listen, part, say};

const F32: i32 = 7;
const SUM: i32 = 0;

fn unique_id() -> UniqueId {
    // SAFETY: an id is numbers, and the pointer is valid.
    unsafe {
        let mut id = std::mem::zeroed();
        ok(ncclGetUniqueId(&raw mut id));
        id
    }
}

fn join(id: UniqueId, ranks: i32, rank: i32) -> usize {
    // SAFETY: the pointer is valid.
    get(|out| unsafe { ncclCommInitRank(out, ranks, id, rank) })
}

/// Runs `body` for each rank, on a thread and a device of its own.
fn each_rank(ranks: i32, body: fn(usize, i32)) {
    let id = unique_id();
    let work = |rank| {
        std::thread::spawn(move || {
            open(rank);
            body(join(id, ranks, rank), rank);
        })
    };
    let threads = (0..ranks).map(work).collect::<Vec<_>>();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn ranks_of_threads_agree() {
    alone("nccl::ranks_of_threads_agree", &[("CUEMU_DEVICES", "4")], &[], || {
        each_rank(4, |comm, rank| {
            let stream = new_stream();
            let mine = (0..8).map(|i| (rank * 10 + i) as f32).collect::<Vec<_>>();
            let (from, to) = (upload(&mine), upload(&[0.0; 32]));
            // SAFETY: the addresses are checked.
            unsafe {
                ok(ncclAllReduce(from, to, 8, F32, SUM, comm, stream));
                ok(synchronize(stream));
                assert_eq!(download(to, 8).unwrap(), (0..8).map(|i| (60 + 4 * i) as f32).collect::<Vec<_>>());
                ok(ncclAllGather(from, to, 8, F32, comm, stream));
                ok(synchronize(stream));
                let all = download(to, 32).unwrap();
                assert_eq!((all[0], all[9], all[31]), (0.0, 11.0, 37.0));
                ok(ncclReduceScatter(from, to, 2, F32, SUM, comm, stream));
                ok(synchronize(stream));
                let part = (60 + 8 * rank) as f32;
                assert_eq!(download(to, 2).unwrap(), [part, part + 4.0]);
                ok(ncclBroadcast(from, to, 8, F32, 2, comm, stream));
                ok(synchronize(stream));
                assert_eq!(download(to, 8).unwrap()[7], 27.0);
                // Each sends to the next.
                ok(ncclGroupStart());
                ok(ncclSend(from, 8, F32, (rank + 1) % 4, comm, stream));
                ok(ncclRecv(to, 8, F32, (rank + 3) % 4, comm, stream));
                ok(ncclGroupEnd());
                ok(synchronize(stream));
                assert_eq!(download(to, 1).unwrap()[0], ((rank + 3) % 4 * 10) as f32);
                ok(ncclCommDestroy(comm));
            }
        });
    });
}

#[test]
fn ranks_that_disagree_are_found() {
    let said = ["the ranks of a communicator disagree"];
    alone("nccl::ranks_that_disagree_are_found", &[("CUEMU_DEVICES", "2")], &said, || {
        each_rank(2, |comm, rank| {
            let (stream, at) = (new_stream(), upload(&[0.0; 8]));
            // SAFETY: the addresses are checked.
            ok(unsafe { ncclAllReduce(at, at, 4 + rank as usize, F32, SUM, comm, stream) });
            assert_eq!(synchronize(stream), 719);
        });
    });
}

#[test]
fn a_rank_that_waits_can_abort() {
    alone("nccl::a_rank_that_waits_can_abort", &[("CUEMU_DEVICES", "2")], &[], || {
        each_rank(2, |comm, rank| {
            if rank == 1 {
                return; // It never comes.
            }
            let (stream, at) = (new_stream(), upload(&[0.0; 8]));
            // SAFETY: the addresses are checked.
            unsafe {
                ok(ncclAllReduce(at, at, 8, F32, SUM, comm, stream));
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(cuStreamQuery(stream), 600, "it waits for the other rank");
                ok(ncclCommAbort(comm));
            }
            ok(synchronize(stream));
        });
    });
}

fn to_text(id: UniqueId) -> String {
    // SAFETY: an id is 16 numbers.
    unsafe { std::mem::transmute::<UniqueId, [u64; 16]>(id) }.map(|n| n.to_string()).join(" ")
}

fn to_id(text: &str) -> UniqueId {
    let numbers = text.split(' ').map(|n| n.parse().expect("a number")).collect::<Vec<u64>>();
    let numbers: [u64; 16] = numbers.try_into().expect("sixteen numbers");
    // SAFETY: an id is 16 numbers.
    unsafe { std::mem::transmute(numbers) }
}

#[test]
fn ranks_of_processes_agree_and_see_one_die() {
    const TEST: &str = "nccl::ranks_of_processes_agree_and_see_one_die";
    if part().is_some() {
        open(0);
        let (comm, stream) = (join(to_id(&listen()), 2, 1), new_stream());
        let at = upload(&[1.0, 2.0, 3.0]);
        // SAFETY: the addresses are checked.
        unsafe {
            ok(ncclAllReduce(at, at, 3, F32, SUM, comm, stream));
            ok(synchronize(stream));
            say(&format!("{:?}", download(at, 3).unwrap()));
            ok(ncclBroadcast(at, at, 3, F32, 0, comm, stream));
            ok(synchronize(stream));
            say(&format!("{:?}", download(at, 3).unwrap()));
        }
        listen();
        return;
    }
    open(0);
    let id = unique_id();
    let mut other = Actor::start(TEST, "trainer", &[]);
    other.tell(&to_text(id));
    let (comm, stream, at) = (join(id, 2, 0), new_stream(), upload(&[10.0, 20.0, 30.0]));
    // SAFETY: the addresses are checked.
    unsafe {
        ok(ncclAllReduce(at, at, 3, F32, SUM, comm, stream));
        assert_eq!(other.hear(), "[11.0, 22.0, 33.0]");
        ok(cuMemsetD32Async(at, 0, 3, stream));
        ok(ncclBroadcast(at, at, 3, F32, 0, comm, stream));
        assert_eq!(other.hear(), "[0.0, 0.0, 0.0]");
        ok(ncclAllReduce(at, at, 3, F32, SUM, comm, stream));
        assert_eq!(get::<i32>(|out| ncclCommGetAsyncError(comm, out)), 0);
        other.kill();
        while get::<i32>(|out| ncclCommGetAsyncError(comm, out)) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(get::<i32>(|out| ncclCommGetAsyncError(comm, out)), 6);
        assert_eq!(cuStreamQuery(stream), 600, "the collective waits for the rank that is gone");
        ok(ncclCommAbort(comm));
    }
    ok(synchronize(stream));
}
