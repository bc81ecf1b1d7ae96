//! Whether a call may be made, by the token in its headers. No message of this module has text of the token file in it,
//! because that may be a token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use crate::error::{Error, Result};
use crate::types::{Owner, Tenant};

/// Fewest characters of a token: an attacker cannot try all 16 random hexadecimal digits through a network.
const MIN_TOKEN_CHARS: usize = 16;
/// Most characters of a token: it travels in a header with every call.
const MAX_TOKEN_CHARS: usize = 1024;
/// Most tokens: each call is compared with all of them.
const MAX_TOKENS: usize = 1024;

/// The permission that a method or a route requires of its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum Role {
    /// No token is needed: liveness, which orchestrators ask without one.
    Anyone,
    /// Generate, score, abort your own requests, and read the server's state.
    Generate,
    /// Everything: weights, sleep, pause, other clients' requests.
    Control,
}

impl Role {
    /// The role's name in `--auth-token-file` and in the API's description.
    pub(in crate::server) fn name(self) -> &'static str {
        match self {
            Self::Anyone => "anyone",
            Self::Generate => "generate",
            Self::Control => "control",
        }
    }
}

/// The tokens of a token file. Each line is `role token` or `role token tenant`; lines that begin with `#` and blank
/// lines are comments. Digests are kept instead of the tokens, so that a comparison reveals nothing of a token's
/// length, and a dump of the memory no token.
pub(super) struct Tokens(Vec<TokenEntry>);

struct TokenEntry {
    digest: [u8; 32],
    role: Role,
    tenant: Tenant,
    /// Number of its line.
    line: usize,
}

impl Tokens {
    /// Reads the text of a token file.
    ///
    /// # Errors
    /// The number of the first wrong line, and why it is wrong.
    pub(super) fn parse(text: &[u8]) -> std::result::Result<Self, String> {
        let text = std::str::from_utf8(text).map_err(|_| "is not text in UTF-8".to_owned())?;
        let mut entries: Vec<TokenEntry> = Vec::new();
        for (number, line) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = TokenEntry::parse(line, number).map_err(|why| format!("line {number}: {why}"))?;
            if let Some(first) = entries.iter().find(|known| known.digest == entry.digest) {
                return Err(format!("line {number}: has the token of line {}; give each token once", first.line));
            }
            if entries.len() == MAX_TOKENS {
                return Err(format!("line {number}: is more than {MAX_TOKENS} tokens"));
            }
            entries.push(entry);
        }
        if entries.is_empty() {
            return Err("has no token; write a line `control TOKEN`".into());
        }
        Ok(Self(entries))
    }

    /// The role, the owner and the tenant that `token` stands for. The owner is the same for the same token, also after
    /// the file was read again. The time that this takes depends on the length of `token` and on the number of tokens
    /// alone.
    fn find(&self, token: &[u8]) -> Option<(Role, Owner, Tenant)> {
        let digest = digest(token);
        let mut found = None;
        for entry in &self.0 {
            if bool::from(entry.digest.ct_eq(&digest)) {
                found = Some(entry);
            }
        }
        found.map(|entry| (entry.role, owner(&entry.digest), entry.tenant.clone()))
    }
}

