//! A template as instructions of minijinja's machine, with calls between them that count the bytes they make.
//!
//! minijinja's fuel counts instructions, and its stable interface has no hook for the result of an operator: doubling a
//! text forty times makes a terabyte. So operators become calls of our own functions, and the results of all other
//! operations pass through a function that counts them.

use std::collections::BTreeMap;
use std::sync::Arc;

use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, Token, eval, make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Value};
use minijinja::{AutoEscape, Environment, State};
use yoke::{Yoke, Yokeable};

use super::meter::{FUEL, Meter, made};
use super::operators;
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};

/// Most bytes of a template. The largest in use, which write tools in several languages, have about 100 KiB.
pub(super) const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Most tags of a template. The largest in use have about 500. Each branch of an `if` takes stack when it is parsed.
const MAX_TAGS: usize = 10_000;
/// Most tokens of a tag. The largest in use have about 100. Each token can add a level to an expression.
const MAX_TAG_TOKENS: usize = 4096;
/// Most bytes that tags make of constants alone, such as `'-' * 40`: they are made when the template is parsed.
const MAX_CONSTANT_BYTES: u64 = 16 << 20;
/// Stack of the thread that parses a template, enough for 10,000 branches of an `if`. Only the used part takes memory.
const PARSE_STACK_BYTES: usize = 256 << 20;

/// Bytes of an environment with its filters and functions.
const ENVIRONMENT_BYTES: u64 = 64 << 10;
/// Bytes that a byte of the source takes, in copies of its texts. It took up to 6.3.
const BYTE: u64 = 8;
/// Bytes that a token takes as a node of the tree and as instructions, before and after calls are put between them. It
/// took up to 280.
const TOKEN: u64 = 320;
/// Bytes of the stack that a tag may take.
const TAG: u64 = (PARSE_STACK_BYTES / MAX_TAGS) as u64;

/// Names of our functions. They are not identifiers, so no template can call or hide them.
const BEGIN: &str = "<begin>";
const MADE: &str = "<made>";
const STORED: &str = "<stored>";
const CONCAT: &str = "<concat>";
const ADD: &str = "<add>";
const MULTIPLY: &str = "<multiply>";
const REMAINDER: &str = "<remainder>";
/// Name under which a render finds the [`Room`].
const ROOM: &str = "<room>";

/// A parsed template, which many threads can render at once.
pub(super) struct Program {
    environment: Environment<'static>,
    /// The instructions, with the source that they borrow.
    parsed: Yoke<Parsed<'static>, Arc<str>>,
}

/// The instructions of a template.
#[derive(Yokeable)]
struct Parsed<'s> {
    main: Instructions<'s>,
    blocks: BTreeMap<&'s str, Instructions<'s>>,
}

/// Where the bytes of a render are counted.
#[derive(Debug)]
struct Room(Traffic);

impl Object for Room {}

impl Program {
    /// Most bytes that parsing `source` takes, of which the program keeps a part.
    ///
    /// # Errors
    /// `Config` if `source` is too large.
    pub(super) fn parsing_bytes(source: &str) -> Result<u64> {
        let Extent { tags, tokens, constants } = extent(source)?;
        Ok(ENVIRONMENT_BYTES + source.len() as u64 * BYTE + tokens * TOKEN + tags * TAG + constants)
    }

    /// Parses `source` for `environment`, whose filters and functions it uses.
    ///
    /// # Errors
    /// `Config` if `source` is too large or is not a template; `ResourceExhausted` if no thread can parse it.
    pub(super) fn new(name: &'static str, source: Arc<str>, mut environment: Environment<'static>) -> Result<Self> {
        extent(&source)?;
        environment.set_fuel(Some(FUEL));
        operators::install(&mut environment);
        environment.add_function(BEGIN, |state: &mut State, room: &Value| {
            if let Some(Room(traffic)) = room.downcast_object_ref() {
                let meter = Meter::new(traffic);
                state.get_or_insert_extension(meter);
            }
        });
        environment.add_function(MADE, made);
        environment.add_function(STORED, operators::stored);
        environment.add_function(CONCAT, operators::concat);
        environment.add_function(ADD, operators::add);
        environment.add_function(MULTIPLY, operators::multiply);
        environment.add_function(REMAINDER, operators::remainder);
        let parsed = Yoke::try_attach_to_cart(source, |source| parse_on_thread(name, source))?;
        Ok(Self { environment, parsed })
    }

