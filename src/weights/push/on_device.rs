//! Tensors that lie in the memory of a device of the ranks: each rank takes what it holds of them to its own device,
//! and packs it there. They are verified where they lie.

use rollout_kernels::{BorrowedRows, Digested, out_of_memory};

use super::manifest::Declared;
use super::receipt::Receipt;
use super::shadow::{ShadowTensor, ShadowWeights};
use super::source::SourceFile;
use crate::error::{Error, Result};
use crate::weights::matrix_shape;

/// A tensor of a push, none of whose bytes comes to the host.
pub(super) struct OnDevice<'a> {
    pub receipt: &'a mut Receipt,
    pub tensor: &'a Declared,
    /// Its values where they lie.
    pub rows: BorrowedRows<'a>,
    /// The index of the shadow tensor that it goes into; `None` if it brings no parameter.
    pub destination: Option<usize>,
}

/// The values of a tensor where they lie, if devices can do all that has to be done with them: it is the one place that
/// decides which way a tensor takes. The host takes all others: from files, short ones, and those that go to vectors or
/// do not lie at a multiple of a value's bytes.
pub(super) fn rows_on_device<'a>(
    file: &'a SourceFile,
    Declared { entry, .. }: &Declared,
    destination: Option<&ShadowTensor>,
) -> Option<BorrowedRows<'a>> {
    let (rows, columns) = matrix_shape(&entry.shape);
    let rows = file.device_memory()?.rows(entry.offset, entry.dtype, [rows, columns]);
    let can_copy = destination.is_none_or(|shadow| shadow.can_copy(&rows));
    (rows.can_be_digested() && can_copy).then_some(rows)
}

/// Packs tensors into `shadow`, and verifies them.
///
/// # Errors
/// `DataLoss` if a device can no longer read them, or they have changed meanwhile, `ResourceExhausted` if it has no
/// memory for their digests; as for [`Receipt::take_digested`].
pub(super) fn take_on_device(tensors: Vec<OnDevice<'_>>, shadow: &mut ShadowWeights) -> Result<()> {
    if tensors.is_empty() {
        return Ok(());
    }
    let rows: Vec<_> = tensors.iter().map(|tensor| tensor.rows).collect();
    let before = digest(&rows)?;
    for OnDevice { tensor, rows, destination, .. } in &tensors {
        if let Some(index) = *destination {
            let copied = shadow.tensors_mut()[index].copy_rows(&tensor.mapping, rows);
            copied.map_err(|error| failed(&format!("tensor {:?} cannot be copied", tensor.entry.name), &error))?;
        }
    }
    // Hashed on both sides of the copy: what a sender changes too early in memory that it shares is noticed.
    let after = digest(&rows)?;
    tensors.into_iter().zip(before.iter().zip(&after)).try_for_each(|(OnDevice { receipt, tensor, .. }, digests)| {
        let name = &tensor.entry.name;
        receipt.take_digested(name, unchanged(name, digests)?)
    })
}

fn digest(rows: &[BorrowedRows<'_>]) -> Result<Vec<Digested>> {
    BorrowedRows::digest(rows).map_err(|error| failed("the tensors in device memory cannot be digested", &error))
}

/// What was found of the tensor `name` before and after it was copied, if that is the same.
fn unchanged<'a>(name: &str, (before, after): (&'a Digested, &Digested)) -> Result<&'a Digested> {
    if before != after {
        return Err(Error::DataLoss(format!(
            "tensor {name:?} has changed while it was copied; memory that is lent stays as it is until the push has ended"
        )));
    }
    Ok(before)
}

fn failed(what: &str, error: &candle_core::Error) -> Error {
    match out_of_memory(error) {
        Some(why) => Error::ResourceExhausted(format!("{what}: {why}")),
        None => Error::DataLoss(format!("{what}: {error}; was it freed during the push?")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_that_changes_while_it_is_copied_is_refused_by_its_name() {
        let found = Digested { digest: [1; 16], not_finite: None };
        assert_eq!(unchanged("a", (&found, &found.clone())).unwrap(), &found);
        let others = [Digested { digest: [2; 16], ..found }, Digested { not_finite: Some(0), ..found }];
        for other in others {
            let error = unchanged("a", (&found, &other)).unwrap_err();
            assert!(error.kind() == "data_loss" && error.to_string().contains("\"a\" has changed"), "{error}");
        }
    }
}
