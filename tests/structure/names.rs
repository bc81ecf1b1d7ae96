//! One name for one thing: the names of types that other files can use.

use std::collections::BTreeMap;

use crate::source::{Source, words};

/// Where types with these names are declared, for each name that `sources` use for several types. Private types are
/// left out, because their names have no meaning outside their file.
pub fn shared_names(sources: &[Source]) -> BTreeMap<String, Vec<String>> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources {
        for (number, line) in source.product_code().lines().enumerate() {
            if let Some(name) = declared_type(line) {
                places.entry(name.to_string()).or_default().push(format!("{}:{}", source.path, number + 1));
            }
        }
    }
    places.retain(|_, places| places.len() > 1);
    places
}

/// The name of the type that a line of code declares, if it is visible outside of its file.
fn declared_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let mut words = words(rest.strip_prefix(' ')?).map(|(_, word)| word).filter(|word| *word != "unsafe");
    match words.next()? {
        "struct" | "enum" | "union" | "trait" | "type" => words.next(),
        _ => None,
    }
}

#[test]
fn declarations_are_found() {
    for (line, name) in [
        ("pub struct Step<'a> {", Some("Step")),
        ("    pub(in crate::cuda) enum Kind {", Some("Kind")),
        ("pub(crate) unsafe trait Plain: Copy {}", Some("Plain")),
        ("pub type Result<T> = std::result::Result<T, Error>;", Some("Result")),
        ("struct Private;", None),
        ("pub structure: usize,", None),
        ("pub fn type_of(struct_name: &str) {}", None),
    ] {
        assert_eq!(declared_type(line), name, "{line}");
    }
}

#[test]
fn names_of_several_types_are_found() {
    let sources = [
        Source::new("a.rs", "pub struct One;\nstruct Two;\n#[cfg(test)]\nmod tests {\n    pub struct Three;\n}\n"),
        Source::new("b.rs", "pub(super) enum One {}\npub struct Two;\npub trait Three {}\n"),
    ];
    let names: Vec<_> = shared_names(&sources).into_iter().collect();
    assert_eq!(names, [("One".to_string(), vec!["a.rs:1".to_string(), "b.rs:1".to_string()])]);
}
