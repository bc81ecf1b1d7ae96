//! Groups of ranks. A machine with fewer GPUs than ranks cannot run these: the emulator has as many as
//! `CUEMU_DEVICES` says.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

use rollout_kernels::{
    Activations, AllReduce, AttentionSequence, Backend, Device, DeviceOptions, Devices, HostCollective, Matrix,
    MatrixShape, Membership, Ops, Padding, RankGroup, StepInput, StorageDtype, TensorView,
};

use crate::common::{NOTHING, Random, values_of};

/// Numbers of ranks, odd ones too.
const WORLDS: [usize; 3] = [2, 3, 4];

/// NCCL may hang where a device has operations of two groups under way: one test at a time has a group.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The results of `body` on each rank of a group.
fn on_ranks<T: Send>(world: usize, all_reduce: AllReduce, body: impl Fn(&Device, &RankGroup) -> T + Sync) -> Vec<T> {
    let devices = Devices::open(Backend::Cuda, world, &DeviceOptions::default()).unwrap();
    let id = devices.of_rank(0).group_id().unwrap().expect("a GPU is not reached through the host");
    std::thread::scope(|scope| {
        let (devices, body) = (&devices, &body);
        let run = |rank| {
            let device = devices.of_rank(rank);
            let group = device.join(&Membership { id, rank, world }, all_reduce).unwrap();
            body(device, &group)
        };
        let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn tensor(device: &Device, values: &[f32], rows: usize, width: usize) -> rollout_kernels::Activations {
    let tensor = device.activations(rows, width).unwrap();
    let source = candle_core::Tensor::from_slice(values, (rows, width), tensor.device()).unwrap();
    tensor.slice_set(&source, 0, 0).unwrap();
    tensor
}

/// The sum of a balanced binary tree: the sum of the first half plus the sum of the second half.
fn tree_sum(terms: &[f32]) -> f32 {
    match terms {
        [one] => *one,
        _ => {
            let (a, b) = terms.split_at(terms.len() / 2);
            tree_sum(a) + tree_sum(b)
        }
    }
}

#[test]
fn every_rank_gets_the_bits_of_the_tree() {
    let _alone = alone();
    for (seed, world) in WORLDS.into_iter().enumerate() {
        println!("seed {seed}, {world} ranks");
        let mut random = Random::new(seed as u64);
        let shapes: Vec<_> = (0..5).map(|_| (random.between(1, 40), random.between(1, 90))).collect();
        // Of very different sizes, so that another order gives other bits.
        let mut terms = |len: usize| -> Vec<f32> {
            random.normals(len, 1.0).iter().zip(random.normals(len, 8.0)).map(|(x, power)| x * power.exp2()).collect()
        };
        let values: Vec<Vec<Vec<f32>>> =
            (0..world).map(|_| shapes.iter().map(|(rows, width)| terms(rows * width)).collect()).collect();
        let found = on_ranks(world, AllReduce::Tree, |device, group| {
            // Calls one after the other, without a wait between them.
            let mine = shapes.iter().zip(&values[group.rank()]);
            let sums: Vec<_> = mine.map(|((rows, width), values)| tensor(device, values, *rows, *width)).collect();
            sums.iter().for_each(|x| group.all_reduce_sum(x).unwrap());
            sums.iter().map(|x| values_of(x)).collect::<Vec<_>>()
        });
        for (i, (rows, width)) in shapes.iter().enumerate() {
            let of_ranks = |at: usize| values.iter().map(|of| of[i][at]).collect::<Vec<f32>>();
            let expected: Vec<f32> = (0..rows * width).map(|at| tree_sum(&of_ranks(at))).collect();
            assert!(found.iter().all(|of| of[i] == expected), "seed {seed}, {world} ranks: {rows} x {width}");
        }
    }
}

#[test]
fn a_sum_longer_than_the_memory_between_ranks_goes_in_parts() {
    let _alone = alone();
    // A little more than half of the memory, which two ranks have to share.
    let (rows, width) = (1100, 4096);
    assert!(
        2 * rows * width * size_of::<f32>()
            > Devices::open(Backend::Cuda, 1, &DeviceOptions::default()).unwrap().of_rank(0).exchange_bytes()
    );
    let value = |rank: usize, i: usize| (i % 1001 + rank) as f32;
    let sums = on_ranks(2, AllReduce::Tree, |device, group| {
        let values: Vec<f32> = (0..rows * width).map(|i| value(group.rank(), i)).collect();
        let (x, whole) = (tensor(device, &values, rows, width), device.activations(rows, 2 * width).unwrap());
        group.all_gather_columns(&x, &whole).unwrap();
        let row = |row: usize| values_of(&whole.narrow(0, row, 1).unwrap());
        for at in [0, 511, 1024, rows - 1] {
            let of = |rank| (at * width..(at + 1) * width).map(move |i| value(rank, i));
            assert!(row(at) == of(0).chain(of(1)).collect::<Vec<_>>(), "row {at}");
        }
        group.all_reduce_sum(&x).unwrap();
        values_of(&x)
    });
    let is_sum = |(i, x): (usize, &f32)| *x == value(0, i) + value(1, i);
    assert!(sums.iter().all(|sum| sum.iter().enumerate().all(is_sum)));
}

#[test]
fn columns_come_in_the_order_of_ranks() {
    let _alone = alone();
    for (seed, world) in WORLDS.into_iter().enumerate() {
        println!("seed {seed}, {world} ranks");
        let mut random = Random::new(seed as u64);
        let (rows, width) = (random.between(1, 20), random.between(1, 300));
        // The last rank may have fewer columns than the others.
        let columns = world * width - random.between(0, width - 1);
        let values: Vec<Vec<f32>> = (0..world).map(|_| random.normals(rows * width, 1.0)).collect();
        let joined: Vec<f32> = (0..rows)
            .flat_map(|row| values.iter().flat_map(move |of| &of[row * width..][..width]).take(columns))
            .copied()
            .collect();
        let found = on_ranks(world, AllReduce::Tree, |device, group| {
            let out = device.activations(rows, columns).unwrap();
            group.all_gather_columns(&tensor(device, &values[group.rank()], rows, width), &out).unwrap();
            group.release();
            values_of(&out)
        });
        assert!(
            found.iter().all(|out| *out == joined),
            "seed {seed}, {world} ranks: {rows} x {columns} of {width} each"
        );
    }
}

#[test]
fn the_library_adds_the_same_numbers() {
    let _alone = alone();
    let sums = on_ranks(4, AllReduce::Library, |device, group| {
        let x = tensor(device, &[group.rank() as f32, 0.5, -1.0], 1, 3);
        group.all_reduce_sum(&x).unwrap();
        values_of(&x)
    });
    assert!(sums.iter().all(|sum| *sum == [6.0, 2.0, -4.0]), "{sums:?}");
}

/// An all-reduce of a minimum over the ranks of a group, on the host.
struct HostGroup {
    values: Vec<AtomicU32>,
    barrier: Barrier,
}

/// One rank's end of a [`HostGroup`].
struct HostRank<'a>(&'a HostGroup, usize);

impl HostCollective for HostRank<'_> {
    fn world(&self) -> usize {
        self.0.values.len()
    }

    fn all_reduce_min(&self, mine: u32) -> u32 {
        self.0.all_reduce_min(self.1, mine)
    }
}

impl HostGroup {
    fn new(world: usize) -> Self {
        Self { values: (0..world).map(|_| AtomicU32::new(0)).collect(), barrier: Barrier::new(world) }
    }

    fn all_reduce_min(&self, rank: usize, mine: u32) -> u32 {
        self.values[rank].store(mine, Ordering::SeqCst);
        self.barrier.wait();
        let min = self.values.iter().map(|value| value.load(Ordering::SeqCst)).min();
        self.barrier.wait();
        min.expect("there are ranks")
    }
}

const WIDTH: usize = 64;
const VOCAB: usize = 30;
const PADDING: Padding = Padding { most_rows: 64, vocabulary: VOCAB, variant: None };

/// A token's embedding on a rank: small integers, so that their sums are exact.
fn embedding(rank: usize, token: u32) -> Vec<f32> {
    (0..WIDTH).map(|i| ((token as usize * 7 + i * (rank + 3)) % 101) as f32).collect()
}

/// A rank whose steps sum the values that all ranks have for some tokens.
struct Summing<'a> {
    device: &'a Device,
    group: &'a RankGroup,
    host: &'a HostGroup,
    ops: Ops,
    table: Matrix,
    square: Matrix,
    out: Activations,
}

