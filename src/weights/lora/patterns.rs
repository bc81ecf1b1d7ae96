//! `rank_pattern` and `alpha_pattern`: tables of module patterns, of which the first that matches counts.
//!
//! PEFT matches each key by `re.match(rf"(.*\.)?({key})$", module)`. Nearly all keys are names of modules or their
//! ends. Those are compared byte by byte. The others are compiled together, so that what they take is limited and
//! known.

use std::collections::HashMap;

use regex::{RegexSet, RegexSetBuilder};

use crate::error::{Error, Result};
use crate::memory::Charge;

/// Most entries of a table. One for every layer of a large model fits; more would only cost memory.
const MAX_PATTERNS: usize = 4096;
/// Most regular expressions among them: more than a large dense model has linear layers.
const MAX_REGEXES: usize = 1024;
/// Bytes of compiled expressions for each of a table. The name of a module takes a few KiB.
const COMPILED_BYTES_EACH: usize = 64 << 10;
/// Most bytes of a table's compiled expressions. It bounds the time that a match takes too.
const COMPILED_BYTES: usize = 2 << 20;
/// Memory for compiling at a time, as a multiple of the limit on the result. Measured: 5 times.
const COMPILING: u64 = 6;
/// Memory for each byte of an expression while it is parsed. Measured: 514 bytes for `||||`.
const PARSED_BYTES: u64 = 640;
/// Memory for a class of Unicode characters while it is parsed. Measured: 51 KB for `(?i:\P{gr_base})`.
const CLASS_BYTES: u64 = 64 << 10;

/// A table of module patterns with their values.
pub(super) struct Patterns<T> {
    /// The value of each entry, in the table's order.
    values: Vec<T>,
    /// The entries that are names.
    names: Vec<(usize, Name)>,
    /// The expressions of all other entries, and which entries those are.
    regexes: RegexSet,
    entries: Vec<usize>,
}

impl<T: Copy> Patterns<T> {
    /// Compiles the entries of the table `field`. The memory for each is counted in `charge` before it is taken.
    ///
    /// # Errors
    /// `InvalidArgument` on `field`; `ResourceExhausted` if there is no memory to compile the expressions.
    pub fn new(field: &str, table: Vec<(&str, T)>, charge: &mut Charge) -> Result<Self> {
        let field = format!("adapter_config.{field}");
        // As in a dict of Python, a repeated key has its last value at its first place.
        let (mut keys, mut values, mut seen) = (Vec::new(), Vec::new(), HashMap::new());
        for (key, value) in table {
            match seen.get(key) {
                Some(&entry) => values[entry] = value,
                None => {
                    seen.insert(key, keys.len());
                    keys.push(key);
                    values.push(value);
                }
            }
        }
        if keys.len() > MAX_PATTERNS {
            return Err(Error::invalid(field, format!("{} entries; a table has at most {MAX_PATTERNS}", keys.len())));
        }
        let (mut names, mut entries) = (Vec::new(), Vec::new());
        for (entry, key) in keys.iter().enumerate() {
            match Name::parse(key) {
                Some(name) => names.push((entry, name)),
                None => entries.push(entry),
            }
        }
        let expressions: Vec<&str> = entries.iter().map(|&entry| keys[entry]).collect();
        Ok(Self { values, names, regexes: compile(field, &expressions, charge)?, entries })
    }

    /// The value of the first entry that matches the module of this name.
    pub fn get(&self, module: &str) -> Option<T> {
        let name = self.names.iter().find(|(_, name)| name.matches(module)).map(|(entry, _)| *entry);
        let regex = self.regexes.matches(module).iter().next().map(|i| self.entries[i]);
        name.into_iter().chain(regex).min().map(|entry| self.values[entry])
    }
}

/// A key that is the name of a module, or the end of one.
struct Name {
    /// Its characters; `None` for a `.`, which stands for any.
    characters: Vec<Option<u8>>,
    /// Whether it is the whole name: it begins with `^`.
    whole: bool,
}

impl Name {
    /// Takes a key apart; `None` for one that is a regular expression.
    fn parse(key: &str) -> Option<Self> {
        let (whole, key) = key.strip_prefix('^').map_or((false, key), |key| (true, key));
        let mut rest = key.strip_suffix('$').unwrap_or(key).bytes();
        let mut characters = Vec::new();
        while let Some(byte) = rest.next() {
            characters.push(match byte {
                b'.' => None,
                b'\\' => Some(rest.next().filter(|next| *next == b'.')?),
                b'_' | b'-' => Some(byte),
                _ if byte.is_ascii_alphanumeric() => Some(byte),
                _ => return None,
            });
        }
        Some(Self { characters, whole })
    }

    /// Whether the name of a module, which is ASCII, is this one or ends with it after a `.`.
    fn matches(&self, module: &str) -> bool {
        let module = module.as_bytes();
        let Some(start) = module.len().checked_sub(self.characters.len()) else { return false };
        let begins = start == 0 || !self.whole && module[start - 1] == b'.';
        begins && self.characters.iter().zip(&module[start..]).all(|(own, byte)| own.is_none_or(|own| own == *byte))
    }
}

/// Compiles the expressions of the table `field`.
fn compile(field: String, expressions: &[&str], charge: &mut Charge) -> Result<RegexSet> {
    if expressions.is_empty() {
        return Ok(RegexSet::empty());
    }
    if expressions.len() > MAX_REGEXES {
        return Err(Error::invalid(
            field,
            format!(
                "{} of its keys are regular expressions, and at most {MAX_REGEXES} may be; names of modules are not \
                 limited so",
                expressions.len()
            ),
        ));
    }
    let size_limit = (COMPILED_BYTES_EACH * expressions.len()).min(COMPILED_BYTES);
    // Names of modules are ASCII. A `.` of all Unicode would take more than most keys do.
    let wrapped: Vec<String> = expressions.iter().map(|key| format!(r"^(?:([[:ascii:]]*\.)?({key})$)")).collect();
    let parsing: u64 = wrapped.iter().map(|text| text.len() as u64 * PARSED_BYTES).sum();
    let classes: usize = expressions.iter().map(|key| key.matches('\\').count() - key.matches(r"\.").count()).sum();
    charge.grow(parsing + classes as u64 * CLASS_BYTES + size_limit as u64 * COMPILING)?;
    let build = |wrapped: &[String]| {
        // Without a lazy DFA, which would take megabytes for each expression and is of use for long texts only.
        RegexSetBuilder::new(wrapped).size_limit(size_limit).dfa_size_limit(0).build()
    };
    build(&wrapped).map_err(|error| {
        let one = wrapped.iter().zip(expressions).find_map(|(wrapped, key)| {
            let error = build(std::slice::from_ref(wrapped)).err()?;
            Some(format!("{key:?} is no regular expression that is understood here: {error}"))
        });
        let all = || format!("its {} regular expressions are too large together: {error}", expressions.len());
        Error::invalid(field, one.unwrap_or_else(all))
    })
}
