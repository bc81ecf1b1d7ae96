"""The keyword options: the same of both clients, each stated and described once, and no others taken."""

from __future__ import annotations

import ast
import inspect
import pydoc
from pathlib import Path

import pytest

import rollout_client
from rollout_client import AsyncRolloutClient, RolloutClient, options


def methods(cls):
    return {name: f for name, f in inspect.getmembers(cls, callable) if not name.startswith("_")}


def option_type(method):
    """The name of the type of a method's `**options`."""
    kinds = {parameter.kind: parameter.annotation for parameter in inspect.signature(method).parameters.values()}
    return kinds.get(inspect.Parameter.VAR_KEYWORD, "").removeprefix("Unpack[").removesuffix("]")


def test_both_clients_have_the_same_methods():
    blocking, waiting = methods(RolloutClient), methods(AsyncRolloutClient)
    assert blocking.keys() == waiting.keys()
    for name, method in blocking.items():
        parameters = list(inspect.signature(method).parameters.values())
        assert parameters == list(inspect.signature(waiting[name]).parameters.values()), name


def test_every_option_type_is_exported_and_named_in_the_help_of_its_method():
    types = {name: option_type(method) for name, method in methods(RolloutClient).items()}
    assert {name: kind for name, kind in types.items() if kind} == {
        "generate": "GenerateOptions",
        "generate_stream": "GenerateStreamOptions",
        "score": "ScoreOptions",
        "push_lora": "PushLoraOptions",
        "push_full": "PushFullOptions",
        "push_delta": "PushDeltaOptions",
        "push_directory": "PushDirectoryOptions",
        "begin_push": "BeginPushOptions",
    }
    for name in filter(types.get, types):
        assert getattr(rollout_client, types[name]).__optional_keys__ and types[name] in rollout_client.__all__
        assert f"`rollout_client.{types[name]}`" in pydoc.render_doc(getattr(RolloutClient, name))


def test_every_option_is_described_and_stated_once():
    """Only `progress` is two options: of pushes and of `generate`."""
    classes = [node for node in ast.parse(Path(options.__file__).read_text()).body if isinstance(node, ast.ClassDef)]
    stated = []
    for cls in classes:
        for key, text in zip(cls.body[1::2], cls.body[2::2], strict=True):
            assert isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr), cls.name
            assert isinstance(text.value.value, str) and "default" in text.value.value.lower(), key.target.id
            stated.append(key.target.id)
    stated.remove("progress")
    assert len(stated) == len(set(stated))
    assert set(stated) == set().union(*(getattr(options, cls.name).__optional_keys__ for cls in classes))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda c: c.generate(["a"], top_logprob=1), "generate() … 'top_logprob'. Did you mean 'top_logprobs'?"),
        (lambda c: c.generate(["a"], colour="red"), "generate() … 'colour'"),
        (lambda c: c.generate(["a"], options={"adapter": "a"}), "generate() … 'options'"),
        (lambda c: c.generate(["a"], return_text=False, stream_tokens=True), "generate() … 'stream_tokens'"),
        (lambda c: c.generate_stream(["a"], time=1), "generate_stream() … 'time'. Did you mean 'timeout'?"),
        (lambda c: c.score([[1]], request_id="a"), "score() … 'request_id'"),
        (lambda c: c.push_lora(None, in_place=True), "push_lora() … 'in_place'"),
        (lambda c: c.push_full({}, buffers=None), "push_full() … 'buffers'. Did you mean 'buffer'?"),
        (lambda c: c.push_delta({}, {}, base_version=1, in_place=True), "push_delta() … 'in_place'"),
        (lambda c: c.push_directory("a", transport="inline"), "push_directory() … 'transport'"),
    ],
)
def test_unknown_options_are_refused_by_name(call, fake, use, message):
    with pytest.raises(TypeError) as error:
        call(use)
    assert str(error.value) == message.replace("…", "got an unexpected keyword argument")
    assert fake.requests == []


def test_one_dict_of_options_serves_both_clients(call, fake):
    chosen: rollout_client.ScoreOptions = {"top_logprobs": 2, "adapter": "a", "min_weight_version": 3}
    fake.answers["Score"] = lambda request, context: iter(())
    assert call(lambda client: client.score([], **chosen)) == []
    (request,) = fake.requests
    assert (request.top_logprobs, request.adapter, request.min_weight_version) == (2, "a", 3)
