"""Pushes into a real server: bits of the weights, outputs of a server started on them, and nothing left behind."""

from __future__ import annotations

import itertools
import json
import threading

import ml_dtypes
import numpy as np
import pytest

import rollout_client
from models import (
    checksums,
    merged,
    partly,
    perturbed,
    random_adapter,
    read_model,
    read_safetensors,
    write_model,
    write_safetensors,
)
from rollout_client import (
    Aborted,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    NotFound,
    ServerProcess,
    SharedBuffer,
)
from serving import (
    FIXTURES,
    LONG,
    PROMPTS,
    PUSH_MODEL,
    SAMPLING,
    SMALL_CACHE,
    assert_idle,
    bits,
    fill_cache,
    outputs,
    resident_bytes,
    seen,
    server,
    start_group,
    wait_for,
)

TRANSPORTS = ["inline", "shared_memory"]
PEFT_CASES = sorted(
    path.parent.name
    for path in FIXTURES.glob("peft/*/merged.json")
    if (FIXTURES / json.loads(path.read_text())["base"]).is_dir()
)


def test_parameters_are_those_of_the_checkpoint(push_target):
    client, base = push_target
    assert {p.name: (p.shape, p.dtype) for p in client.parameters()} == {
        name: (array.shape, "bfloat16") for name, array in base.items()
    }
    assert client.checksum() == checksums(base, "bfloat16")
    with pytest.raises(InvalidArgument, match="nonsense"):
        client.checksum(["nonsense"])


@pytest.fixture(params=[("qwen2", 1, "bfloat16"), ("qwen2", 2, "bfloat16"), ("llama-tied", 2, "float32")], ids=str)
def pair(request, binary, tmp_path):
    """A server, its base as arrays, and what a second server says that is started on other weights."""
    model, tp, dtype = request.param
    base = read_model(FIXTURES / model, {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype])
    flags = ["--tp", tp, "--dtype", dtype]

    def fresh(state, name):
        with server(binary, write_model(tmp_path / name, FIXTURES / model, state), *flags) as client:
            found = client.checksum(), outputs(client)
        assert found[0] == checksums(state, dtype)
        return found

    with server(binary, FIXTURES / model, *flags, "--weights-dir", tmp_path) as client:
        assert client.checksum() == checksums(base, dtype)
        yield client, base, fresh


def test_full_pushes_are_a_server_started_on_them(pair, rng):
    client, base, fresh = pair
    before, full = seen(client), perturbed(rng, base)
    expected = fresh(full, "full")
    for transport in TRANSPORTS:
        version = client.status().weight_version + 9
        result = client.push_full(iter(full.items()), version=version, transport=transport)
        assert (result.weight_version, result.parameters, result.pending) == (version, len(base), False)
        assert result.bytes == sum(array.nbytes for array in full.values())
        assert seen(client) == expected != before
        client.push_full(base)
        assert seen(client) == before
    with SharedBuffer(sum(array.nbytes for array in full.values())) as buffer:
        gathered = {}
        for name, array in full.items():
            gathered[name] = np.frombuffer(buffer.take(array.nbytes), array.dtype).reshape(array.shape)
            gathered[name][...] = array
        client.push_full(gathered, buffer=buffer)
        assert seen(client) == expected
    client.push_full(base, version=1, force_version=True)
    client.push_directory("full", "full", expected_version=1, version=12)
    assert seen(client) == expected


def test_delta_pushes_are_a_server_started_on_the_changed_weights(pair, rng):
    client, base, fresh = pair
    before, changed = seen(client), partly(rng, base, perturbed(rng, base), 0.03)
    expected = fresh(changed, "changed")
    for transport in TRANSPORTS:
        version = client.status().weight_version
        result = client.push_delta(base, changed, base_version=version, version=version + 7, transport=transport)
        assert result.weight_version == version + 7
        assert seen(client) == expected != before
        client.push_delta(changed, base, base_version=version + 7)
        assert seen(client) == before


