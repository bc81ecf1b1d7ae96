//! Bodies made of groups of members, so that a group that several routes share is written once. Serde's own `flatten`
//! would keep the whole body in memory a second time, and hide which members nothing reads.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

/// A group of optional members of a JSON object.
pub(super) trait Members: Default {
    /// Reads the value of the member `name`, if it is of this group; false if it is not.
    fn read<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<bool, A::Error>;
}

impl<A: Members, B: Members> Members for (A, B) {
    fn read<'de, M: MapAccess<'de>>(&mut self, name: &str, map: &mut M) -> Result<bool, M::Error> {
        Ok(self.0.read(name, map)? || self.1.read(name, map)?)
    }
}

/// Defines a struct of optional members and implements [`Members`] for it.
macro_rules! members {
    ($(#[$about:meta])* $visibility:vis struct $name:ident {
        $($(#[$meta:meta])* $inner:vis $member:ident: $type:ty,)*
    }) => {
        $(#[$about])*
        #[derive(Default, utoipa::ToSchema)]
        $visibility struct $name {
            $($(#[$meta])* $inner $member: Option<$type>,)*
        }

        impl $crate::server::http::members::Members for $name {
            fn read<'de, A: serde::de::MapAccess<'de>>(
                &mut self,
                name: &str,
                map: &mut A,
            ) -> std::result::Result<bool, A::Error> {
                match name {
                    $(stringify!($member) => self.$member = map.next_value()?,)*
                    _ => return Ok(false),
                }
                Ok(true)
            }
        }
    };
}
pub(super) use members;

/// A body with the members of `T`. Others are passed over, and named in the answer's header.
pub(super) struct BodyOf<T>(pub(super) T);

impl<'de, T: Members> Deserialize<'de> for BodyOf<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor(PhantomData))
    }
}

struct BodyVisitor<T>(PhantomData<T>);

impl<'de, T: Members> Visitor<'de> for BodyVisitor<T> {
    type Value = BodyOf<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = T::default();
        while let Some(name) = map.next_key::<String>()? {
            if !members.read(&name, &mut map)? {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(BodyOf(members))
    }
}
