//! Collectives, of threads and of processes.

use std::time::Duration;

use cuda::libraries::nccl::*;

use crate::device::*;
use crate::graphs::{begin, end, instantiate, replay};
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

/// Adds 8 values of all ranks.
fn add(at: u64, comm: usize, stream: usize) {
    // SAFETY: the addresses are checked.
    ok(unsafe { ncclAllReduce(at, at, 8, F32, SUM, comm, stream) });
}

/// A graph of what `launches` starts, and the same as it can be launched.
fn record(stream: usize, launches: impl FnOnce()) -> (usize, usize) {
    begin(stream);
    launches();
    let graph = end(stream).unwrap();
    (graph, instantiate(graph))
}

fn destroy((graph, exec): (usize, usize)) {
    // SAFETY: any handle may be given.
    unsafe {
        ok(cuGraphExecDestroy(exec));
        ok(cuGraphDestroy(graph));
    }
}

#[test]
fn captured_collectives_are_made_when_their_graph_is_launched() {
    alone("nccl::captured_collectives_are_made_when_their_graph_is_launched", &[("CUEMU_DEVICES", "4")], &[], || {
        each_rank(4, |comm, rank| {
            let (stream, at, all) = (new_stream(), upload(&[1.0 + rank as f32; 8]), upload(&[0.0; 32]));
            let (twice, gathered) = (
                record(stream, || (0..2).for_each(|_| add(at, comm, stream))),
                // SAFETY: the addresses are checked.
                record(stream, || ok(unsafe { ncclAllGather(at, all, 8, F32, comm, stream) })),
            );
            ok(synchronize(stream));
            assert_eq!(download(at, 1).unwrap(), [1.0 + rank as f32], "a capture does nothing");
            // The sum is 10; each further one is four times the last.
            replay(twice.1, stream);
            add(at, comm, stream);
            replay(twice.1, stream);
            replay(gathered.1, stream);
            ok(synchronize(stream));
            assert_eq!(download(at, 8).unwrap(), [2560.0; 8]);
            assert_eq!(download(all, 32).unwrap(), [2560.0; 32]);
            replay(twice.1, stream);
            [twice, gathered].into_iter().for_each(destroy);
            // SAFETY: nothing uses it but what was launched.
            ok(unsafe { ncclCommDestroy(comm) });
        });
    });
}

const DISAGREE: &str = "the ranks of a communicator disagree about a collective: ";

#[test]
fn a_graph_that_one_rank_launches_alone_is_found() {
    let said = [DISAGREE, "some ranks launch a graph that has it, others do not"];
    alone("nccl::a_graph_that_one_rank_launches_alone_is_found", &[("CUEMU_DEVICES", "2")], &said, || {
        each_rank(2, |comm, rank| {
            let (stream, at) = (new_stream(), upload(&[0.0; 8]));
            let (_, exec) = record(stream, || add(at, comm, stream));
            if rank == 0 {
                replay(exec, stream)
            } else {
                add(at, comm, stream)
            }
            assert_eq!(synchronize(stream), 719);
        });
    });
}

#[test]
fn a_collective_that_one_rank_captures_alone_is_found() {
    let said = [DISAGREE, "some have captured collectives and others have not"];
    alone("nccl::a_collective_that_one_rank_captures_alone_is_found", &[("CUEMU_DEVICES", "2")], &said, || {
        each_rank(2, |comm, rank| {
            let (stream, at) = (new_stream(), upload(&[0.0; 8]));
            if rank == 0 {
                record(stream, || add(at, comm, stream));
            }
            // The graph is never launched: all is as NCCL wants it but for the capture.
            add(at, comm, stream);
            assert_eq!(synchronize(stream), 719);
        });
    });
}

#[test]
fn graphs_of_different_captures_are_found() {
    let said = [DISAGREE, "ranks launch graphs of different captures"];
    alone("nccl::graphs_of_different_captures_are_found", &[("CUEMU_DEVICES", "2")], &said, || {
        each_rank(2, |comm, rank| {
            let (stream, at) = (new_stream(), upload(&[0.0; 8]));
            let graphs = [(); 2].map(|()| record(stream, || add(at, comm, stream)));
            replay(graphs[0].1, stream);
            ok(synchronize(stream));
            replay(graphs[rank as usize].1, stream);
            assert_eq!(synchronize(stream), 719);
        });
    });
}

#[test]
fn a_communicator_is_destroyed_after_its_graphs() {
    let said = ["the real one waits for ever"];
    alone("nccl::a_communicator_is_destroyed_after_its_graphs", &[("CUEMU_DEVICES", "2")], &said, || {
        each_rank(2, |comm, _| {
            let (stream, at) = (new_stream(), upload(&[0.0; 8]));
            record(stream, || add(at, comm, stream));
            // SAFETY: any handle may be given.
            assert_eq!(unsafe { ncclCommDestroy(comm) }, 5);
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

#[test]
fn a_rank_that_does_not_block_can_give_up() {
    alone("nccl::a_rank_that_does_not_block_can_give_up", &[("CUEMU_DEVICES", "2")], &[], || {
        let config = [24u64, 21_400 << 32 | 0xcafe_beef, 0];
        let begin = |id| {
            let mut comm = 0;
            // SAFETY: the pointers are valid.
            let status = unsafe { ncclCommInitRankConfig(&raw mut comm, 2, id, 0, config.as_ptr().cast()) };
            assert_eq!(status, 7, "it goes on");
            comm
        };
        // SAFETY: the pointers and addresses are valid.
        let error = |comm| get::<i32>(|out| unsafe { ncclCommGetAsyncError(comm, out) });
        open(0);
        let alone = begin(unique_id());
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(error(alone), 7, "the other has not come");
        // SAFETY: nothing uses it.
        ok(unsafe { ncclCommAbort(alone) });

        let id = unique_id();
        let comm = begin(id);
        let other = std::thread::spawn(move || {
            open(1);
            let (comm, stream, at) = (join(id, 2, 1), new_stream(), upload(&[5.0; 8]));
            // SAFETY: the addresses are checked.
            ok(unsafe { ncclBroadcast(at, at, 8, F32, 1, comm, stream) });
            ok(synchronize(stream));
        });
        while error(comm) == 7 {
            std::thread::yield_now();
        }
        let (stream, at) = (new_stream(), upload(&[0.0; 8]));
        // SAFETY: the addresses are checked.
        ok(unsafe { ncclBroadcast(at, at, 8, F32, 1, comm, stream) });
        ok(synchronize(stream));
        assert_eq!(download(at, 8).unwrap(), [5.0; 8]);
        other.join().unwrap();
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