def test_adapters_are_a_server_started_on_the_merged_weights(pair, rng, tmp_path):
    client, base, fresh = pair
    before = seen(client)
    adapter, config = random_adapter(rng, base)
    path = tmp_path / "adapter"
    path.mkdir()
    write_safetensors(path / "adapter_model.safetensors", adapter)
    (path / "adapter_config.json").write_text(json.dumps(config))
    found = []
    for push in (
        lambda: client.push_lora(adapter, config, transport="inline"),
        lambda: client.push_lora(adapter, config, transport="shared_memory"),
        lambda: client.push_directory(path),
    ):
        push()
        found.append(seen(client))
        client.push_lora({})
        assert seen(client) == before
    if client.info().dtype == "bfloat16":  # for which `merged` is exact
        found.append(fresh({**base, **merged(base, adapter, config)}, "merged"))
    assert all(each == found[0] for each in found) and found[0] != before
    # After a full push that is the base.
    full = perturbed(rng, base)
    client.push_full(full)
    expected = seen(client)
    client.push_lora(adapter, config)
    if client.info().dtype == "bfloat16":
        assert client.checksum() == checksums({**full, **merged(full, adapter, config)}, "bfloat16")
    client.push_lora(None)
    assert seen(client) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PEFT_CASES)
def test_adapters_are_merged_as_real_peft_does(binary, name, dtype):
    """Against the checksums that PEFT's own `merge_adapter()` gave, by every transport."""
    case = json.loads((FIXTURES / "peft" / name / "merged.json").read_text())
    tensors = read_safetensors(FIXTURES / "peft" / name / "adapter_model.safetensors")
    config = (FIXTURES / "peft" / name / "adapter_config.json").read_text()
    with server(binary, FIXTURES / case["base"], "--dtype", dtype, "--weights-dir", FIXTURES / "peft") as client:
        before = client.checksum()
        for push in (
            lambda: client.push_lora(tensors, config, transport="inline"),
            lambda: client.push_lora(tensors, json.loads(config), transport="shared_memory"),
            lambda: client.push_directory(name),
        ):
            push()
            found = client.checksum()
            assert {n: case["merged"][dtype][n] for n in found} == found
            client.push_lora(None)
            assert client.checksum() == before


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_the_state_dict_of_a_tied_model_may_be_gathered_lazily(binary, rng, transport):
    with server(binary, FIXTURES / "llama-tied") as client:
        full = perturbed(rng, read_model(FIXTURES / "llama-tied"))
        named = {**full, "lm_head.weight": full["model.embed_tokens.weight"]}
        client.push_full(iter(named.items()), transport=transport)
        assert client.checksum() == checksums(full, client.info().dtype)


PUSHES = 2000
WARM_UP = 400


def test_two_thousand_adapters_leave_no_drift_and_no_memory(binary, tmp_path, rng):
    base = read_model(PUSH_MODEL)
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as process:
        client = process.client
        before = client.checksum()
        assert before == checksums(base, "bfloat16")
        fill_cache(client)  # whose pages are no growth then
        touched, resident, bytes_pushed = set(), [], 0
        for step in range(1, PUSHES + 1):
            layers = None if step % 50 == 0 else [step % 2]
            adapter, config = random_adapter(rng, base, rank=int(rng.integers(1, 5)), layers=layers)
            bytes_pushed += sum(array.nbytes for array in adapter.values())
            assert client.push_lora(adapter, config, version=step).weight_version == step
            expected = merged(base, adapter, config)
            # What this push does not touch is the base's again.
            names = None if step % 50 == 0 else sorted(touched | expected.keys())
            state = {**base, **expected}
            assert client.checksum(names) == checksums({n: state[n] for n in names or base}, "bfloat16"), step
            touched = set(expected)
            if step % 250 == 0:
                with server(binary, write_model(tmp_path / str(step), PUSH_MODEL, state)) as fresh:
                    assert outputs(client) == outputs(fresh)
            if step > WARM_UP and step % 10 == 0:
                resident.append(resident_bytes(process.process.pid))
        slope = np.polyfit(np.arange(len(resident)) * 10, resident, 1)[0]
        print("resident KiB:", [size >> 10 for size in resident])
        print(f"resident memory: {slope:.0f} bytes per push, of {bytes_pushed / PUSHES:.0f} bytes on average")
        # One adapter in twenty that stays would be more; what is left is the allocator's noise.
        assert slope < bytes_pushed / PUSHES / 20
        client.push_lora(None)
        assert client.checksum() == before
        assert_idle(client)


