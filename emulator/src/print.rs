//! `printf` of kernels: nvcc passes the format and the address of the arguments, each at its own alignment.

use std::ffi::CString;
use std::io::Write;

/// An argument of `printf`.
enum Argument {
    Word(u32),
    Long(u64),
    Double(f64),
    Text(CString),
}

/// A conversion of a format: `%-8.3f`, without the stars, whose values are read before.
struct Conversion {
    specification: CString,
    stars: usize,
    argument: u8,
    is_long: bool,
}

/// Bytes until the first zero, by a function that reads one; what cannot be read ends the text.
pub(crate) fn text(read: impl Fn(u64) -> Option<u8>, address: u64) -> Vec<u8> {
    (address..).map_while(|at| read(at).filter(|&byte| byte != 0)).collect()
}

/// The conversion at the beginning of a text behind its percent sign, and its length.
fn conversion(format: &[u8]) -> Option<(Conversion, usize)> {
    let length = format.iter().position(|byte| !b"-+ #0123456789.*hljzt".contains(byte))?;
    let (flags, argument) = (&format[..length], format[length]);
    if !b"diuoxXcspfFeEgGaA%".contains(&argument) {
        return None;
    }
    let specification = [b"%", flags, &[argument]].concat();
    let found = Conversion {
        specification: CString::new(specification).ok()?,
        stars: flags.iter().filter(|byte| **byte == b'*').count(),
        argument,
        is_long: flags.iter().any(|byte| b"ljzt".contains(byte)),
    };
    Some((found, length + 1))
}

/// One conversion, as formatted by C's `snprintf`.
fn formatted(conversion: &Conversion, stars: &[i32], argument: &Argument) -> Vec<u8> {
    let print = |to: *mut libc::c_char, bytes: usize| {
        let format = conversion.specification.as_ptr();
        macro_rules! print {
            ($value:expr) => {
                // SAFETY: `to` has as many bytes, and the arguments are those of the conversion, as it was parsed.
                unsafe {
                    match stars {
                        [] => libc::snprintf(to, bytes, format, $value),
                        [a] => libc::snprintf(to, bytes, format, *a, $value),
                        [a, b, ..] => libc::snprintf(to, bytes, format, *a, *b, $value),
                    }
                }
            };
        }
        match argument {
            Argument::Word(x) => print!(*x),
            Argument::Long(x) => print!(*x),
            Argument::Double(x) => print!(*x),
            Argument::Text(x) => print!(x.as_ptr()),
        }
    };
    let length = usize::try_from(print(std::ptr::null_mut(), 0)).unwrap_or(0);
    let mut out = vec![0; length + 1];
    print(out.as_mut_ptr().cast(), out.len());
    out.truncate(length);
    out
}

/// The text of a `printf`; `read` gives a byte of the device's memory, `arguments` those of the thread.
fn format(read: impl Fn(u64) -> Option<u8> + Copy, format: u64, arguments: impl Fn(usize) -> u8) -> Vec<u8> {
    let (format, mut out, mut at) = (text(read, format), Vec::new(), 0usize);
    let mut take = |bytes: usize| {
        let start = at.next_multiple_of(bytes);
        at = start + bytes;
        (0..bytes).map(|i| u64::from(arguments(start + i)) << (8 * i)).sum::<u64>()
    };
    let mut rest = &format[..];
    while let Some((&byte, after)) = rest.split_first() {
        let Some((conversion, length)) = Some(after).filter(|_| byte == b'%').and_then(conversion) else {
            out.push(byte);
            rest = after;
            continue;
        };
        rest = &after[length..];
        let stars = (0..conversion.stars).map(|_| take(4) as i32).collect::<Vec<_>>();
        let argument = match conversion.argument {
            b'%' => Argument::Word(0),
            b's' => Argument::Text(CString::new(text(read, take(8))).unwrap_or_default()),
            b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b'a' | b'A' => Argument::Double(f64::from_bits(take(8))),
            b'p' => Argument::Long(take(8)),
            _ if conversion.is_long => Argument::Long(take(8)),
            _ => Argument::Word(take(4) as u32),
        };
        out.extend(formatted(&conversion, &stars, &argument));
    }
    out
}

/// Writes what a kernel prints to the standard error, in one piece.
///
/// # Safety
/// `arguments` is the address of the arguments that the format asks for, in the memory of the thread that prints.
pub(crate) unsafe fn print(read: impl Fn(u64) -> Option<u8> + Copy, format_address: u64, arguments: *const u8) {
    // SAFETY: the format asks for no byte that the caller's compiler did not write.
    let out = format(read, format_address, |at| unsafe { *arguments.add(at) });
    // Nobody is there to be told when the standard error is closed.
    let _ = std::io::stderr().write_all(&out);
}

#[cfg(test)]
mod tests {
    use super::format;

    /// Prints a format at address 0 and the strings behind it.
    fn printed(memory: &[u8], arguments: &[u8]) -> String {
        let read = |at: u64| memory.get(at as usize).copied();
        String::from_utf8(format(read, 0, |at| arguments[at])).expect("the texts are ASCII")
    }

    #[test]
    fn conversions_take_their_arguments_at_their_alignment() {
        let mut arguments = (-7i32).to_le_bytes().to_vec();
        arguments.resize(8, 0);
        arguments.extend(2.5f64.to_le_bytes());
        arguments.extend(0xff_ffff_ffffu64.to_le_bytes());
        arguments.extend(b"x\0\0\0");
        assert_eq!(printed(b"%d %.2f %llx %c 100%%\n\0", &arguments), "-7 2.50 ffffffffff x 100%\n");
    }

    #[test]
    fn texts_come_from_memory_and_widths_from_arguments() {
        let memory = b"[%*s|%-5u]\0pear\0";
        let mut arguments = 6i32.to_le_bytes().to_vec();
        arguments.resize(8, 0);
        arguments.extend(11u64.to_le_bytes());
        arguments.extend(42u32.to_le_bytes());
        assert_eq!(printed(memory, &arguments), "[  pear|42   ]");
    }
}
