//! Pushes from device memory: allocations of another process on the devices that this one computes on. Tensors of a
//! FULL push go from there to the devices of their weights, and are verified where they lie.

use std::collections::HashMap;
use std::sync::Arc;

use rollout_kernels::{BorrowedRows, Device, DeviceError, Devices, Digested, out_of_memory};

use super::source_file::SourceFile;
use crate::error::{Error, Result, shown};
use crate::weights::update::{Allocation, RowLayout, TensorEntry, TransitBytes};

/// Most bytes of a UUID that errors repeat.
const MAX_UUID_BYTES: usize = 64;

/// The allocations that the tensors of one push lie in: each is opened once, and closed when this and the tensors are
/// dropped.
pub(in crate::weights::push) struct Allocations {
    devices: Vec<(String, Device)>,
    opened: HashMap<Allocation, Arc<SourceFile>>,
}

impl Allocations {
    /// No allocation yet, of these devices.
    ///
    /// # Errors
    /// `FailedPrecondition` if memory of other processes cannot be borrowed on any of them.
    pub fn new(devices: &Devices) -> Result<Self> {
        let devices: Vec<_> = devices.iter().filter_map(|device| Some((device.uuid()?, device.clone()))).collect();
        if devices.is_empty() {
            let why = "source.device_memory: this server computes on no device whose memory it could share with the \
                       client; push inline or through shared memory";
            return Err(Error::FailedPrecondition(why.into()));
        }
        Ok(Self { devices, opened: HashMap::new() })
    }

    /// Memory for tensors that come to a device from another one's memory: nothing where there is one device.
    pub fn transit(&self) -> TransitBytes {
        let arriving = self.devices.iter().map(|(_, device)| device.arriving_bytes() as u64);
        TransitBytes { on_devices: if self.devices.len() > 1 { arriving.sum() } else { 0 }, on_host: 0 }
    }

    /// The allocation of the next tensor, which is opened if no tensor before has named it.
    ///
    /// # Errors
    /// Naming the tensor: `InvalidArgument` if it names none, `FailedPrecondition` if that is on no device of these,
    /// `NotFound` if it cannot be opened, `ResourceExhausted` if there is no memory to map it.
    pub fn file_of(&mut self, index: usize, entry: &TensorEntry) -> Result<Arc<SourceFile>> {
        let Some(allocation) = &entry.allocation else {
            let what = format!("tensor {:?}: is missing; name the allocation that it lies in", entry.name);
            return Err(Error::invalid(format!("tensors[{index}].allocation"), what));
        };
        if let Some(file) = self.opened.get(allocation) {
            return Ok(file.clone());
        }
        let file = Arc::new(self.open(&entry.name, allocation)?);
        self.opened.insert(allocation.clone(), file.clone());
        Ok(file)
    }

    fn open(&self, tensor: &str, Allocation { device: uuid, handle }: &Allocation) -> Result<SourceFile> {
        let Some((_, device)) = self.devices.iter().find(|(known, _)| known == uuid) else {
            let known: Vec<&str> = self.devices.iter().map(|(uuid, _)| uuid.as_str()).collect();
            return Err(Error::FailedPrecondition(format!(
                "tensor {tensor:?} lies on device {:?}, but this server computes on {known:?}; push it inline or \
                 through shared memory",
                shown(uuid, MAX_UUID_BYTES)
            )));
        };
        let memory = device.borrow_memory(handle).map_err(|error| match error {
            DeviceError::OutOfMemory(why) => Error::ResourceExhausted(format!("tensor {tensor:?}: {why}")),
            DeviceError::Unsupported(why) => Error::NotFound(format!(
                "tensor {tensor:?}: its allocation cannot be opened: {why}; is the client another process of this \
                 machine, with another process number and the same IPC namespace, and does it still hold the memory?"
            )),
        })?;
        Ok(SourceFile::on_device("its allocation", memory))
    }
}

/// The values of a tensor where they lie, if a device can digest them there. The host takes all others: from files,
/// short ones, and those that do not lie at a multiple of a value's bytes.
pub(in crate::weights::push) fn rows_on_device<'a>(
    file: &'a SourceFile,
    entry: &TensorEntry,
    RowLayout { dtype, columns }: RowLayout,
) -> Option<BorrowedRows<'a>> {
    let rows = entry.shape.iter().product::<usize>() / columns;
    let rows = file.device_memory()?.rows(entry.offset, dtype, [rows, columns]);
    rows.can_be_digested().then_some(rows)
}

/// Copies tensors that lie on devices to where their weights are, and verifies them in device memory. `copy` copies
/// tensor `i` of `rows`, whose name is `name(i)`.
///
/// # Errors
/// `DataLoss` if a device can no longer read them, or they have changed meanwhile; `ResourceExhausted` if it has no
/// memory for their digests.
pub(in crate::weights::push) fn copy_on_device<'a>(
    rows: &[BorrowedRows<'_>],
    name: impl Fn(usize) -> &'a str,
    mut copy: impl FnMut(usize) -> candle_core::Result<()>,
) -> Result<Vec<Digested>> {
    let digest = || {
        BorrowedRows::digest(rows).map_err(|error| failed("the tensors in device memory cannot be digested", &error))
    };
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let before = digest()?;
    for index in 0..rows.len() {
        copy(index).map_err(|error| failed(&format!("tensor {:?} cannot be copied", name(index)), &error))?;
    }
    // Hashed on both sides of the copy, so that a change by the sender in shared memory is noticed.
    let after = digest()?;
    (0..).zip(before.iter().zip(&after)).try_for_each(|(index, found)| check_unchanged(name(index), found))?;
    Ok(before)
}

/// Checks that the tensor `name` had the same digest before and after it was copied.
pub(in crate::weights::push) fn check_unchanged(name: &str, (before, after): (&Digested, &Digested)) -> Result<()> {
    if before == after {
        return Ok(());
    }
    Err(Error::DataLoss(format!(
        "tensor {name:?} has changed while it was copied; memory that is lent stays as it is until the push has ended"
    )))
}

fn failed(what: &str, error: &candle_core::Error) -> Error {
    match out_of_memory(error) {
        Some(why) => Error::ResourceExhausted(format!("{what}: {why}")),
        None => Error::DataLoss(format!("{what}: {error}; was it freed during the push?")),
    }
}
