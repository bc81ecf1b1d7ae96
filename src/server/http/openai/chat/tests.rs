use super::*;
use crate::memory::Traffic;
use crate::server::http::body::parse;
use crate::server::http::heap::peak_of;
use crate::server::http::weight::parsed_bytes;
use crate::server::security::Caller;

/// `part` repeated to a list that is about a megabyte long.
fn list_of(part: &str) -> String {
    let parts = vec![part; (1 << 20) / (part.len() + 1)];
    format!("[{}]", parts.join(","))
}

#[test]
fn parsing_takes_no_more_than_is_counted_for_it() {
    for member in
        ["messages", "tools", "documents", "chat_template_kwargs", "tool_choice", "functions", "response_format"]
    {
        for text in
            [list_of("{}"), list_of("1"), list_of("{\"role\":\"user\"}"), format!("\"{}\"", "\\n".repeat(1 << 19))]
        {
            let body = format!("{{\"{member}\": {text}}}");
            let charge = Traffic::new(1 << 40).charge_always(0);
            let parsed = || parse::<BodyOf<Body>>(body.as_bytes(), charge, Caller::default()).map(|body| body.value);
            let (most, _) = peak_of(parsed);
            let counted = parsed_bytes(body.as_bytes());
            assert!(most <= counted + 4096, "{most} bytes of {counted} counted for {member} of {}", &text[..20]);
        }
    }
}

#[test]
fn flags_are_booleans_or_0_and_1() {
    let read = |text: &str| serde_json::from_str::<Flag>(text).ok();
    assert_eq!(
        (read("true"), read("1"), read("false"), read("0")),
        (Some(Flag(true)), Some(Flag(true)), Some(Flag(false)), Some(Flag(false)))
    );
    for wrong in ["5", "-1", "\"true\"", "1.0", "[]"] {
        assert_eq!(read(wrong), None, "{wrong}");
    }
}
