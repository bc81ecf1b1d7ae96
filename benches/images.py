#!/usr/bin/env python3
"""Pictures in prompts, each figure beside another of the same run; prints a Markdown section for RESULTS.md.

    make bench-images
    .venv-trainers/bin/python benches/images.py --only tower,text --runs 3 -- --threads 1

    tower   encoding 1,280 tokens with the towers of Qwen2.5-VL-3B and InternVL3, beside transformers
    group   8 samples of a prompt with two pictures; the first token of another prompt with them, beside a text's
    wait    the tokens of a running sample while a picture is encoded, beside a prefill
    call    many pictures in one call: the tower's share of the time, and the memory
    push    LoRA adapters for the decoder, beside the same decoder without a tower
    text    texts, beside the same decoder without a tower

Models are random and written to a temporary directory, 5 GB in all. Runs take turns after one of each that is not
counted, so a ratio is the median of the runs' ratios: the time of the first column divided by that of the second.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import IO, Any

import numpy as np
import torch
import transformers
from doors import first_token, paired
from end_to_end import best_of, peak_resident_bytes
from step_profile import report
from vision_models import GRID, TOKENS, TOWERS, Models, Tower, is_of_tower, windowed
from weight_sync import Timing, random_adapter, timed
from workloads import WORKLOADS, Limits, Workload, commit, machine, measure_limits, run_once

from rollout_client import RolloutClient, SamplingParams, ServerProcess, TokenDelta, clean_stale_segments

MAX_BATCH_TOKENS = 1024
SETTLED = 16
"""Tokens that a running sample has before another request begins."""
ALIKE = 0.1
"""Most that log-probabilities may differ from transformers', as a part of what another picture changes."""
ONE = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
PROMPT_TOKENS = 2 * TOKENS + 16
"""Of a prompt with two pictures, and of the text beside it."""
ALONE = Workload(prompts=1, n=1, prompt_len=PROMPT_TOKENS, new_tokens=1, temperature=0.0)

Picture = np.ndarray
Prompt = list[int]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    title: str
    ours: object
    beside: object = ""
    ratio: object = ""
    aim: str = ""

    def __str__(self) -> str:
        """The line in Markdown."""
        cells = (self.title, self.ours, self.beside, self.ratio, self.aim)
        return f"| {' | '.join(map(str, cells))} |"


def once(title: str, ours: float, beside: float, aim: str = "", digits: int = 1) -> Row:
    """The line of two figures that were measured once."""
    return Row(title, f"{ours:,.{digits}f}", f"{beside:,.{digits}f}", f"{ours / beside:.2f}", aim)


@dataclass(frozen=True)
class Pair:
    """Times of runs in turn: ours, and those beside it."""

    ours: list[float]
    beside: list[float]

    @property
    def ratio(self) -> Timing:
        """Run by run."""
        return Timing.of([a / b for a, b in zip(self.ours, self.beside, strict=True)])

    def row(self, title: str, aim: str, figure: Callable[[float], float] = lambda seconds: seconds) -> Row:
        """The line with a figure of each time, which is the time itself unless it says otherwise."""
        ours, beside = (Timing.of([figure(seconds) for seconds in times]) for times in (self.ours, self.beside))
        return Row(title, ours, beside, self.ratio, aim)


@dataclass(frozen=True)
class Bench:
    """What the sections measure with."""

    args: argparse.Namespace
    models: Models
    limits: Limits

    @contextmanager
    def serving(self, model: Path, *flags: str, output: IO[Any] | None = None) -> Iterator[ServerProcess]:
        """A server of a model in bfloat16, without speculation, so that a step makes a token of each sample."""
        flags = ("--dtype", "bfloat16", "--speculation", "off", "--mem-util", str(self.args.mem_util), *flags)
        memory = ["--kv-cache-bytes", "384MiB", "--max-model-len", "4096", "--max-batch-tokens", str(MAX_BATCH_TOKENS)]
        with ServerProcess(self.args.server, model, [*flags, *memory, *self.args.flags], output=output) as server:
            yield server

    def paired(self, *measures: Callable[[], float], times: int = 1) -> Pair:
        """Runs two measures in turn, `times` as often as `--runs` says."""
        return Pair(*paired(times * self.args.runs, *measures))


def picture(seed: int) -> Picture:
    """A picture of `TOKENS` tokens for a Qwen2.5-VL, another one for each seed."""
    return windowed.picture(GRID, torch.Generator().manual_seed(seed)).numpy()


def text(length: int, rng: Random) -> Prompt:
    """Random token ids, none of which stands for an image."""
    return [rng.randrange(3, windowed.VISION_START) for _ in range(length)]


