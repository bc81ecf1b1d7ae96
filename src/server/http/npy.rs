//! Files of numpy's (`.npy`), version 1.0.

/// The head of a file of C-ordered values of the type `descr`, such as `<f4`, and this shape.
pub(super) fn npy_header(descr: &str, shape: &[usize]) -> Vec<u8> {
    /// The head with its own length, which is a multiple of this.
    const ALIGNMENT: usize = 64;
    const MAGIC: &[u8] = b"\x93NUMPY\x01\x00";
    let shape = shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let shape = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    let length = (MAGIC.len() + size_of::<u16>() + shape.len() + 1).next_multiple_of(ALIGNMENT);
    let text = length - MAGIC.len() - size_of::<u16>();
    let mut header = MAGIC.to_vec();
    header.extend(u16::try_from(text).unwrap_or(u16::MAX).to_le_bytes());
    header.extend(format!("{shape:<width$}\n", width = text - 1).into_bytes());
    header
}
