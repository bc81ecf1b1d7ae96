"""A lint of the prose: phrases that documentation and comments avoid, and one sentence per line in Markdown."""

from __future__ import annotations

import ast
import re

import pytest

from serving import REPOSITORY

# Which files the lint reads.
MARKDOWN = ["*.md", "docs/*.md", ".github/*.md", "clients/python/README.md"]
COMMENTS = ["src/**/*.rs", "kernels/**/*.rs", "emulator/**/*.rs", "proto/**/*.proto", "clients/python/src/**/*.py"]
BEGIN = r"(?:^|[.?!:] |[*-] |\| )"
# A phrase, and how to say it instead.
BANNED = [
    (r"\bgo(es)? on\b", "'continues', 'keeps running'"),
    (r"\b(is|are|be|was|were|as) told\b", "say who tells whom, or 'as requested'"),
    (r"\bwhoever\b", "'anyone who', 'any client that'"),
    (r"\b(no|some)body\b", "name the party: 'no client', 'an attacker'"),
    (r"\ball else\b", "'everything else'"),
    (r"\bfor ever\b", "'forever', 'without a limit'"),
    (r"\b(come|comes|make|makes) (\w+ )?again\b", "'returns', 'is repeated', 'reproduces'"),
    (r"(?<!\b[Tt]here) (is|are) no (?!longer\b|more\b|farther\b|faster\b)", "'is not a …', 'has no …'"),
    (r"\bfor want of\b", "'because there is no …'"),
    (r"\banew\b", "'again'"),
    (r"\bshall\b", "'must', 'should'"),
    (r"\bone's own\b", "'your own'"),
    (r"\bwants? (a|an|the) (token|flag|header)\b", "'needs', 'requires'"),
    (BEGIN + r"(Understood|Supported|Refused|Needed|Allowed|Proven|Seen|Kept) (is|are)\b", "begin with the subject"),
    (BEGIN + r"What [^.?!|]*[.|]", "a 'what' clause is not a noun: name the thing"),
    (r"\b[Ww]hat (does not fit|is refused|is wrong|fits)\b", "name the thing: 'a request that does not fit'"),
]  # fmt: skip


def covered(patterns):
    names = {str(path.relative_to(REPOSITORY)) for pattern in patterns for path in REPOSITORY.glob(pattern)}
    return sorted(names)


def markdown(text):
    """The lines outside of blocks of code, numbered, without spans of code and the targets of links."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`code`", line))
        yield number, "" if code or fence else plain


def comments(text, name):
    """Paragraphs of doc comments (Rust), comments (proto) and docstrings (Python), numbered, each as one line."""
    if name.endswith(".py"):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
                yield node.body[0].lineno, re.sub(r"`[^`]*`", "`code`", " ".join(docstring.split()))
        return
    marks, first, block = r"\s*//[/!] ?(.*)" if name.endswith(".rs") else r"\s*// ?(.*)", 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        comment = re.match(marks, line)
        if comment and comment[1].strip():
            first, block = (first if block else number), [*block, comment[1]]
        elif block:
            yield first, re.sub(r"`[^`]*`", "`code`", " ".join(block))
            block = []


def banned(lines):
    for number, line in lines:
        for pattern, instead in BANNED:
            for found in re.finditer(pattern, line):
                yield f"{number}: {found.group().strip()!r}: {instead}"


def misplaced(lines):
    """Lines with two sentences, and sentences on two lines. Tables, headings and a bold beginning of an item may."""
    before = ""
    for number, line in lines:
        item = re.match(r"\s*([*-]|\d+\.) +", line)
        text = line[item.end() if item else 0 :].strip()
        if re.match(r"[|#<!]|\[!\[", text):
            text = ""
        inner = re.sub(r"\([^()]*\)|^\*\*[^*]+\*\*", "", text)
        if re.search(r"\w[.?!][)*\"]* +[A-Z`\[]", inner) and not re.search(r"\b(e\.g|i\.e)\. ", inner):
            yield f"{number}: more than one sentence on the line"
        if text and before and not item and not re.search(r"[.?!:;…][)*\"]*$", before):
            yield f"{number}: the sentence began on the line before"
        before = text


@pytest.mark.parametrize("lint", [banned, misplaced])
def test_the_pages(lint):
    pages = {name: (REPOSITORY / name).read_text() for name in covered(MARKDOWN)}
    found = [f"{name}:{line}" for name, text in pages.items() for line in lint(markdown(text))]
    assert pages and not found, "\n" + "\n".join(found)


def test_the_comments():
    sources = {name: (REPOSITORY / name).read_text() for name in covered(COMMENTS)}
    found = [f"{name}:{line}" for name, text in sources.items() for line in banned(comments(text, name))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(("text", "phrases"), [
    ("The server goes on.", 1),
    ("- Understood are names.", 1),
    ("What does not fit is refused.", 2),
    ("A name is no path.", 1),
    ("What is the capital?", 0),
    ("There is no such file, and it is no longer there.", 0),
    ("`goes on`\n```\nIt goes on.\n```", 0),
])  # fmt: skip
def test_phrases_are_found(text, phrases):
    assert len(list(banned(markdown(text)))) == phrases


def test_phrases_are_found_in_comments():
    rust = "//! It goes\n//! on.\n\nfn f() {} // goes on\n/// Nobody.\n/// nobody\n"
    assert [line.split(":")[0] for line in banned(comments(rust, "a.rs"))] == ["1", "5"]
    assert len(list(banned(comments("// It is told.\nint32 a = 1;\n", "a.proto")))) == 1
    assert len(list(banned(comments('def f():\n    """It goes\n    on."""\n    "goes on"\n', "a.py")))) == 1


def test_the_ends_of_sentences_are_found():
    text = "One. Two.\n\nA sentence that\nis wrapped.\n\n- **Bold.** One (in `code`. And more).\n- Two."
    assert [line.split(":")[0] for line in misplaced(markdown(text))] == ["1", "4"]


def test_the_tests_that_the_page_why_names_exist():
    named = re.findall(r"`([\w/.]+)::(\w+)`", (REPOSITORY / "docs/why.md").read_text())
    assert len(named) > 20
    for path, name in named:
        assert re.search(rf"\b(def|fn) {name}\b", (REPOSITORY / path).read_text()), f"docs/why.md: no {name} in {path}"
