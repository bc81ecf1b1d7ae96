//! What parsing a JSON text takes. A text of a few bytes for each value, such as `["","",…]`, takes many times its size
//! once it is parsed, and a text of token ids hardly more than its size, so the values are counted.

/// Bytes for a byte of the text: raw values keep a copy of it.
const TEXT: u64 = 1;
/// Bytes for a byte within strings, beside [`TEXT`]: the string, and a buffer for one that has escapes.
const WITHIN: u64 = 2;
/// Bytes for a byte of the name of a member, beside [`TEXT`]: the name, its place in the path of what is wrong, and the
/// path of a member that nothing reads.
const WITHIN_NAME: u64 = 5;
/// Bytes for an item of a list. A token id takes four, which a growing list takes three times.
const ITEM: u64 = 12;
/// Bytes for the name of a member, with its place in a map.
const NAME: u64 = 64;
/// Bytes for a string or a list, which is an item of a growing list, has memory of its own, and becomes a part of a
/// message.
const VALUE: u64 = 320;
/// Bytes for an object.
const OBJECT: u64 = 1 << 10;

/// Most bytes that parsing `json` takes beside the text itself, and then turning it into a message. The text need not
/// be valid.
pub(super) fn parsed_bytes(json: &[u8]) -> u64 {
    let (mut bytes, mut at) = (TEXT * json.len() as u64, 0);
    while let Some(&byte) = json.get(at) {
        at += 1;
        bytes += match byte {
            b',' => ITEM,
            b'[' => VALUE,
            b'{' => OBJECT,
            b'"' => {
                let length = string_bytes(&json[at..]);
                at += length + 1;
                match is_name(json.get(at..)) {
                    true => WITHIN_NAME * length as u64 + NAME,
                    false => WITHIN * length as u64 + VALUE,
                }
            }
            _ => 0,
        };
    }
    bytes
}

/// Number of bytes up to the quote that ends a string, or up to the end.
fn string_bytes(rest: &[u8]) -> usize {
    let mut at = 0;
    loop {
        match rest[at..].iter().position(|byte| matches!(byte, b'"' | b'\\')) {
            Some(found) if rest[at + found] == b'"' => return at + found,
            // The byte after a backslash ends nothing.
            Some(found) => at = (at + found + 2).min(rest.len()),
            None => return rest.len(),
        }
    }
}

/// Whether the string before `rest` is the name of a member.
fn is_name(rest: Option<&[u8]>) -> bool {
    rest.is_some_and(|rest| rest.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings_only() {
        for (text, rest) in [
            ("", 0),
            ("1", 0),
            ("[1,2,3]", VALUE + 2 * ITEM),
            (r#""a,[{\"\\""#, VALUE + WITHIN * 8),
            (r#"{"a" : "b"}"#, OBJECT + NAME + WITHIN_NAME + VALUE + WITHIN),
            (r#"["a""#, 2 * VALUE + WITHIN),
            (r#""never ends\"#, VALUE + WITHIN * 11),
            ("\"", VALUE),
        ] {
            assert_eq!(parsed_bytes(text.as_bytes()), text.len() as u64 + rest, "{text}");
        }
    }
}
