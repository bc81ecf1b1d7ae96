"""Pushes of experts into a real server: one by one or fused, as changes, in place, broken off, a thousand adapters."""

from __future__ import annotations

import json

import pytest

from models import (
    checksums,
    fused_experts,
    partly,
    perturbed,
    random_adapter,
    random_expert_adapter,
    random_router_adapter,
    read_model,
    write_model,
)
from rollout_client import InvalidArgument, ResourceExhausted, RolloutError, _proto, make_delta
from rollout_client._convert_weights import update_header
from rollout_client._segment import digest_of
from rollout_client._senders import OutgoingTensor, chunk_request
from rollout_client._tensors import Layout, bytes_of
from serving import FIXTURES, held, no_room, seen, server, wait_for
from test_weight_failures import full_messages, send

MODEL = FIXTURES / "qwen3_moe"
MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
"""Parts of the names in Mixtral's checkpoints, and the server's for them."""


def served_names(state):
    """The parameters of a checkpoint under the server's names."""

    def of(name):
        for theirs, own in MIXTRAL.items():
            name = name.replace(theirs, own)
        return name

    return {of(name): array for name, array in state.items()}


def in_memory(state):
    """The parameters as transformers 5 has them: experts fused, and without buffers."""
    own = {name: array for name, array in served_names(state).items() if "correction_bias" not in name}
    return fused_experts(own)


FORMS = {"one by one": dict, "fused": in_memory}


@pytest.fixture(scope="module")
def shared(binary):
    """A bfloat16 server that tests share, and its parameters as arrays."""
    with server(binary, MODEL) as client:
        yield client, read_model(MODEL)


# Pushes that break


def adapter_messages(tensors, config):
    given = {name: bytes_of(name, array) for name, array in tensors.items()}
    outgoing = [OutgoingTensor(name, each.layout, each.data) for name, each in given.items()]
    return declared_at_once("lora", outgoing, adapter_config=json.dumps(config))


def delta_messages(old, new, version):
    outgoing = [
        OutgoingTensor(each.name, Layout(each.dtype, each.shape), memoryview(each.payload), each.changed)
        for each in make_delta(old, new)
    ]
    return declared_at_once("delta", outgoing, options={"expected_version": version})


def declared_at_once(kind, outgoing, options=None, adapter_config=""):
    """The requests of a push, serialised: a header with all tensors, two chunks for each, the commit."""
    header = update_header(kind, options or {}, adapter_config=adapter_config)
    header.tensors.extend(_proto.Tensor.FromString(each.entry(digest_of(each.data))) for each in outgoing)
    made = [_proto.UPDATE.request(header=header).SerializeToString()]
    for index, each in enumerate(outgoing):
        half = len(each.data) // 2
        for at, to in ((0, half), (half, len(each.data))):
            made.append(b"".join(chunk_request(index, at, each.data[at:to])))
    return [*made, _proto.UPDATE.request(commit={}).SerializeToString()]


def whole_push(kind, rng, client, state):
    """The requests of a push of all experts, the number of those of a tensor, and the checksums afterwards."""
    new = perturbed(rng, state)
    after = lambda: checksums(new, "bfloat16")  # noqa: E731
    match kind:
        case "full, one by one" | "full, fused":
            return full_messages(FORMS[kind.removeprefix("full, ")](new)), 3, after
        case "delta, one by one" | "delta, fused":
            form, version = FORMS[kind.removeprefix("delta, ")], client.status().weight_version
            return delta_messages(form(state), form(new), version), 2, after
        case "lora, one by one":
            adapter = random_adapter(rng, state)
        case "lora, fused":
            adapter = random_expert_adapter(rng, state)
    return adapter_messages(*adapter), 2, lambda: pushed_again(client, adapter)


def pushed_again(client, adapter):
    """The checksums that an adapter gives from the base."""
    client.push_lora(None)
    client.push_lora(*adapter)
    return client.checksum()


