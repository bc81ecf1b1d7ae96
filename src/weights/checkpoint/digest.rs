//! A digest of a tensor's rows that is the same in whatever order and parts they are read.

use std::ops::Range;

use twox_hash::XxHash3_128;

/// The digest of `rows`, whose bytes are `bytes`: the wrapping sum of a number for each row, which depends on the row's
/// index and bytes. So several threads can each digest a part, and the sum of their digests is that of the whole. It
/// protects against accidents, not against an adversary.
pub(super) fn digest_of_rows(bytes: &[u8], row_bytes: usize, rows: Range<usize>) -> u64 {
    assert_eq!(bytes.len(), rows.len() * row_bytes, "bytes of the rows");
    let digest = |(row, bytes): (usize, &[u8])| {
        let hash = XxHash3_128::oneshot(bytes);
        // An odd factor can be inverted, so no information is lost; a different one for each row detects exchanged
        // rows.
        ((hash >> 64) as u64 ^ hash as u64).wrapping_mul(2 * row as u64 + 1)
    };
    rows.zip(bytes.chunks_exact(row_bytes.max(1))).map(digest).fold(0, u64::wrapping_add)
}
