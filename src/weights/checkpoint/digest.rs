//! A number by which rows of a tensor are known again, whatever order and parts they are read in.

use std::ops::Range;

use twox_hash::XxHash3_128;

/// The sum over `rows`, which are `bytes`, of something that depends on each row's number and bytes: sums of parts of a
/// tensor that are read by several threads give the whole's. Against accidents, not against an adversary.
pub(super) fn digest_of_rows(bytes: &[u8], row_bytes: usize, rows: Range<usize>) -> u64 {
    assert_eq!(bytes.len(), rows.len() * row_bytes, "bytes of the rows");
    let digest = |(row, bytes): (usize, &[u8])| {
        let hash = XxHash3_128::oneshot(bytes);
        // An odd factor loses nothing, and another one for each row tells an exchange of rows.
        ((hash >> 64) as u64 ^ hash as u64).wrapping_mul(2 * row as u64 + 1)
    };
    rows.zip(bytes.chunks_exact(row_bytes.max(1))).map(digest).fold(0, u64::wrapping_add)
}
