//! The CPU as the device of a rank. Its memory is the host's.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use super::isa::Isa;
use super::kv::KvBlocks;
use super::ops::CpuOps;
use super::packed::{PANEL, PackedMatrix};
use super::pool::Cpu;
use crate::activations::Activations;
use crate::backend::device::{DeviceImpl, DeviceOptions, ModelShape};
use crate::backend::operators::OpsImpl;
use crate::backend::storage::{KvCacheImpl, MatrixImpl, MemoryImpl, RoutingImpl};
use crate::error::DeviceError;
use crate::host::{HostRouting, memory};
use crate::kv_layout::KvLayout;
use crate::routing_shape::RoutingShape;
use crate::tensor::{with_f32, with_f32_mut};
use crate::values::{TensorData, TensorView};
use crate::weights::MatrixShape;

/// Bytes of a cache line. Rows of whole cache lines that start at one are stored line by line.
const LINE: usize = 64;

/// The instruction set and the number of threads that a rank computes with.
pub(crate) struct CpuDevice {
    isa: Isa,
    threads: usize,
    rank: usize,
}

impl CpuDevice {
    /// # Errors
    /// [`DeviceError::Unsupported`] with the instruction sets of the processor, if it lacks the requested one.
    pub fn open(options: &DeviceOptions<'_>) -> std::result::Result<Self, DeviceError> {
        let isa = instruction_set(options.kernel, &Isa::all())?;
        Ok(Self { isa, threads: options.threads, rank: options.rank })
    }
}

/// Looks up an instruction set by name in `of`, which lists them fastest first; `auto` is the first.
fn instruction_set(name: &str, of: &[Isa]) -> std::result::Result<Isa, DeviceError> {
    let found = of.iter().find(|isa| name == "auto" || isa.name() == name);
    found.copied().ok_or_else(|| {
        let names: Vec<_> = of.iter().filter(|isa| !isa.is_emulated()).map(|isa| isa.name()).collect();
        DeviceError::Unsupported(format!("--kernel {name}: this processor lacks it; it has {}", names.join(", ")))
    })
}

impl DeviceImpl for CpuDevice {
    fn kernel(&self) -> &'static str {
        self.isa.name()
    }

    fn check(&self, model: &ModelShape) -> std::result::Result<(), DeviceError> {
        let head_dim = model.head_dim;
        if !head_dim.is_multiple_of(PANEL) {
            return Err(DeviceError::Unsupported(format!(
                "config.json: head_dim is {head_dim}; the attention kernel takes multiples of {PANEL}"
            )));
        }
        match model.experts {
            Some([hidden, width]) if !(hidden.is_multiple_of(PANEL) && (2 * width).is_multiple_of(PANEL)) => {
                Err(DeviceError::Unsupported(format!(
                    "config.json: experts of width {width} and hidden size {hidden}; their kernel takes multiples of {} \
                     and {PANEL}",
                    PANEL / 2
                )))
            }
            _ => Ok(()),
        }
    }

    fn memory(&self) -> usize {
        0
    }

    fn total_bytes(&self) -> u64 {
        memory::total_bytes()
    }

    fn used_bytes(&self) -> u64 {
        memory::resident_bytes()
    }

    fn trim(&self) {
        memory::trim();
    }

    fn ops(&self) -> Box<dyn OpsImpl> {
        Box::new(CpuOps::new(Cpu::of_rank(self.rank, self.threads, self.isa)))
    }
}

impl MemoryImpl for CpuDevice {
    fn matrix_bytes(&self, shape: MatrixShape) -> usize {
        PackedMatrix::bytes_for(shape.dtype, shape.n, shape.k)
    }

    fn matrix(&self, shape: MatrixShape) -> std::result::Result<Box<dyn MatrixImpl>, DeviceError> {
        let bytes = self.matrix_bytes(shape);
        let matrix = PackedMatrix::try_zeros(shape).map_err(|e| cannot_map("a matrix", bytes, &e))?;
        Ok(Box::new(matrix))
    }

