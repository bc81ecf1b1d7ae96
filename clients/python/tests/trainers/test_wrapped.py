"""Models of torch as trainers wrap and shard them, pushed: what serves is what the model has."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch
import torch.multiprocessing
import transformers
from sharded import gathered, ranks, second_rank, sharded_parameters
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from models import read_model
from rollout_client import InvalidArgument, checksum_of
from serving import PUSH_MODEL, server

CONFIG = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}


@pytest.fixture(scope="module")
def served(binary):
    with server(binary, PUSH_MODEL) as client:
        yield client


@pytest.fixture
def alone(tmp_path):
    """This process as the only rank."""
    with ranks(tmp_path, 0, 1):
        yield


def policy(seed=0):
    """A model of other values than the server's, the same in every process."""
    model = transformers.AutoModelForCausalLM.from_pretrained(PUSH_MODEL, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def checksums(client, model):
    """Those of the parameters that the server has, as the model has them."""
    state = dict(model.named_parameters())
    return {name: checksum_of(state[name], "bfloat16") for name in client.checksum()}


def sharded(model):
    for module in model.modules():
        if isinstance(module, Qwen2DecoderLayer):
            fully_shard(module)
    return fully_shard(model)


def data_parallel(model):
    return torch.nn.parallel.DistributedDataParallel(model)


WRAPPED = {
    "compile": torch.compile,
    "DDP": data_parallel,
    "DDP of compile": lambda model: data_parallel(torch.compile(model)),
    "FSDP2": sharded,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_models_are_pushed_as_what_they_wrap(served, alone, wrap):
    expected = checksums(served, policy())
    served.push_full(wrap(policy()))
    assert served.checksum() == expected
    model = wrap(policy(1))
    with served.begin_push() as push:
        push.write_all(model.named_parameters())
    assert served.checksum() == checksums(served, policy(1))


def adapted():
    torch.manual_seed(0)
    return peft.get_peft_model(policy(), peft.LoraConfig(**CONFIG))


@pytest.mark.parametrize("wrap", [*WRAPPED.values(), "FSDP1"], ids=[*WRAPPED, "FSDP1"])
def test_wrapped_peft_models_push_the_same_adapter(served, alone, wrap):
    digest = served.push_lora(adapted()).digest
    if wrap != "FSDP1":
        assert served.push_lora(wrap(adapted())).digest == digest
        return
    model = fsdp1(adapted())
    with pytest.raises(InvalidArgument, match="summon_full_params"):
        served.push_lora(model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        assert served.push_lora(model).digest == digest


def fsdp1(model):
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Qwen2DecoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def test_fsdp1_is_refused_unless_its_parameters_are_summoned(served, alone):
    expected, model = checksums(served, policy()), fsdp1(policy())
    with pytest.raises(InvalidArgument, match="summon_full_params"):
        served.push_full(model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        served.push_full(model)
    assert served.checksum() == expected


def test_two_ranks_gather_what_one_of_them_pushes(served, tmp_path):
    """The recipe of docs/weights.md, once with a push that fails."""
    second = torch.multiprocessing.get_context("spawn").Process(target=second_rank, args=(tmp_path, 2))
    second.start()
    with ranks(tmp_path, 0, 2):
        model = sharded_parameters()
        with pytest.raises(InvalidArgument, match=r"is sharded over 2 ranks; .*full_tensor"):
            served.push_full(model)
        with pytest.raises(InvalidArgument, match="total_bytes"):
            gathered(model, lambda tensors: served.push_full(tensors, total_bytes=5000))
        gathered(model, served.push_full)
        second.join(120)
    assert second.exitcode == 0
    doubled = {name: 2 * array for name, array in read_model(PUSH_MODEL, np.float32).items()}
    assert served.checksum() == {name: checksum_of(array, "bfloat16") for name, array in doubled.items()}