def metric(server: ServerProcess, name: str) -> float:
    """A counter or gauge of the server."""
    with urllib.request.urlopen(f"http://{server.http_address}/metrics") as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
    if not found:
        raise RuntimeError(f"the server has no metric {name}")
    return float(found[1])


def encoded(server: ServerProcess) -> int:
    """Pictures that the server has encoded so far."""
    return int(metric(server, "rollout:images_encoded_total"))


def check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise RuntimeError(otherwise)


def one_token(client: RolloutClient, prompt: Prompt, pictures: list[Picture]) -> float:
    """Seconds of a request for one token, starting with an empty prefix cache."""
    client.reset_prefix_cache()
    return timed(lambda: client.generate([prompt], sampling=ONE, images=[pictures], return_text=False))[0]


def tower(bench: Bench) -> list[Row]:
    """Measures both towers."""
    return [row for tower in TOWERS for row in encoding(bench, tower)]


def encoding(bench: Bench, tower: Tower) -> list[Row]:
    """Measures a tower: the seconds of a request with a new picture, less those of the same request once more, which
    sends the same bytes and finds the embeddings. The tower of transformers gets patches that are normalised already.
    """
    path = bench.models[tower.model]
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    generator = torch.Generator().manual_seed(1)
    inputs = tower.inputs(tower.picture(generator))
    prompt = [5, tower.placeholder, 6, 7]
    with bench.serving(path) as server:
        client = server.client

        def ours() -> float:
            pictures = [tower.picture(generator).numpy()]
            return one_token(client, prompt, pictures) - one_token(client, prompt, pictures)

        @torch.inference_mode()
        def theirs() -> float:
            return timed(lambda: model.model.get_image_features(**inputs))[0]

        times = bench.paired(ours, theirs)
        check(encoded(server) == bench.args.runs + 1, f"{encoded(server)} pictures in {bench.args.runs + 1} runs")
        off, by_another = differences(client, model, tower)
    check(off <= ALIKE * by_another, f"log-probabilities are {off:.3f} off transformers' in the mean")
    peak = bench.limits.peak_gflops("bfloat16")
    return [
        times.row(f"{tower.title}, {TOKENS:,} tokens, s (beside: transformers {transformers.__version__})", "≤ 1"),
        replace(
            times.row(f"… of {tower.flops / 1e12:.2f} TFLOP, TFLOP/s", "", lambda s: tower.flops / 1e12 / s), ratio=""
        ),
        replace(
            times.row(f"… % of {peak / 1e3:.2f} TFLOP/s in bfloat16", "", lambda s: tower.flops / 1e7 / s / peak),
            ratio="",
        ),
        once(
            "… mean difference of log-probabilities from transformers' (beside: with another picture)",
            off,
            by_another,
            f"≤ {ALIKE:g}",
            digits=3,
        ),
    ]


def differences(client: RolloutClient, model: Any, tower: Tower) -> tuple[float, float]:
    """By how much log-probabilities of text after a picture differ from transformers' in the mean, and from those after
    another picture.
    """
    rgb, other = (tower.picture(torch.Generator().manual_seed(seed)) for seed in (2, 3))
    tokens = [5] + [tower.placeholder] * TOKENS + text(64, Random(1))
    scores = client.score([tokens] * 2, images=[[rgb.numpy()], [other.numpy()]])
    ours, others = (np.array(score.raw_logprobs[TOKENS + 2 :]) for score in scores)
    theirs = tower.logprobs(model, torch.tensor(tokens, dtype=torch.int32), [rgb])[TOKENS + 1 :].numpy()
    return float(np.abs(ours - theirs).mean()), float(np.abs(ours - others).mean())


def group(bench: Bench) -> list[Row]:
    """Measures a group on two pictures, and the first token of another prompt with them."""
    rng, pictures, samples = Random(2), [picture(1), picture(2)], 8
    placeholders = [windowed.IMAGE] * len(pictures)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, seed=1)
    with bench.serving(bench.models["vision-language"], "--limit-mm-per-prompt", "image=2") as server:
        client = server.client
        client.generate([[5, *placeholders, 6]], n=samples, sampling=sampling, images=[pictures], return_text=False)
        made = encoded(server)
        check(made == len(pictures), f"{made} pictures were encoded")
        # Prompts that begin with other tokens share no blocks of the prefix cache.
        times = bench.paired(
            lambda: first_token(client, ALONE, [[*text(16, rng), *placeholders]], [pictures]),
            lambda: first_token(client, ALONE, [text(PROMPT_TOKENS, rng)]),
        )
        hits = metric(server, "rollout:prefix_cache_hits_total")
        check(encoded(server) == made and hits == 0, f"{encoded(server)} pictures encoded, {hits:.0f} tokens cached")
    whole = samples * len(pictures)
    return [
        Row(f"{samples} samples, two pictures: pictures encoded (beside: of all samples)", made, whole, aim="2"),
        times.row(f"{PROMPT_TOKENS:,} tokens with both again, first token, s (beside: as many of text)", "≤ 1.1"),
    ]


