//! The rules on the code's shape that no lint can state, each with its reason: layers, circles between files, names of
//! types, lengths of files, the files that may have unsafe code, who may know the network, a scheduler without device
//! or clock, no globals, a reason for each dependency, files for the image. The rules that the compiler and clippy can
//! check are in Cargo.toml (`[workspace.lints]`).

mod circles;
mod names;
mod source;

use std::fmt::Write as _;

use circles::circles;
use names::shared_names;
use source::{Source, root, rust_files, words};

/// Modules from the top layer down. A module may use only modules of layers further down, not those of its own.
const LAYERS: &[&[&str]] = &[
    &["main", "startup", "lib"],
    &["server"],
    &["engine"],
    &["scheduler", "executor"],
    &["cache", "model", "grammar"],
    &["weights", "text", "pixels", "observe"],
    &["comm", "memory"],
    &["types", "clock", "config", "logs", "profile", "stacks"],
    &["error"],
];
/// Longest file in lines. (Clippy counts the lines of functions.)
const MAX_FILE_LINES: usize = 500;
/// Longest line of a comment in characters, as rustfmt.toml has it for code.
const MAX_COMMENT_CHARS: usize = 120;
const OWN_CODE: &[&str] = &["src", "kernels/src"];
const ALL_CODE: &[&str] = &["src", "kernels/src", "kernels/tests", "emulator/src", "emulator/tests", "tests"];

/// Fails with `rule` and the list of offenders, if there are any.
fn assert_none(offenders: &[String], rule: &str) {
    let mut list = String::new();
    for offender in offenders {
        write!(list, "\n  {offender}").expect("writing to a string");
    }
    assert!(offenders.is_empty(), "{rule}{list}");
}

/// Lines of `sources` whose code has one of `names` as a whole word, or as the start of a path if the name ends in
/// `::`.
fn lines_with(sources: &[Source], names: &[&str], allowed: impl Fn(&str) -> bool) -> Vec<String> {
    let has = |line: &str, name: &str| match name.strip_suffix("::") {
        Some(root) => words(line).any(|(at, word)| word == root && line[at + word.len()..].starts_with("::")),
        None => words(line).any(|(_, word)| word == name),
    };
    let mut found = Vec::new();
    for source in sources.iter().filter(|source| !allowed(&source.path)) {
        for (number, line) in source.code_lines() {
            found.extend(names.iter().filter(|n| has(line, n)).map(|n| format!("{}:{number}: {n}", source.path)));
        }
    }
    found
}

/// The top-level module that a file of `src/` belongs to.
fn module_of(path: &str) -> &str {
    let inside = path.strip_prefix("src/").expect("a file of src/");
    inside.split('/').next().expect("split gives at least one").trim_end_matches(".rs")
}

/// The top-level modules that `code` names through `crate::`, with line numbers.
fn crate_uses(code: &str) -> Vec<(usize, String)> {
    let mut uses = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let preceded = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$');
        if preceded {
            continue;
        }
        let line = code[..at].matches('\n').count() + 1;
        let rest = &code[at + "crate::".len()..];
        let names: Vec<&str> = match rest.strip_prefix('{') {
            Some(group) => first_names(group),
            None => words(rest).next().map(|(_, word)| word).into_iter().collect(),
        };
        uses.extend(names.into_iter().map(|name| (line, name.to_string())));
    }
    uses
}

/// The first name of each path in the group that starts after `{`.
fn first_names(group: &str) -> Vec<&str> {
    let (mut depth, mut wanted, mut names) = (0, true, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => wanted = true,
            c if wanted && (c.is_alphanumeric() || c == '_') => {
                names.extend(words(&group[at..]).next().map(|(_, word)| word));
                wanted = false;
            }
            _ => {}
        }
    }
    names
}

#[test]
fn modules_use_only_layers_below_them() {
    let layer = |module: &str| LAYERS.iter().position(|row| row.contains(&module));
    let mut offenders = Vec::new();
    for source in rust_files(&["src"]) {
        let module = module_of(&source.path);
        let Some(own) = layer(module) else {
            offenders.push(format!("{}: `{module}` has no place in LAYERS; give it one", source.path));
            continue;
        };
        for (line, used) in crate_uses(&source.code).into_iter().filter(|(_, used)| used != module) {
            // A name that is no module is an item of the crate's root, such as a macro.
            if layer(&used).is_some_and(|theirs| theirs <= own) {
                offenders.push(format!("{}:{line}: `{module}` uses `crate::{used}`", source.path));
            }
        }
    }
    assert_none(
        &offenders,
        "a module uses only modules below it (see LAYERS), so that each can be read and tested without those above:",
    );
}

