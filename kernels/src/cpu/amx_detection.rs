//! Whether AMX can be used. It takes more than the processor: Linux saves tiles only for a process that has asked.

use std::sync::OnceLock;

/// Whether this processor has the instructions and Linux lets this process use them. Asks Linux the first time.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && is_permitted())
}

/// Whether CPUID reports tiles and their products of bfloat16 pairs.
fn has_instructions() -> bool {
    const FEATURES: u32 = 7;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    if std::arch::x86_64::__cpuid(0).eax < FEATURES {
        return false;
    }
    let found = std::arch::x86_64::__cpuid_count(FEATURES, 0).edx;
    found & AMX_BF16 != 0 && found & AMX_TILE != 0
}

/// Requests the state of tiles from Linux for all threads of this process; 5.16 or newer grants it.
fn is_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: the call takes no pointer, and changes only what the threads of this process may use.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}