# Running requests


@pytest.mark.parametrize("policy", ["keep", "recompute", "wait", "abort"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_running_requests_meet_a_push_as_told(at_base, rng, policy, kind):
    client, base = at_base
    old = client.status().weight_version
    expected_alone = [bits(s) for s in start_group(client)()]
    full, adapter = perturbed(rng, base, 0.05), random_adapter(rng, base)
    join = start_group(client)
    result = client.push_full(full, running=policy) if kind == "full" else client.push_lora(*adapter, running=policy)
    assert result.weight_version == old + 1
    samples = join()
    for sample in samples:
        spans = sample.weight_versions
        assert spans[0].start == 0 and spans[-1].end == len(sample.token_ids)
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))
        if policy == "abort":
            assert sample.finish_reason is FinishReason.ABORTED and 0 < len(sample.token_ids) < LONG.max_tokens
            assert [span.weight_version for span in spans] == [old]
        elif policy == "wait":
            assert [span.weight_version for span in spans] == [old]
        else:
            assert [span.weight_version for span in spans] == [old, old + 1]
            assert len(sample.token_ids) == LONG.max_tokens
    if policy == "wait":
        assert [bits(s) for s in samples] == expected_alone
    assert_idle(client)


def test_recomputed_requests_go_on_as_the_new_policy_scores_them(at_base, rng):
    """With their KV computed again, log-probabilities after the change are those that the new policy gives."""
    client, base = at_base
    full = perturbed(rng, base, 0.05)
    join = start_group(client)
    client.push_full(full, running="recompute")
    for sample in join():
        changed = sample.weight_versions[1].start
        score = client.score([[5, 6, 7, *sample.token_ids]])[0]
        assert np.float32(score.raw_logprobs[3 + changed :]).tobytes() == sample.raw_logprobs[changed:].tobytes()


def test_a_cached_prefix_of_the_old_policy_is_never_used(at_base, binary, tmp_path, rng):
    client, base = at_base
    full = perturbed(rng, base)
    with server(binary, write_model(tmp_path / "full", PUSH_MODEL, full)) as fresh:
        expected = outputs(fresh)
    old = outputs(client)
    for _ in range(5):
        client.push_full(full)
        assert outputs(client) == expected
        client.push_full(base)
        assert outputs(client) == old
    # A prompt that is being computed while the push comes starts again.
    prompt = [[(7 * i + j) % 500 for i in range(900)] for j in range(8)]
    wanted = client.status().weight_version + 1
    found = []
    asking = threading.Thread(target=lambda: found.extend(client.score(prompt)))
    asking.start()
    client.push_full(full, version=wanted)
    asking.join()
    by_version = {wanted: client.score(prompt)}
    client.push_full(base)
    by_version[wanted - 1] = client.score(prompt)
    for i, score in enumerate(found):
        assert score.raw_logprobs == by_version[score.weight_version][i].raw_logprobs


def test_requests_can_wait_for_the_policy_or_insist_on_it(at_base, rng):
    client, base = at_base
    version = client.status().weight_version
    found = []
    waiting = threading.Thread(
        target=lambda: found.extend(client.generate([[1, 2]], sampling=SAMPLING, min_weight_version=version + 5))
    )
    waiting.start()
    wait_for(client, lambda status: status.held_requests == 1, "held")
    client.push_lora(*random_adapter(rng, base), version=version + 5)
    waiting.join(60)
    assert [span.weight_version for span in found[0].samples[0].weight_versions] == [version + 5]
    with pytest.raises(Aborted, match=str(version + 5)):
        client.generate([[1]], if_weight_version=version)
    with pytest.raises(Aborted, match=str(version + 5)):
        client.push_lora(None, expected_version=version)
    with pytest.raises(Aborted, match=str(version + 5)):
        client.push_delta(base, base, base_version=version)


