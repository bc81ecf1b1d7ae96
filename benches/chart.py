#!/usr/bin/env python3
"""Draws the results of `end_to_end.py --json` as one SVG that reads on light and on dark pages.

    .venv/bin/python benches/chart.py benches/results.json benches/results.svg

One panel for each workload, its own scale: a bar for our server and for each peer with its tokens per second, the least
and the most of the runs as a line through the bar's end, and the machine's limit as a dashed line.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

from engines import NOTES
from section import is_ours, number
from workloads import TITLES, WORKLOADS

WIDTH, MARGIN, GAP = 920, 24, 40
NAMES = 150
"""Width left of a panel, for the names of its bars."""
RIGHT = 20
"""Width right of a panel, beyond the limit's line."""
CHARACTER = 7.4
"""Estimated width of a character. Our figure stands in its bar if there is room, and no figure on the limit's line."""
BAR, PITCH = 18, 25
HEAD, FOOT, TITLE = 58, 30, 44
COLUMNS = 2

STYLE = """
text { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; font-size: 13px }
.title { font-size: 17px; font-weight: 600 } .panel { font-size: 14px; font-weight: 600 }
.note, .peer { fill: #59636e } .note { font-size: 12px } .ours { font-weight: 600 } .end { text-anchor: end }
.inside { fill: #ffffff; font-weight: 600 }
.bar-ours { fill: #0969da } .bar-peer { fill: #afb8c1 } .spread { stroke: #1f2328; stroke-width: 1.2 }
.limit { stroke: #bc4c00; stroke-width: 1.5; stroke-dasharray: 4 3 } .limit-text { fill: #bc4c00; font-size: 12px }
.axis { stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .note, .peer { fill: #9198a1 } .bar-ours { fill: #1f6feb } .bar-peer { fill: #656c76 }
.spread { stroke: #f0f6fc } .limit { stroke: #f0883e } .limit-text { fill: #f0883e } .axis { stroke: #3d444d }
}
"""


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def panel(x: float, y: float, width: float, name: str, results: list[dict]) -> list[str]:
    """The panel of one workload, with its upper left corner at (x, y)."""
    w, measured = WORKLOADS[name], [r for r in results if r["runs"]]
    counted = "prompt tokens" if w.new_tokens == 1 else "generated tokens"
    floor = measured[0]["floor_seconds"]
    limit = w.counted_tokens / floor if floor else None
    longest = max([r["tokens_per_second_max"] for r in measured] + ([limit] if limit else []))
    left, scale = x + NAMES, (width - NAMES - RIGHT) / longest
    bottom = y + HEAD + PITCH * len(results)
    what = f"{w.prompts} × {w.n} samples, {w.prompt_len:,} + {w.new_tokens} tokens; {counted} a second"
    parts = [text(x, y + 14, f"{name} {TITLES[name].partition(',')[0]}", "panel"), text(x, y + 31, what, "note")]
    parts.append(line(left, y + HEAD - 5, left, bottom, "axis"))
    at = left + scale * limit if limit else None
    labels = []

    def label(start: float, middle: float, content: str, kind: str) -> None:
        """Where a figure starts: right of its bar's end, or beyond the limit's line if it would cross that and has room
        there.
        """
        width_of_it = CHARACTER * len(content)
        if at and start < at < start + width_of_it and at + width_of_it + 6 <= x + width + RIGHT:
            start = at + 6
        labels.append(text(start, middle + 4.5, content, kind))

    for i, r in enumerate(results):
        top, kind = y + HEAD + i * PITCH, "ours" if is_ours(r) else "peer"
        middle = top + BAR / 2
        parts.append(text(left - 8, middle + 4.5, r["engine"], f"end {kind}"))
        if not r["runs"]:
            label(left + 6, middle, f"left out: about {r['expected_seconds'] / 60:.1f} min", kind)
            continue
        rate, low, high = (left + scale * r[f"tokens_per_second{end}"] for end in ("", "_min", "_max"))
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{rate - left:.1f}" height="{BAR}" rx="2" class="bar-{kind}"/>'
        )
        if high - low >= 2:
            parts.append(line(low, middle, high, middle, "spread"))
        share = f" · {100 * r['tokens_per_second'] / limit:.0f} %" if limit and is_ours(r) else ""
        content = f"{number(r['tokens_per_second'])}{share}"
        if is_ours(r) and low - left > CHARACTER * len(content) + 12:
            labels.append(text(low - 6, middle + 4.5, content, "inside end"))
        else:
            label(high + 6, middle, content, kind)
    if at and limit:
        parts += [
            line(at, y + HEAD - 8, at, bottom, "limit"),
            text(at, y + HEAD - 12, f"limit {number(limit)}", "limit-text end"),
        ]
    return parts + labels


def chart(report: dict) -> str:
    """The whole picture: for each model, a row of panels for every two workloads."""
    width = (WIDTH - 2 * MARGIN - GAP * (COLUMNS - 1)) / COLUMNS
    y, parts = MARGIN, []
    for model in report["models"]:
        runs = f"medians of {model['runs']} runs" if model["runs"] > 1 else "single runs"
        parts.append(text(MARGIN, y + 16, f"{model['model']}, {model['dtype']}; {runs}", "title"))
        y += TITLE
        names = list(dict.fromkeys(r["workload"] for r in model["results"]))
        for start in range(0, len(names), COLUMNS):
            panels = [[r for r in model["results"] if r["workload"] == n] for n in names[start : start + COLUMNS]]
            for column, results in enumerate(panels):
                parts += panel(MARGIN + column * (width + GAP), y, width, results[0]["workload"], results)
            y += HEAD + PITCH * max(map(len, panels)) + FOOT
    limits = report["limits"]
    peak = limits["bf16_tile_gflops"] or limits["bf16_dot_gflops"] or limits["f32_fma_gflops"]
    notes = [
        f"{report['machine']}; {report['date']}, commit {report['commit']}; whole workloads.",
        "The limit, and the share of it: of one token of a sample in a step (speculation makes more), at "
        f"{peak:.0f} GFLOP/s and {limits['read_gb_per_s']:.0f} GB/s.",
    ]
    names = dict.fromkeys(r["engine"] for m in report["models"] for r in m["results"])
    notes += [f"{name}: {NOTES[name]}." for name in names if name in NOTES]
    notes += [f"{m['model']}: without {', '.join(m['absent'])}." for m in report["models"] if m["absent"]]
    for note in notes:
        parts.append(text(MARGIN, y + 8, note, "note"))
        y += 18
    height = y + MARGIN - 10
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    described = "Tokens per second of rollout-server and its peers beside the machine's limit"
    return "\n".join([head, f"<title>{described}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: chart.py results.json results.svg", file=sys.stderr)
        return 2
    Path(sys.argv[2]).write_text(chart(json.loads(Path(sys.argv[1]).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
