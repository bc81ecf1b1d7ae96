//! Reads the repository's source files, with and without their comments and literals.

use std::ops::Range;
use std::path::{Path, PathBuf};

/// One Rust file.
pub struct Source {
    /// Path relative to the repository's root, with `/`.
    pub path: String,
    pub text: String,
    /// `text` with every comment, string and character literal blanked. It has the same length and the same lines.
    pub code: String,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        Self { path: path.into(), text: text.into(), code: blank_comments_and_literals(text) }
    }

    /// The code without the file's own module of tests, which stands at its end.
    pub fn product_code(&self) -> &str {
        self.code.split("#[cfg(test)]\nmod tests {").next().expect("split gives at least one")
    }

    /// Lines of `code` with their numbers, starting at 1.
    pub fn code_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.code.lines().enumerate().map(|(i, line)| (i + 1, line))
    }
}

/// The root directory of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust files below these folders of the root, sorted. Each folder must have some.
pub fn rust_files(folders: &[&str]) -> Vec<Source> {
    let mut sources = Vec::new();
    for folder in folders {
        let paths = walk(&root().join(folder));
        assert!(!paths.is_empty(), "no Rust files in {folder}: the scan is wrong");
        for path in paths {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let relative =
                path.strip_prefix(root()).expect("walked from the root").to_string_lossy().replace('\\', "/");
            sources.push(Source::new(&relative, &text));
        }
    }
    sources
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    let expand = |path: PathBuf| match (path.is_dir(), path.extension()) {
        (true, _) => walk(&path),
        (false, Some(extension)) if extension == "rs" => vec![path],
        _ => Vec::new(),
    };
    paths.into_iter().flat_map(expand).collect()
}

/// Identifiers and keywords in `code`, with their byte offsets.
pub fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = 0;
    std::iter::from_fn(move || {
        let start = rest + code[rest..].find(is_word)?;
        let end = code[start..].find(|c| !is_word(c)).map_or(code.len(), |len| start + len);
        rest = end;
        Some((start, &code[start..end]))
    })
}

fn blank_comments_and_literals(text: &str) -> String {
    let mut code = text.to_string().into_bytes();
    let mut at = 0;
    while at < text.len() {
        match literal_at(text, at) {
            Some(range) => {
                for byte in &mut code[range.clone()] {
                    if *byte != b'\n' {
                        *byte = b' ';
                    }
                }
                at = range.end;
            }
            // An identifier is skipped whole, so that the r of `for "` is not taken for the start of a raw string.
            None => {
                at += words(&text[at..])
                    .next()
                    .filter(|(start, _)| *start == 0)
                    .map_or_else(|| text[at..].chars().next().map_or(1, char::len_utf8), |(_, word)| word.len())
            }
        }
    }
    String::from_utf8(code).expect("whole characters were blanked")
}

/// Byte range of the comment, string or character literal that starts at byte `at`.
fn literal_at(text: &str, at: usize) -> Option<Range<usize>> {
    let rest = &text[at..];
    let until = |len: Option<usize>| Some(at..len.map_or(text.len(), |len| at + len));
    if rest.starts_with("//") {
        return until(rest.find('\n'));
    }
    if rest.starts_with("/*") {
        return until(block_comment_len(rest));
    }
    let raw = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'));
    if let Some(raw) = raw {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let close = format!("\"{}", "#".repeat(hashes));
            let body = rest.len() - raw.len() + hashes + 1;
            return until(rest[body..].find(&close).map(|len| body + len + close.len()));
        }
    }
    let plain = if rest.starts_with("b\"") || rest.starts_with("b'") { &rest[1..] } else { rest };
    let prefix = rest.len() - plain.len();
    match plain.chars().next() {
        Some('"') => until(quoted_len(plain, '"').map(|len| prefix + len)),
        Some('\'') if is_char_literal(plain) => until(quoted_len(plain, '\'').map(|len| prefix + len)),
        _ => None,
    }
}

/// Whether a quote starts a character literal, not a lifetime or a label.
fn is_char_literal(rest: &str) -> bool {
    let mut chars = rest.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), _) => true,
        (_, next) => next == Some('\''),
    }
}

/// Length in bytes of a literal, with both its quotes.
fn quoted_len(rest: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (i, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return Some(i + 1),
            _ => {}
        }
    }
    None
}

/// Length in bytes of a block comment. Block comments nest.
fn block_comment_len(rest: &str) -> Option<usize> {
    let mut depth = 0;
    let mut at = 0;
    loop {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return Some(at);
            }
        } else {
            at += rest[at..].chars().next()?.len_utf8();
        }
    }
}
