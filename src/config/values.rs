//! Values of flags that have a form of their own.

/// The port of HTTP; `None` disables HTTP.
pub type HttpPort = Option<u16>;

/// A port, or `off`.
pub(super) fn parse_port(text: &str) -> Result<HttpPort, String> {
    if text.eq_ignore_ascii_case("off") {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| "expected a port from 0 to 65535, or off".into())
}

/// Bytes from a text like "2GiB", "500MB" or "1048576".
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(format!("{unit:?} is not a unit; use KiB, MiB, GiB, KB, MB, GB or plain bytes")),
    };
    let value: f64 = number.parse().map_err(|_| format!("{number:?} is not a number"))?;
    let bytes = value * factor as f64;
    if bytes >= u64::MAX as f64 {
        return Err("is more memory than any machine has".into());
    }
    Ok(bytes as u64)
}

/// A host name without scheme and port.
pub(super) fn parse_host_name(text: &str) -> std::result::Result<String, String> {
    if text.is_empty() || !text.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) {
        return Err("is not a host name; give it without scheme and port, such as rollout.example".into());
    }
    Ok(text.to_owned())
}
