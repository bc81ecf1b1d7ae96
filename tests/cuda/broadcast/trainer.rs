//! A trainer as the server meets it: rank 0 of a group, which packs tensors as vLLM's producer does and broadcasts them
//! by NCCL. It calls the libraries by itself, apart from all code of the server's.

use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute_copy;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream, result, sys};
use serde_json::{Value, json};

use super::server::{Answer, Http, refusal};
use crate::common::StateDict;
use crate::emulator;

const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const BFLOAT16: c_int = 9;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Id(pub [u8; 128]);

type Comm = *mut c_void;

/// A function of NCCL.
fn nccl<F: Copy>(name: &CStr) -> F {
    // SAFETY: names end in zeros; the library is never closed, and the caller names the function's type.
    unsafe {
        let library = libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "LD_LIBRARY_PATH names the emulator");
        let function = libc::dlsym(library, name.as_ptr());
        assert!(!function.is_null(), "{name:?}");
        transmute_copy(&function)
    }
}

pub fn new_id() -> Id {
    let (get, mut id) = (nccl::<unsafe extern "C" fn(*mut Id) -> c_int>(c"ncclGetUniqueId"), Id([0; 128]));
    // SAFETY: the id is written.
    assert_eq!(unsafe { get(&raw mut id) }, 0);
    id
}

/// Tensors by name in the order in which they are sent, with their types as torch calls them, shapes and bytes.
pub type Tensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

/// The tensors of weights, as float32 or, where `is_bf16` says so, as bfloat16.
pub fn tensors(weights: &StateDict, is_bf16: impl Fn(usize) -> bool) -> Tensors {
    let tensor = |i: usize, name: &String, shape: &[usize], values: &[f32]| {
        let (dtype, bytes) = if is_bf16(i) {
            let bits = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_bits().to_le_bytes());
            ("bfloat16", bits.collect())
        } else {
            ("float32", crate::common::to_bytes(values))
        };
        (name.clone(), dtype, shape.to_vec(), bytes)
    };
    weights.iter().enumerate().map(|(i, (name, (shape, values)))| tensor(i, name, shape, values)).collect()
}

/// What the trainer says of tensors.
pub fn info(tensors: &Tensors) -> Value {
    let names: Vec<_> = tensors.iter().map(|t| &t.0).collect();
    let dtypes: Vec<_> = tensors.iter().map(|t| t.1).collect();
    let shapes: Vec<_> = tensors.iter().map(|t| &t.2).collect();
    json!({"names": names, "dtype_names": dtypes, "shapes": shapes})
}

/// The bytes of each broadcast, and their type. `buffer` is None where each tensor comes by itself. The packing is that
/// of `pack_tensors` in vllm/distributed/weight_transfer/packed_tensor.py of vLLM 0.32: a chunk ends behind the tensor
/// with which it has more bytes than the buffer.
pub fn broadcasts(tensors: &Tensors, buffer: Option<usize>) -> Vec<(Vec<u8>, c_int)> {
    let Some(buffer) = buffer else {
        let code = |dtype| if dtype == "float32" { FLOAT32 } else { BFLOAT16 };
        return tensors.iter().map(|(_, dtype, _, bytes)| (bytes.clone(), code(*dtype))).collect();
    };
    let (mut chunks, mut chunk) = (Vec::new(), Vec::new());
    for (_, _, _, bytes) in tensors {
        chunk.extend(bytes);
        if chunk.len() > buffer {
            chunks.push((std::mem::take(&mut chunk), UINT8));
        }
    }
    if !chunk.is_empty() {
        chunks.push((chunk, UINT8));
    }
    chunks
}

pub struct Trainer {
    pub http: Http,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    comm: Comm,
    pub buffer: Option<usize>,
}

impl Trainer {
    /// Joins with the server's ranks, by the group's id. `buffer` is None where tensors are not packed.
    pub fn join(http: &Http, ranks: usize, buffer: Option<usize>) -> Self {
        let id = new_id();
        let mut init = json!({"nccl_unique_id_b64": base64(&id.0), "rank_offset": 1, "world_size": ranks + 1});
        if let Some(bytes) = buffer {
            (init["packed"], init["packed_buffer_size_bytes"]) = (true.into(), bytes.into());
        }
        let call = http.post_later("/init_weight_transfer_engine", json!({"init_info": init}));
        let trainer = Self::enter(http, id, ranks, buffer);
        assert_eq!(call.join().unwrap(), (200, json!({"message": "Weight transfer initialized"})));
        trainer
    }

