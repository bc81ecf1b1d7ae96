//! Operands in C: registers, numbers, addresses, special registers.

use super::body::{FunctionBody, Name};
use super::error::{Cause, Result};
use super::instructions::StateSpace;
use super::statement::{Instruction, split};
use super::types::PtxType;

/// A C name for a name of PTX.
pub(super) fn mangle(name: &str) -> String {
    let (prefix, rest) = match name.as_bytes().first() {
        Some(b'%') => ("r_", &name[1..]),
        Some(b'$') => ("l_", &name[1..]),
        _ => ("n_", name),
    };
    let word = rest.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' });
    prefix.chars().chain(word).collect()
}

/// The bits of a literal of so many bytes: decimal, hexadecimal, octal, `0f` and `0d` bits, or a decimal fraction.
pub(super) fn number(text: &str, bytes: usize) -> Option<u64> {
    let text = text.trim();
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let digits = digits.trim_end_matches('U');
    let prefixed = |prefixes: [&str; 2]| prefixes.iter().find_map(|prefix| digits.strip_prefix(prefix));
    let value = if let Some(hexadecimal) = prefixed(["0x", "0X"]) {
        u64::from_str_radix(hexadecimal, 16).ok()?
    } else if let Some(binary) = prefixed(["0b", "0B"]) {
        u64::from_str_radix(binary, 2).ok()?
    } else if let Some(bits) = prefixed(["0f", "0F"]).or(prefixed(["0d", "0D"])) {
        u64::from_str_radix(bits, 16).ok()?
    } else if digits.contains('.') {
        let value = text.parse::<f64>().ok()?;
        return Some(if bytes == 4 { (value as f32).to_bits().into() } else { value.to_bits() });
    } else if digits.len() > 1 && digits.starts_with('0') {
        u64::from_str_radix(&digits[1..], 8).ok()?
    } else {
        digits.parse().ok()?
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

/// `{a, b}`, or one operand.
pub(super) fn list(operand: &str) -> Vec<String> {
    let inside = operand.strip_prefix('{').and_then(|operand| operand.strip_suffix('}'));
    inside.map_or_else(|| vec![operand.to_owned()], split)
}

/// A special register in C.
fn special(name: &str) -> Option<&'static str> {
    Some(match name {
        "%tid.x" => "T->tid[0]",
        "%tid.y" => "T->tid[1]",
        "%tid.z" => "T->tid[2]",
        "%ntid.x" => "T->b->ntid[0]",
        "%ntid.y" => "T->b->ntid[1]",
        "%ntid.z" => "T->b->ntid[2]",
        "%ctaid.x" | "%clusterid.x" => "T->b->ctaid[0]",
        "%ctaid.y" | "%clusterid.y" => "T->b->ctaid[1]",
        "%ctaid.z" | "%clusterid.z" => "T->b->ctaid[2]",
        "%nctaid.x" | "%nclusterid.x" => "T->b->nctaid[0]",
        "%nctaid.y" | "%nclusterid.y" => "T->b->nctaid[1]",
        "%nctaid.z" | "%nclusterid.z" => "T->b->nctaid[2]",
        // A cluster has one block.
        "%cluster_ctaid.x" | "%cluster_ctaid.y" | "%cluster_ctaid.z" | "%cluster_ctarank" => "0u",
        "%cluster_nctaid.x" | "%cluster_nctaid.y" | "%cluster_nctaid.z" | "%cluster_nctarank" => "1u",
        "%laneid" => "T->lane",
        "%warpid" => "T->warp",
        "%nwarpid" => "32u",
        "%smid" | "%gridid" => "0u",
        "%nsmid" => "1u",
        "%lanemask_eq" => "(1u << T->lane)",
        "%lanemask_lt" => "((1u << T->lane) - 1)",
        "%lanemask_le" => "((2u << T->lane) - 1)",
        "%lanemask_gt" => "~((2u << T->lane) - 1)",
        "%lanemask_ge" => "~((1u << T->lane) - 1)",
        "%clock" | "%clock64" => "(u64)__builtin_ia32_rdtsc()",
        "%clock_hi" => "(u32)((u64)__builtin_ia32_rdtsc() >> 32)",
        "%globaltimer" => "nanoseconds()",
        "%globaltimer_lo" => "(u32)nanoseconds()",
        "%globaltimer_hi" => "(u32)(nanoseconds() >> 32)",
        "%total_smem_size" => "T->b->shared_size",
        "%dynamic_smem_size" => "(T->b->shared_size - STATIC_SHARED)",
        "WARP_SZ" => "32u",
        _ => return None,
    })
}

impl FunctionBody<'_, '_> {
    /// The bits of an operand as a C expression; a literal is one of so many bytes.
    pub fn raw(&self, operand: &str, bytes: usize) -> Result<String> {
        let operand = operand.trim();
        if let Some(predicate) = operand.strip_prefix('!') {
            return Ok(format!("(u8)!{}", self.raw(predicate, bytes)?));
        }
        match self.name(operand) {
            Some(Name::Register(_)) => return Ok(mangle(operand)),
            Some(Name::Memory) => return Ok(format!("(u64){}", mangle(operand))),
            None => {}
        }
        if let Some(register) = special(operand) {
            return Ok(register.into());
        }
        if let Some(bits) = number(operand, bytes) {
            return Ok(match bytes {
                16 => format!("(u128){bits}ull"),
                8 => format!("{bits}ull"),
                4 => format!("{}u", bits as u32),
                2 => format!("(u16){}u", bits as u16),
                _ => format!("(u8){}u", bits as u8),
            });
        }
        if let Some((symbol, plus)) = operand.split_once('+') {
            return Ok(format!("({} + {})", self.raw(symbol, bytes)?, self.raw(plus, bytes)?));
        }
        if let Some(at) = self.unit.shared.get(operand) {
            return Ok(format!("{at}u"));
        }
        let variables = &self.unit.source.variables;
        match variables.iter().position(|v| v.name == operand) {
            Some(i) if variables[i].space == "shared" => Ok(format!("DYNAMIC_{}", mangle(operand))),
            Some(i) => Ok(format!("T->b->globals[{i}]")),
            None => Err(Cause::Operand(operand.into())),
        }
    }

    /// An operand as a C value of its type; halves are doubles.
    pub fn value(&self, operand: &str, ty: PtxType) -> Result<String> {
        let raw = self.raw(operand, ty.bytes())?;
        Ok(match ty {
            PtxType::F32 | PtxType::Tf32 => format!("F32({raw})"),
            PtxType::F64 => format!("F64({raw})"),
            PtxType::F16 => format!("F16({raw})"),
            PtxType::Bf16 => format!("(double)BF16({raw})"),
            PtxType::Pred => raw,
            _ => format!("({})({raw})", ty.c_int()),
        })
    }

    /// The bits of a C value of a type.
    pub fn bits(ty: PtxType, value: &str) -> String {
        match ty {
            PtxType::F32 | PtxType::Tf32 => format!("B32({value})"),
            PtxType::F64 => format!("B64({value})"),
            PtxType::F16 => format!("B16({value})"),
            PtxType::Bf16 => format!("BB16({value})"),
            PtxType::Pred => format!("(u8)(({value}) != 0)"),
            _ => format!("({})({value})", ty.c_int()),
        }
    }

    /// C that writes a C value of a type into a register, which may be wider, or into `_`.
    pub fn set(&self, to: &str, ty: PtxType, value: &str) -> Result<String> {
        if to == "_" {
            return Ok(format!("(void)({value});"));
        }
        match self.name(to) {
            Some(Name::Register(_)) => Ok(format!("{} = {};", mangle(to), Self::bits(ty, value))),
            _ => Err(Cause::Operand(to.into())),
        }
    }

    /// `[base + offset]` as a C expression of 64 bits.
    pub fn address(&self, operand: &str) -> Result<String> {
        let unknown = || Cause::Operand(operand.into());
        let inside = operand.trim().strip_prefix('[').and_then(|o| o.strip_suffix(']')).ok_or_else(unknown)?;
        let (base, offset) = inside.split_once('+').unwrap_or((inside, "0"));
        let (base, offset) = (base.trim(), number(offset, 8).ok_or_else(unknown)? as i64);
        match self.name(base) {
            Some(Name::Register(ty)) if ty.bytes() == 4 => {
                Ok(format!("(u64)(u32)({} + {}u)", mangle(base), offset as u32))
            }
            _ => Ok(format!("({} + {offset}ll)", self.raw(base, 8)?)),
        }
    }

    /// A C pointer to `bytes` of memory, checked for this kind of access (`READ`, `WRITE`, `ATOMIC`, `STRONG_READ`).
    pub fn pointer(&self, space: StateSpace, operand: &str, bytes: usize, access: &str) -> Result<String> {
        let address = self.address(operand)?;
        Ok(match space {
            StateSpace::Shared => format!("shared_at(T, {address}, {bytes}, {bytes}, {access})"),
            StateSpace::Local => format!("local_at(T, {address}, {bytes}, {bytes}, {access})"),
            StateSpace::Param => format!("(u8 *){address}"),
            StateSpace::Global | StateSpace::Generic => format!("global_at(T, {address}, {bytes}, {bytes}, {access})"),
        })
    }

    /// An operand that is a predicate, and not a number or another register.
    pub fn is_predicate(&self, operand: &str) -> bool {
        self.name(operand.trim_start_matches('!')) == Some(Name::Register(PtxType::Pred))
    }

    /// The operands of a predicate result: `p|q`.
    pub fn pair<'i>(i: &'i Instruction<'_>) -> Result<(&'i str, Option<&'i str>)> {
        let operand = i.operand(0)?;
        Ok(operand.split_once('|').map_or((operand, None), |(p, q)| (p.trim(), Some(q.trim()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let cases: [(&str, u64); 10] = [
            ("42", 42),
            ("-1", u64::MAX),
            ("0x1F", 31),
            ("0xffffffffU", 0xffff_ffff),
            ("017", 15),
            ("0b101", 5),
            ("0f3F800000", 0x3f80_0000),
            ("0d3FF0000000000000", 0x3ff0_0000_0000_0000),
            ("0", 0),
            ("-8", -8i64 as u64),
        ];
        for (text, bits) in cases {
            assert_eq!(number(text, 8), Some(bits), "{text}");
        }
        assert_eq!((number("1.5", 4), number("1.5", 8)), (Some(0x3fc0_0000), Some(0x3ff8_0000_0000_0000)));
        assert_eq!((number("%r1", 4), number("name", 4), number("", 4)), (None, None, None));
    }

    #[test]
    fn names_of_each_kind_stay_apart() {
        let names = ["%r1", "$r1", "r1", "r_1"].map(mangle);
        assert_eq!(names, ["r_r1", "l_r1", "n_r1", "n_r_1"]);
    }
}
