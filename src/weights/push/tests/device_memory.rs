//! Pushes from device memory that are refused without a device; `tests/cuda/transport` has the others.

use rollout_kernels::{Backend, DeviceOptions, Devices, Digested};

use super::super::transport::device::check_unchanged;
use super::*;

fn opened(push: &[Sent], source: Source, parameters: &Arc<Parameters>) -> Result<DeclaredPush> {
    let devices = Devices::open(Backend::Reference, 2, &DeviceOptions::default()).unwrap();
    let header = UpdateHeader { source, ..UpdateHeader::new(UpdateKind::Full) };
    declare(header, push, parameters, &Sources::default().with_devices(devices))
}

fn allocation() -> Option<Allocation> {
    Some(Allocation::new("a device".into(), &[1; 64]).unwrap())
}

#[test]
fn a_server_without_such_devices_says_what_to_use_instead() {
    let parameters = model(true);
    let mut push = random_push(&mut rng(1), &parameters);
    push.iter_mut().for_each(|sent| sent.entry.allocation = allocation());
    let error = opened(&push, Source::DeviceMemory, &parameters).err().expect("there are none");
    assert_eq!(error.kind(), "failed_precondition");
    assert!(error.to_string().contains("push inline or through shared memory"), "{error}");
    assert!(Sources::default().device_uuids().is_empty());
}

#[test]
fn allocations_are_for_device_memory_and_digests_for_all_else() {
    let parameters = model(true);
    let good = random_push(&mut rng(2), &parameters);
    let mut push = good.clone();
    push[3].entry.allocation = allocation();
    refused(
        opened(&push, Source::Inline, &parameters),
        "tensors[3].allocation",
        &[&push[3].entry.name, "leave it out"],
    );
    let mut push = good;
    push[5].entry.digest = None;
    refused(opened(&push, Source::Inline, &parameters), "tensors[5].digest", &[&push[5].entry.name, "missing"]);
}

#[test]
fn a_handle_has_its_length() {
    for bytes in (0..200).chain([1 << 20]).filter(|bytes| *bytes != 64) {
        refused(Allocation::new(String::new(), &vec![7; bytes]), "handle", &[&format!("{bytes} bytes")]);
    }
}

#[test]
fn a_tensor_that_changes_while_it_is_copied_is_refused_by_its_name() {
    let found = Digested { digest: [1; 16], not_finite: None };
    check_unchanged("a", (&found, &found.clone())).unwrap();
    let others = [Digested { digest: [2; 16], ..found }, Digested { not_finite: Some(0), ..found }];
    for other in others {
        let error = check_unchanged("a", (&found, &other)).unwrap_err();
        assert!(error.kind() == "data_loss" && error.to_string().contains("\"a\" has changed"), "{error}");
    }
}
