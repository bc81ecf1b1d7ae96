//! Tables of module patterns, compared with one regular expression for each key, which is how PEFT matches.

use std::collections::BTreeMap;

use rand::seq::IndexedRandom;
use regex::Regex;

use super::super::patterns::Patterns;
use super::*;

/// The value that PEFT finds: of the first key that matches, where a repeated key has its last value.
fn found_by_peft(table: &[(&str, u32)], module: &str) -> Option<u32> {
    let matches = |key: &str| Regex::new(&format!(r"^(?:(.*\.)?({key})$)")).unwrap().is_match(module);
    let (first, _) = table.iter().find(|(key, _)| matches(key))?;
    table.iter().rev().find(|(key, _)| key == first).map(|(_, value)| *value)
}

fn unlimited() -> Traffic {
    Traffic::new(u64::MAX)
}

fn patterns(table: Vec<(&str, u32)>, traffic: &Traffic) -> Result<Patterns<u32>> {
    Patterns::new("rank_pattern", table, &mut traffic.charge(0)?)
}

#[test]
fn the_first_key_that_matches_as_in_peft_counts() {
    let modules = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.10.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "lm_head",
        "model.embed_tokens",
    ];
    let pieces = [
        "model",
        "layers",
        "0",
        "10",
        "1",
        "self_attn",
        "mlp",
        "q_proj",
        "_proj",
        "up_proj",
        "lm_head",
        ".",
        ".",
        ".",
        r"\.",
        "^",
        "$",
        ".*",
        r"\d+",
        "(q|k)_proj",
        "|",
        "[01]",
        "q.proj",
        "",
        r"\w",
        "é",
    ];
    let mut hits = BTreeMap::new();
    for seed in 0..300 {
        let mut rng = rng(seed);
        let keys: Vec<String> = (0..rng.random_range(1..12))
            .map(|_| match rng.random_range(0..3) {
                // The end of a name, which is most likely to match.
                0 => {
                    let module = modules.choose(&mut rng).unwrap();
                    module[rng.random_range(0..module.len())..].to_string()
                }
                _ => (0..rng.random_range(1..7)).map(|_| *pieces.choose(&mut rng).unwrap()).collect(),
            })
            .collect();
        let table: Vec<(&str, u32)> = keys.iter().map(String::as_str).zip(0..).collect();
        let patterns = patterns(table.clone(), &unlimited()).unwrap();
        for module in modules {
            let expected = found_by_peft(&table, module);
            assert_eq!(patterns.get(module), expected, "seed {seed}: {module} in {table:?}");
            *hits.entry(expected.is_some()).or_insert(0) += 1;
        }
    }
    assert!(hits[&true] > 200 && hits[&false] > 200, "{hits:?}: the test is blind");
}

#[test]
fn names_are_not_regular_expressions_but_dots_stand_for_any_character() {
    let traffic = unlimited();
    let names = ["q_proj", "layers.0.mlp", "^model.norm", "^model$", r"model\.norm", "a-b", "x.", ""];
    patterns(names.into_iter().zip(0..).collect(), &traffic).unwrap();
    assert_eq!(traffic.take_high_water(), 0, "nothing is compiled");
    let table = vec![("q.proj", 1), (r"q\.proj", 2), ("proj", 3), ("q_proj", 4), ("q.proj", 5)];
    assert_eq!(patterns(table, &traffic).unwrap().get("model.q_proj"), Some(5), "the first key with its last value");
    assert_eq!(traffic.take_high_water(), 0);
    patterns(vec![("(q|k)_proj", 1)], &traffic).unwrap();
    assert!(traffic.take_high_water() > 0);
}

#[test]
fn what_is_compiled_is_limited_and_counted_before() {
    let texts = |count: usize, text: &str| (0..count).map(|i| text.replace("{i}", &i.to_string())).collect::<Vec<_>>();
    let refused = |keys: &[String], traffic: &Traffic| {
        let table = keys.iter().map(String::as_str).zip(0..).collect();
        patterns(table, traffic).err().expect("refused").to_string()
    };
    // Wild patterns for all linear layers of a large model are taken.
    let wild = texts(560, r".*layers\.{i}\..*q_proj");
    let table = wild.iter().map(String::as_str).zip(0..).collect();
    assert_eq!(patterns(table, &unlimited()).unwrap().get("model.layers.7.self_attn.q_proj"), Some(7));
    for (keys, message) in [
        (texts(4097, "name{i}"), "4097 entries"),
        (texts(1025, "(a|b){i}"), "1025 of its keys are regular expressions"),
        (texts(1024, "(a|.*.*.*){i}"), "1024 regular expressions are too large together"),
        (vec!["a".into(), "(a".into()], r#""(a" is no regular expression"#),
        (vec!["(a|b){100000}".into()], "is no regular expression"),
    ] {
        let error = refused(&keys, &unlimited());
        assert!(error.contains(message) && error.contains("adapter_config.rank_pattern"), "{error}");
    }
    // A class of Unicode characters takes 25 KB while it is parsed, for two bytes of text.
    let traffic = Traffic::new(8 << 20);
    let error = refused(&[r"\W{0}".repeat(500)], &traffic);
    assert!(error.contains("--request-bytes"), "{error}");
    assert_eq!(traffic.used(), 0);
    assert!(patterns(vec![(r".*layers\.(0|1)\..*q_proj", 1)], &traffic).is_ok(), "a small server takes an expression");
}