#[test]
fn files_name_each_other_in_no_circle() {
    let sources = rust_files(OWN_CODE);
    let offenders: Vec<String> = OWN_CODE.iter().flat_map(|root| circles(&sources, root)).collect();
    assert_none(&offenders, "files that name each other in a circle can only be read together; move what both need:");
}

#[test]
fn a_name_is_that_of_one_type() {
    /// Names that several types may have, because of these reasons.
    const ALLOWED: &[(&str, &str)] =
        &[("Result", "an alias of the standard type with the errors of its crate or module, as std::io has one")];
    let is_test = |path: &str| path.contains("/tests/") || path.ends_with("/tests.rs") || path.contains("/testing");
    let mut sources = rust_files(&["src", "kernels/src", "emulator/src"]);
    sources.retain(|source| !is_test(&source.path));
    let shared = shared_names(&sources);
    let is_allowed = |name: &str| ALLOWED.iter().any(|(allowed, _reason)| *allowed == name);
    let offenders = shared.iter().filter(|(name, _)| !is_allowed(name));
    let offenders: Vec<_> = offenders.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect();
    assert_none(&offenders, "a type that other files use has a name of its own, so that a reader can search for it:");
    let outdated = ALLOWED.iter().filter(|(name, _reason)| !shared.contains_key(*name));
    let outdated: Vec<_> = outdated.map(|(name, _reason)| (*name).to_string()).collect();
    assert_none(&outdated, "only one type has this name now; remove it from ALLOWED:");
}

#[test]
fn files_are_short() {
    let mut offenders = Vec::new();
    for source in rust_files(ALL_CODE) {
        let lines = source.text.lines().count();
        if lines > MAX_FILE_LINES {
            offenders.push(format!("{}: {lines} lines (at most {MAX_FILE_LINES})", source.path));
        }
    }
    assert_none(&offenders, "files fit a head; split these:");
}

#[test]
fn comments_are_within_the_width() {
    let mut offenders = Vec::new();
    for source in rust_files(ALL_CODE) {
        let comments = source.text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//"));
        let long = comments.filter(|(_, line)| line.chars().count() > MAX_COMMENT_CHARS);
        offenders.extend(long.map(|(i, _)| format!("{}:{}", source.path, i + 1)));
    }
    assert_none(&offenders, "comments have lines as long as the code's; rustfmt breaks only the code:");
}

#[test]
fn unsafe_code_is_in_few_files() {
    /// Files of `src/` that may have unsafe code, for mapped files, calls of libc, signal handlers, a sum over the
    /// ranks' own buffers, and a test's allocator.
    const ALLOWED: &[&str] = &[
        "src/weights/parameters/tensor.rs",
        "src/memory/borrowed.rs",
        "src/memory/identity.rs",
        "src/stacks.rs",
        "src/comm/local.rs",
        "src/server/http/connections.rs",
        "src/server/http/tests/heap.rs",
    ];
    let offenders = lines_with(&rust_files(&["src"]), &["unsafe"], |path| ALLOWED.contains(&path));
    assert_none(&offenders, "unsafe code lives in kernels/ and the few files in ALLOWED:");
}

#[test]
fn only_the_server_knows_the_network_and_the_runtime() {
    const NAMES: &[&str] = &[
        "tonic::",
        "tonic_health::",
        "tonic_prost::",
        "tonic_reflection::",
        "prost::",
        "tokio::",
        "tokio_stream::",
        "axum::",
        "hyper::",
        "http::",
        "rustls::",
        "tokio_rustls::",
    ];
    let allowed = |path: &str| path == "src/main.rs" || path.starts_with("src/server/");
    let offenders = lines_with(&rust_files(OWN_CODE), NAMES, allowed);
    assert_none(&offenders, "transport and runtime end in src/server; the engine below is plain threads and data:");
}

#[test]
fn only_pixels_decodes_pictures() {
    const NAMES: &[&str] =
        &["DynamicImage", "ImageReader", "ImageDecoder", "PngDecoder", "JpegDecoder", "fast_image_resize::"];
    let offenders = lines_with(&rust_files(OWN_CODE), NAMES, |path| path.starts_with("src/pixels/"));
    assert_none(&offenders, "a file of a client is decoded in src/pixels, behind its limits; others take a `Picture`:");
}

