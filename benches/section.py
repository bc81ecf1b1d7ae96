#!/usr/bin/env python3
"""Makes the Markdown sections of RESULTS.md from the output of `end_to_end.py --json`. end_to_end.py prints them too.

.venv/bin/python benches/section.py benches/results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import NOTES, OURS, PLAIN
from workloads import TITLES


def markdown(report: dict) -> str:
    return "\n\n".join(section(report, model) for model in report["models"] if model["results"])


def section(report: dict, model: dict) -> str:
    """The section of one model: how it was measured, then a line for each workload and engine."""
    limits, memory = report["limits"], model["memory"]
    dot, tile, peak = limits["bf16_dot_gflops"], limits["bf16_tile_gflops"], memory["peak_resident_bytes"]
    peak_mib = "?" if peak is None else f"{peak / 2**20:,.0f}"
    absent = [f"{name} is absent: {reason}" for name, reason in model["absent"].items()]
    lines = [
        f"## {report['date']}: {model['model']}, {model['dtype']}",
        "",
        f"- machine: {report['machine']}",
        f"- commit: {report['commit']}",
        f"- command: `{report['command']}`",
        f"- limits, the best of before and after: f32 FMA {limits['f32_fma_gflops']:.0f} GFLOP/s "
        f"({limits['instructions']}), bf16 dot {'none' if dot is None else f'{dot:.0f} GFLOP/s'}, "
        f"{'' if tile is None else f'bf16 tiles {tile:.0f} GFLOP/s, '}memory read "
        f"{limits['read_gb_per_s']:.1f} GB/s, {limits['threads']} threads; the server's kernel is {model['kernel']}",
        f"- start: {model['start_seconds'][OURS]:.2f} s from process start to first token, model in the page cache",
        f"- memory: peak resident {peak_mib} MiB, ceiling {memory['ceiling_bytes'] / 2**20:,.0f} MiB",
        f"- peers, in turn with our server in the same session: {'; '.join([*found(model), *absent]) or 'none'}",
        f"- runs: {times(report, model)}",
        "",
        "| workload | engine | tokens/s median (min–max) | wall s | of floor | ours is ahead by | others' cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for workload in dict.fromkeys(r["workload"] for r in model["results"]):
        results = [r for r in model["results"] if r["workload"] == workload]
        lines += [row(r, ahead(r, results)) for r in results]
    return "\n".join(lines)


def found(model: dict) -> list[str]:
    """Each peer with its version, how it was started, and what a reader of its figures must know."""
    peers = [name for name in model["versions"] if name != OURS]
    return [
        f"{name} {model['versions'][name]} ("
        + ", ".join(filter(None, [f"start {model['start_seconds'][name]:.1f} s", NOTES.get(name)]))
        + ")"
        for name in peers
    ]


def times(report: dict, model: dict) -> str:
    """How often each engine ran, and why some ran less often."""
    minutes = report["peer_minutes"]
    limit = f"; {minutes:g} min at most for all runs of a peer at a workload" if minutes else ""
    return f"{model['runs']} of each engine, or as many as its line says{limit}"


def ahead(r: dict, results: list[dict]) -> str:
    """Our speed divided by a peer's: in our own lines by the best peer's, in a peer's line by that peer's."""
    measured = [other for other in results if other["runs"]]
    ours = {other["engine"]: other["tokens_per_second"] for other in measured if is_ours(other)}
    peers = {other["engine"]: other["tokens_per_second"] for other in measured if not is_ours(other)}
    if not r["runs"] or not peers:
        return ""
    if is_ours(r):
        best = max(peers, key=peers.__getitem__)
        return f"{r['tokens_per_second'] / peers[best]:.2f} × {best}, the best peer"
    ratios = [f"{rate / r['tokens_per_second']:.1f} ×" for rate in ours.values()]
    return f"{ratios[0]} ({PLAIN} {ratios[1]})" if len(ratios) > 1 else ratios[0]


def row(r: dict, ahead: str) -> str:
    titles = {OURS: f"{r['workload']} {TITLES[r['workload']]}", PLAIN: f"… {PLAIN}"}
    title, engine = titles.get(r["engine"], ""), OURS if is_ours(r) else r["engine"]
    if not r["runs"]:
        minutes = f"{r['expected_seconds'] / 60:.1f}"
        return f"| {title} | {engine} | left out: a run takes about {minutes} min | | | | |"
    rate, low, high = (number(r[f"tokens_per_second{end}"]) for end in ("", "_min", "_max"))
    fewer = {1: " (1 run)", 2: f" ({low}–{high}, 2 runs)"}
    rates = rate + fewer.get(r["runs"], f" ({low}–{high})")
    of_floor = "" if r["floor_fraction"] is None else f"{100 * r['floor_fraction']:.0f} %"
    cells = [title, engine, rates, f"{r['wall_seconds']:.2f}", of_floor, ahead, f"{r['others_cores']:.2f}"]
    return f"| {' | '.join(cells)} |"


def is_ours(r: dict) -> bool:
    return r["engine"] in (OURS, PLAIN)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: section.py results.json", file=sys.stderr)
        return 2
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
