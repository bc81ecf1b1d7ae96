//! The token file: who may use the server. Each line is `role token`; lines that begin with `#` and blank lines are
//! comments. No message of this module has text of the file in it, because that may be a token.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::server::role::Role;
use crate::types::Owner;

/// Fewest characters of a token: 16 random hexadecimal digits are more than anybody can try through a network.
const MIN_TOKEN_CHARS: usize = 16;
/// Most characters of a token: it travels in a header with every call.
const MAX_TOKEN_CHARS: usize = 1024;
/// Most tokens: each call is compared with all of them.
const MAX_TOKENS: usize = 1024;

/// The tokens that are known. Digests are kept instead of the tokens, so that a comparison tells nothing of a token's
/// length, and a dump of the memory no token.
pub(super) struct Tokens(Vec<Entry>);

struct Entry {
    digest: [u8; 32],
    role: Role,
}

/// Whom a token stands for.
pub(super) struct Holder {
    pub(super) role: Role,
    /// The same for the same token, also after the file was read again.
    pub(super) owner: Owner,
}

impl Tokens {
    /// Reads the text of a token file.
    ///
    /// # Errors
    /// What is wrong, with the number of the line.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(text).map_err(|_| "is not text in UTF-8".to_owned())?;
        let mut entries: Vec<Entry> = Vec::new();
        let mut lines: Vec<usize> = Vec::new();
        for (number, line) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = Entry::parse(line).map_err(|why| format!("line {number}: {why}"))?;
            if let Some(first) = entries.iter().position(|known| known.digest == entry.digest) {
                return Err(format!("line {number}: has the token of line {}; give each token once", lines[first]));
            }
            if entries.len() == MAX_TOKENS {
                return Err(format!("line {number}: is more than {MAX_TOKENS} tokens"));
            }
            entries.push(entry);
            lines.push(number);
        }
        if entries.is_empty() {
            return Err("has no token; write a line `control TOKEN`".into());
        }
        Ok(Self(entries))
    }

    /// The holder of `token`. The time that this takes depends on the length of `token` and on the number of tokens
    /// alone.
    pub(super) fn find(&self, token: &[u8]) -> Option<Holder> {
        let digest = digest(token);
        let mut found = None;
        for entry in &self.0 {
            if bool::from(entry.digest.ct_eq(&digest)) {
                found = Some(entry);
            }
        }
        found.map(|entry| Holder { role: entry.role, owner: owner(&entry.digest) })
    }
}

impl Entry {
    fn parse(line: &str) -> Result<Self, String> {
        let mut words = line.split_ascii_whitespace();
        let role = match words.next() {
            Some("generate") => Role::Generate,
            Some("control") => Role::Control,
            _ => return Err("does not begin with `generate` or `control`; a line is `role token`".into()),
        };
        let token = words.next().ok_or("has a role and no token")?;
        if words.next().is_some() {
            return Err("has more than a role and a token; tokens have no spaces".into());
        }
        if !(MIN_TOKEN_CHARS..=MAX_TOKEN_CHARS).contains(&token.len()) {
            return Err(format!(
                "the token has {} characters; give {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS}, such as those of \
                 `openssl rand -hex 32`",
                token.chars().count()
            ));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("the token has characters that no header can carry; use letters, digits and -._~+/=".into());
        }
        Ok(Self { digest: digest(token.as_bytes()), role })
    }
}

fn digest(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

fn owner(digest: &[u8; 32]) -> Owner {
    let (start, _) = digest.split_first_chunk().expect("a digest has more than 8 bytes");
    Owner(u64::from_be_bytes(*start))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "0123456789abcdef";
    const TWO: &str = "fedcba9876543210";

    fn refusal(text: &str) -> String {
        Tokens::parse(text.as_bytes()).err().expect("refused")
    }

    #[test]
    fn tokens_are_found_with_their_roles() {
        let text = format!("\u{feff}# who may\n\n  generate {ONE}\r\ncontrol\t{TWO}  \n");
        let tokens = Tokens::parse(text.as_bytes()).unwrap();
        let (one, two) = (tokens.find(ONE.as_bytes()).unwrap(), tokens.find(TWO.as_bytes()).unwrap());
        assert_eq!((one.role, two.role), (Role::Generate, Role::Control));
        assert_ne!(one.owner, two.owner);
        for other in ["", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF"] {
            assert!(tokens.find(other.as_bytes()).is_none(), "{other:?}");
        }
        let again = Tokens::parse(format!("control {ONE}").as_bytes()).unwrap().find(ONE.as_bytes()).unwrap();
        assert_eq!(again.owner, one.owner, "an owner outlives a reload");
    }

    #[test]
    fn a_wrong_line_is_named_without_its_text() {
        for (text, part) in [
            ("".to_owned(), "has no token"),
            ("# only this\n".into(), "has no token"),
            (format!("generate {ONE}\n{TWO}\n"), "line 2: does not begin with `generate` or `control`"),
            (format!("{TWO} control"), "line 1: does not begin"),
            ("control".into(), "line 1: has a role and no token"),
            (format!("control {ONE} {TWO}"), "line 1: has more than a role and a token"),
            ("control short-token".into(), "line 1: the token has 11 characters; give 16 to 1024"),
            (format!("control {}", "x".repeat(1025)), "line 1: the token has 1025 characters"),
            ("control 0123456789abcdef\u{e9}".into(), "line 1: the token has characters that no header"),
            (format!("control {ONE}\n\ngenerate {ONE}"), "line 3: has the token of line 1"),
            ((0..1025).map(|i| format!("generate {ONE}{i}\n")).collect(), "line 1025: is more than 1024 tokens"),
        ] {
            let said = refusal(&text);
            assert!(said.contains(part), "{part:?} is missing in {said:?}");
            for secret in [ONE, TWO, "short-token", "xxxx"] {
                assert!(!said.contains(secret), "{said:?}");
            }
        }
        assert!(Tokens::parse(b"control \xff\xfe").is_err());
    }
}