#[test]
fn no_file_above_the_kernels_names_a_device() {
    const DEVICES: &[&str] =
        &["Cpu", "cpu::", "Cuda", "cuda::", "cudarc::", "Reference", "reference::", "Isa", "PackedMatrix", "KvBlocks"];
    /// Names through which code reads the host's memory directly.
    const HOST: &[&str] = &["host::", "with_f32", "with_f32_mut"];
    /// Modules that must not assume that a tensor lies in the host's memory.
    const WITHOUT_HOST: &[&str] = &["src/model", "src/scheduler", "src/cache", "src/engine"];
    let product = |source: Source| Source { code: source.product_code().into(), ..source };
    let sources: Vec<Source> = rust_files(&["src"]).into_iter().map(product).collect();
    let is_test = |path: &str| path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("/testing.rs");
    let mut offenders = lines_with(&sources, DEVICES, is_test);
    let elsewhere = |path: &str| !WITHOUT_HOST.iter().any(|room| path.starts_with(room)) || is_test(path);
    offenders.extend(lines_with(&sources, HOST, elsewhere));
    assert_none(
        &offenders,
        "a device is a room of kernels/ and a variant of its enum; what is above takes what `Device` and `Ops` give:",
    );
}

#[test]
fn scheduler_and_cache_are_pure() {
    const NAMES: &[&str] =
        &["candle_core::", "rollout_kernels::", "mpsc", "thread", "Instant", "SystemTime", "Duration", "File", "fs::"];
    let elsewhere = |path: &str| !(path.starts_with("src/scheduler") || path.starts_with("src/cache"));
    let offenders = lines_with(&rust_files(&["src"]), NAMES, elsewhere);
    assert_none(
        &offenders,
        "scheduler and cache know no device, clock, channel or file, so that they can be simulated:",
    );
}

#[test]
fn no_lock_or_global_holds_serving_state() {
    const NAMES: &[&str] = &["Mutex", "RwLock", "OnceLock", "LazyLock", "OnceCell", "thread_local"];
    /// Files that may have locks or globals, because those hold no serving state.
    const ALLOWED: &[(&str, &str)] = &[
        ("src/observe/journal.rs", "notes of pushes and errors that have ended: nothing that serves"),
        ("src/observe/metrics/calls.rs", "counts of calls that have ended: nothing that serves"),
        ("src/observe/metrics/tenants.rs", "names of tenants that have asked for something: nothing that serves"),
        ("src/server/http/tests/heap.rs", "tests count what their threads allocate"),
        ("src/server/listener/handshakes.rs", "when a failed handshake was logged last: nothing that serves"),
        ("src/memory/borrowed.rs", "a signal has one handler in a process, which looks up what its thread reads"),
        ("src/stacks.rs", "a signal has one handler in a process, which writes where the thread that asks reads"),
        ("src/pixels/slots.rs", "how many files may still be decoded at once: nothing that serves"),
        ("src/server/held_pictures.rs", "pictures of requests that have ended, to be found again by later ones"),
        ("src/grammar/compiler.rs", "compiled grammars, to be found again by the next request"),
        ("src/grammar/watchdog.rs", "the deadlines of work on grammars, for the thread that ends what is late"),
        (
            "src/weights/push/transport/shared_memory.rs",
            "a client's memory, mapped for its next push: nothing that serves",
        ),
    ];
    let allowed = |path: &str| ALLOWED.iter().any(|(file, _reason)| *file == path);
    let sources = rust_files(&["src"]);
    let mut offenders = lines_with(&sources, NAMES, allowed);
    for source in sources.iter().filter(|source| !allowed(&source.path)) {
        // `static NAME` is an item, `&'static` a lifetime.
        let is_item = |line: &str| line.trim_start().trim_start_matches("pub ").starts_with("static ");
        let items = source.code_lines().filter(|(_, line)| is_item(line));
        offenders.extend(items.map(|(number, _)| format!("{}:{number}: static", source.path)));
    }
    assert_none(&offenders, "serving state has one owner, the engine's thread; others send it a command:");
}

#[test]
fn nothing_is_left_to_do() {
    const MARKS: &[&str] = &["TODO", "FIXME", "XXX"];
    let mut offenders = Vec::new();
    // The files of this test are left out, because they name the marks.
    for source in rust_files(ALL_CODE).iter().filter(|source| !source.path.starts_with("tests/structure/")) {
        for (i, line) in source.text.lines().enumerate() {
            let found = MARKS.iter().filter(|mark| words(line).any(|(_, word)| word == **mark));
            offenders.extend(found.map(|mark| format!("{}:{}: {mark}", source.path, i + 1)));
        }
    }
    assert_none(&offenders, "what is not done is an issue, not a comment:");
}

