//! The types of PTX.

use super::error::{Cause, Result};

/// The type of an instruction, register or variable. Numbers are bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PtxType {
    Pred,
    Bits(usize),
    Unsigned(usize),
    Signed(usize),
    F16,
    Bf16,
    Tf32,
    F32,
    F64,
    F16x2,
    Bf16x2,
}

impl PtxType {
    /// From its name without the dot.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "tf32" => Self::Tf32,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "f16x2" => Self::F16x2,
            "bf16x2" => Self::Bf16x2,
            "b128" => Self::Bits(128),
            _ => {
                let bits = match name.get(1..)? {
                    "8" => 8,
                    "16" => 16,
                    "32" => 32,
                    "64" => 64,
                    _ => return None,
                };
                match name.as_bytes()[0] {
                    b'b' => Self::Bits(bits),
                    b'u' => Self::Unsigned(bits),
                    b's' => Self::Signed(bits),
                    _ => return None,
                }
            }
        })
    }

    /// From its name without the dot, which a declaration must have.
    pub fn parse(name: &str) -> Result<Self> {
        Self::from_name(name).ok_or_else(|| Cause::Type(format!(".{name}")))
    }

    pub fn bits(self) -> usize {
        match self {
            Self::Pred => 8,
            Self::Bits(bits) | Self::Unsigned(bits) | Self::Signed(bits) => bits,
            Self::F16 | Self::Bf16 => 16,
            Self::Tf32 | Self::F32 | Self::F16x2 | Self::Bf16x2 => 32,
            Self::F64 => 64,
        }
    }

    pub fn bytes(self) -> usize {
        self.bits() / 8
    }

    pub fn is_float(self) -> bool {
        !matches!(self, Self::Pred | Self::Bits(_) | Self::Unsigned(_) | Self::Signed(_))
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Self::Signed(_))
    }

    /// Whether it is one half, which is computed in double and rounded once.
    pub fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16)
    }

    /// The type of the two elements of a packed type.
    pub fn element(self) -> Option<Self> {
        match self {
            Self::F16x2 => Some(Self::F16),
            Self::Bf16x2 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Its bits alone.
    pub fn as_bits(self) -> Self {
        Self::Bits(self.bits())
    }

    /// An integer of twice the width.
    pub fn wide(self) -> Self {
        match self {
            Self::Signed(bits) => Self::Signed(2 * bits),
            other => Self::Unsigned(2 * other.bits()),
        }
    }

    /// The C integer of its width and sign.
    pub fn c_int(self) -> String {
        format!("{}{}", if self.is_signed() { 's' } else { 'u' }, self.bits())
    }

    /// Its name without the dot.
    pub fn name(self) -> String {
        match self {
            Self::Pred => "pred".into(),
            Self::Bits(bits) => format!("b{bits}"),
            Self::Unsigned(bits) => format!("u{bits}"),
            Self::Signed(bits) => format!("s{bits}"),
            Self::F16 => "f16".into(),
            Self::Bf16 => "bf16".into(),
            Self::Tf32 => "tf32".into(),
            Self::F32 => "f32".into(),
            Self::F64 => "f64".into(),
            Self::F16x2 => "f16x2".into(),
            Self::Bf16x2 => "bf16x2".into(),
        }
    }
}