def gaps(client: RolloutClient, prompt: Prompt, other: Callable[[], object]) -> list[float]:
    """Seconds between the tokens of a running sample while `other` runs."""
    sampling = SamplingParams(max_tokens=2048, ignore_eos=True, seed=1)
    arrivals: list[float] = []
    other_result: Future | None = None
    with (
        ThreadPoolExecutor(1) as pool,
        client.generate_stream([prompt], sampling=sampling, stream_tokens=True, return_text=False) as events,
    ):
        for _ in (event for event in events if isinstance(event, TokenDelta)):
            arrivals.append(time.perf_counter())
            if len(arrivals) == SETTLED:
                other_result = pool.submit(other)
            elif other_result and other_result.done():
                other_result.result()
                return [after - before for before, after in pairwise(arrivals[SETTLED - 1 :])]
    raise RuntimeError(f"the sample has ended after {len(arrivals)} tokens, before the other request")


def wait(bench: Bench) -> list[Row]:
    """Measures how long a running sample waits for its next token beside a picture and beside a prefill."""
    rng, seeds = Random(3), count(10)
    middles: list[float] = []
    with bench.serving(bench.models["vision-language"]) as server:
        client = server.client

        def beside_picture() -> float:
            new = picture(next(seeds))
            found = gaps(client, text(32, rng), lambda: one_token(client, [5, windowed.IMAGE, 6], [new]))
            middles.append(float(np.median(found)))
            return max(found)

        def beside_prefill() -> float:
            return max(gaps(client, text(32, rng), lambda: one_token(client, text(MAX_BATCH_TOKENS, rng), [])))

        longest = bench.paired(beside_picture, beside_prefill)
    medians = Pair(middles[1:], longest.beside)  # without the run that is not counted
    beside = f"(beside: longest during a prefill of {MAX_BATCH_TOKENS:,} tokens)"
    return [
        longest.row(f"longest wait for a token during a picture, ms {beside}", "≤ 1.5", lambda s: 1e3 * s),
        medians.row("median wait for a token during a picture, ms (beside: the same)", "", lambda s: 1e3 * s),
    ]


def call(bench: Bench) -> list[Row]:
    """Measures a call of many pictures, of which the client makes several messages."""
    number = bench.args.pictures
    pictures = [picture(100 + seed) for seed in range(number)]
    prompts, images = [[5, windowed.IMAGE, 6]] * number, [[image] for image in pictures]
    with (
        tempfile.NamedTemporaryFile("w") as output,
        Path(output.name).open() as log,
        bench.serving(bench.models["small-tower"], "--profile", output=output) as server,
    ):
        client = server.client
        one_token(client, prompts[0], [picture(99)])
        report(server, log)
        wall, _ = timed(lambda: client.generate(prompts, sampling=ONE, images=images, return_text=False))
        profile = report(server, log)
        check(encoded(server) == number + 1, f"{encoded(server) - 1} pictures were encoded")
        memory, peak = client.status().memory, peak_resident_bytes(server.process.pid) or 0
    in_tower = sum(map(float, re.findall(r"^ +encode \d+ +\d+ +([\d.]+)", profile, re.MULTILINE)))
    steps = float(re.search(r"steps took ([\d.]+) s", profile)[1])
    reserved = sum(memory.entries.values())
    size = sum(image.nbytes for image in pictures) / 1e6
    ceiling = f"the ceiling of {memory.ceiling_bytes / 2**20:,.0f}"
    return [
        once(
            f"{number} pictures of {size / number:.1f} MB in one call, s (beside: time in the tower)",
            wall,
            in_tower,
            "≤ 1.1",
        ),
        once("… the same (beside: time in steps of the engine)", wall, steps),
        once(
            f"… peak resident memory, MiB (beside: all reservations, below {ceiling})",
            peak / 2**20,
            reserved / 2**20,
            "≤ 1",
        ),
    ]


@contextmanager
def both(bench: Bench) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Servers of the model with the tower, and of its decoder alone."""
    with ExitStack() as stack:
        paths = (bench.models["vision-language"], bench.models.decoder)
        with_tower, alone = (stack.enter_context(bench.serving(path)) for path in paths)
        yield with_tower, alone


def push(bench: Bench) -> list[Row]:
    """Measures pushes of an adapter for the decoder, which leave a picture's embeddings as they are."""
    image, prompt = picture(1), [5, windowed.IMAGE, 6]
    with both(bench) as (with_tower, alone):
        adapter, config = random_adapter([p for p in with_tower.client.parameters() if not is_of_tower(p.name)])
        one_token(with_tower.client, prompt, [image])

        def pause(server: ServerProcess) -> float:
            return server.client.push_lora(adapter, config, progress=False).pause_ms

        pauses = bench.paired(partial(pause, with_tower), partial(pause, alone))
        one_token(with_tower.client, prompt, [image])
        check(encoded(with_tower) == 1, "a push of the decoder has dropped a picture's embeddings")
    size = sum(tensor.nbytes for tensor in adapter.values()) / 1e6
    title = f"LoRA r=16 on the decoder, {size:.0f} MB, pause, ms (beside: the decoder as a Qwen2)"
    return [pauses.row(title, "≤ 1.05")]