impl<'a> Summing<'a> {
    fn new(device: &'a Device, group: &'a RankGroup, host: &'a HostGroup) -> Self {
        let zeros = |dtype, n| device.zeros(MatrixShape { dtype, n, k: WIDTH, leaves: 1 }).unwrap();
        let (mut table, square) = (zeros(StorageDtype::F32, VOCAB), zeros(StorageDtype::Bf16, WIDTH));
        let values: Vec<f32> = (0..VOCAB as u32).flat_map(|token| embedding(group.rank(), token)).collect();
        table.write_rows(0, TensorView::F32(&values));
        let (ops, out) = (device.ops(), device.activations(PADDING.most_rows, WIDTH).unwrap());
        Self { device, group, host, ops, table, square, out }
    }

    /// The sums of one step, and whether its operators were called.
    fn step(&self, tokens: &[u32]) -> (Vec<f32>, bool) {
        let sequence =
            |first_row| AttentionSequence { first_row, rows: 1, start_position: 0, visible: None, block_table: &[0] };
        let sequences: Vec<_> = (0..tokens.len()).map(sequence).collect();
        let step = self.ops.prepare_padded(StepInput { tokens, sequences: &sequences, ..NOTHING }, PADDING).unwrap();
        let mut is_called = false;
        let launches = || {
            is_called = true;
            let out = self.out.narrow(0, 0, step.rows())?;
            self.ops.embed(&self.table, 0, &step, &out)?;
            self.group.all_reduce_sum(&out)
        };
        let ranks = HostRank(self.host, self.group.rank());
        self.ops.capture_or_replay::<candle_core::Error>(&step, &ranks, launches).unwrap();
        (values_of(&self.out.narrow(0, 0, tokens.len()).unwrap()), is_called)
    }

