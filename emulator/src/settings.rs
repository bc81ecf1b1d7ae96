//! The settings of the emulator: environment variables, read once. README.md lists them.

use std::path::PathBuf;
use std::sync::OnceLock;

/// Most devices that `CUEMU_DEVICES` may ask for.
pub const MAX_DEVICES: usize = 16;

const MIB: u64 = 1 << 20;

/// How much NVML reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nvml {
    /// The memory of each process.
    Processes,
    /// Only the total of all processes, as in some containers.
    Device,
    /// Nothing: it does not start.
    Off,
}

pub struct Settings {
    pub devices: usize,
    /// Memory of each device in bytes.
    pub memory: u64,
    /// The part of it that a context takes, in bytes.
    pub context: u64,
    /// A file through which the processes that name it share the memory of their devices.
    pub ledger: Option<PathBuf>,
    pub nvml: Nvml,
    pub races: bool,
    pub seed: u64,
    pub jitter_us: u64,
    /// Threads of the machine that run the blocks of one launch.
    pub threads: usize,
    /// So many bytes of a fresh allocation are filled with NaN.
    pub poison: u64,
    /// Compute capability times ten.
    pub capability: i32,
    pub processors: i32,
    /// Most shared memory of a block in bytes.
    pub shared: u32,
    pub blas_fixed: bool,
    /// Where compiled functions are kept.
    pub cache: PathBuf,
    /// The C compiler.
    pub compiler: String,
    /// Calls that fail, as [`crate::failures`] reads them.
    pub failures: String,
}

/// The settings of this process.
pub fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(read)
}

/// Reads the settings from the environment.
///
/// # Panics
/// If a variable is invalid: a test must not run under other settings than it asked for.
fn read() -> Settings {
    let devices = number("CUEMU_DEVICES", 1) as usize;
    assert!((1..=MAX_DEVICES).contains(&devices), "CUEMU_DEVICES is {devices}; it must be 1 to {MAX_DEVICES}");
    let cache = text("CUEMU_CACHE").map_or_else(|| std::env::temp_dir().join("cuda-emulator"), PathBuf::from);
    Settings {
        devices,
        memory: number("CUEMU_MEMORY_MIB", 4096) * MIB,
        context: number("CUEMU_CONTEXT_MIB", 64) * MIB,
        ledger: text("CUEMU_LEDGER").map(PathBuf::from),
        nvml: match text("CUEMU_NVML").as_deref() {
            None | Some("processes") => Nvml::Processes,
            Some("device") => Nvml::Device,
            Some("off") => Nvml::Off,
            Some(other) => panic!("CUEMU_NVML is «{other}»; it must be processes, device or off"),
        },
        races: number("CUEMU_RACES", 0) != 0,
        seed: number("CUEMU_SEED", 0),
        jitter_us: number("CUEMU_JITTER_US", 0),
        threads: number("CUEMU_THREADS", 1).max(1) as usize,
        poison: number("CUEMU_POISON_MIB", 64) * MIB,
        capability: number("CUEMU_CAPABILITY", 90) as i32,
        processors: number("CUEMU_PROCESSORS", 132) as i32,
        shared: number("CUEMU_SHARED", 232_448) as u32,
        blas_fixed: number("CUEMU_BLAS_FIXED", 0) != 0,
        cache,
        compiler: text("CC").unwrap_or_else(|| "cc".into()),
        failures: text("CUEMU_FAIL").unwrap_or_default(),
    }
}

#[expect(clippy::disallowed_methods, reason = "a stand-in for the driver gets no other configuration than this")]
fn text(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str, default: u64) -> u64 {
    let Some(value) = text(name) else { return default };
    value.parse().unwrap_or_else(|_| panic!("{name} is «{value}», which is not a whole number"))
}
