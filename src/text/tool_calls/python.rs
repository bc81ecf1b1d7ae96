//! Literals of Python, which models write where their chat template has shown arguments so.

use serde_json::{Map, Number, Value};

/// Most lists and dictionaries within each other, as in serde_json.
const MAX_DEPTH: usize = 128;

/// The JSON of a literal: a list, tuple, dictionary, text, number, `True`, `False` or `None`.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text.trim() };
    let value = reader.value(MAX_DEPTH)?;
    reader.rest.trim_start().is_empty().then_some(value)
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    /// Skips white space and then `mark`, if it is there.
    fn takes(&mut self, mark: char) -> bool {
        self.rest = self.rest.trim_start();
        let behind = self.rest.strip_prefix(mark);
        self.rest = behind.unwrap_or(self.rest);
        behind.is_some()
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => self.dictionary(depth),
            quote @ ('\'' | '"') => self.text(quote).map(Value::String),
            _ => self.word(),
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.takes(open);
        let mut items = Vec::new();
        while !self.takes(close) {
            items.push(self.value(depth)?);
            if !self.takes(',') {
                return self.takes(close).then_some(Value::Array(items));
            }
        }
        Some(Value::Array(items))
    }

    fn dictionary(&mut self, depth: usize) -> Option<Value> {
        self.takes('{');
        let mut members = Map::new();
        while !self.takes('}') {
            let Value::String(key) = self.value(depth)? else { return None };
            if !self.takes(':') {
                return None;
            }
            members.insert(key, self.value(depth)?);
            if !self.takes(',') {
                return self.takes('}').then_some(Value::Object(members));
            }
        }
        Some(Value::Object(members))
    }

    fn text(&mut self, quote: char) -> Option<String> {
        self.takes(quote);
        let (mut text, mut chars) = (String::new(), self.rest.chars());
        loop {
            match chars.next()? {
                c if c == quote => break,
                '\n' => return None,
                '\\' => match chars.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    c @ ('\\' | '\'' | '"') => text.push(c),
                    'x' => text.push(code(&mut chars, 2)?),
                    'u' => text.push(code(&mut chars, 4)?),
                    // As in Python, what is no escape stands for itself.
                    c => text.extend(['\\', c]),
                },
                c => text.push(c),
            }
        }
        self.rest = chars.as_str();
        Some(text)
    }

    /// A constant or a number.
    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find([',', ']', ')', '}', ':']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim_end() {
            "True" => Some(true.into()),
            "False" => Some(false.into()),
            "None" => Some(Value::Null),
            word => word.parse::<Number>().ok().map(Value::Number),
        }
    }
}

/// The character that the next `digits` hexadecimal digits stand for.
fn code(chars: &mut std::str::Chars<'_>, digits: usize) -> Option<char> {
    let digits: Option<String> = (0..digits).map(|_| chars.next()).collect();
    char::from_u32(u32::from_str_radix(&digits?, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_become_json() {
        for (text, json) in [
            ("{'a': [1, -2.5, True], \"b\": (), }", r#"{"a":[1,-2.5,true],"b":[]}"#),
            ("['it\\'s', \"\\x41\\u00e9\\n\\d\"]", r#"["it's","Aé\n\\d"]"#),
            (" None ", "null"),
            ("{}", "{}"),
            ("(1,)", "[1]"),
        ] {
            assert_eq!(literal(text).map(|value| value.to_string()).as_deref(), Some(json), "{text}");
        }
    }

    #[test]
    fn everything_else_is_no_literal() {
        let deep = "[".repeat(100_000);
        for text in
            ["", "[1", "{1: 2}", "{'a'}", "f(1)", "'a", "['a' 'b']", "a", "[1] 2", "'\\xg0'", "'\\ud800'", &deep]
        {
            assert_eq!(literal(text), None, "{}", &text[..text.len().min(20)]);
        }
    }
}
