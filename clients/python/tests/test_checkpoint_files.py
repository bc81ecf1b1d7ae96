"""A server whose checkpoint somebody writes to: DATA_LOSS, and the server lives."""

from __future__ import annotations

import os
import shutil

import pytest

from models import random_adapter, read_model
from rollout_client import DataLoss, Lifecycle, ServerProcess
from serving import FIXTURES, PUSH_MODEL, SMALL_CACHE, outputs, seen

GGUF = FIXTURES / "llama-tied.gguf"


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path):
    """Other weights in the second half, and the time of the last change set back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        rest = file.read()
        file.seek(before.st_size // 2)
        file.write(bytes(byte ^ 1 for byte in rest))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("damage", [truncate, overwrite])
@pytest.mark.parametrize("model", [PUSH_MODEL, GGUF], ids=["safetensors", "gguf"])
def test_a_checkpoint_changed_in_place_is_data_loss_and_the_server_lives(binary, rng, tmp_path, model, damage):
    served = tmp_path / model.name
    shutil.copytree(model, served) if model.is_dir() else shutil.copy(model, served)
    weights = served / "model.safetensors" if served.is_dir() else served
    whole = weights.read_bytes()
    tensors, config = random_adapter(rng, read_model(model if model.is_dir() else FIXTURES / "llama-tied"))
    with ServerProcess(binary, served, [*SMALL_CACHE, "--mem-util", "0.2", "--tp", "2"]) as process:
        client = process.client
        before = seen(client)
        damage(weights)
        for _ in range(2):
            with pytest.raises(DataLoss, match="nothing has changed"):
                client.push_lora(tensors, config)
        assert seen(client) == before and client.status().updates == 0
        for level, reload in ((1, False), (2, True)):
            client.sleep(level)
            with pytest.raises(DataLoss, match="nothing has changed"):
                client.wake(reload=reload)
            assert client.status().lifecycle is Lifecycle.ASLEEP
            weights.write_bytes(whole)
            client.wake(reload=reload)
            assert seen(client) == before
            damage(weights)
        client.sleep(2)
        client.wake()
        assert client.status().lifecycle is Lifecycle.WEIGHTS_MISSING
        with pytest.raises(DataLoss):
            client.push_lora(None)
        weights.write_bytes(whole)
        client.push_lora(None)
        assert seen(client) == before
        # Another file in its place is another's: the server goes on with the one it has.
        new = tmp_path / "new"
        new.write_bytes(whole)
        damage(new)
        new.rename(weights)
        client.push_lora(tensors, config)
        client.push_lora(None)
        assert outputs(client) == before[1]
        assert process.process.poll() is None
