"""Every bit that a client gets, against a record: what is not meant to change a result does not change it.

`tests/fixtures/recorded.json` has a digest of the outputs of each case. A change that is meant to change bits (another
order of a sum) writes it anew with `make record`, and says in its commit why. No case may be missing from it.

There are three records: for kernels that multiply float32, for those that multiply pairs of bfloat16 (`avx512_bf16`),
and for those that multiply tiles (`amx`). Within each all instruction sets and all numbers of ranks give the same bits.
"""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import pytest

from models import LINEAR, QWEN_V1_LINEAR, read_model
from rollout_client import SamplingParams
from serving import FIXTURES, server

RECORD = FIXTURES / "recorded.json"
MODELS = [
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "qwen_v1",
    "mistral",
    "smollm3",
    "phi3",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "glm4_moe",
]
DTYPES = ["float32", "bfloat16"]
RECORDS = {"avx512_bf16": "dots", "amx": "tiles"}
RANK = 4
# A prefix of several blocks that two prompts share, one block less a token, and a single token.
SHARED = [(7 * i * i + 3) % 500 for i in range(70)]
PROMPTS = [[*SHARED, 5, 6, 7], [*SHARED, 8], SHARED[:15], [9]]
SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "top-k": SamplingParams(temperature=0.8, top_k=20),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7),
    "min-p": SamplingParams(min_p=0.3),
    "all filters": SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.5),
    "edits": SamplingParams(logit_bias={5: 3.0, 6: -2.0}, allowed_token_ids=range(3, 90), min_tokens=6),
    "stops": SamplingParams(stop_token_ids=range(100, 200), min_tokens=2),
}


def values(name, shape, scale):
    """Numbers that depend on nothing but the name: no generator whose stream a library may change."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    hashed = (np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * 2654435761 + seed) * 2246822519 % (1 << 32)
    return (scale * (hashed / float(1 << 31) - 1.0)).astype(np.float32).reshape(shape)


def adapter(state, salt):
    """Factors for all linear layers of a model but experts, which no resident adapter can change, and their
    configuration.
    """
    tensors = {}
    for name, array in state.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEAR + QWEN_V1_LINEAR and ".experts." not in module:
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = values(f"{salt} {name} A", (RANK, array.shape[1]), 0.3)
            tensors[f"{prefix}.lora_B.weight"] = values(f"{salt} {name} B", (array.shape[0], RANK), 0.3)
    return tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": LINEAR}


def changed(state, salt):
    """Other values for all parameters."""
    return {
        name: (array.astype(np.float32) + values(f"{salt} {name}", array.shape, 0.05)).astype(array.dtype)
        for name, array in state.items()
    }


class Digest:
    """A digest of everything about outputs that depends on the weights and the request alone."""

    def __init__(self):
        self._sha256 = hashlib.sha256()

    def add(self, *parts):
        for part in parts:
            data = part.tobytes() if isinstance(part, np.ndarray) else str(part).encode()
            self._sha256.update(struct.pack("<Q", len(data)) + data)

    def add_likely(self, positions):
        for likely in positions:
            self.add(np.array(list(likely), np.int32), np.array(list(likely.values()), np.float32))

    def __str__(self):
        return self._sha256.hexdigest()[:16]


def generated(client, sampling, **options):
    digest = Digest()
    sampling = SamplingParams(**{**vars(sampling), "max_tokens": 14, "seed": 31, "ignore_eos": True})
    for output in client.generate(PROMPTS, n=3, sampling=sampling, return_text=False, **options):
        if output.prompt_logprobs is not None:
            raw = [np.nan if x is None else x for x in output.prompt_logprobs.raw_logprobs]
            digest.add(np.array(raw, np.float32))
            digest.add_likely(output.prompt_logprobs.top_logprobs)
        for sample in output.samples:
            digest.add(np.array(sample.token_ids, np.int32), sample.logprobs, sample.raw_logprobs)
            digest.add(sample.finish_reason, sample.seed)
            digest.add_likely(sample.top_logprobs)
    return str(digest)


def scored(client, **options):
    digest = Digest()
    for score in client.score(PROMPTS, top_logprobs=3, sampling=SamplingParams(temperature=0.7, top_k=90), **options):
        digest.add(np.array([np.nan if x is None else x for x in score.raw_logprobs], np.float32))
        digest.add(np.array([np.nan if x is None else x for x in score.logprobs], np.float32))
        digest.add_likely(score.top_logprobs)
    return str(digest)


def served(client):
    """Outputs and parameters of the policy that serves."""
    digest = Digest()
    digest.add(sorted(client.checksum().items()))
    return {
        "outputs": generated(client, SETTINGS["plain"], top_logprobs=2),
        "score": scored(client),
        "weights": str(digest),
    }


def sampling_cases(client):
    cases = {name: generated(client, sampling, top_logprobs=3) for name, sampling in SETTINGS.items()}
    cases["prompt log-probabilities"] = generated(client, SETTINGS["top-p"], top_logprobs=2, prompt_logprobs=True)
    return cases | served(client)


def push_cases(client, state):
    """One policy after the other; each depends on what came before."""
    cases = {}

    def note(what, found):
        cases.update({f"{what}: {key}": digest for key, digest in found.items()})

    client.push_lora(*adapter(state, "first"))
    note("adapter", served(client))
    client.push_lora(*adapter(state, "resident"), name="resident")
    chosen = {"adapter": "resident"}
    note(
        "resident adapter",
        {"outputs": generated(client, SETTINGS["plain"], **chosen), "score": scored(client, **chosen)},
    )
    first, second = changed(state, "first"), changed(state, "second")
    version = client.push_full(first).weight_version
    note("full", served(client))
    some = {name: np.where(values(name, array.shape, 1.0) > 0.8, second[name], array) for name, array in first.items()}
    client.push_delta(first, some, base_version=version)
    note("delta", served(client))
    client.push_lora(*adapter(state, "second"))
    client.sleep()
    client.wake()
    note("adapter on it, asleep and awake", served(client))
    client.sleep(2)
    client.wake(reload=True)
    note("checkpoint again", served(client))
    return cases


def outcomes(binary, model, dtype, ranks, kernel):
    """Digests by case, and which record they belong to."""
    flags = ["--dtype", dtype, "--tp", ranks, "--kernel", kernel, "--max-adapters", 2]
    with server(binary, FIXTURES / model, *flags) as client:
        record = RECORDS.get(client.info().kernel.removesuffix("_emulated"), "products")
        return record, sampling_cases(client) | push_cases(client, read_model(FIXTURES / model))


@pytest.fixture(scope="module")
def records(request):
    """Digests by kind of kernel, model and case; with `--record` those that this run finds first."""
    if not request.config.getoption("--record"):
        yield lambda record, model, _: json.loads(RECORD.read_text())[record][model]
        return
    written = {}
    yield lambda record, model, found: written.setdefault(record, {}).setdefault(model, found)
    RECORD.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("kernel", ["auto", "scalar", *(f"{kernel}_emulated" for kernel in RECORDS)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_outputs_are_those_of_the_record(records, binary, model, dtype, ranks, kernel):  # noqa: PLR0917
    record, found = outcomes(binary, model, dtype, ranks, kernel)
    expected = records(record, f"{model}, {dtype}", found)
    different = [case for case in found.keys() | expected.keys() if found.get(case) != expected.get(case)]
    assert not different, f"{record}, {ranks} ranks, kernel {kernel}: other bits in {sorted(different)}"