def test_versions_that_go_back_or_repeat_must_be_meant(at_base, rng):
    client, base = at_base
    version = client.push_lora(None).weight_version
    before = seen(client)
    for wrong in (0, version - 1, version):
        for push in (
            lambda wrong=wrong, **options: client.push_lora(*random_adapter(rng, base), version=wrong, **options),
            lambda wrong=wrong, **options: client.push_full(base, version=wrong, **options),
            lambda wrong=wrong, **options: client.push_delta(
                base, base, base_version=client.status().weight_version, version=wrong, **options
            ),
        ):
            with pytest.raises(FailedPrecondition, match=rf"{wrong} is not above {version}, .*force_version"):
                push()
    assert seen(client) == before and client.status().weight_version == version
    # A trainer that begins again beside this server.
    assert client.push_lora(None, version=1, force_version=True).weight_version == 1
    assert client.push_lora(None, version=2).weight_version == 2
    assert client.push_lora(None).weight_version == 3
    assert client.push_lora(None, version=version + 10, force_version=False).weight_version == version + 10


# Resident adapters


@pytest.fixture
def with_adapters(binary):
    with server(binary, PUSH_MODEL, "--max-adapters", 2) as client:
        yield client, read_model(PUSH_MODEL)


def test_adapters_stay_beside_the_policy(with_adapters, rng):
    client, base = with_adapters
    version, alone = client.status().weight_version, outputs(client)
    adapter, config = random_adapter(rng, base, scale=0.1)
    first = client.push_lora(adapter, config, name="one", expected_generation=0)
    assert first.weight_version == version and first.adapter_generation
    with pytest.raises(Aborted):
        client.push_lora(adapter, config, name="one", expected_generation=0)
    zero = {name: np.zeros_like(a) if "lora_B" in name else a for name, a in adapter.items()}
    client.push_lora(zero, config, name="zero")
    assert {a.name for a in client.adapters()} == {"one", "zero"}
    # One flat batch, several policies: each as alone.
    with_adapter = outputs(client, adapter="one")
    assert outputs(client) == alone == outputs(client, adapter="zero") != with_adapter
    with pytest.raises(rollout_client.ResourceExhausted, match="zero"):
        client.push_lora(adapter, config, name="three")
    with pytest.raises(NotFound, match="three"):
        client.generate([[1]], adapter="three")
    second = client.push_lora(zero, config, name="one", expected_generation=first.adapter_generation)
    assert second.adapter_generation > first.adapter_generation
    assert outputs(client, adapter="one") == alone
    for name in ("one", "zero"):
        client.remove_adapter(name)
    assert client.adapters() == []


def test_an_adapter_beside_the_policy_and_merged_into_it_are_the_same_policy(binary, rng):
    # In float32: rounded to bfloat16, merged weights alone moved a log-probability by 0.45.
    with server(binary, PUSH_MODEL, "--max-adapters", 1, "--dtype", "float32") as client:
        adapter, config = random_adapter(rng, read_model(PUSH_MODEL), scale=0.1)
        base = client.score(PROMPTS)
        client.push_lora(adapter, config, name="one")
        beside = client.score(PROMPTS, adapter="one")
        client.push_lora(adapter, config)
        for a, b, c in zip(beside, client.score(PROMPTS), base, strict=True):
            np.testing.assert_allclose(a.raw_logprobs[1:], b.raw_logprobs[1:], rtol=0, atol=1e-3)
            assert np.abs(np.subtract(a.raw_logprobs[1:], c.raw_logprobs[1:])).max() > 0.01