impl TokenEntry {
    fn parse(line: &str, number: usize) -> std::result::Result<Self, String> {
        let mut words = line.split_ascii_whitespace();
        let role = match words.next() {
            Some("generate") => Role::Generate,
            Some("control") => Role::Control,
            _ => return Err("does not begin with `generate` or `control`; a line is `role token`".into()),
        };
        let token = words.next().ok_or("has a role and no token")?;
        let tenant = Tenant::parse(words.next().unwrap_or_default(), "tenant").map_err(|error| error.to_string())?;
        if words.next().is_some() {
            return Err("has more than a role, a token and a tenant; none of them has spaces".into());
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
        Ok(Self { digest: digest(token.as_bytes()), role, tenant, line: number })
    }
}

fn digest(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

fn owner(digest: &[u8; 32]) -> Owner {
    let (start, _) = digest.split_first_chunk().expect("a digest has more than 8 bytes");
    Owner(u64::from_be_bytes(*start))
}

/// Checks the tokens of calls, over gRPC and HTTP. Cheap to clone.
#[derive(Clone)]
pub(in crate::server) struct Access {
    /// The tokens of the token file as it was read last; without a file every client may do everything.
    pub(super) tokens: Option<watch::Receiver<Arc<Tokens>>>,
    warned: Arc<AtomicBool>,
}

/// Who makes a call that is allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::server) struct Caller {
    /// Owner of the requests that the call starts; None without a token file.
    pub(in crate::server) owner: Option<Owner>,
    /// The owner whose requests alone the caller may end; None for one who may end all.
    pub(in crate::server) limited_to: Option<Owner>,
    /// The tenant of the requests that the call starts, unless they name another.
    pub(in crate::server) tenant: Tenant,
}

impl Caller {
    /// The tenant of a request that names `named`; an empty name is none.
    ///
    /// # Errors
    /// `InvalidArgument` if `named` cannot be the name of a tenant; `PermissionDenied` if a caller with the role
    /// `generate` names another than its own.
    pub(in crate::server) fn tenant_of(&self, named: &str) -> Result<Tenant> {
        if named.is_empty() {
            return Ok(self.tenant.clone());
        }
        let named = Tenant::parse(named, "tenant")?;
        if self.limited_to.is_some() && named != self.tenant {
            return Err(Error::PermissionDenied(
                "tenant: is not that of the token; a token with the role generate may name no other".into(),
            ));
        }
        Ok(named)
    }
}

impl Access {
    pub(super) fn new(tokens: Option<watch::Receiver<Arc<Tokens>>>) -> Self {
        Self { tokens, warned: Arc::default() }
    }

    /// Checks that a call with these headers may do what needs `role`. `name` names the call in the error.
    ///
    /// # Errors
    /// `Unauthenticated` if there is no token that is known, `PermissionDenied` if its role is another.
    pub(in crate::server) fn check(&self, headers: &HeaderMap, role: Role, name: &str) -> Result<Caller> {
        let Some(tokens) = &self.tokens else {
            if headers.contains_key(AUTHORIZATION) && !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "a client sends a token: this server checks none, and serves every client that reaches its port"
                );
            }
            return Ok(Caller::default());
        };
        if role == Role::Anyone {
            return Ok(Caller::default());
        }
        let token = bearer(headers)?;
        let known = tokens.borrow().find(token);
        let (has, owner, tenant) = known.ok_or_else(|| Error::Unauthenticated("invalid bearer token".into()))?;
        match (has, role) {
            (Role::Control, _) => Ok(Caller { owner: Some(owner), limited_to: None, tenant }),
            (Role::Generate, Role::Generate) => Ok(Caller { owner: Some(owner), limited_to: Some(owner), tenant }),
            _ => Err(Error::PermissionDenied(format!(
                "{name} needs a token with the role {}; this one has the role {}",
                role.name(),
                has.name()
            ))),
        }
    }
}