    fn kv_cache(&self, layout: KvLayout) -> std::result::Result<Box<dyn KvCacheImpl>, DeviceError> {
        let bytes = layout.blocks * layout.bytes_per_block();
        let cache = KvBlocks::try_new(layout).map_err(|e| cannot_map("a layer's KV cache", bytes, &e))?;
        Ok(Box::new(cache))
    }

    fn routing(&self, shape: &RoutingShape) -> std::result::Result<Box<dyn RoutingImpl>, DeviceError> {
        Ok(Box::new(HostRouting::new(shape)))
    }

    fn zeros(&self, len: usize) -> Result<Activations> {
        Tensor::zeros(len, DType::F32, &Device::Cpu).map(Activations::owned)
    }

    /// The first row starts at a cache line. Rows of whole cache lines then all do, so that a vector is stored to one
    /// line and not to two.
    fn activations(&self, rows: usize, width: usize) -> Result<Activations> {
        let memory = Tensor::zeros(rows * width + LINE / size_of::<f32>(), DType::F32, &Device::Cpu)?;
        let start = with_f32(&memory, |values| values.as_ptr().align_offset(LINE))?;
        memory.narrow(0, start, rows * width)?.reshape((rows, width)).map(Activations::owned)
    }

    fn write(&self, to: &Tensor, start: usize, values: &[f32]) -> Result<()> {
        with_f32_mut(to, |stored| stored[start..start + values.len()].copy_from_slice(values))
    }

    fn read(&self, from: &Tensor, range: Range<usize>) -> Result<Vec<f32>> {
        with_f32(from, |stored| stored[range].to_vec())
    }
}

fn cannot_map(what: &str, bytes: usize, error: &std::io::Error) -> DeviceError {
    DeviceError::OutOfMemory(format!("cannot map {bytes} bytes for {what}: {error}"))
}

impl MatrixImpl for PackedMatrix {
    fn write_columns(&mut self, row0: usize, rows: TensorView<'_>, width: usize, first_column: usize) {
        PackedMatrix::write_columns(self, row0, rows, width, first_column);
    }

    fn read_rows(&self, rows: Range<usize>) -> TensorData<'static> {
        PackedMatrix::read_rows(self, rows)
    }

    fn read_f32(&self, row0: usize, out: &mut [f32]) {
        PackedMatrix::read_f32(self, row0, out);
    }
}

impl KvCacheImpl for KvBlocks {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_set_that_the_processor_lacks_is_refused_by_name() {
        let all = Isa::all();
        assert_eq!(instruction_set("auto", &all).expect("there is one"), Isa::detect());
        let plain: Vec<Isa> = all.iter().copied().filter(|isa| isa.name() == "scalar").collect();
        for name in ["auto", "scalar"] {
            assert_eq!(instruction_set(name, &plain).expect("it is there").name(), "scalar");
        }
        let emulated = instruction_set("avx512_bf16_emulated", &all).expect("every processor can");
        assert_eq!((emulated.name(), emulated.is_emulated()), ("avx512_bf16_emulated", true));
        let emulated = instruction_set("amx_emulated", &all).expect("every processor can");
        assert_eq!((emulated.name(), emulated.is_emulated()), ("amx_emulated", true));
        for name in ["amx", "avx512_bf16", "avx512f", "avx2", "neon"] {
            let refused = instruction_set(name, &plain).expect_err("it is not there").to_string();
            assert_eq!(refused, format!("--kernel {name}: this processor lacks it; it has scalar"));
            let is_there = Isa::available().iter().any(|isa| isa.name() == name);
            assert_eq!(instruction_set(name, &all).is_ok_and(|isa| isa.name() == name), is_there);
        }
    }

    #[test]
    fn activations_start_with_a_cache_line() {
        let device = CpuDevice::open(&DeviceOptions::default()).unwrap();
        for (rows, width) in [(1, 1), (3, 16), (7, 100)] {
            let activations = device.activations(rows, width).unwrap();
            assert_eq!(activations.dims(), [rows, width]);
            assert_eq!(with_f32(&activations, |values| values.as_ptr().align_offset(LINE)).unwrap(), 0);
        }
    }
}
