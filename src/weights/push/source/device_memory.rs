//! Pushes from device memory: allocations of another process on the devices that this one computes on.

use std::collections::HashMap;

use rollout_kernels::{Device, DeviceError, Devices, MemoryHandle};

use super::SourceRoom;
use super::file::SourceFile;
use crate::error::{Error, Result, shown};
use crate::weights::TensorEntry;

/// Most bytes of a UUID that errors repeat.
const MAX_UUID_BYTES: usize = 64;

/// An allocation that a tensor lies in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// UUID of the device that it is on.
    device: String,
    handle: MemoryHandle,
}

impl Allocation {
    /// # Errors
    /// `InvalidArgument` if a handle has another number of bytes.
    pub fn new(device: String, handle: &[u8]) -> Result<Self> {
        let handle = handle.try_into().map_err(|_| {
            let what = format!("{} bytes; a handle of an allocation has {}", handle.len(), MemoryHandle::BYTES);
            Error::invalid("handle", what)
        })?;
        Ok(Self { device, handle: MemoryHandle(handle) })
    }
}

/// The allocations that the tensors of one push lie in: each is opened once, and closed when this is dropped.
pub(in crate::weights::push) struct Allocations {
    devices: Vec<(String, Device)>,
    opened: Vec<SourceFile>,
    /// Index in `opened` of each allocation.
    indices: HashMap<Allocation, usize>,
    /// Index in `opened` of each tensor's allocation.
    places: Vec<usize>,
}

impl Allocations {
    /// None, of these devices.
    ///
    /// # Errors
    /// `FailedPrecondition` if memory of other processes cannot be borrowed on any of them.
    pub fn new(devices: &Devices) -> Result<Self> {
        let devices: Vec<_> = devices.iter().filter_map(|device| Some((device.uuid()?, device.clone()))).collect();
        if devices.is_empty() {
            return Err(Error::FailedPrecondition(
                "source.device_memory: this server computes on no device whose memory it could share with the client; \
                 push inline or through shared memory"
                    .into(),
            ));
        }
        Ok(Self { devices, opened: Vec::new(), indices: HashMap::new(), places: Vec::new() })
    }

    /// What tensors take that come to a device from another one's memory: nothing where there is one device.
    pub fn room(&self) -> SourceRoom {
        let arriving = self.devices.iter().map(|(_, device)| device.arriving_bytes() as u64);
        SourceRoom { of_devices: if self.devices.len() > 1 { arriving.sum() } else { 0 }, of_host: 0 }
    }

    /// Takes note of the next tensor's allocation, and opens it if no tensor before has named it.
    ///
    /// # Errors
    /// Naming the tensor: `InvalidArgument` if it names none, `FailedPrecondition` if that is on no device of these,
    /// `NotFound` if it cannot be opened, `ResourceExhausted` if there is no memory to map it.
    pub fn add(&mut self, index: usize, entry: &TensorEntry) -> Result<()> {
        let Some(allocation) = &entry.allocation else {
            let what = format!("tensor {:?}: is missing; name the allocation that it lies in", entry.name);
            return Err(Error::invalid(format!("tensors[{index}].allocation"), what));
        };
        let place = match self.indices.get(allocation) {
            Some(&place) => place,
            None => {
                self.opened.push(self.open(&entry.name, allocation)?);
                let place = self.opened.len() - 1;
                self.indices.insert(allocation.clone(), place);
                place
            }
        };
        self.places.push(place);
        Ok(())
    }

    /// The allocation that tensor `index` lies in.
    pub fn file(&self, index: usize) -> Option<&SourceFile> {
        self.opened.get(*self.places.get(index)?)
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
        Ok(SourceFile::borrowed("its allocation", memory))
    }
}
