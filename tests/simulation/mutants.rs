//! The list of planted bugs, `mutants.json`: a file, a text in it, what the bug makes of the text, and what it breaks.
//! `make simulate-mutants` builds a copy of the tree with all of them and switches on one at a time; the simulation
//! must find each within ten minutes.

use std::path::Path;

/// Least number of planted bugs.
const LEAST: usize = 20;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    file: String,
    before: String,
    after: String,
    breaks: String,
}

#[test]
fn each_planted_bug_has_its_place_in_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mutants: Vec<Mutant> = serde_json::from_str(&read("tests/simulation/mutants.json")).expect("a list of mutants");
    assert!(mutants.len() >= LEAST, "{} planted bugs", mutants.len());
    for Mutant { file, before, after, breaks } in &mutants {
        assert_eq!(read(file).matches(before).count(), 1, "{file}, {breaks}: {before}");
        assert!(before != after && !breaks.is_empty(), "{file}: {before}");
    }
}