/// Lines of a Cargo.toml that add a dependency without a comment that says why.
fn dependencies_without_reason(manifest: &str) -> Vec<&str> {
    let mut in_dependencies = false;
    let mut found = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            in_dependencies = line.trim_end_matches(']').ends_with("dependencies");
        } else if in_dependencies && !line.is_empty() && !line.starts_with('#') {
            // A dependency that comes from the workspace has its reason there.
            let reason = line.split_once(" # ").map_or("", |(_, reason)| reason.trim());
            if !line.contains("workspace = true") && reason.is_empty() {
                found.push(line);
            }
        }
    }
    found
}

#[test]
fn every_dependency_has_its_reason() {
    let mut offenders = Vec::new();
    for path in ["Cargo.toml", "kernels/Cargo.toml", "emulator/Cargo.toml"] {
        let manifest = std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        offenders.extend(dependencies_without_reason(&manifest).iter().map(|line| format!("{path}: {line}")));
    }
    assert_none(&offenders, "a dependency says in a comment on its line why it is there:");
}

/// The paths of the targets that a Cargo.toml names: `[[test]]` with the name `heap` is tests/heap.rs or tests/heap/.
fn named_targets(manifest: &str) -> Vec<String> {
    let mut folder = None;
    let mut files = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            let kind = line.strip_prefix("[[").and_then(|rest| rest.strip_suffix("]]"));
            folder = kind.map(|kind| if kind == "bench" { "benches".to_string() } else { format!("{kind}s") });
        } else if let (Some(folder), Some(name)) = (&folder, line.strip_prefix("name = ")) {
            files.push(format!("{folder}/{}", name.trim_matches('"')));
        }
    }
    files
}

#[test]
fn the_image_is_built_of_all_that_cargo_asks_for() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let dockerfile = read("docker/Dockerfile");
    let copied: Vec<&str> =
        dockerfile.lines().filter_map(|line| line.strip_prefix("COPY ")).flat_map(str::split_whitespace).collect();
    let needed = ["Cargo.toml", "Cargo.lock", "build.rs", "src", "proto", "kernels", "emulator", "tests"];
    let absent = needed.into_iter().filter(|path| !copied.contains(path)).map(String::from);
    let dockerignore = read(".dockerignore");
    let kept: Vec<&str> = dockerignore.lines().filter_map(|line| line.strip_prefix('!')).collect();
    let ignored = named_targets(&read("Cargo.toml"))
        .into_iter()
        .filter(|target| !kept.iter().any(|path| path.strip_suffix(".rs").unwrap_or(path) == target));
    assert_none(
        &absent.chain(ignored).collect::<Vec<_>>(),
        "cargo refuses a Cargo.toml that names a file which is not there; COPY it in docker/Dockerfile, and let \
         .dockerignore keep it:",
    );
}

mod scan {
    //! Tests of the scans themselves, on texts made for them.

    use super::*;

    const SAMPLE: &str = r##"
        // crate::in_a_comment { unsafe
        /* /* nested */ crate::in_a_block { */
        use crate::{error::{Error, Result}, types as t, config};
        fn one<'a>(x: &'a str, f: fn(u8) -> u8) -> char where [u8; 3]: Sized {
            let quotes = ['"', '\'', '{', 'a']; let raw = r#"crate::raw " {"#; let bytes = b"{\"";
            'label: for c in "crate::string } {".chars() { break 'label; }
            my_crate::other(); x.len(); crate::memory::probe();
            '}'
        }
        trait T { fn declared(&self) -> [u8; 2]; fn given(&self) {} }
    "##;

    #[test]
    fn comments_and_literals_are_not_code() {
        let source = Source::new("sample.rs", SAMPLE);
        assert_eq!(source.code.len(), SAMPLE.len());
        assert_eq!(source.code.matches('{').count(), source.code.matches('}').count());
        let uses: Vec<String> = crate_uses(&source.code).into_iter().map(|(_, name)| name).collect();
        assert_eq!(uses, ["error", "types", "config", "memory"]);
    }

    #[test]
    fn dependencies_without_a_comment_are_found() {
        let manifest = "[package]\nname = \"a\"\n[dependencies]\nb = \"1\" # why\nc = \"2\"\nd.workspace = true\n";
        assert_eq!(dependencies_without_reason(manifest), ["c = \"2\""]);
    }

    #[test]
    fn named_targets_are_found() {
        let manifest = "[package]\nname = \"a\"\n[[test]]\nname = \"b\"\nharness = false\n[[bench]]\nname = \"c\"\n";
        assert_eq!(named_targets(manifest), ["tests/b", "benches/c"]);
    }

    #[test]
    fn words_of_a_path_are_found() {
        let source = Source::new("src/a.rs", "use tokio::sync; // tokio::x\nlet tokio = 1; my_tokio::f();");
        assert_eq!(lines_with(&[source], &["tokio::"], |_| false), ["src/a.rs:1: tokio::"]);
    }
}
