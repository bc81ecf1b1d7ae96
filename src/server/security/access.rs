//! Whether a call may be made, by the token in its headers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use tokio::sync::watch;

use super::tokens::{Holder, Tokens};
use crate::error::{Error, Result};
use crate::server::role::Role;
use crate::types::Owner;

/// Checks the tokens of calls, for both doors. Cheap to clone.
#[derive(Clone)]
pub(in crate::server) struct Access {
    /// The tokens of the token file as it was read last; None without one, when everybody may do everything.
    tokens: Option<watch::Receiver<Arc<Tokens>>>,
    warned: Arc<AtomicBool>,
}

/// Who makes a call that is allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::server) struct Caller {
    /// Owner of the requests that the call starts; None without a token file.
    pub(in crate::server) owner: Option<Owner>,
    /// The owner whose requests alone the caller may end; None for one who may end all.
    pub(in crate::server) limited_to: Option<Owner>,
}

impl Access {
    pub(super) fn new(tokens: Option<watch::Receiver<Arc<Tokens>>>) -> Self {
        Self { tokens, warned: Arc::default() }
    }

    /// Lets a call with these headers in, if it may do what needs `role`. `what` names it in the refusal.
    ///
    /// # Errors
    /// `Unauthenticated` if there is no token that is known, `PermissionDenied` if its role is another.
    pub(in crate::server) fn check(&self, headers: &HeaderMap, role: Role, what: &str) -> Result<Caller> {
        let Some(tokens) = &self.tokens else {
            if headers.contains_key(AUTHORIZATION) && !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!("a client sends a token: this server checks none, and serves whoever reaches its port");
            }
            return Ok(Caller::default());
        };
        if role == Role::Anyone {
            return Ok(Caller::default());
        }
        let token = bearer(headers)?;
        let holder = tokens.borrow().find(token);
        let Some(Holder { role: has, owner }) = holder else {
            return Err(Error::Unauthenticated("the token is none of this server's".into()));
        };
        match (has, role) {
            (Role::Control, _) => Ok(Caller { owner: Some(owner), limited_to: None }),
            (Role::Generate, Role::Generate) => Ok(Caller { owner: Some(owner), limited_to: Some(owner) }),
            _ => Err(Error::PermissionDenied(format!(
                "{what} needs a token with the role {}; this one has the role {}",
                role.name(),
                has.name()
            ))),
        }
    }
}

/// The token of an `Authorization: Bearer TOKEN` header.
///
/// # Errors
/// `Unauthenticated` if there is none, or more than one.
fn bearer(headers: &HeaderMap) -> Result<&[u8]> {
    let refused = |why: &str| Error::Unauthenticated(format!("{why}; send `authorization: Bearer TOKEN`"));
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or_else(|| refused("no token"))?.as_bytes();
    if values.next().is_some() {
        return Err(refused("more than one authorization"));
    }
    let (scheme, token) = value.split_at(value.iter().position(|byte| *byte == b' ').unwrap_or(value.len()));
    if !scheme.eq_ignore_ascii_case(b"bearer") || token.trim_ascii().is_empty() {
        return Err(refused("the authorization is no bearer token"));
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
    fn whoever_has_no_token_of_the_file_is_refused_without_an_echo() {
        let (access, two) = (access(), format!("Bearer {USER}"));
        for values in [
            &[][..],
            &[""],
            &["Bearer"],
            &["Bearer "],
            &["Bearer token-of-nobody-99"],
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
    fn without_a_token_file_everybody_may_do_everything() {
        let access = Access::new(None);
        for values in [&[][..], &["Bearer whatever"]] {
            assert_eq!(check(&access, values, Role::Control).expect("open"), Caller::default());
        }
    }
}
