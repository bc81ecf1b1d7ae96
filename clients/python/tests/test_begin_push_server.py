"""Pushes whose tensors are handed over one by one, against a real server: what serves, and what a failure leaves."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from models import checksums, partly, perturbed, random_adapter, read_model
from rollout_client import Aborted, InvalidArgument, RolloutClient
from serving import PUSH_MODEL, held, outputs, seen, server, wait_for
from waited import WaitedClient

CLIENTS = {"sync": RolloutClient, "async": WaitedClient}


@pytest.fixture(params=CLIENTS)
def either(request, at_base):
    """A client of the shared server, of either kind; with the base that serves."""
    client, base = at_base
    with CLIENTS[request.param](client.address, timeout=120) as second:
        yield second, base


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_a_full_push_serves_what_was_written(either, rng, transport):
    client, base = either
    full, bucket = perturbed(rng, base), bytearray(max(array.nbytes for array in base.values()))
    with client.begin_push(transport=transport) as push:
        for name in rng.permutation(list(full)):
            view = memoryview(bucket)[: full[name].nbytes]
            view[:] = full[name].tobytes()
            push.write(str(name), (view, "bfloat16", full[name].shape))
    assert client.checksum() == checksums(full, "bfloat16")
    assert push.receipt.digest == client.push_full(full).digest


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_adapters_and_deltas_serve_what_they_do_when_pushed_in_one_call(either, rng, transport):
    client, base = either
    tensors, config = random_adapter(rng, base)
    whole = client.push_lora(tensors, config)
    served = client.checksum()
    client.push_lora(None)
    with client.begin_push("lora", config, transport=transport) as push:
        push.write_all(tensors)
    assert push.receipt.digest == whole.digest and client.checksum() == served
    client.push_full(base)
    new = partly(rng, base, perturbed(rng, base), 0.1)
    version = client.status().weight_version
    with client.begin_push("delta", base_version=version, transport=transport) as push:
        for name, tensor in new.items():
            push.write(name, tensor, base[name])
    assert client.checksum() == checksums(new, "bfloat16")


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_after_a_rollback_the_old_policy_serves_and_the_next_push_comes_through(either, rng, transport):
    client, base = either
    before, full = client.checksum(), perturbed(rng, base)
    for _ in range(20):
        with contextlib.suppress(KeyError), client.begin_push(transport=transport) as push:
            push.write(*next(iter(full.items())))
            raise KeyError
        with client.begin_push(transport=transport) as push:
            push.rollback()
        client.push_lora(None, timeout=60)
    assert client.checksum() == before
    with client.begin_push(transport=transport) as push:
        push.write_all(full)
    assert client.checksum() == checksums(full, "bfloat16")


def test_a_tensor_that_does_not_fit_is_named_by_a_write_or_the_commit(either):
    client, base = either
    before, name = client.checksum(), "model.norm.weight"
    for transport in ("inline", "shared_memory"):
        with (
            pytest.raises(InvalidArgument, match=r'"model.norm.weight" has shape \[3\], expected was'),
            client.begin_push(transport=transport) as push,
        ):
            push.write(name, np.zeros(3, np.float32))
            push.write_all((other, tensor) for other, tensor in base.items() if other != name)
        with pytest.raises(InvalidArgument, match="are missing"), client.begin_push(transport=transport) as push:
            push.write(name, base[name])
    assert client.checksum() == before


def test_no_other_push_comes_while_one_is_open(either):
    client, base = either
    version = client.status().weight_version + 9
    with client.begin_push(version=version) as push:
        push.write(*next(iter(base.items())))
        wait_for(client, lambda status: status.update and status.update.new_version == version, "open")
        for transport in ("inline", "shared_memory"):
            with pytest.raises(Aborted, match="under way"):
                client.push_full(base, transport=transport)
        push.rollback()


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_push_that_is_left_open_is_ended_by_the_server_and_says_so(binary, rng, kind):
    with server(binary, PUSH_MODEL, "--update-idle-seconds", "1") as client, CLIENTS[kind](client.address) as second:
        before, full = seen(client), perturbed(rng, read_model(PUSH_MODEL))
        with pytest.raises(Aborted, match="update-idle-seconds"), second.begin_push(version=7) as push:
            push.write(*next(iter(full.items())))
            wait_for(client, lambda status: status.update and status.update.new_version == 7, "open")
            wait_for(client, lambda status: status.update is None, "without a push")
            push.write_all(full)
        assert seen(client) == before and "update_staging" not in held(client.status())
        with second.begin_push() as push:
            push.write_all(full)
        assert push.receipt.weight_version == 1 and outputs(client) != before[1]
