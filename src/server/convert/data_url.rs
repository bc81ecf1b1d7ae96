//! Files in `data:` URLs, the only URLs that the server reads.

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};

use crate::error::shown;

/// Some clients leave out the padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// Longest beginning of a URL in an error.
const MAX_SHOWN: usize = 32;

/// The file in a URL `data:TYPE;base64,DATA`, or why there is none. TYPE is not read: the first bytes of a file name
/// its format.
pub(in crate::server) fn decode(url: &str) -> Result<Vec<u8>, String> {
    let Some((kind, data)) = url.strip_prefix("data:").and_then(|rest| rest.split_once(',')) else {
        let shown = shown(url, MAX_SHOWN);
        return Err(format!(
            "{shown:?} is not a data: URL, and the server opens no other; send data:image/png;base64,..."
        ));
    };
    if !kind.ends_with(";base64") {
        let kind = shown(kind, MAX_SHOWN);
        return Err(format!("data:{kind} is not in base64; send data:image/png;base64,..."));
    }
    BASE64.decode(data).map_err(|error| format!("is not base64: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_from_data_urls_alone() {
        for url in ["data:image/png;base64,aGVsbG8=", "data:;base64,aGVsbG8", "data:image/jpeg;x=y;base64,aGVsbG8="] {
            assert_eq!(decode(url).as_deref(), Ok(&b"hello"[..]), "{url}");
        }
        for (url, error) in [
            ("https://example.com/a.png", "\"https://example.com/a.png\" is not a data: URL"),
            ("file:///etc/passwd", "\"file:///etc/passwd\" is not a data: URL"),
            ("", "\"\" is not a data: URL"),
            ("data:image/png;base64", "is not a data: URL"),
            ("data:image/png,hello", "data:image/png is not in base64"),
            ("data:image/png;base64,a b", "is not base64: Invalid"),
        ] {
            let found = decode(url).expect_err(url);
            assert!(found.contains(error), "{url}: {found}");
        }
    }
}