KINDS = [f"{kind}, {form}" for kind in ("full", "delta", "lora") for form in FORMS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_that_breaks_at_any_tenth_tensor_leaves_the_old_bits(shared, rng, kind):
    client, base = shared
    state = perturbed(rng, base)
    client.push_full(state)
    if not kind.startswith("delta"):  # whose base would be this adapter's merge
        client.push_lora(*random_expert_adapter(rng, state))
    before, status = seen(client), client.status()
    requests, each, after = whole_push(kind, rng, client, state)
    tensors = (len(requests) - 2) // each
    step = 10 if tensors > 40 else 2  # fused, there are fewer
    for tensor in range(0, tensors, step):
        for count in (1 + each * tensor, each * (tensor + 1)):  # before it, and in its middle
            send(client, requests[:count], then="break")
            wait_for(client, lambda now: not now.updating, "without a push")
            assert seen(client) == before, count
            with pytest.raises(RolloutError, match="commit"):
                send(client, requests[:count])
            assert seen(client) == before, count
    now = client.status()
    assert (now.weight_version, now.updates) == (status.weight_version, status.updates)
    assert "update_staging" not in held(now)
    send(client, requests)
    found = client.checksum()
    assert found == after() != before[0]


# Both forms


def test_a_delta_changes_experts_one_by_one_and_fused(shared, rng):
    client, base = shared
    changed = partly(rng, base, perturbed(rng, base), 0.03)
    client.push_full(changed)
    expected = seen(client)
    assert expected[0] == checksums(changed, "bfloat16")
    for form in FORMS.values():
        for transport in ("inline", "shared_memory"):
            client.push_full(base)
            version = client.status().weight_version
            client.push_delta(form(base), form(changed), base_version=version, transport=transport)
            assert seen(client) == expected


def flattened(tensor, name="model.layers.0.mlp.experts.gate_up_proj"):
    return {**tensor, name: tensor[name].reshape(-1, tensor[name].shape[2])}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (lambda state: state | in_memory(state), r"\"model\.layers\.0\.mlp\..*bring the same parameter"),
        (lambda state: flattened(in_memory(state)), r"experts\.gate_up_proj.*\[512, 64\], expected was \[8, 64, 64\]"),
    ],
)
def test_a_delta_that_names_experts_wrongly_is_refused_by_name(shared, rng, form, says):
    client, base = shared
    client.push_full(base)
    before, new = seen(client), perturbed(rng, base)
    version = client.status().weight_version
    with pytest.raises(InvalidArgument, match=says):
        client.push_delta(form(base), form(new), base_version=version)
    assert seen(client) == before
    client.push_delta(base, new, base_version=version)
    assert client.checksum() == checksums(new, "bfloat16")


@pytest.fixture(scope="module")
def crowded(binary):
    """Flags of a server that has no room for a push beside its weights."""
    return no_room(binary)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_pushes_in_place_give_the_bits_of_pushes_beside(binary, crowded, rng, model):
    base = read_model(FIXTURES / model)
    full = perturbed(rng, base)
    # transformers has the correction bias of GLM-4.5 in a buffer, which a trainer does not push.
    full |= {name: array for name, array in base.items() if name.endswith("correction_bias")}
    with server(binary, FIXTURES / model) as client:
        client.push_full(full)
        beside = seen(client)
    with server(binary, FIXTURES / model, *crowded) as client:
        before = seen(client)
        for form in FORMS.values():
            client.pause("abort")
            with pytest.raises(ResourceExhausted):
                client.push_full(form(full))
            client.push_full(form(full), in_place=True)
            client.resume()
            assert seen(client) == beside
            client.pause("abort")
            client.push_full(form(base), in_place=True)
            client.resume()
            assert seen(client) == before


# Adapters

ADAPTERS = 1000


def attention_adapter(rng, state, rank):
    return random_adapter(rng, {name: array for name, array in state.items() if ".self_attn." in name}, rank=rank)


def test_a_thousand_adapters_leave_no_trace(binary, tmp_path, rng):
    """Of experts, routers and attention: half of them on the checkpoint, the others on a base that was pushed."""
    makers = [random_expert_adapter, random_router_adapter, attention_adapter]
    base = read_model(MODEL)
    pushed = perturbed(rng, base)
    with server(binary, MODEL) as client:
        for state in (base, pushed):
            if state is pushed:
                client.push_full(pushed)
            adapters = [make(rng, state, rank=rank) for rank in (1, 3) for make in makers]
            directory = write_model(tmp_path / str(state is pushed), MODEL, state)
            expected = [alone(binary, directory, adapter) for adapter in adapters]
            at_base, ledger = seen(client), {}
            for _ in range(ADAPTERS // 2):
                chosen = int(rng.integers(len(adapters)))
                client.push_lora(*adapters[chosen])
                assert client.checksum() == expected[chosen][0]
                entries = client.status().memory.entries
                assert ledger.setdefault(chosen, entries) == entries
            assert seen(client) == expected[chosen]
            client.push_lora(None)
            assert seen(client) == at_base
            assert at_base[0] == checksums(state, "bfloat16")
            assert "base_copies" not in held(client.status())


def alone(binary, directory, adapter):
    """What is seen of a server that gets no other push."""
    with server(binary, directory) as client:
        client.push_lora(*adapter)
        return seen(client)
