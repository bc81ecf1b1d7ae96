use serde::Deserialize;

use super::*;
use crate::memory::Traffic;

#[derive(Debug, Deserialize)]
struct Message {
    n: Option<u32>,
    #[serde(default)]
    inner: Vec<Inner>,
    maybe: Option<Inner>,
}

#[derive(Debug, Deserialize)]
struct Inner {
    x: u8,
}

fn parsed(text: &str) -> Result<JsonBody<Message>> {
    parse(text.as_bytes(), Traffic::new(1 << 30).charge_always(100), Caller::default())
}

#[test]
fn members_that_nothing_reads_are_named() {
    let body = parsed(r#"{"n": 3, "q": {"deep": 1}, "inner": [{"x": 1, "y": [2]}], "maybe": {"x": 0, "z": 0}}"#)
        .expect("valid");
    assert_eq!((body.value.n, body.value.inner[0].x), (Some(3), 1));
    assert_eq!(body.ignored.header().expect("some were ignored"), "q, inner.0.y, maybe.z");
    assert_eq!(body.value.maybe.map(|inner| inner.x), Some(0));
    assert!(parsed("{}").expect("valid").ignored.header().is_none());
}

#[test]
fn the_names_of_ignored_members_are_short_whatever_they_are() {
    let members: Vec<String> =
        (0..1000).map(|i| format!("\"{i}\\r\\nx-evil: {}\": 0", "\u{1f980}".repeat(100))).collect();
    let body = parsed(&format!("{{{}}}", members.join(","))).expect("valid");
    let header = body.ignored.header().expect("they fit into a header");
    assert!(header.len() < 20_000, "{} bytes", header.len());
    assert!(header.to_str().expect("plain text").ends_with("and 984 more"));
}

#[test]
fn a_wrong_member_is_named_by_its_path() {
    for (text, member) in [
        (r#"{"n": "three"}"#, "n"),
        (r#"{"n": -1}"#, "n"),
        (r#"{"inner": [{"x": 1}, {"x": 300}]}"#, "inner[1].x"),
        (r#"{"inner": [{}]}"#, "inner[0]"),
        ("3", "body"),
        ("[1]", "body"),
        (" [1]", "body"),
        ("null", "body"),
        ("{\"n\": 1} {}", "body"),
        ("", "body"),
        ("{\"n\": NaN}", "n"),
    ] {
        match parsed(text).map(|body| body.value) {
            Err(Error::InvalidArgument { field, .. }) => assert_eq!(field, member, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    let deep = "[".repeat(100_000);
    assert!(parsed(&format!("{{\"q\": {deep}")).is_err());
}

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
