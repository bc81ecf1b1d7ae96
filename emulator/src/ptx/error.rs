//! Errors of modules that cannot be emulated.

use std::fmt;

/// The reason why a statement is not emulated, or not PTX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// No such instruction, or not with this modifier.
    NotEmulated(String),
    /// A type that the instruction does not take, or no type.
    Type(String),
    /// An operand that is not a register, variable, number or address.
    Operand(String),
    /// Fewer operands than the instruction takes.
    FewOperands,
    /// The text is not as PTX is written.
    Syntax(&'static str),
    /// A function is called or jumped to that has no body here.
    NoFunction(String),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEmulated(what) => write!(f, "{what} is not emulated"),
            Self::Type(what) => write!(f, "the type {what} is not emulated here"),
            Self::Operand(what) => write!(f, "the operand {what} is not known"),
            Self::FewOperands => write!(f, "operands are missing"),
            Self::Syntax(what) => write!(f, "{what}"),
            Self::NoFunction(name) => write!(f, "the function {name} has no body in this module"),
        }
    }
}

/// A statement of a module that cannot be emulated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxError {
    /// Of the module's text, from 1.
    pub line: usize,
    pub statement: String,
    pub cause: Cause,
}

impl fmt::Display for PtxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: `{}`: {}", self.line, self.statement, self.cause)
    }
}

impl std::error::Error for PtxError {}

/// The result of translating a part of a statement.
pub(super) type Result<T, E = Cause> = std::result::Result<T, E>;
