//! The traits that a device's room implements. [`Device`](crate::Device), [`Ops`](crate::Ops),
//! [`Matrix`](crate::Matrix), [`KvCache`](crate::KvCache) and [`DeviceBuffer`](crate::DeviceBuffer) are these as
//! everything above this crate sees them.

pub(crate) mod broadcast;
pub(crate) mod device;
pub(crate) mod group;
pub(crate) mod operators;
pub(crate) mod storage;