    /// Has operators take more memory than they keep, which moves it.
    fn grow(&self, rows: usize) {
        let [x, out] = [(); 2].map(|()| self.device.activations(rows, WIDTH).unwrap());
        self.ops.linear(&x, &self.square, None, &out).unwrap();
    }
}

#[test]
fn ranks_capture_and_replay_together_whatever_happens_to_one_of_them() {
    let _alone = alone();
    for (seed, world) in WORLDS.into_iter().enumerate() {
        println!("seed {seed}, {world} ranks");
        let host = HostGroup::new(world);
        let called = on_ranks(world, AllReduce::Tree, |device, group| {
            let rank = Summing::new(device, group, &host);
            // All ranks draw the same.
            let mut random = Random::new(seed as u64);
            let mut one = |i: usize| {
                let (event, is_mine) = (random.below(12), random.below(world) == group.rank());
                match event {
                    0 if is_mine => rank.ops.drop_graphs(),
                    1 if is_mine => rank.grow(2000 + 500 * i),
                    _ => {}
                }
                let rows = [1, 2, 3, 7][random.below(4)];
                let tokens: Vec<u32> = (0..rows).map(|_| random.below(VOCAB) as u32).collect();
                let (found, is_called) = rank.step(&tokens);
                let of_ranks = |token: u32| (0..world).map(move |rank| embedding(rank, token));
                let sum = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect();
                let expected = tokens.iter().flat_map(|token| of_ranks(*token).reduce(sum).unwrap());
                assert!(found == expected.collect::<Vec<f32>>(), "step {i}");
                assert!(is_called || event > 1, "step {i}: a graph that one rank has lost is replayed");
                is_called
            };
            (0..80).map(&mut one).collect::<Vec<_>>()
        });
        let replayed = called[0].iter().filter(|is_called| !**is_called).count();
        println!("{replayed} steps were replayed");
        assert!(called.iter().all(|of_rank| *of_rank == called[0]), "ranks that do not the same: {called:?}");
        assert!(replayed > 5);
    }
}

#[test]
fn more_ranks_than_devices_are_refused_with_their_number() {
    let count =
        (1..64).find(|ranks| Devices::open(Backend::Cuda, ranks + 1, &DeviceOptions::default()).is_err()).unwrap();
    let error = Devices::open(Backend::Cuda, count + 1, &DeviceOptions::default()).err().unwrap().to_string();
    assert!(error.contains(&format!("rank {count} has none: this process sees {count}")), "{error}");
}