TEXTS = {
    "single stream, decode": replace(WORKLOADS["W2"], prompt_len=32, new_tokens=32),
    "group of 16, decode": replace(WORKLOADS["W4"], prompt_len=32, new_tokens=32),
    "prefill": replace(WORKLOADS["W3"], prompts=3),
}


def text_only(bench: Bench) -> list[Row]:
    """Measures texts on the model with a tower and on its decoder alone, which must give the same bits."""
    rows = []
    with both(bench) as servers:
        for name, workload in TEXTS.items():
            prompts = workload.make_prompts(windowed.VISION_START)
            results = [bits(server.client, workload, prompts) for server in servers]
            check(results[0] == results[1], f"{name}: the decoder alone gives other tokens or log-probabilities")
            # Twice as many runs, because the aim is near the noise.
            times = bench.paired(*(partial(run_once, server.client, workload, prompts) for server in servers), times=2)
            rate = partial(tokens_per_second, workload)
            rows.append(times.row(f"{name}, tokens/s (beside: the decoder as a Qwen2; the same bits)", "≤ 1.01", rate))
    return rows


def tokens_per_second(workload: Workload, seconds: float) -> float:
    return workload.counted_tokens / seconds


def bits(client: RolloutClient, workload: Workload, prompts: list[Prompt]) -> list[tuple[list[int], bytes]]:
    """Greedy tokens and log-probabilities of each sample of the workload. Drawn tokens would differ, because only the
    model with a tower never draws the tokens of images.
    """
    sampling = SamplingParams(max_tokens=workload.new_tokens, temperature=0.0, ignore_eos=True)
    outputs = client.generate(prompts, n=workload.n, sampling=sampling, return_text=False)
    return [(sample.token_ids, sample.raw_logprobs.tobytes()) for output in outputs for sample in output.samples]


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "tower": tower,
    "group": group,
    "wait": wait,
    "call": call,
    "push": push,
    "text": text_only,
}


def header(args: argparse.Namespace, limits: Limits, load: float) -> str:
    """The lines before those of the sections; `load` is the load average before."""
    peak = limits.peak_gflops("bfloat16")
    return "\n".join(
        [
            f"## {datetime.date.today().isoformat()}: images",
            "",
            f"- machine: {machine()}; load average {load:.1f} before; bfloat16 {peak:,.0f} GFLOP/s",
            f"- commit: {commit()}",
            f"- command: `benches/images.py {' '.join(sys.argv[1:])}`",
            f"- median (least–most) of {args.runs} runs in turn (texts: {2 * args.runs}) after one that is not counted",
            "- ratio: of the times, run by run, ours divided by those beside it",
            f"- towers: random weights, a picture of {TOKENS:,} tokens, a decoder of two layers",
            "- the call of many pictures: a tower of four blocks, a decoder of two layers",
            "- other lines: the shape of Qwen2.5-0.5B, with 8 of the 32 blocks of Qwen2.5-VL-3B's tower",
            "",
            "| | ours | beside | ratio | aim |",
            "|---|---|---|---|---|",
        ]
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--limits", default="target/release/examples/limits", help="the probe's binary")
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--mem-util", type=float, default=0.4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=128, help="pictures of the call of many")
    parser.add_argument("--models-dir", type=Path, help="keeps the models there instead of a temporary directory")
    parser.add_argument("flags", nargs="*", help="further flags of the servers, after --")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - SECTIONS.keys():
        parser.error(f"--only: {sorted(unknown)} are not among {list(SECTIONS)}")
    return args


def main() -> int:
    args, load = parse_args(), os.getloadavg()[0]
    clean_stale_segments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("measuring this machine's limits …", file=sys.stderr)
    limits = best_of(measure_limits(args.limits), measure_limits(args.limits))
    torch.set_num_threads(limits.threads)
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as directory:
        bench = Bench(args, Models(args.models_dir or Path(directory)), limits)
        print(header(args, limits, load), flush=True)
        for name in args.only:
            start = time.monotonic()
            print("\n".join(map(str, SECTIONS[name](bench))), flush=True)
            print(f"\n{name} took {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
