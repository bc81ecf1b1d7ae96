//! A trainer in another process, and what it lends of its device memory.

use std::ffi::c_void;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{Sender, channel};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_kernels::{Backend, Device, DeviceError, DeviceOptions};
use rollout_server::weights::Allocation;

use crate::common::Push;

/// Allocations of a multiple of so many bytes share no block of the driver's with others.
pub const BLOCK_BYTES: usize = 2 << 20;

/// A device of this process; its context stays open as long as it.
pub fn open(rank: usize) -> std::result::Result<Device, DeviceError> {
    let backend = Backend::ALL.iter().find(|backend| backend.name() == "cuda").expect("it is built with it");
    backend.open(&DeviceOptions { rank, ..DeviceOptions::default() })
}

pub fn uuid(rank: usize) -> String {
    open(rank).unwrap().uuid().expect("the driver answers")
}

unsafe extern "C" {
    fn cuInit(flags: u32) -> i32;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: i32) -> i32;
    fn cuCtxSetCurrent(context: *mut c_void) -> i32;
    fn cuCtxSynchronize() -> i32;
    fn cuMemAlloc_v2(at: *mut u64, bytes: usize) -> i32;
    fn cuMemFree_v2(at: u64) -> i32;
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> i32;
    fn cuIpcGetMemHandle(handle: *mut [u8; 64], at: u64) -> i32;
}

/// Another process with device memory.
pub struct Trainer {
    pub child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Trainer {
    pub fn new() -> Self {
        let mut child =
            crate::child("transport::a_trainer").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, orders, answers }
    }

    pub fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
        loop {
            let line = self.answers.next().expect("the trainer answers").unwrap();
            if let Some((_, answer)) = line.split_once("answer ") {
                return answer.into();
            }
        }
    }

    /// Allocates these bytes on a device; gives the handle.
    pub fn allocate(&mut self, rank: usize, bytes: &[u8]) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let handle = self.ask(&format!("allocate {rank} {}", file.path().display()));
        (0..handle.len()).step_by(2).map(|i| u8::from_str_radix(&handle[i..i + 2], 16).unwrap()).collect()
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        self.orders.take();
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

fn succeed(code: i32) {
    assert_eq!(code, 0, "a call of the driver");
}

/// Makes a device the thread's.
fn use_device(device: i32) {
    let mut context = std::ptr::null_mut();
    // SAFETY: the context is written before it is read.
    unsafe {
        succeed(cuDevicePrimaryCtxRetain(&raw mut context, device));
        succeed(cuCtxSetCurrent(context));
    }
}

/// Writes one finite float32 after the other to an address, until the process ends. Says when it has begun.
fn change(device: i32, at: u64, begun: &Sender<()>) {
    use_device(device);
    for i in 0.. {
        let value = f32::from_bits(1f32.to_bits() + i % (1 << 20));
        // SAFETY: the value lives through the call, and the address is of an allocation.
        succeed(unsafe { cuMemcpyHtoD_v2(at, (&raw const value).cast(), 4) });
        // Nobody listens any more after the first.
        let _ = begun.send(());
    }
}

/// What the child does: what it reads from its standard input.
pub fn serve() {
    // SAFETY: the driver can be opened at any time.
    succeed(unsafe { cuInit(0) });
    let mut allocations = Vec::new();
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        let words: Vec<&str> = order.split(' ').collect();
        let mut answer = String::new();
        match words[..] {
            ["allocate", device, path] => {
                let bytes = std::fs::read(path).unwrap();
                let (mut at, mut handle) = (0, [0; 64]);
                use_device(device.parse().unwrap());
                // SAFETY: all is written to places that live through the calls; the allocation is as long as `bytes`.
                unsafe {
                    // Smaller ones share a block on a card, and a handle is of the whole block.
                    succeed(cuMemAlloc_v2(&raw mut at, bytes.len().next_multiple_of(BLOCK_BYTES)));
                    succeed(cuMemcpyHtoD_v2(at, bytes.as_ptr().cast(), bytes.len()));
                    succeed(cuCtxSynchronize());
                    succeed(cuIpcGetMemHandle(&raw mut handle, at));
                }
                allocations.push(at);
                handle.iter().for_each(|byte| write!(answer, "{byte:02x}").unwrap());
            }
            ["change", device, allocation, offset] => {
                let [device, allocation] = [device, allocation].map(|number| number.parse::<usize>().unwrap());
                let at = allocations[allocation] + offset.parse::<u64>().unwrap();
                let (begun, begins) = channel();
                std::thread::spawn(move || change(device as i32, at, &begun));
                begins.recv().unwrap();
            }
            ["free"] => {
                // SAFETY: they were allocated above.
                allocations.drain(..).for_each(|at| succeed(unsafe { cuMemFree_v2(at) }));
            }
            _ => panic!("«{order}»"),
        }
        println!("\nanswer {answer}");
    }
}

/// Lays the tensors of a push into at most so many allocations of a trainer, on devices in turn, with gaps of NaN
/// between them. One of `misaligned` is at no multiple of its values' bytes. Returns how many allocations there are.
pub fn lend(
    trainer: &mut Trainer,
    push: &mut Push,
    allocations: usize,
    devices: usize,
    misaligned: Option<usize>,
    seed: u64,
) -> u64 {
    println!("gaps from seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let share = push.tensors.len().div_ceil(allocations);
    for (i, tensors) in push.tensors.chunks_mut(share).enumerate() {
        let mut bytes = Vec::new();
        for (j, (entry, tensor)) in tensors.iter_mut().enumerate() {
            let gap = (bytes.len() + rng.random_range(8..48)).next_multiple_of(entry.dtype.size());
            let is_misaligned = misaligned.is_some_and(|one_of| (i * share + j) % one_of == one_of - 1);
            bytes.resize(gap + usize::from(is_misaligned), 0xff);
            entry.offset = bytes.len() as u64;
            bytes.extend_from_slice(tensor);
        }
        let handle = trainer.allocate(i % devices, &bytes);
        let allocation = Allocation::new(uuid(i % devices), &handle).unwrap();
        tensors.iter_mut().for_each(|(entry, _)| entry.allocation = Some(allocation.clone()));
    }
    push.tensors.len().div_ceil(share) as u64
}