    /// The text that the template renders from `variables`, and the charge for all bytes that the render made.
    ///
    /// # Errors
    /// The template's own errors, and those of the [`Meter`].
    pub(super) fn render(
        &self,
        mut variables: BTreeMap<&str, Value>,
        traffic: &Traffic,
    ) -> std::result::Result<(String, Charge), minijinja::Error> {
        variables.insert(ROOM, Value::from_object(Room(traffic.clone())));
        let mut text = String::new();
        let root = Value::from(variables);
        let mut out = make_string_output(&mut text);
        let Parsed { main, blocks } = self.parsed.get();
        let (_, mut state) = eval(&self.environment, main, root, blocks, &mut out, AutoEscape::None)?;
        let charge = Meter::of(&mut state)?.take_charge();
        drop(state);
        Ok((text, charge))
    }
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Program")
    }
}

pub(super) fn syntax() -> Result<SyntaxConfig> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.map_err(|e| Error::Internal(e.to_string()))
}

/// Parses on a thread of its own: nested tags and long expressions take more stack than other threads have.
fn parse_on_thread<'s>(name: &'static str, source: &'s str) -> Result<Parsed<'s>> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat-template".into()).stack_size(PARSE_STACK_BYTES);
        let parsing = thread.spawn_scoped(scope, || parse(name, source)).map_err(|e| {
            Error::ResourceExhausted(format!("the chat template needs a thread, which did not start: {e}; retry"))
        })?;
        parsing.join().map_err(|_| Error::Internal("parsing the chat template panicked".into()))?
    })
}

fn parse<'s>(name: &'static str, source: &'s str) -> Result<Parsed<'s>> {
    let config = TemplateConfig { syntax_config: syntax()?, default_auto_escape: Arc::new(|_| AutoEscape::None) };
    let compiled = CompiledTemplate::new(name, source, &config)
        .map_err(|e| Error::Config(format!("the chat template cannot be compiled: {e}")))?;
    let mut main = Instructions::new(name, source);
    for instruction in [Instruction::Lookup(ROOM), Instruction::CallFunction(BEGIN, Some(1)), Instruction::DiscardTop] {
        main.add(instruction);
    }
    let main = counted(&compiled.instructions, main);
    let blocks = compiled.blocks.iter();
    let blocks = blocks.map(|(name, block)| (*name, counted(block, Instructions::new(name, source)))).collect();
    Ok(Parsed { main, blocks })
}

/// The size of a template, which bounds the memory of parsing it.
#[derive(Default)]
struct Extent {
    tags: u64,
    tokens: u64,
    /// Bytes that tags make of constants alone.
    constants: u64,
}

