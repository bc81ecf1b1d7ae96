//! The value of `--limit-mm-per-prompt`.

use std::collections::BTreeMap;
use std::str::FromStr;

/// Most images of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimit(pub usize);

impl FromStr for ImageLimit {
    type Err = String;

    /// From `image=2`, or as vLLM's newer versions take it, `{"image": 2}`. Other content may be named with 0.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?}: expected image=N or {{\"image\": N}}");
        let limits: BTreeMap<String, usize> = match text.starts_with('{') {
            true => serde_json::from_str(text).map_err(|_| wrong())?,
            false => text.split(',').map(pair).collect::<Option<_>>().ok_or_else(wrong)?,
        };
        if let Some((kind, count)) = limits.iter().find(|(kind, count)| *kind != "image" && **count > 0) {
            return Err(format!("{kind}={count}: this server takes images, and nothing else besides text"));
        }
        limits.get("image").copied().map(Self).ok_or_else(wrong)
    }
}

fn pair(text: &str) -> Option<(String, usize)> {
    let (kind, count) = text.split_once('=')?;
    Some((kind.trim().to_string(), count.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_of_vllms_forms_are_read() {
        let read = |text: &str| text.parse::<ImageLimit>();
        for text in ["image=2", r#"{"image": 2}"#, "image=2,video=0", r#"{"video": 0, "image": 2}"#] {
            assert_eq!(read(text), Ok(ImageLimit(2)), "{text}");
        }
        for text in ["", "2", "image", "image=x", "image=-1", "{", r#"{"image": {"count": 2}}"#, "video=0"] {
            assert!(read(text).unwrap_err().contains("expected image=N"), "{text}");
        }
        assert!(read("image=1,video=2").unwrap_err().starts_with("video=2: this server takes images"));
    }
}
