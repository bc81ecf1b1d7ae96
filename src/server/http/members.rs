//! Bodies of many members, defined as structs. Groups of members that several routes share are structs of their own.
//! Serde's own `flatten` would keep the whole body in memory a second time, and hide the members that nothing reads.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Neutral values, which clients send for members that they do not use.
const NEUTRAL: [&str; 11] =
    ["null", "false", "\"\"", "[]", "{}", "0", "1", "1.0", "\"none\"", "\"auto\"", "[\"text\"]"];

/// The members of a JSON object, each of which may be absent or null.
pub(super) trait Members: Default {
    /// Reads the value of the member `name`; false if there is no such member.
    fn read<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<bool, A::Error>;
}

/// Defines a struct of optional members, which may be null, and of groups of such members (`..group: Group`), and
/// implements [`Members`] and `Deserialize` for it. Members named in `rejects` are an error unless their value is
/// neutral. All others have no effect, and the answer's header names them.
macro_rules! members {
    ($(#[$about:meta])* $visibility:vis struct $name:ident {
        $($(#[$meta:meta])* $inner:vis $member:ident: $type:ty,)*
        $(..$group_visibility:vis $group:ident: $group_type:ty,)*
    } $(rejects $rejected:expr;)*) => {
        $(#[$about])*
        #[derive(Default, utoipa::ToSchema)]
        $visibility struct $name {
            $($(#[$meta])* $inner $member: Option<$type>,)*
            $(#[serde(flatten)] $group_visibility $group: $group_type,)*
        }

        impl $crate::server::http::members::Members for $name {
            fn read<'de, A: serde::de::MapAccess<'de>>(
                &mut self,
                name: &str,
                map: &mut A,
            ) -> std::result::Result<bool, A::Error> {
                match name {
                    $(stringify!($member) => self.$member = map.next_value()?,)*
                    _ => return Ok(
                        $($crate::server::http::members::Members::read(&mut self.$group, name, map)? ||)*
                        $($crate::server::http::members::reject(&$rejected, name, map)? ||)*
                        false
                    ),
                }
                Ok(true)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
                $crate::server::http::members::deserialize(deserializer)
            }
        }
    };
}
pub(super) use members;

/// Fails if the member `name` is one of `rejected` and its value is not neutral; false if it is not one of them.
pub(super) fn reject<'de, A: MapAccess<'de>>(rejected: &[&str], name: &str, map: &mut A) -> Result<bool, A::Error> {
    if !rejected.contains(&name) {
        return Ok(false);
    }
    map.next_value::<Neutral>()?;
    Ok(true)
}

/// A neutral value. It is an error to read another one, so that the error has the path of the member.
struct Neutral;

impl<'de> Deserialize<'de> for Neutral {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Box::<RawValue>::deserialize(deserializer)?;
        match NEUTRAL.contains(&value.get()) {
            true => Ok(Self),
            false => Err(de::Error::custom("is not supported; leave it out")),
        }
    }
}

/// Reads a list, or a text as a list of one element.
pub(super) fn text_or_list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
    expected: &'static str,
    of_text: fn(&str) -> T,
) -> Result<Vec<T>, D::Error> {
    struct TextOrList<T>(&'static str, fn(&str) -> T);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for TextOrList<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
            Ok(vec![self.1(text)])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Vec<T>, A::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(list))
        }
    }

    deserializer.deserialize_any(TextOrList(expected, of_text))
}

/// Reads an object with the members of `T`.
pub(super) fn deserialize<'de, T: Members, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct MembersVisitor<T>(PhantomData<T>);

    impl<'de, T: Members> Visitor<'de> for MembersVisitor<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
            let mut members = T::default();
            while let Some(name) = map.next_key::<String>()? {
                if !members.read(&name, &mut map)? {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok(members)
        }
    }

    deserializer.deserialize_map(MembersVisitor(PhantomData))
}
