#!/usr/bin/env python3
"""Writes the blocking Python client from the asyncio one: the same text without `async` and `await`.

    .venv/bin/python scripts/blocking_client.py          # after a change of a file on the left of MODULES
    .venv/bin/python scripts/blocking_client.py --check  # exits with 1, and names the files, if any is out of date

A comment `# asyncio only` removes the statement, or the `except` clause, below it from the blocking client.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "clients/python/src/rollout_client"
MODULES = {
    "_async_connection.py": "_connection.py",
    "_async_stream.py": "_stream.py",
    "_async_weights.py": "_weights.py",
    "aio.py": "client.py",
    "fleet/_async_methods.py": "fleet/_methods.py",
}
"""The asyncio text and the blocking one that is made from it, in the package."""
HEADER = "# Generated from {source} by scripts/blocking_client.py: change that file, and run the script.\n"
ASYNCIO_ONLY = "# asyncio only"
# In this order.
REPLACEMENTS = [
    (r"await asyncio\.to_thread\(([\w.]+)(?:, )?", r"\1("),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\bgrpc\.aio\b", "grpc"),
    (r"\b(?:await|async) ", ""),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\b(_?)(?:Async|async_)(?=\w)", r"\1"),
]


def blocking(source: str, name: str) -> str:
    """The blocking text of an asyncio module, before it is formatted."""
    text = without_asyncio_only(source)
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    return HEADER.format(source=name) + text


def without_asyncio_only(source: str) -> str:
    """The text without what `# asyncio only` marks."""
    lines, removed = source.splitlines(keepends=True), set()
    ends = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            ends[node.lineno] = max(node.end_lineno, ends.get(node.lineno, 0))
    for number, line in enumerate(lines, 1):
        if line.strip().startswith(ASYNCIO_ONLY):
            removed |= set(range(number, ends[number + 1] + 1))
    return "".join(line for number, line in enumerate(lines, 1) if number not in removed)


def formatted(text: str, target: Path) -> str:
    """The text as ruff sorts, prunes and formats it."""
    for command in (["check", "--fix-only", "--select", "F401,I,SIM117"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(target), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def generated() -> dict[Path, str]:
    """Every generated file with its text."""
    return {
        PACKAGE / target: formatted(blocking((PACKAGE / source).read_text(), source), PACKAGE / target)
        for source, target in MODULES.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = {path: text for path, text in generated().items() if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is out of date' if options.check else 'is written'}")
        if not options.check:
            path.write_text(text)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
