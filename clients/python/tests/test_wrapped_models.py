"""Models as trainers wrap and shard them, with stand-ins for torch's classes: trainers/test_wrapped.py has the real."""

from __future__ import annotations

import enum

import numpy as np
import pytest

from fake_weights import held, hold, in_bytes
from rollout_client import InvalidArgument
from rollout_client._lora import adapter_parts
from rollout_client._model import plain_name, unwrapped


class Module:
    """What pushes use of a module of torch."""

    def __init__(self, state, prefix=""):
        self.state, self.prefix = state, prefix

    def named_parameters(self):
        return [(self.prefix + name, array) for name, array in self.state.items()]

    def state_dict(self):
        raise AssertionError("may be a collective call")

    def modules(self):
        return [self]


def wrapper(name, attribute, model):
    """An instance of a subclass of a class of this name, which has the model in this attribute."""

    def modules(self):
        return [self, *model.modules()]

    base = type(name, (), {"modules": modules, "named_parameters": None, "state_dict": None})
    made = type("Own", (base,), {})()
    setattr(made, attribute, model)
    return made


class Training(enum.Enum):
    IDLE = 1
    SUMMON_FULL_PARAMS = 2


def state_of(rng):
    return {f"model.layers.{i}.mlp.up_proj.weight": rng.standard_normal((3, 4), dtype=np.float32) for i in range(3)}


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("DistributedDataParallel", "module"), ("DeepSpeedEngine", "module"), ("OptimizedModule", "_orig_mod")],
)
def test_wrappers_are_looked_through(call, fake, rng, name, attribute):
    state = state_of(rng)
    hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
    model = Module(state)
    assert unwrapped(wrapper(name, attribute, model)) is model
    twice = wrapper("DistributedDataParallel", "module", wrapper(name, attribute, model))
    call(lambda client: client.push_full(twice))
    assert held(fake) == in_bytes(state)


def test_a_module_of_the_name_of_a_wrappers_attribute_is_left_alone(rng):
    model = Module(state_of(rng))
    model.module = Module({})
    assert unwrapped(model) is model


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_what_wrappers_add_to_names_is_taken_off(pusher, fake, rng, prefix):
    state = state_of(rng)
    hold(fake, state)
    pusher.push_full(Module(state, prefix))
    assert held(fake) == in_bytes(state)
    name = "base_model.model.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.lora_A.weight"
    plain = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors, _ = adapter_parts({prefix + name: state["model.layers.0.mlp.up_proj.weight"]}, {})
    assert list(tensors) == [plain] and plain_name("model.module.weight") == "model.module.weight"
    with pusher.begin_push("lora", {}) as push:
        push.write(prefix + name, state["model.layers.0.mlp.up_proj.weight"])
    assert list(fake.weights.commits[-1].tensors) == [plain]


def test_fsdp_is_refused_unless_its_parameters_are_summoned(call, fake, rng):
    state = state_of(rng)
    hold(fake, state)
    model = wrapper("FullyShardedDataParallel", "module", Module(state, "_fsdp_wrapped_module."))
    model.training_state = Training.IDLE
    for use in (lambda client: client.push_full(model), lambda client: client.push_lora(model)):
        with pytest.raises(InvalidArgument, match=r"summon_full_params.*every rank"):
            call(use)
    model.training_state = Training.SUMMON_FULL_PARAMS
    call(lambda client: client.push_full(model))
    assert held(fake) == in_bytes(state) and len(fake.weights.commits) == 1


def test_peft_models_and_others_are_told_apart(call, fake, rng):
    model = Module(state_of(rng))
    with pytest.raises(InvalidArgument, match="Module is not a PEFT model; push_full"):
        call(lambda client: client.push_lora(wrapper("DistributedDataParallel", "module", model)))
    model.peft_config = {}
    with pytest.raises(InvalidArgument, match="a PEFT model; push its adapter with push_lora"):
        call(lambda client: client.push_full(wrapper("DistributedDataParallel", "module", model)))
    assert fake.weights.commits == []


class Tensor:
    """What pushes use of a tensor of torch."""

    def __init__(self, array, **attributes):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        vars(self).update(attributes)

    def __array__(self, *_, **__):
        return self.array


class Placement:
    def __init__(self, replicated):
        self.replicated = replicated

    def is_replicate(self):
        return self.replicated


class Mesh:
    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


def distributed(array, ranks, replicated):
    """A stand-in for a DTensor: its own values are those of this rank alone."""
    whole = Tensor(array)
    return Tensor(array * 0, full_tensor=lambda: whole, device_mesh=Mesh(ranks), placements=[Placement(replicated)])


@pytest.mark.parametrize(("ranks", "replicated"), [(1, False), (2, True)])
def test_distributed_tensors_that_are_whole_here_are_pushed(call, fake, rng, ranks, replicated):
    array = rng.standard_normal((4, 4), dtype=np.float32)
    hold(fake, {"a": np.zeros_like(array)})
    call(lambda client: client.push_full({"a": distributed(array, ranks, replicated)}))
    assert held(fake) == in_bytes({"a": array})


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            lambda array: distributed(array, 2, False),
            r"a: is sharded over 2 ranks; .*`full_tensor\(\)`, which every rank",
        ),
        (lambda array: Tensor(array[:0, 0], ds_shape=(4, 4)), r"a: is partitioned, of shape \[0\] here.*Gathered"),
        (lambda array: Tensor(array[:0, 0]), r"a: is partitioned, of shape \[0\] here"),
        (lambda array: Tensor(array, is_meta=True), "a: has no values"),
    ],
)
def test_parts_of_tensors_are_refused_with_the_word_to_use(call, fake, rng, part, says):
    array = rng.standard_normal((4, 4), dtype=np.float32)
    hold(fake, {"a": array})
    tensor = part(array)
    for given in ({"a": tensor}, iter([("a", tensor)]), Module({"a": tensor})):
        with pytest.raises(InvalidArgument, match=says):
            call(lambda client, given=given: client.push_full(given))
    with pytest.raises(InvalidArgument, match=says):
        call(lambda client: client.push_lora({"a": tensor}, {}))
    assert fake.weights.commits == []


def test_a_partitioned_tensor_that_is_gathered_is_pushed(pusher, fake, rng):
    array = rng.standard_normal((4, 4), dtype=np.float32)
    hold(fake, {"a": np.zeros_like(array)})
    pusher.push_full({"a": Tensor(array, ds_shape=(4, 4))})
    assert held(fake) == in_bytes({"a": array})
