//! The filter `tojson` as transformers defines it for templates: Python's `json.dumps`, without escapes for HTML.

use std::collections::BTreeMap;
use std::io::{self, Write};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use serde::Serialize as _;
use serde_json::Serializer;
use serde_json::ser::Formatter;

use super::meter::{ITEM_BYTES, Meter};
use super::operators::check_width;

/// Python's `json.dumps(value, …)` with these options. `ensure_ascii` is false by default.
pub(super) fn tojson(state: &mut State, value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    check_width(indent.unwrap_or(0) as u64)?;
    let (item, member) = match separators.as_deref() {
        Some([item, member]) => (item.clone(), member.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators are two texts")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let ascii = ensure_ascii.unwrap_or(false);
    let format = PythonFormat { item, member, indent, ascii, depth: 0, has_items: false };
    let meter = Meter::of(state)?;
    let value = if sort_keys.unwrap_or(false) { &sorted(meter, value)? } else { value };
    let mut json = Counted { meter, text: Vec::new(), refusal: None };
    let written = value.serialize(&mut Serializer::with_formatter(&mut json, format));
    let Counted { text, refusal, .. } = json;
    written.map_err(|e| refusal.unwrap_or_else(|| Error::new(ErrorKind::InvalidOperation, e.to_string())))?;
    Ok(String::from_utf8(text).expect("JSON is UTF-8"))
}

/// `value`, with the members of all its objects sorted by their names.
fn sorted(meter: &mut Meter, value: &Value) -> Result<Value, Error> {
    meter.spend(value.len().unwrap_or(0) as u64 * ITEM_BYTES)?;
    match value.kind() {
        ValueKind::Map => {
            let members = value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten();
            let members = members.map(|(name, member)| Ok((name, sorted(meter, &member)?)));
            Ok(Value::from(members.collect::<Result<BTreeMap<Value, Value>, Error>>()?))
        }
        ValueKind::Seq => value.try_iter()?.map(|item| sorted(meter, &item)).collect(),
        _ => Ok(value.clone()),
    }
}

/// A text whose bytes are counted before it grows.
struct Counted<'a> {
    meter: &'a mut Meter,
    text: Vec<u8>,
    /// Why it could not grow.
    refusal: Option<Error>,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        /// Bytes of a new text: most values are short.
        const FIRST: usize = 256;
        let needed = self.text.len() + bytes.len();
        if needed > self.text.capacity() {
            let capacity = needed.max(2 * self.text.capacity()).max(FIRST);
            if let Err(refusal) = self.meter.spend(capacity as u64) {
                self.refusal = Some(refusal);
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            self.text.reserve_exact(capacity - self.text.len());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes JSON as Python does.
struct PythonFormat {
    /// Separator of two items.
    item: String,
    /// Separator of a member's name and its value.
    member: String,
    /// Spaces per level, with each item on its own line; None puts everything on one line.
    indent: Option<usize>,
    /// Whether characters beyond ASCII are escaped.
    ascii: bool,
    depth: usize,
    /// Whether the list or object that ends next has any items.
    has_items: bool,
}

impl PythonFormat {
    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.break_line(writer)?;
        }
        writer.write_all(bracket)
    }

    fn begin_item<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.break_line(writer)
    }

    fn break_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth * indent).try_for_each(|_| writer.write_all(b" "))
    }
}

impl Formatter for PythonFormat {
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ascii {
            return writer.write_all(fragment.as_bytes());
        }
        fragment.chars().try_for_each(|c| match c {
            ' '..='~' => writer.write_all(&[c as u8]),
            _ => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(writer, "\\u{unit:04x}")),
        })
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.member.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }
}

/// Python's `repr` of a finite number: the shortest digits that round-trip, with an exponent of at least two digits
/// below 1e-4 and from 1e16 on.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format writes an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a number");
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{value}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected texts are the output of Python 3.11.
    #[test]
    fn floats_are_those_of_python() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (2.5, "2.5"),
            (100.0, "100.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.5e22, "-1.5e+22"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (1e300, "1e+300"),
            (0.1, "0.1"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }
}
