//! The PTX in what a program loads.

use crate::error::{NO_BINARY_FOR_GPU, Result};
use crate::settings;

/// First bytes of a fat binary.
const FAT_BINARY: u32 = 0xba55_ed50;
/// First bytes of an ELF file, such as code for one processor.
const ELF: u32 = 0x464c_457f;
/// Kind of an entry of a fat binary that is PTX.
const PTX: u16 = 1;

/// # Safety
/// There are as many bytes at `at + offset`.
unsafe fn read<T: Copy>(at: *const u8, offset: usize) -> T {
    // SAFETY: the caller answers for the bytes, and asks for whole numbers only.
    unsafe { at.add(offset).cast::<T>().read_unaligned() }
}

/// The PTX of an image: its text, or the newest of a fat binary that the device's capability allows.
///
/// # Safety
/// `image` is a fat binary or PTX text that ends with a zero.
pub unsafe fn ptx_of(image: *const u8) -> Result<String> {
    // SAFETY: the caller answers for the image.
    unsafe {
        match read::<u32>(image, 0) {
            FAT_BINARY => from_fat_binary(image),
            ELF => Err(NO_BINARY_FOR_GPU),
            _ => Ok(std::ffi::CStr::from_ptr(image.cast()).to_string_lossy().into_owned()),
        }
    }
}

/// # Safety
/// `image` is a fat binary.
unsafe fn from_fat_binary(image: *const u8) -> Result<String> {
    let capability = settings::get().capability as u32;
    // SAFETY: the headers say how long they and their entries are.
    unsafe {
        let header = usize::from(read::<u16>(image, 6));
        let end = header + read::<u64>(image, 8) as usize;
        let (mut at, mut found) = (header, None);
        while at < end {
            let entry = image.add(at);
            let (header, bytes) = (read::<u32>(entry, 4) as usize, read::<u64>(entry, 8) as usize);
            let (compressed, architecture) = (read::<u32>(entry, 16), read::<u32>(entry, 28));
            let newest = found.as_ref().is_none_or(|(other, _)| *other < architecture);
            if read::<u16>(entry, 0) == PTX && architecture <= capability && newest {
                if compressed != 0 {
                    eprintln!("emulator: the PTX in this fat binary is compressed: build it with --compress-mode=none");
                    return Err(NO_BINARY_FOR_GPU);
                }
                let text = std::slice::from_raw_parts(entry.add(header), bytes);
                found = Some((architecture, String::from_utf8_lossy(text).trim_end_matches('\0').to_owned()));
            }
            at += header + bytes;
        }
        found.map(|(_, text)| text).ok_or(NO_BINARY_FOR_GPU)
    }
}