/// The token of the `Authorization: Bearer TOKEN` header; `Unauthenticated` if there is none, or more than one.
fn bearer(headers: &HeaderMap) -> Result<&[u8]> {
    let refused = |why: &str| Error::Unauthenticated(format!("{why}; send `authorization: Bearer TOKEN`"));
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or_else(|| refused("no token"))?.as_bytes();
    if values.next().is_some() {
        return Err(refused("more than one authorization"));
    }
    let (scheme, token) = value.split_at(value.iter().position(|byte| *byte == b' ').unwrap_or(value.len()));
    if !scheme.eq_ignore_ascii_case(b"bearer") || token.trim_ascii().is_empty() {
        return Err(refused("the authorization is not a bearer token"));
    }
    Ok(token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: &str = "token-of-a-user-0";
    const OTHER: &str = "token-of-another-1";
    const TRAINER: &str = "token-of-a-trainer";

    fn access() -> Access {
        let text = format!("generate {USER}\ngenerate {OTHER}\ncontrol {TRAINER}\n");
        let tokens = Tokens::parse(text.as_bytes()).expect("valid");
        Access::new(Some(watch::channel(Arc::new(tokens)).1))
    }

    fn headers(values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (AUTHORIZATION, value.parse().expect("a header's value"))).collect()
    }

    fn check(access: &Access, values: &[&str], role: Role) -> Result<Caller> {
        access.check(&headers(values), role, "the method")
    }

    #[test]
    fn a_role_may_do_what_it_may_do() {
        let access = access();
        let user = check(&access, &[&format!("Bearer {USER}")], Role::Generate).expect("may generate");
        assert!(user.owner.is_some() && user.limited_to == user.owner);
        let other = check(&access, &[&format!("bEaReR   {OTHER} ")], Role::Generate).expect("may generate");
        assert_ne!(other.owner, user.owner);
        for role in [Role::Generate, Role::Control] {
            let trainer = check(&access, &[&format!("bearer {TRAINER}")], role).expect("may do everything");
            assert!(trainer.owner.is_some() && trainer.limited_to.is_none());
        }
        let refused = check(&access, &[&format!("Bearer {USER}")], Role::Control).expect_err("may not");
        assert!(matches!(&refused, Error::PermissionDenied(why) if why.contains("the method needs a token")));
        assert_eq!(check(&access, &[], Role::Anyone).expect("needs none"), Caller::default());
        assert!(check(&access, &["Bearer nonsense"], Role::Anyone).is_ok());
    }

    #[test]
    fn clients_without_a_token_of_the_file_are_rejected_without_an_echo() {
        let (access, two) = (access(), format!("Bearer {USER}"));
        for values in [
            &[][..],
            &[""],
            &["Bearer"],
            &["Bearer "],
            &["Bearer token-of-no-one-99"],
            &["Basic token-of-a-user-0"],
            &[USER],
            &["Bearer  token-of-a-user-0 more"],
            &[&two, &two],
        ] {
            let refused = check(&access, values, Role::Generate).expect_err("no token of the file");
            let said = refused.to_string();
            assert!(matches!(refused, Error::Unauthenticated(_)), "{values:?}: {said}");
            assert!(!said.contains("token-of"), "{said}");
        }
    }

    #[test]
    fn without_a_token_file_every_client_may_do_everything() {
        let access = Access::new(None);
        for values in [&[][..], &["Bearer whatever"]] {
            assert_eq!(check(&access, values, Role::Control).expect("open"), Caller::default());
        }
    }

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
        assert_eq!((one.0, two.0), (Role::Generate, Role::Control));
        assert_ne!(one.1, two.1);
        for other in ["", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF"] {
            assert!(tokens.find(other.as_bytes()).is_none(), "{other:?}");
        }
        let again = Tokens::parse(format!("control {ONE}").as_bytes()).unwrap().find(ONE.as_bytes()).unwrap();
        assert_eq!(again.1, one.1, "an owner outlives a reload");
    }

    #[test]
    fn a_token_stands_for_its_tenant_and_control_for_any() {
        let text = format!("generate {ONE} team-a\ncontrol {TWO}  team-b \ngenerate {USER}\n");
        let tokens = Tokens::parse(text.as_bytes()).unwrap();
        let access = Access::new(Some(watch::channel(Arc::new(tokens)).1));
        let caller = |token| check(&access, &[&format!("Bearer {token}")], Role::Generate).expect("may generate");
        let tenant = |token, named| caller(token).tenant_of(named).map(|tenant| tenant.to_string());
        for (token, named, expected) in [
            (ONE, "", "team-a"),
            (ONE, "team-a", "team-a"),
            (TWO, "", "team-b"),
            (TWO, "team-a", "team-a"),
            (USER, "", ""),
        ] {
            assert_eq!(tenant(token, named).expect("allowed"), expected, "{named:?}");
        }
        for token in [ONE, USER] {
            let refused = tenant(token, "team-b").expect_err("another's");
            assert!(matches!(&refused, Error::PermissionDenied(why) if why.starts_with("tenant: ")), "{refused}");
        }
        let refused = tenant(TWO, "a b").expect_err("no name");
        assert!(matches!(&refused, Error::InvalidArgument { field, .. } if field == "tenant"), "{refused}");
        assert_eq!(
            Access::new(None).check(&HeaderMap::new(), Role::Generate, "").unwrap().tenant_of("x").unwrap().as_str(),
            "x"
        );
    }

    #[test]
    fn a_wrong_line_is_named_without_its_text() {
        for (text, part) in [
            ("".to_owned(), "has no token"),
            ("# only this\n".into(), "has no token"),
            (format!("generate {ONE}\n{TWO}\n"), "line 2: does not begin with `generate` or `control`"),
            (format!("{TWO} control"), "line 1: does not begin"),
            ("control".into(), "line 1: has a role and no token"),
            (format!("control {ONE} {TWO} {TWO}"), "line 1: has more than a role, a token and a tenant"),
            (format!("control {ONE} t\u{e9}am"), "line 1: tenant: has other characters"),
            (format!("control {ONE} {}", "x".repeat(65)), "line 1: tenant: has 65 bytes"),
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