    /// Joins as rank 0, and adds up a value with all ranks, as vLLM's `PyNcclCommunicator` does.
    pub fn enter(http: &Http, id: Id, ranks: usize, buffer: Option<usize>) -> Self {
        let context = CudaContext::new(if emulator::is_there() { 0 } else { ranks }).unwrap();
        let stream = context.new_stream().unwrap();
        let init: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int) -> c_int = nccl(c"ncclCommInitRank");
        let mut comm = std::ptr::null_mut();
        // SAFETY: the communicator is written.
        assert_eq!(unsafe { init(&raw mut comm, ranks as c_int + 1, id, 0) }, 0);
        let trainer = Self { http: http.clone(), context, stream, comm, buffer };
        let add: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, sys::CUstream) -> c_int =
            nccl(c"ncclAllReduce");
        trainer.with_device_copy(&1f32.to_le_bytes(), |at| {
            // SAFETY: the address has a value.
            assert_eq!(unsafe { add(at, at, 1, FLOAT32, 0, trainer.comm, trainer.stream.cu_stream()) }, 0);
        });
        trainer
    }

    fn with_device_copy(&self, bytes: &[u8], work: impl FnOnce(u64)) {
        self.context.bind_to_thread().unwrap();
        // SAFETY: the memory is as large as what is copied, and freed when the stream has come so far.
        unsafe {
            let at = result::malloc_sync(bytes.len()).unwrap();
            result::memcpy_htod_sync(at, bytes).unwrap();
            work(at);
            self.stream.synchronize().unwrap();
            result::free_sync(at).unwrap();
        }
    }

    /// Broadcasts, and waits until all ranks have received it.
    pub fn broadcast(&self, bytes: &[u8], dtype: c_int) {
        let send: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, sys::CUstream) -> c_int =
            nccl(c"ncclBroadcast");
        let size = match dtype {
            FLOAT32 => 4,
            BFLOAT16 => 2,
            _ => 1,
        };
        self.with_device_copy(bytes, |at| {
            // SAFETY: the address has as many bytes.
            let sent = unsafe { send(at, at, bytes.len() / size, dtype, 0, self.comm, self.stream.cu_stream()) };
            assert_eq!(sent, 0);
        });
    }

    /// One `/update_weights`, with what it announces. All is broadcast, whatever the answer.
    pub fn send(&self, tensors: &Tensors, info: &Value) -> Answer {
        let call = self.http.post_later("/update_weights", json!({"update_info": info}));
        for (bytes, dtype) in broadcasts(tensors, self.buffer) {
            self.broadcast(&bytes, dtype);
        }
        call.join().unwrap()
    }

    /// A whole update, in so many parts.
    pub fn update(&self, tensors: &Tensors, parts: usize, finish: &Value) {
        assert_eq!(self.http.done("/start_weight_update", &json!({})), json!({"message": "Weight update started"}));
        for part in tensors.chunks(tensors.len().div_ceil(parts)) {
            let part = part.to_vec();
            assert_eq!(self.send(&part, &info(&part)), (200, json!({"message": "Weights updated"})));
        }
        assert_eq!(self.http.done("/finish_weight_update", finish), json!({"message": "Weight update finished"}));
    }

    /// An update that is refused while it is sent; its message.
    pub fn refused(&self, tensors: &Tensors, status: u16) -> String {
        self.http.done("/start_weight_update", &json!({}));
        let message = refusal(self.send(tensors, &info(tensors)), status);
        let finish = self.http.refused("/finish_weight_update", &json!({}), 409);
        assert!(finish.contains("/start_weight_update"), "{finish}");
        message
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        let abort: unsafe extern "C" fn(Comm) -> c_int = nccl(c"ncclCommAbort");
        // SAFETY: nothing uses the communicator any more.
        unsafe { abort(self.comm) };
    }
}

/// Base64 as Python's `base64.b64encode` writes it.
pub fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |three: &[u8]| {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        let letter =
            |i: usize| if i <= three.len() { LETTERS[(bits >> (18 - 6 * i)) as usize & 63] as char } else { '=' };
        [0, 1, 2, 3].map(letter)
    };
    bytes.chunks(3).flat_map(group).collect()
}
