//! Finds circles among files that name each other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::source::{Source, words};

/// Path of a module as names, starting at the crate's root.
type ModulePath = Vec<String>;

/// Circles among the files below `root`, each written as the files on its way. A module and the modules inside it may
/// name each other, because they are parts of one thing. Tests may name anything.
pub fn circles(sources: &[Source], root: &str) -> Vec<String> {
    let is_test = |path: &str| path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("/testing.rs");
    let sources = sources.iter().filter(|source| source.path.starts_with(root) && !is_test(&source.path));
    let files: BTreeMap<ModulePath, &Source> =
        sources.map(|source| (module_path(&source.path, root), source)).collect();
    let uses = |(own, source): (&ModulePath, &&Source)| (own.clone(), used_files(own, source, &files));
    let uses: BTreeMap<ModulePath, BTreeSet<ModulePath>> = files.iter().map(uses).collect();
    let mut found = BTreeMap::new();
    for (from, used) in &uses {
        for way in used.iter().filter_map(|to| shortest_way(to, from, &uses)) {
            let members: BTreeSet<_> = way.iter().cloned().collect();
            let names = way.iter().map(|module| files[module].path.as_str());
            found.entry(members).or_insert_with(|| names.collect::<Vec<_>>().join(" → "));
        }
    }
    found.into_values().collect()
}

/// Module path of a file: `src/a/b.rs` and `src/a/b/mod.rs` are `a::b`.
fn module_path(path: &str, root: &str) -> ModulePath {
    let inside = path.strip_prefix(root).expect("a file below the root").trim_start_matches('/');
    let inside = inside.strip_suffix(".rs").expect("a Rust file");
    let mut names: ModulePath = inside.split('/').map(String::from).collect();
    if names.last().is_some_and(|name| ["mod", "lib", "main"].contains(&name.as_str())) {
        names.pop();
    }
    names
}

/// The files that `source` names, except modules that contain it or are inside it.
fn used_files(own: &ModulePath, source: &Source, files: &BTreeMap<ModulePath, &Source>) -> BTreeSet<ModulePath> {
    let code = source.product_code();
    let mut used = BTreeSet::new();
    for mut path in paths(code, own) {
        while !path.is_empty() && !files.contains_key(&path) {
            path.pop();
        }
        if files.contains_key(&path) && !path.starts_with(own) && !own.starts_with(&path) {
            used.insert(path);
        }
    }
    used
}

/// Every path through `crate`, `self` or `super` in `code` of the module `own`, resolved from the crate's root. Each
/// path in a group of `use` counts by itself.
fn paths(code: &str, own: &ModulePath) -> Vec<ModulePath> {
    let mut found = Vec::new();
    for (at, word) in words(code) {
        let base = match word {
            "crate" => Vec::new(),
            "self" => own.clone(),
            "super" => own[..own.len().saturating_sub(1)].to_vec(),
            _ => continue,
        };
        let begins = !code[..at].ends_with("::") && !code[..at].ends_with('$');
        if let (true, Some(rest)) = (begins, code[at + word.len()..].strip_prefix("::")) {
            spread(rest, base, &mut found);
        }
    }
    found
}

/// Adds the paths that begin with `base` and continue with the start of `code`. Returns the code after them.
fn spread<'a>(code: &'a str, mut base: ModulePath, found: &mut Vec<ModulePath>) -> &'a str {
    let code = code.trim_start();
    if let Some(mut group) = code.strip_prefix('{') {
        loop {
            group = spread(group, base.clone(), found).trim_start();
            match group.strip_prefix(',').map(str::trim_start) {
                Some(rest) if !rest.starts_with('}') => group = rest,
                Some(rest) => return &rest[1..],
                None => return group.strip_prefix('}').unwrap_or(group),
            }
        }
    }
    let (_, word) = words(code).next().filter(|(at, _)| *at == 0).unwrap_or((0, ""));
    match word {
        "" => {}
        "super" => _ = base.pop(),
        "self" => {}
        name => base.push(name.into()),
    }
    // A glob adds no name, and what follows `as` is only the file's own name for it.
    let rest = code[word.len()..].trim_start_matches('*').trim_start();
    if let Some(rest) = rest.strip_prefix("::").filter(|_| !word.is_empty()) {
        return spread(rest, base, found);
    }
    found.push(base);
    match rest.strip_prefix("as ") {
        Some(renamed) => &renamed[words(renamed).next().map_or(0, |(at, word)| at + word.len())..],
        None => rest,
    }
}

/// The shortest way from `from` to `to` over files that name each other, both ends included.
fn shortest_way(
    from: &ModulePath,
    to: &ModulePath,
    uses: &BTreeMap<ModulePath, BTreeSet<ModulePath>>,
) -> Option<Vec<ModulePath>> {
    let (mut before, mut queue) = (BTreeMap::from([(from, None)]), VecDeque::from([from]));
    while let Some(module) = queue.pop_front() {
        if module == to {
            let way = std::iter::successors(Some(module), |module| before[*module]);
            let mut way: Vec<_> = way.cloned().collect();
            way.reverse();
            return Some(way);
        }
        for next in &uses[module] {
            if !before.contains_key(next) {
                before.insert(next, Some(module));
                queue.push_back(next);
            }
        }
    }
    None
}

#[test]
fn paths_are_spread_out() {
    let code = "use super::{b::C, self as d, e::{F, g::*},}; fn f(x: crate::h::I) { self.j(); super::super::k() }";
    let own = ["l", "m", "n"].map(String::from).to_vec();
    let found: Vec<String> = paths(code, &own).iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["l::m::b::C", "l::m", "l::m::e::F", "l::m::e::g", "h::I", "l::k"]);
}

#[test]
fn circles_are_found_but_not_between_a_module_and_its_parts() {
    let file = |path: &str, code: &str| Source::new(path, code);
    let sources = [
        file("src/lib.rs", "mod a; mod b; mod c;"),
        file("src/a/mod.rs", "mod x; pub use x::X; use crate::b::B;"),
        file("src/a/x.rs", "use super::Y; use crate::c::C;"),
        file("src/b.rs", "use crate::c::C; #[cfg(test)]\nmod tests { use crate::a::Y; }"),
        file("src/c.rs", "struct C;"),
    ];
    assert!(circles(&sources, "src").is_empty());
    let mut sources = sources.into_iter().collect::<Vec<_>>();
    sources[4] = file("src/c.rs", "use crate::a::x::X;");
    assert_eq!(circles(&sources, "src"), ["src/c.rs → src/a/x.rs"]);
}
