"""`rollout generate`: samples completions and prints them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..types import Chat, FinishReason, PromptInput, PromptOutput, Sample, SamplingParams
from . import _format
from ._command import CommandError, add_command, connected


def register(commands: Any) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "generate", _run, "samples completions of prompts")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text; - reads standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="each prompt is a user message for the model's chat template")
    form.add_argument("--tokens", action="store_true", help="each prompt is token ids, separated by commas or spaces")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="PNG or JPEG file, for the next image placeholder of each prompt; repeatable. With --chat images come "
        "before the text, which needs no placeholders",
    )
    parser.add_argument("-n", type=int, default=1, help="samples of each prompt [1]")
    parser.add_argument("--adapter", metavar="NAME", help="resident adapter to use")
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each sample, with all its numbers"
    )
    sampling = parser.add_argument_group("sampling")
    for name, kind, what in (
        ("max-tokens", int, "maximum tokens of a sample"),
        ("temperature", float, "0 is greedy"),
        ("top-k", int, "keep the k most likely tokens; 0 keeps all"),
        ("top-p", float, "keep the most likely tokens with this much probability"),
        ("min-p", float, "keep tokens with at least this fraction of the best one's probability"),
        ("repetition-penalty", float, "penalty for tokens in the prompt or the output"),
    ):
        default = getattr(SamplingParams, name.replace("-", "_"))
        sampling.add_argument(f"--{name}", type=kind, default=default, help=f"{what} [{default}]")
    sampling.add_argument(
        "--seed", type=int, help="seed of the request; with a sample's own seed, -n 1 repeats the sample [random]"
    )
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends a sample; repeatable"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="continue after the model's end-of-sequence tokens")


def _run(options: argparse.Namespace) -> None:
    prompts = [_prompt(text, options) for text in options.prompts]
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
    images = [[_file(path) for path in options.image]] * len(prompts)
    with connected(options) as client:
        readable = client.info().has_tokenizer
        outputs = client.generate(
            prompts, options.n, sampling, adapter=options.adapter, images=images, return_text=readable
        )
    samples = [sample for output in outputs for sample in output.samples]
    if options.json:
        for sample in samples:
            print(_format.to_json(sample))
    elif len(samples) == 1:
        print(_text(samples[0]))
    else:
        print("\n\n".join(f"{_heading(outputs, sample)}\n{_text(sample)}" for sample in samples))
    parts = sum(sample.finish_reason is FinishReason.ABORTED for sample in samples)
    if parts:
        raise CommandError(f"{parts} of {len(samples)} samples were ended early, by --timeout or by another client")


def _prompt(text: str, options: argparse.Namespace) -> PromptInput:
    content = _standard_input() if text == "-" else text
    if options.chat:
        parts = [*({"type": "image"} for _ in options.image), {"type": "text", "text": content}]
        return Chat([{"role": "user", "content": parts if options.image else content}])
    if not options.tokens:
        return content
    words = content.replace(",", " ").split()
    for word in words:
        if not word.isdecimal():
            raise CommandError(f"--tokens: {word!r} is not a token id; give numbers separated by commas or spaces")
    return [int(word) for word in words]


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"--image {path}: {error.strerror}") from None


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not text: {error}") from None


def _text(sample: Sample) -> str:
    return " ".join(map(str, sample.token_ids)) if sample.text is None else sample.text


def _heading(outputs: list[PromptOutput], sample: Sample) -> str:
    which = f"sample {sample.sample_index}"
    if len(outputs) > 1:
        which = f"prompt {sample.prompt_index}, {which}"
    return f"── {which}: {len(sample.token_ids)} tokens, {sample.finish_reason}, seed {sample.seed}"
