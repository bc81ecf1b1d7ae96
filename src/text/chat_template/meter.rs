//! Limits on the memory and the time of one render. Fuel counts only a template's instructions, but one instruction can
//! make a text of gigabytes or compare values for hours, so the meter also counts bytes, values and time.

use std::fmt::{self, Write};
use std::time::{Duration, Instant};

use minijinja::value::{Value, ValueKind};
use minijinja::{ErrorKind, State};

use crate::error::Error;
use crate::memory::{Charge, Traffic};

/// Most instructions of one render. The templates of Qwen, Llama and Mistral take about a hundred per message, so this
/// is enough for 100,000 messages; it takes about a second.
pub(super) const FUEL: u64 = 20_000_000;
/// Most bytes that one render makes, including those it has freed. A million bytes of messages take 5 to 20 million,
/// and no model's context holds a text of more than ten million bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Most values that are visited to measure lists and maps, which takes about half a second: 10,000 messages with five
/// members each can be sliced or filtered 80 times.
const MAX_VISITS: u64 = 4_000_000;
/// Most elements of a list that an operation makes: minijinja's own limit for `range`.
pub(super) const MAX_ITEMS: usize = 100_000;
/// Deepest nesting of lists and maps that an operation makes. JSON of requests has up to 128 levels, and the arguments
/// of calls in it have up to 128 more. Each level takes stack when a value is written or dropped.
const MAX_DEPTH: usize = 400;
/// Longest time of a render. Real renders take milliseconds. The limits above end most others within seconds; this
/// limit ends those that compare or search large values.
const MAX_TIME: Duration = Duration::from_secs(30);
/// Bytes that an element of a list or a map takes.
pub(super) const ITEM_BYTES: u64 = 64;
/// Bytes per charge, so that small texts do not each take a charge.
const STEP: u64 = 64 << 10;

/// Counts the bytes that a render makes. All of them stay charged until the render ends.
pub(super) struct Meter {
    made: u64,
    visits: u64,
    ends_at: Instant,
    charge: Charge,
}

impl Meter {
    pub(super) fn new(traffic: &Traffic) -> Self {
        Self { made: 0, visits: 0, ends_at: Instant::now() + MAX_TIME, charge: traffic.charge_always(0) }
    }

    /// The meter of a render.
    ///
    /// # Errors
    /// Only if the program's prelude has not run.
    pub(super) fn of<'a>(state: &'a mut State) -> Result<&'a mut Self, minijinja::Error> {
        let missing = || minijinja::Error::new(ErrorKind::InvalidOperation, "a value is made outside of a render");
        state.get_extension_mut::<Self>().ok_or_else(missing)
    }

    /// The charge for everything that the render made, including the text.
    pub(super) fn take_charge(&mut self) -> Charge {
        self.charge.split(u64::MAX)
    }

    /// Counts `bytes` that are about to be made.
    pub(super) fn spend(&mut self, bytes: u64) -> Result<(), minijinja::Error> {
        self.tick()?;
        self.made = self.made.saturating_add(bytes);
        if self.made > MAX_BYTES {
            return Err(exceeded(&format!("makes more than {MAX_BYTES} bytes of text and lists")));
        }
        match self.made.checked_sub(self.charge.bytes()) {
            Some(missing) if missing > 0 => self.charge.grow(missing.next_multiple_of(STEP)).map_err(carried),
            _ => Ok(()),
        }
    }

    /// Fails if the render has taken too long.
    fn tick(&self) -> Result<(), minijinja::Error> {
        if Instant::now() <= self.ends_at {
            return Ok(());
        }
        let message = format!(
            "the chat template takes more than {} s for this chat; send fewer or shorter messages, or token ids",
            MAX_TIME.as_secs()
        );
        Err(carried(Error::ResourceExhausted(message)))
    }

    /// Counts a value that an operation made, and measures how deeply it is nested.
    fn count(&mut self, value: &Value) -> Result<(), minijinja::Error> {
        self.visit(value, 0)?;
        let bytes = match value.kind() {
            ValueKind::String | ValueKind::Bytes => length(value),
            ValueKind::Seq => elements(value).map(|element| ITEM_BYTES + length(&element)).sum(),
            ValueKind::Map => value.len().unwrap_or(0) as u64 * ITEM_BYTES,
            _ => 0,
        };
        self.spend(bytes)
    }

    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), minijinja::Error> {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return Err(exceeded(&format!("makes more than {MAX_VISITS} elements of lists and maps")));
        }
        if depth > MAX_DEPTH {
            return Err(exceeded(&format!("nests lists and maps more than {MAX_DEPTH} levels deep")));
        }
        match value.kind() {
            ValueKind::Seq => elements(value).try_for_each(|element| self.visit(&element, depth + 1)),
            ValueKind::Map => {
                let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
                pairs.into_iter().flatten().try_for_each(|(_, value)| self.visit(&value, depth + 1))
            }
            _ => Ok(()),
        }
    }
}

fn elements(value: &Value) -> impl Iterator<Item = Value> {
    value.try_iter().into_iter().flatten()
}

/// Bytes of a text; 0 for other values.
fn length(value: &Value) -> u64 {
    value.as_bytes().map_or(0, |bytes| bytes.len() as u64)
}

/// Counts the result of an operation. A lazy list becomes a plain one, because the work of nested lazy lists cannot be
/// measured.
pub(super) fn made(state: &mut State, value: Value) -> Result<Value, minijinja::Error> {
    let value = match value.kind() {
        ValueKind::Iterable => {
            let mut items = Vec::new();
            for item in value.try_iter()? {
                if items.len() == MAX_ITEMS {
                    return Err(too_many_items());
                }
                items.push(item);
            }
            Value::from(items)
        }
        _ => value,
    };
    Meter::of(state)?.count(&value)?;
    Ok(value)
}

/// Bytes of the text form of a value, counted without making the text.
///
/// # Errors
/// If the text has more bytes than a render may make.
pub(super) fn shown_bytes(value: &Value) -> Result<u64, minijinja::Error> {
    struct Counter(u64);

    impl Write for Counter {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0 += text.len() as u64;
            if self.0 > MAX_BYTES { Err(fmt::Error) } else { Ok(()) }
        }
    }

    if let Some(text) = value.as_str() {
        return Ok(text.len() as u64);
    }
    let mut counter = Counter(0);
    match write!(counter, "{value}") {
        Ok(()) => Ok(counter.0),
        Err(_) => Err(exceeded(&format!("makes more than {MAX_BYTES} bytes of text and lists"))),
    }
}

/// The error of a render that exceeds a limit.
pub(super) fn exceeded(what: &str) -> minijinja::Error {
    let message = format!("the chat template {what} for this chat; send fewer or shorter messages, or token ids");
    carried(Error::invalid("messages", message))
}

pub(super) fn too_many_items() -> minijinja::Error {
    exceeded(&format!("makes a list of more than {MAX_ITEMS} elements"))
}

/// Wraps `error` so that [`typed`] can find it.
fn carried(error: Error) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, error.to_string()).with_source(error)
}

/// The error that ended a render: one of this module, or the template's own.
pub(super) fn typed(error: &minijinja::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(carried) = current.downcast_ref::<Error>() {
            return carried.clone();
        }
        match current.downcast_ref::<minijinja::Error>() {
            Some(inner) if inner.kind() == ErrorKind::OutOfFuel => {
                return typed(&exceeded(&format!("takes more than {FUEL} instructions")));
            }
            _ => cause = current.source(),
        }
    }
    let message = error.detail().map_or_else(|| error.to_string(), str::to_string);
    Error::invalid("messages", format!("the chat template refuses them: {message}"))
}
