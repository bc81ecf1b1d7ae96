//! Matrix instructions that a warp does at one meeting: waiting for each other costs its threads more than the work.
//!
//! An instruction joins the open batch with the values of its registers at that point; it is executed when the batch is
//! closed. Until then nothing may depend on it: only instructions that compute registers may come between, and none
//! that are results of the batch. Values that a later instruction of the batch reads from an earlier one stay in the
//! batch.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::body::{FunctionBody, Name};
use super::error::{Cause, Result};
use super::instructions;
use super::operand::mangle;
use super::statement::Instruction;
use super::unit::write_line;

/// Most words that a lane brings to a meeting: they lie on its stack.
const MAX_WORDS: usize = 512;

/// The matrix instructions that have not been done yet.
#[derive(Default)]
pub(super) struct Batch {
    /// The word of each register that the batch writes.
    results: BTreeMap<String, usize>,
    words: usize,
    /// The calls that do the instructions.
    calls: String,
    /// Of the first instruction.
    line: usize,
}

impl Batch {
    pub fn is_open(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Whether an operand has a register whose value comes with the batch.
    pub fn writes(&self, operand: &str) -> bool {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "_$%".contains(c);
        operand.split(|c| !is_name(c)).any(|name| self.results.contains_key(name))
    }

    /// Whether an instruction may be written before the batch is closed: it joins the batch, or only computes registers
    /// from registers, none of which are results of the batch.
    pub fn lets_pass(&self, i: &Instruction<'_>) -> bool {
        match i.opcode {
            "mma" | "movmatrix" => true,
            "ldmatrix" => !i.operands.iter().any(|operand| operand.starts_with('[') && self.writes(operand)),
            opcode => instructions::is_computation(opcode) && !i.operands.iter().any(|operand| self.writes(operand)),
        }
    }

    /// Whether there is no place for another instruction.
    pub fn is_full(&self) -> bool {
        self.words + 16 > MAX_WORDS
    }
}

impl FunctionBody<'_, '_> {
    /// The word that holds an operand of an instruction that joins the batch.
    pub fn batch_operand(&mut self, operand: &str) -> Result<usize> {
        match self.batch.results.get(operand) {
            Some(word) => Ok(*word),
            None => {
                let value = self.raw(operand, 4)?;
                Ok(self.batch_value(&value))
            }
        }
    }

    /// A word with the value that a C expression has now.
    pub fn batch_value(&mut self, value: &str) -> usize {
        let word = self.batch.words;
        self.batch.words += 1;
        self.write(format_args!("W.w[{word}] = (u32)({value});"));
        word
    }

    /// A word for a register that an instruction of the batch writes.
    pub fn batch_result(&mut self, register: &str) -> Result<usize> {
        let Some(Name::Register(_)) = self.name(register) else { return Err(Cause::Operand(register.into())) };
        let word = self.batch.words;
        self.batch.words += 1;
        self.batch.results.insert(register.to_owned(), word);
        Ok(word)
    }

    /// Adds an instruction: a call of a function with these arguments and the places of its words.
    pub fn batch_call(&mut self, line: usize, function: &str, words: &[usize]) {
        if !self.batch.is_open() {
            self.batch.line = line;
        }
        let words = words.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        write!(self.batch.calls, " {{ static const u16 at[] = {{{words}}}; {function} at); }}")
            .expect("a string takes any text");
    }

    /// Has the warp meet for the batch, if one is open, and its results written.
    pub fn close_batch(&mut self) {
        if !self.batch.is_open() {
            return;
        }
        let batch = std::mem::take(&mut self.batch);
        self.unit.alone = false;
        self.words = self.words.max(batch.words);
        let name = format!("meet_batch_{}", self.unit.batches);
        self.unit.batches += 1;
        write_line(
            &mut self.unit.declarations,
            format_args!(
                "static void {name}(void **slots, u32 mask) {{ Words **lanes = whole_warp(slots, mask);{} }}",
                batch.calls
            ),
        );
        self.write(format_args!("T->line = {}; MEET(~0u, 0, {name}, &W);", batch.line));
        for (register, word) in batch.results {
            self.write(format_args!("{} = W.w[{word}];", mangle(&register)));
        }
    }
}
