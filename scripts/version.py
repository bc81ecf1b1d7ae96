#!/usr/bin/env python3
"""The version, from its one place: `[workspace.package]` of Cargo.toml.

scripts/version.py                  writes it into the files that repeat it
scripts/version.py --print          prints it
scripts/version.py --check [TAG]    fails if one of them, the newest heading of CHANGELOG.md or the tag vX.Y.Z differs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = re.compile(r'^\[workspace\.package\]\nversion = "([^"]+)"', re.MULTILINE)
# The files that repeat it, each with what stands before and after.
COPIES = [
    ("Cargo.toml", r'^rollout-kernels = \{ path = "kernels", version = "=', '"'),
    ("Cargo.lock", r'^name = "(?:rollout-server|rollout-kernels|cuda-emulator)"\nversion = "', '"$'),
    ("README.md", r"\*\*It is new\.\*\* This is version ", r"\.$"),
    ("clients/python/pyproject.toml", r'^version = "', '"$'),
    ("packaging/server/pyproject.toml", r'^dependencies = \["rollout-client==', '"'),
]
HEADING = re.compile(r"^## (\d\S*)", re.MULTILINE)


def source(root: Path) -> str:
    return SOURCE.search((root / "Cargo.toml").read_text())[1]


def copies(root: Path) -> list[tuple[Path, re.Pattern[str]]]:
    return [
        (root / name, re.compile(f'({before})([^"\\s]+?)(?={after})', re.MULTILINE)) for name, before, after in COPIES
    ]


def write(root: Path) -> None:
    version = source(root)
    for path, pattern in copies(root):
        path.write_text(pattern.sub(rf"\g<1>{version}", path.read_text()))


def differences(root: Path, tag: str | None) -> list[str]:
    version = source(root)
    found = {}
    for path, pattern in copies(root):
        found[str(path.relative_to(root))] = {match[2] for match in pattern.finditer(path.read_text())}
    found["CHANGELOG.md, its newest heading"] = set(HEADING.findall((root / "CHANGELOG.md").read_text())[:1])
    if tag is not None:
        found["the tag"] = {tag.removeprefix("v")}
    return [
        f"{place}: {', '.join(sorted(versions)) or 'no version'}, but Cargo.toml has {version}"
        for place, versions in found.items()
        if versions != {version}
    ]


def main(arguments: list[str]) -> int:
    match arguments:
        case []:
            write(ROOT)
            return 0
        case ["--print"]:
            print(source(ROOT))
            return 0
        case ["--check", *tag] if len(tag) <= 1:
            wrong = differences(ROOT, *(tag or [None]))
            print(*wrong, sep="\n", end="\n" if wrong else "")
            return 1 if wrong else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
