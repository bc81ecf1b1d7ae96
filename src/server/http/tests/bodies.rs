//! Bodies of protocols that become those of chats.

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use super::heap::peak_of;
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::server::http::request_body::{JsonBody, parse, parsed_bytes};
use crate::server::security::Caller;

/// Parses a body.
pub(in crate::server::http) fn parsed<T: DeserializeOwned>(text: &str) -> Result<JsonBody<T>> {
    parse(text.as_bytes(), Traffic::new(1 << 40).charge_always(0), Caller::default())
}

/// The value of a member; null if it is absent.
pub(in crate::server::http) fn value_of(member: Option<&RawValue>) -> Value {
    member.map_or(Value::Null, |json| serde_json::from_str(json.get()).expect("is JSON"))
}

/// Checks that `read` refuses the body with each of the `wrong` members and values, and names the path of the value.
pub(in crate::server::http) fn assert_named<T>(
    body: &Value,
    wrong: impl IntoIterator<Item = (&'static str, Value, &'static str)>,
    read: impl Fn(&Value) -> Result<T>,
) {
    assert!(read(body).is_ok(), "{body}");
    for (member, value, named) in wrong {
        let mut body = body.clone();
        body[member] = value;
        match read(&body).err() {
            Some(Error::InvalidArgument { field, .. }) => assert_eq!(field.replace(".?", ""), named, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}

/// Checks that `read` takes no more for a body whose `member` is a long list than is counted: what parsing takes, and
/// `copies` of the text. The items of the list are such as take much more than their text.
pub(in crate::server::http) fn assert_counted<T>(member: &str, copies: u64, read: impl Fn(&str) -> T) {
    for item in [
        "{}",
        "{\"role\":\"user\",\"content\":\"\"}",
        "{\"role\":\"user\",\"content\":[{\"type\":\"\"}]}",
        "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"\"},{\"type\":\"text\",\"text\":\"\"}]}",
    ] {
        let items = vec![item; (1 << 19) / (item.len() + 1)].join(",");
        let body = format!("{{\"{member}\": [{items}]}}");
        let (most, _) = peak_of(|| read(&body));
        let counted = parsed_bytes(body.as_bytes()) + copies * body.len() as u64;
        assert!(most <= counted + 4096, "{most} bytes of {counted} counted for {item}");
    }
}
