"""A rollout-server from start to stop: groups of samples, a new policy pushed into it, its sleep, and the old policy.

python -m rollout_client.demo --model org/name
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from typing import IO

import numpy as np

from . import (
    NotFound,
    PromptOutput,
    PromptTokens,
    RolloutClient,
    RolloutError,
    Sample,
    SamplingParams,
    ServerProcess,
    ServerStatus,
    Summary,
    Unavailable,
)
from .process import find_server

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a short rhyme about a cat and the moon.",
    "Name three things that a good friend does.",
]
SAMPLES = 4
SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=80, seed=1)
START_SECONDS = 300
# Of an adapter that a trainer could have made, if it had trained on noise.
ADAPTED = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 16
ADAPTER_SCALE = 0.08

IS_TERMINAL = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
WIDTH = min(shutil.get_terminal_size((100, 24)).columns, 110)


def styled(code: str, text: str) -> str:
    """`text` in an ANSI style; plain where the output is not a terminal."""
    return f"\x1b[{code}m{text}\x1b[0m" if IS_TERMINAL else text


def step(text: str) -> None:
    print(f"\n{styled('1;36', '==>')} {styled('1', text)}", flush=True)


def progress(text: str, milestone: bool = False) -> None:
    """Replaces the line on a terminal; elsewhere prints milestones only, so that a log stays short."""
    if IS_TERMINAL:
        print(f"\r\x1b[2K    {text}\r", end="", flush=True)
    elif milestone:
        print(f"    {text}", flush=True)


def printable(text: str) -> str:
    """`text` without control characters, which a model may say and a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def clear_progress() -> None:
    if IS_TERMINAL:
        print("\r\x1b[2K", end="", flush=True)


def follow(log: IO[str]) -> None:
    """Prints what the server has logged since the last look."""
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", log.read())
    for line in without_colours.splitlines():
        clear_progress()
        print(styled("2", f"    | {line[: WIDTH - 6] if IS_TERMINAL else line}"), flush=True)


def wait(server: ServerProcess, log: IO[str]) -> None:
    """Waits for the server, showing its log and the time."""
    start = time.monotonic()
    while True:
        try:
            server.wait_until_ready(0.25)
            break
        except Unavailable as error:
            if time.monotonic() - start > START_SECONDS:
                raise RolloutError(f"the server is not ready after {START_SECONDS} s: {error}") from None
        finally:
            follow(log)
        progress(f"loading … {time.monotonic() - start:.0f} s")
    clear_progress()
    print(f"    ready after {time.monotonic() - start:.1f} s at {server.address}")


def sample_groups(server: ServerProcess) -> tuple[list[PromptOutput], Summary, float]:
    """All samples of all questions, the server's summary and the seconds it took."""
    groups: list[list[Sample]] = [[] for _ in QUESTIONS]
    prompts: dict[int, list[int]] = {}
    total = len(QUESTIONS) * SAMPLES
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    tokens = finished = 0
    start = time.monotonic()
    with server.client.generate_stream(chats, n=SAMPLES, sampling=SAMPLING, stream_tokens=True) as stream:
        for event in stream:
            seconds = time.monotonic() - start
            if isinstance(event, Sample):
                groups[event.prompt_index].append(event)
                finished += 1
            elif isinstance(event, PromptTokens):
                prompts[event.prompt_index] = event.token_ids
            elif isinstance(event, Summary):
                summary = event
            else:
                tokens += len(event.token_ids)
            line = f"{finished}/{total} samples, {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s"
            progress(line, milestone=isinstance(event, Sample) and finished % SAMPLES == 0)
    clear_progress()
    outputs = [
        PromptOutput(i, prompts[i], sorted(group, key=lambda sample: sample.sample_index), None)
        for i, group in enumerate(groups)
    ]
    return outputs, summary, time.monotonic() - start


def show_groups(outputs: list[PromptOutput]) -> None:
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n{styled('1;33', question)}")
        for sample in output.samples:
            facts = (
                f"#{sample.sample_index}  {sample.finish_reason}, {len(sample.token_ids)} tokens, "
                f"mean log-probability {sample.logprobs.mean():.3f} (raw {sample.raw_logprobs.mean():.3f}), "
                f"seed {sample.seed}"
            )
            print(styled("2;32", f"  {facts}"))
            for paragraph in printable(sample.text or "").strip().splitlines():
                print(textwrap.fill(paragraph, WIDTH, initial_indent="    ", subsequent_indent="    "))


def show_totals(summary: Summary, seconds: float, status: ServerStatus, block_size: int) -> None:
    step("What it took")
    print(
        f"    {summary.completion_tokens} tokens in {seconds:.2f} s: "
        f"{styled('1', f'{summary.completion_tokens / seconds:.0f} tokens/s')} "
        f"({summary.prompt_tokens} prompt tokens, {SAMPLES} samples share each prompt's cache)"
    )
    memory = status.memory
    print(f"    memory: ceiling {mib(memory.ceiling_bytes)} of {mib(memory.total_bytes)}")
    for name, size in memory.entries.items():
        note = f"  ({status.total_blocks * block_size} tokens)" if name == "kv_cache" else ""
        print(f"      {name:<24}{mib(size):>12}{note}")
    print(f"      {'resident now':<24}{mib(memory.resident_bytes):>12}")
    print(f"    blocks: {status.free_blocks} of {status.total_blocks} free")


