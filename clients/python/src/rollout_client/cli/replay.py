"""`rollout replay`: generates recorded samples again and reports the differences."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from ..replay import Receipt, Replayed, Report, Verdict, parse_receipt, replay
from . import _format
from ._command import CommandError, add_command, connected, one_line

_SHOWN = 5
_WORDS = {
    Verdict.SAME: "the same bits",
    Verdict.SAME_UNTIL_PUSH: "the same bits up to a push",
    Verdict.DIFFERS: "differ",
    Verdict.REFUSED: "refused",
}


def register(commands: Any) -> None:
    """Adds the subcommand."""
    parser = add_command(
        commands,
        "replay",
        _run,
        "generates recorded samples again and reports which differ",
        "The exit status is 0 if each sample has the same bits, as far as the serving weights sampled it.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="receipts from rollout_client.replay.Recorder")
    parser.add_argument("--weight-version", type=int, metavar="N", help="only samples that began with this version")
    parser.add_argument("--line", type=int, action="append", metavar="N", help="only this line; repeatable")
    parser.add_argument("--images", type=Path, metavar="DIR", help="directory of the images, as the recorder had it")
    parser.add_argument("--all", action="store_true", help=f"print every difference, not only {_SHOWN} for each reason")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each sample")


def _run(options: argparse.Namespace) -> int:
    reader = _Reader(options)
    shown = _print_json if options.json else None
    with connected(options) as client:
        report = replay(client, reader, shown, images=options.images)
    most = None if options.all else _SHOWN
    for problem in reader.problems[:most]:
        print(f"rollout: {problem}", file=sys.stderr)
    if len(reader.problems) > _SHOWN and not options.all:
        left = len(reader.problems) - _SHOWN
        print(f"rollout: {options.file}: and {left} more invalid lines: --all prints them", file=sys.stderr)
    if not report.results and not reader.problems:
        selected = options.line is not None or options.weight_version is not None
        raise CommandError(f"{options.file}: no receipts{' of that line or version' if selected else ''}")
    if report.results and not options.json:
        print("\n".join(_summary(report, most)))
    return 0 if report.same and not reader.problems else 1


class _Reader:
    """The selected receipts; collects a problem for each invalid line."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Opens the file only when iterated."""
        self.problems: list[str] = []
        self._path, self._lines, self._version = options.file, options.line, options.weight_version

    def __iter__(self) -> Iterator[Receipt]:
        """Reads the file."""
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip() and (self._lines is None or number in self._lines):
                        yield from self._wanted(line, number)
        except OSError as error:
            raise CommandError(f"{self._path}: {error.strerror}") from None

    def _wanted(self, line: str, number: int) -> Iterator[Receipt]:
        try:
            receipt = parse_receipt(line, number)
        except InvalidArgument as error:
            self.problems.append(f"{self._path}, line {number}: {one_line(error)}")
            return
        if self._version is None or (receipt.spans and receipt.spans[0].weight_version == self._version):
            yield receipt


def _print_json(result: Replayed) -> None:
    receipt = result.receipt
    facts = {
        "line": receipt.line,
        "prompt_index": receipt.prompt_index,
        "sample_index": receipt.sample_index,
        "weight_versions": [span.weight_version for span in receipt.spans],
        "verdict": result.verdict,
        "token": result.token,
        "difference": result.difference,
        "reason": result.reason,
    }
    print(_format.to_json(facts))


def _summary(report: Report, most: int | None) -> list[str]:
    lines = []
    for version, results in _grouped(report.results, _first_version).items():
        name = "no version" if version is None else f"version {version}"
        counts = Counter(_WORDS[result.verdict] for result in results)
        totals = ", ".join(f"{count} {words}" for words, count in counts.items())
        lines.append(f"{name}: {_count(len(results))}: {totals}")
        for reason, alike in _grouped((r for r in results if r.reason), lambda result: result.reason).items():
            lines.append(f"  {reason}")
            lines += [f"    {_described(result)}" for result in alike[:most]]
            if most is not None and len(alike) > most:
                lines.append(f"    and {len(alike) - most} more: --all prints them")
    same = sum(result.verdict is Verdict.SAME for result in report.results)
    digest = "" if report.weights is None else f", weights {report.weights}"
    served = f"the server has version {report.weight_version}{digest}"
    have = "has" if len(report.results) == 1 else "have"
    return [*lines, f"{same} of {_count(len(report.results))} {have} the same bits; {served}"]


def _grouped(results: Iterable[Replayed], key: Callable[[Replayed], Any]) -> dict[Any, list[Replayed]]:
    """Results grouped by `key`, in the order of the file."""
    groups: dict[Any, list[Replayed]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def _first_version(result: Replayed) -> int | None:
    """The version that sampled the first token; None for a sample without tokens."""
    spans = result.receipt.spans
    return spans[0].weight_version if spans else None


def _count(number: int) -> str:
    return "1 sample" if number == 1 else f"{number} samples"


def _described(result: Replayed) -> str:
    receipt = result.receipt
    where = f"line {receipt.line}, prompt {receipt.prompt_index}, sample {receipt.sample_index}"
    if result.token is not None:
        where = f"{where}, token {result.token}"
    return f"{where}: {result.difference}"
