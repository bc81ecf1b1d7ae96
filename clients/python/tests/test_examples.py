"""The examples in the docstrings of both clients' methods, run against a fake server."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import math
import types

import numpy as np
import pytest

from fake_server import completion, summary
from fake_weights import hold
from rollout_client import AsyncRolloutClient, RolloutClient, SamplingParams, _proto, checksum_of

CLIENTS = (RolloutClient, AsyncRolloutClient)
SHOWN = {
    *("generate", "generate_stream", "score", "abort", "info", "status", "sleep", "wake", "awake", "pause"),
    *("wait_until_ready", "push_lora", "push_full", "push_delta", "begin_push", "parameters", "checksum"),
}
STATE = {
    name: np.arange(32, dtype=np.float32).reshape(8, 4) for name in ("model.embed_tokens.weight", "lm_head.weight")
}
ADAPTER = {f"base_model.model.model.layers.0.q_proj.lora_{part}.weight": np.zeros((4, 4), np.float32) for part in "AB"}
LORA_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def documented(cls):
    """A client's class and its methods, by name, as far as their docstrings have examples."""
    members = {"": cls, **dict(inspect.getmembers(cls, inspect.isfunction))}
    return {name: member.__doc__ for name, member in members.items() if ">>>" in (member.__doc__ or "")}


@pytest.fixture
def served(fake):
    """Answers as the examples show them."""

    def generate(request, context):
        for sample in range(request.n):
            yield completion(0, sample, text=" Paris")
        yield summary()

    def score(request, context):
        values = [math.nan, -0.5, -0.25]
        yield _proto.SCORE.response(score={"raw_logprobs": values, "logprobs": values}, sequence_index=0)

    answers = {
        "Abort": _proto.ABORT.response(unknown=["my-request"]),
        "GetInfo": _proto.GET_INFO.response(dtype="bfloat16"),
        "GetStatus": _proto.GET_STATUS.response(lifecycle=1, weight_version=4, running_samples=2),
        "Sleep": _proto.SLEEP.response(released=[{"tag": 2, "bytes": 1 << 20}]),
        "Wake": _proto.WAKE.response(lifecycle=1),
        "Pause": _proto.PAUSE.response(),
        "Resume": _proto.RESUME.response(),
    }
    fake.answers |= {name: lambda request, context, answer=answer: answer for name, answer in answers.items()}
    fake.answers |= {"Generate": generate, "Score": score}
    hold(fake, STATE)
    fake.weights.version = 2
    return fake


async def run(examples, names):
    """Runs examples, of which some await, and compares what they print."""
    for example in examples:
        code = compile(example.source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            result = types.FunctionType(code, names)()
            if inspect.iscoroutine(result):
                await result
        assert doctest.OutputChecker().check_output(example.want, printed.getvalue(), 0), (
            f"{example.source}gives\n{printed.getvalue()}and not\n{example.want}"
        )


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls in CLIENTS for name in documented(cls)])
def test_an_example_gives_what_it_shows(cls, name, served):
    names = {"AsyncRolloutClient": AsyncRolloutClient, "RolloutClient": RolloutClient, "SamplingParams": SamplingParams}
    names |= {"address": served.address, "checksum_of": checksum_of}
    names |= {"state_dict": STATE, "adapter": ADAPTER, "lora_config": LORA_CONFIG}

    async def main():
        client = names["client"] = cls(served.address, timeout=60)
        try:
            await run(doctest.DocTestParser().get_examples(documented(cls)[name]), names)
        finally:
            closing = client.close()
            if closing is not None:
                await closing

    asyncio.run(main())


def test_the_main_methods_have_examples():
    for cls in CLIENTS:
        assert documented(cls).keys() >= SHOWN