/// Measures a template, and rejects one that would take too much stack or memory when it is parsed. Text that is not a
/// token is left to the parser.
fn extent(source: &str) -> Result<Extent> {
    if source.len() > MAX_SOURCE_BYTES {
        let bytes = source.len();
        return Err(Error::Config(format!(
            "the chat template has {bytes} bytes, and at most {MAX_SOURCE_BYTES} are read; shorten it"
        )));
    }
    let refuse = |line: u16, what: String| Err(Error::Config(format!("the chat template: line {line}: {what}")));
    let (mut all, mut tokens) = (Extent::default(), 0);
    // For each tag: its longest text, a bound on the product of its numbers, and whether it multiplies texts or lists.
    let (mut longest, mut product, mut multiplies, mut has_text) = (0_u64, 1_u64, false, false);
    for (token, span) in tokenize(source, false, syntax()?).map_while(std::result::Result::ok) {
        match token {
            Token::VariableStart | Token::BlockStart => {
                all.tags += 1;
                (tokens, longest, product, multiplies, has_text) = (0, 0, 1, false, false);
            }
            Token::VariableEnd | Token::BlockEnd if multiplies && has_text => {
                let made = product.saturating_mul(longest + size_of::<Value>() as u64);
                all.constants = all.constants.saturating_add(made);
            }
            Token::Str(text) => (longest, has_text) = (longest.max(text.len() as u64), true),
            Token::String(text) => (longest, has_text) = (longest.max(text.len() as u64), true),
            Token::BracketOpen | Token::Comma => has_text = true,
            Token::Int(number) => product = product.saturating_mul(number.saturating_add(1)),
            Token::Ident("true" | "True") => product = product.saturating_mul(2),
            Token::Mul => multiplies = true,
            Token::Int128(_) | Token::Pow => (product, multiplies) = (u64::MAX, true),
            _ => {}
        }
        (tokens, all.tokens) = (tokens + 1, all.tokens + 1);
        if all.tags > MAX_TAGS as u64 {
            return refuse(span.start_line, format!("more than {MAX_TAGS} tags; shorten the template"));
        }
        if tokens > MAX_TAG_TOKENS {
            return refuse(span.start_line, format!("more than {MAX_TAG_TOKENS} tokens in one tag; split it with set"));
        }
        if all.constants > MAX_CONSTANT_BYTES {
            let what = format!("constants multiplied to more than {MAX_CONSTANT_BYTES} bytes; write shorter ones");
            return refuse(span.start_line, what);
        }
    }
    Ok(all)
}

/// Appends the instructions of `given` to those of `program`, with calls between them that count the bytes they make.
fn counted<'s>(given: &Instructions<'s>, mut program: Instructions<'s>) -> Instructions<'s> {
    let expanded: Vec<_> = (0..).map_while(|index| given.get(index)).map(expand).collect();
    let mut next = (0..).find(|&index| program.get(index).is_none()).unwrap_or(0);
    // The new index of each instruction, and one more for jumps past the last.
    let mut starts = Vec::with_capacity(expanded.len() + 1);
    for instructions in &expanded {
        starts.push(next);
        next += instructions.len() as u32;
    }
    starts.push(next);
    for (index, instruction) in (0..).zip(expanded).flat_map(|(index, all)| all.into_iter().map(move |i| (index, i))) {
        let instruction = retargeted(instruction, &starts);
        match (given.get_span(index), given.get_line(index)) {
            (Some(span), _) => program.add_with_span(instruction, span),
            (None, Some(line)) => program.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
            (None, None) => program.add(instruction),
        };
    }
    program
}

/// The instructions that replace one instruction.
fn expand<'s>(instruction: &Instruction<'s>) -> Vec<Instruction<'s>> {
    use Instruction as I;
    let count = || I::CallFunction(MADE, Some(1));
    match instruction {
        // Raw text passes no hook, so it is emitted as a value.
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        I::StringConcat => vec![I::CallFunction(CONCAT, Some(2)), count()],
        I::Add => vec![I::CallFunction(ADD, Some(2)), count()],
        I::Mul => vec![I::CallFunction(MULTIPLY, Some(2)), count()],
        I::Rem => vec![I::CallFunction(REMAINDER, Some(2)), count()],
        I::SetAttr(_) => vec![I::Swap, I::CallFunction(STORED, Some(1)), I::Swap, instruction.clone()],
        I::Slice
        | I::BuildMap(_)
        | I::BuildList(_)
        | I::BuildTuple(_)
        | I::EndCapture
        | I::ApplyFilter(..)
        | I::PerformTest(..)
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(_)
        | I::Eq
        | I::Ne
        | I::Gt
        | I::Gte
        | I::Lt
        | I::Lte
        | I::In
        | I::CompareAndPreserve(_) => vec![instruction.clone(), count()],
        _ => vec![instruction.clone()],
    }
}

/// The instruction with its jump target moved to the new index.
fn retargeted<'s>(mut instruction: Instruction<'s>, starts: &[u32]) -> Instruction<'s> {
    use Instruction as I;
    if let I::Iterate(target)
    | I::Jump(target)
    | I::JumpIfFalse(target)
    | I::JumpIfFalseOrPop(target)
    | I::JumpIfTrueOrPop(target)
    | I::BuildMacro(_, target, _) = &mut instruction
    {
        *target = starts[*target as usize];
    }
    instruction
}
