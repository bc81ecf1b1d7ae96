//! Instructions that compute one register from others, each in a table with the same arithmetic in Rust.

use super::device;
use super::random::Random;

/// An instruction on `%a`, `%b`, `%c` and the predicate `%p`, which is whether c is odd. Registers have their width
/// behind the name: `add.s32 %d32, %a32, %b32;`.
pub struct Operation {
    pub ptx: &'static str,
    /// The result of the sources' bits, of which the instruction sees as many as its registers have.
    pub expected: fn(u64, u64, u64) -> u64,
}

/// How two results are compared.
#[derive(Clone, Copy)]
pub enum Equal {
    Bits,
    /// Of float32, float64 or halves; not-a-number is equal to itself.
    F32,
    F64,
    F16,
    Bf16,
    /// Of float32, within so many units in the last place.
    Ulps(i32),
}

impl Equal {
    fn holds(self, a: u64, b: u64) -> bool {
        let is_nan = |bits: u64| match self {
            Self::Bits => false,
            Self::F32 | Self::Ulps(_) => f32::from_bits(bits as u32).is_nan(),
            Self::F64 => f64::from_bits(bits).is_nan(),
            Self::F16 => bits & 0x7fff > 0x7c00,
            Self::Bf16 => bits & 0x7fff > 0x7f80,
        };
        let distance = || (a as i32).wrapping_sub(b as i32).abs();
        let near = matches!(self, Self::Ulps(ulps) if distance() <= ulps);
        a == b || near || is_nan(a) && is_nan(b)
    }
}

const THREADS: u32 = 128;

/// Runs each operation on random sources and compares.
pub fn check(seed: u64, equal: Equal, sources: fn(&mut Random) -> u64, operations: &[Operation]) {
    let mut random = Random(seed);
    let inputs = (0..3 * THREADS).map(|_| sources(&mut random)).collect::<Vec<_>>();
    let count = operations.len() * THREADS as usize;
    let out = device::upload(&vec![0xdead_beef; count]);
    device::launch(&module(operations), 1, THREADS, 0, &[device::upload(&inputs), out]).expect("the kernel runs");
    let results = device::download(out, count);
    for (operation, results) in operations.iter().zip(results.chunks(THREADS as usize)) {
        for (&found, source) in results.iter().zip(inputs.chunks(3)) {
            let mask = if operation.ptx.contains("%d64") { !0 } else { (1 << width(operation.ptx)) - 1 };
            let expected = (operation.expected)(source[0], source[1], source[2]) & mask;
            let found = found & mask;
            assert!(
                equal.holds(found, expected),
                "seed {seed}: `{}` of {source:x?} is {found:#x} and should be {expected:#x}",
                operation.ptx
            );
        }
    }
}

/// The width of the result.
fn width(ptx: &str) -> u32 {
    let at = ptx.find("%d").expect("each operation has a result") + 2;
    ptx[at..at + 2].parse().expect("a register is named with its width")
}

fn module(operations: &[Operation]) -> String {
    let mut text = String::from(
        ".visible .entry test(.param .u64 in, .param .u64 out) {
            .reg .b64 %in, %out, %a64, %b64, %c64, %d64, %e64, %at;
            .reg .b32 %t, %a32, %b32, %c32, %d32, %e32;
            .reg .b16 %a16, %b16, %c16, %d16, %e16;
            .reg .pred %p, %q;
            ld.param.u64 %in, [in];
            ld.param.u64 %out, [out];
            mov.u32 %t, %tid.x;
            mad.wide.u32 %at, %t, 24, %in;
            ld.global.b64 %a64, [%at]; ld.global.b64 %b64, [%at+8]; ld.global.b64 %c64, [%at+16];
            cvt.u32.u64 %a32, %a64; cvt.u32.u64 %b32, %b64; cvt.u32.u64 %c32, %c64;
            cvt.u16.u64 %a16, %a64; cvt.u16.u64 %b16, %b64; cvt.u16.u64 %c16, %c64;
            and.b32 %d32, %c32, 1;
            setp.ne.b32 %p, %d32, 0;
            mad.wide.u32 %at, %t, 8, %out;\n",
    );
    for (n, operation) in operations.iter().enumerate() {
        let (width, at) = (width(operation.ptx), n * THREADS as usize * 8);
        let operation = operation.ptx;
        text += &format!("{operation}\nst.global.b{width} [%at+{at}], %d{width};\n");
    }
    text + "ret;\n}\n"
}
