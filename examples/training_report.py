"""What a training run tells at its end: a table, and a picture of reward, agreement and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import matplotlib.pyplot as plt

# In the order in which a step does them; colours that the colour-blind can tell apart.
PARTS = {"wake": "#e69f00", "push": "#d55e00", "generate": "#0072b2", "sleep": "#cc79a7", "train": "#8da0a8"}

# Each exam takes the next colour.
EXAM_COLOURS = ("#009e73", "#d55e00")


@dataclass
class Step:
    """What a step has come to."""

    reward: float
    """Mean over all samples."""
    max_difference: float
    """Largest |log-probability by the trainer - log-probability by the server| of a sampled token."""
    tokens: int
    """Sampled in this step."""
    seconds: dict[str, float]
    """Time of each part, by the names of `PARTS`."""
    kl: float | None = None
    """Mean divergence from the base model, if it is in the loss."""


@dataclass
class Exam:
    """What the run has changed for questions that it did not train on."""

    name: str
    before: float
    """Mean reward of the most likely answers."""
    after: float


def summary(steps: Sequence[Step], exams: Sequence[Exam]) -> str:
    """The run as a table."""
    few = max(len(steps) // 10, 1)
    first, last = (fmean(step.reward for step in part) for part in (steps[:few], steps[-few:]))
    total = sum(sum(step.seconds.values()) for step in steps)
    rows = [
        ("reward, mean of the first and of the last tenth of the steps", f"{first:.2f} → {last:.2f}"),
        *((f"reward of the most likely answers, {e.name}", f"{e.before:.2f} → {e.after:.2f}") for e in exams),
        ("largest difference of log-probabilities, server and trainer", f"{max(s.max_difference for s in steps):.1e}"),
        *(
            [("mean divergence from the base model, last step", f"{steps[-1].kl:.3f}")]
            if steps[-1].kl is not None
            else []
        ),
        ("tokens, steps, seconds", f"{sum(step.tokens for step in steps):,}, {len(steps)}, {total:.1f}"),
    ]
    for part in PARTS:
        times = [step.seconds[part] for step in steps]
        rows.append(
            (f"  {part}: median, share of the time", f"{1e3 * median(times):,.1f} ms, {sum(times) / total:.0%}")
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def draw(steps: Sequence[Step], exams: Sequence[Exam], path: Path, title: str) -> None:
    """Writes the picture; the format is that of the path's suffix."""
    plt.switch_backend("agg")  # no window
    has_kl = steps[-1].kl is not None
    figure, panels = plt.subplots(1, 3 + has_kl, figsize=(13 + 4 * has_kl, 3.6), layout="constrained")
    reward, difference, time = panels[:3]
    numbers = range(1, len(steps) + 1)
    reward.plot(numbers, [step.reward for step in steps], color="#0072b2", label="samples of the step")
    for exam, colour in zip(exams, EXAM_COLOURS, strict=False):
        ends = (1, len(steps)), (exam.before, exam.after)
        reward.plot(*ends, "o--", color=colour, linewidth=1, clip_on=False, label=exam.name)
    reward.set(title="mean reward", ylim=(0, 1.3), yticks=(0, 0.2, 0.4, 0.6, 0.8, 1))  # room for the legend
    reward.legend(loc="upper left", fontsize=8)
    difference.semilogy(numbers, [step.max_difference for step in steps], ".", color="#0072b2")
    difference.axhline(1e-4, color="#d55e00", linestyle="--", linewidth=1)
    difference.set(title="largest |Δ log-probability|, server and trainer", ylim=(1e-8, 1e-3))
    below = [0.0] * len(steps)
    for part, colour in PARTS.items():
        seconds = [step.seconds[part] for step in steps]
        time.bar(numbers, seconds, 1.0, below, label=part, color=colour)
        below = [a + b for a, b in zip(below, seconds, strict=True)]
    time.set(title="seconds of a step", ylim=(0, 1.3 * max(below)))  # room for the legend
    time.legend(loc="upper right", fontsize=8, ncols=2)
    if has_kl:
        panels[3].plot(numbers, [step.kl for step in steps], color="#0072b2")
        panels[3].set(title="KL(policy ‖ base), nats a token")
    for axes in panels:
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