def random_adapter(client: RolloutClient) -> tuple[dict[str, np.ndarray], dict]:
    """Tensors and configuration of a LoRA adapter as PEFT names them, with the shapes that the server's model has."""
    rng = np.random.default_rng(0)
    tensors = {}
    for parameter in client.parameters():
        module = parameter.name.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTED:
            rows, columns = parameter.shape
            a = rng.standard_normal((RANK, columns), dtype=np.float32) / np.sqrt(columns)
            b = ADAPTER_SCALE * rng.standard_normal((rows, RANK), dtype=np.float32)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    return tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ADAPTED}


def ask_again(client: RolloutClient) -> Sample:
    """The first sample of the first question, whatever the policy is now."""
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    return client.generate([chat], sampling=SAMPLING)[0].samples[0]


def show_answer(sample: Sample) -> None:
    versions = ", ".join(str(span.weight_version) for span in sample.weight_versions)
    print(styled("2;32", f"    version {versions}, seed {sample.seed}:"))
    text = " ".join(printable(sample.text or "").split())
    print(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    "))


def push_policy(client: RolloutClient, before: Sample) -> Sample:
    """A new policy while the server runs; returns what it answers where the old one answered `before`."""
    tensors, config = random_adapter(client)
    size = sum(tensor.nbytes for tensor in tensors.values())
    step(f"Pushing a LoRA adapter: rank {RANK} on {len(tensors) // 2} layers, {mib(size)}, random")
    result = client.push_lora(tensors, config)
    print(
        f"    version {result.weight_version}, {result.parameters} parameters changed; "
        f"checked in {result.staging_ms:.0f} ms beside the old policy, which stood still for {result.pause_ms:.0f} ms"
    )
    sample = ask_again(client)
    print(f"    The same question with the same seed, answered before and after: {QUESTIONS[0]}")
    show_answer(before)
    show_answer(sample)
    return sample


def sleep_and_wake(client: RolloutClient) -> None:
    """Shows the memory that a trainer on the same machine gets meanwhile."""
    step("Sleeping, so that a trainer has the memory")
    before = client.status().memory.resident_bytes
    asleep = client.sleep(level=1)
    print(f"    resident memory {mib(before)} → {styled('1', mib(asleep.resident_bytes))} in {asleep.seconds:.2f} s")
    for tag, size in asleep.released.items():
        print(f"      {tag:<24}{mib(size):>12}")
    woken = client.wake()
    print(f"    awake again after {woken.seconds:.2f} s: {woken.lifecycle}")


def show_same(what: str, now: Sample, before: Sample) -> None:
    same = now.token_ids == before.token_ids and (now.logprobs == before.logprobs).all()
    if not same:
        raise RolloutError(f"{what}: the answer is another than before")
    print(f"    {what}: the same {len(now.token_ids)} tokens and log-probabilities, bit for bit")


def mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def run(server: ServerProcess, log: IO[str]) -> None:
    wait(server, log)
    info = server.client.info()
    step(
        f"Asking {len(QUESTIONS)} questions, {SAMPLES} samples each ({info.architecture}, {info.dtype}, {info.kernel})"
    )
    outputs, summary, seconds = sample_groups(server)
    show_groups(outputs)
    show_totals(summary, seconds, server.client.status(), info.block_size)
    adapted = push_policy(server.client, outputs[0].samples[0])
    sleep_and_wake(server.client)
    show_same("The adapted policy after its sleep", ask_again(server.client), adapted)
    step("Going back to the base")
    result = server.client.push_lora(None)
    print(f"    version {result.weight_version}, pause {result.pause_ms:.0f} ms")
    show_same("The base after all that", ask_again(server.client), outputs[0].samples[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rollout_client.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--server", help="the server's binary [default: the installed rollout-server]")
    parser.add_argument("--model", required=True, help="an instruction-tuned model, as the server's --model takes it")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    flags = args.flags or ["--mem-util", "0.5"]
    try:
        binary = find_server(args.server)
    except NotFound as error:
        sys.exit(f"demo failed: {error}")
    step(f"Starting {binary} --model {args.model} {' '.join(flags)}")
    with tempfile.NamedTemporaryFile("w+", prefix="rollout-server-", suffix=".log") as written:
        try:
            server = ServerProcess(binary, args.model, flags, output=written)
        except OSError as error:
            sys.exit(f"demo failed: cannot run {binary}: {error.strerror}")
        try:
            with open(written.name) as log:
                run(server, log)
            step("Stopping the server")
        except RolloutError as error:
            sys.exit(f"demo failed: {error}")
        finally:
            status = server.stop()
    print(f"    ended with status {status}")
    return 0 if status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
