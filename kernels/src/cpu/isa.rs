//! Instruction sets, found at run time.

#[cfg(target_arch = "x86_64")]
use super::amx_detection;
#[cfg(target_arch = "aarch64")]
use super::lanes::Neon;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Scalar};

/// An instruction set that this processor has or can emulate. Values exist only for those that it can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa {
    /// The instructions that kernels are compiled for.
    level: Level,
    /// How bfloat16 weights are multiplied.
    products: Products,
    /// Whether the products have the results of instructions that the level lacks, which takes several times as long.
    is_emulated: bool,
}

/// How bfloat16 weights, keys and values are multiplied. The results of each have their own bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// In float32, to which they are widened.
    Widened,
    /// As dot products of bfloat16 pairs, by avx512_bf16. The other factors are rounded to bfloat16.
    Pairs,
    /// As products of tiles of bfloat16 pairs, by AMX. The other factors are rounded to bfloat16.
    Tiles,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Scalar,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

/// A computation written once over [`Lanes`]. `run` must be `#[inline(always)]`, so that it is compiled with the target
/// features of the instruction set that [`Isa::dispatch`] picks.
pub(crate) trait Kernel {
    type Output;

    /// Whether the kernel uses [`Lanes::dot_pairs`] or [`Lanes::rounded_pairs`], for which avx512_bf16 has
    /// instructions.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86-64 has the instruction"))]
    const DOT_PAIRS: bool = false;

    fn run<L: Lanes>(self) -> Self::Output;
}

impl Isa {
    /// The fastest instruction set of this processor.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// All instruction sets of this processor, fastest first; the last is the portable one.
    pub fn available() -> Vec<Isa> {
        let mut found = vec![];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let avx512_bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
            if avx512_bf16 && amx_detection::is_available() {
                found.push(Isa::real(Level::Avx512Bf16, Products::Tiles));
            }
            if avx512_bf16 {
                found.push(Isa::real(Level::Avx512Bf16, Products::Pairs));
            }
            if avx512 {
                found.push(Isa::real(Level::Avx512, Products::Widened));
            }
            if avx2 {
                found.push(Isa::real(Level::Avx2, Products::Widened));
            }
        }
        #[cfg(target_arch = "aarch64")]
        found.push(Isa::real(Level::Neon, Products::Widened));
        found.push(Isa::real(Level::Scalar, Products::Widened));
        found
    }

    /// The [`available`](Isa::available) instruction sets, then avx512_bf16 emulated on each of them that lacks it, and
    /// AMX emulated on the fastest, so that tests can check that arithmetic on every processor.
    pub fn all() -> Vec<Isa> {
        let mut all = Isa::available();
        let without = all.clone().into_iter().filter(|isa| !isa.rounds_activations());
        all.extend(without.map(|isa| Isa { products: Products::Pairs, is_emulated: true, ..isa }));
        all.push(Isa { products: Products::Tiles, is_emulated: true, ..all[0] });
        all
    }

    /// The fastest of [`all`](Isa::all) instruction sets that has this [`name`](Isa::name).
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::all().into_iter().find(|isa| isa.name() == name)
    }

    fn real(level: Level, products: Products) -> Isa {
        Isa { level, products, is_emulated: false }
    }

    pub fn is_emulated(self) -> bool {
        self.is_emulated
    }

    /// How this instruction set multiplies bfloat16.
    pub fn products(self) -> Products {
        self.products
    }

    pub fn name(self) -> &'static str {
        match self.level {
            _ if self.products == Products::Tiles && self.is_emulated => "amx_emulated",
            _ if self.products == Products::Tiles => "amx",
            _ if self.is_emulated => "avx512_bf16_emulated",
            Level::Scalar => "scalar",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512f",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// Whether the values that bfloat16 is multiplied by are rounded to bfloat16 first: activations in
    /// [`linear`](super::linear()), queries and softmax weights in [`paged_attention`](super::paged_attention).
    pub fn rounds_activations(self) -> bool {
        self.products != Products::Widened
    }

    /// How many accumulators of 16 lanes a kernel may hold in registers.
    pub(crate) fn accumulators(self) -> usize {
        struct Accumulators;
        impl Kernel for Accumulators {
            type Output = usize;
            #[inline(always)]
            fn run<L: Lanes>(self) -> usize {
                L::ACCUMULATORS
            }
        }
        self.dispatch(Accumulators)
    }

    /// Runs `kernel`, compiled for this instruction set.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self.level {
            Level::Scalar => scalar(kernel),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => neon(kernel),
            // SAFETY: a Level of x86-64 is only made by `available`, which found its features.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 if K::DOT_PAIRS => unsafe { avx512bf16(kernel) },
            // SAFETY: as above; avx512_bf16 is only found together with these.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Bf16 => unsafe { avx512(kernel) },
        }
    }
}

#[inline(never)]
fn scalar<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Scalar>()
}

#[cfg(target_arch = "aarch64")]
#[inline(never)]
fn neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512<false>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn avx512bf16<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512<true>>()
}
