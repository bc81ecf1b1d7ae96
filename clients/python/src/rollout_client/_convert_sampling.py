"""Converts sampling parameters to the message of `rollout.v1`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import _proto
from ._fields import extend, set_field
from .errors import InvalidArgument
from .types import SamplingParams, StructuredOutputs

_STRUCTURED = ("regex", "json", "choice", "grammar", "json_object")
_DISTRIBUTION_FIELDS = ("temperature", "top_k", "top_p", "min_p")
_GENERATION_FIELDS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "skip_special_tokens",
)


def _set_structured(message: Any, given: StructuredOutputs, path: str) -> None:
    if not isinstance(given, Mapping) or len(given) != 1:
        raise InvalidArgument(f"{path}: expected a dict of one of {', '.join(_STRUCTURED)}, got {given!r}")
    ((kind, value),) = given.items()
    if kind not in _STRUCTURED:
        raise InvalidArgument(f"{path}: {kind!r} is none of {', '.join(_STRUCTURED)}")
    if kind == "choice":
        if isinstance(value, str):
            raise InvalidArgument(f"{path}.choice: expected a list of strings, got a single string; put it in a list")
        message.choice.SetInParent()
        extend(message.choice.choices, value, f"{path}.choice")
        return
    if kind == "json" and not isinstance(value, str):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{path}.json: {error}") from None
    set_field(message, "json_schema" if kind == "json" else kind, value, f"{path}.{kind}")


def set_sampling_of_prompts(request: Any, sampling: Sequence[SamplingParams]) -> None:
    """Sets the sampling of each prompt; raises `InvalidArgument` unless there is one for each."""
    if len(sampling) != len(request.prompts):
        raise InvalidArgument(
            f"sampling: {len(sampling)} for {len(request.prompts)} prompts; give one SamplingParams for all, or a list "
            "with one for each prompt"
        )
    for i, (prompt, params) in enumerate(zip(request.prompts, sampling, strict=True)):
        prompt.sampling.CopyFrom(sampling_message(params, f"sampling[{i}]"))


def sampling_message(params: SamplingParams, path: str, scoring: bool = False) -> Any:
    """The message of sampling parameters. Every field is set, so that the server uses the dataclass's defaults.

    For scoring the server rejects some of the fields, so those are sent only if the caller has changed them.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidArgument(f"{path}: expected SamplingParams, got {type(params).__name__}")
    message = _proto.SamplingParamsMessage()
    for name in _DISTRIBUTION_FIELDS + _GENERATION_FIELDS:
        value = getattr(params, name)
        if scoring and name in _GENERATION_FIELDS and value == getattr(SamplingParams, name):
            continue
        set_field(message, name, value, f"{path}.{name}")
    for name in ("seed", "thinking_token_budget"):
        if (value := getattr(params, name)) is not None:
            set_field(message, name, value, f"{path}.{name}")
    if params.structured_outputs is not None:
        _set_structured(message.structured_outputs, params.structured_outputs, f"{path}.structured_outputs")
    if params.allowed_token_ids is not None:
        extend(message.allowed_token_ids, params.allowed_token_ids, f"{path}.allowed_token_ids")
        # In the message an empty list means that all tokens are allowed, the opposite of an empty list here.
        if not message.allowed_token_ids:
            raise InvalidArgument(f"{path}.allowed_token_ids: empty; name at least one token, or pass None for all")
    extend(message.stop_token_ids, params.stop_token_ids, f"{path}.stop_token_ids")
    for name in ("stop", "bad_words"):
        if isinstance(texts := getattr(params, name), str):
            raise InvalidArgument(f"{path}.{name}: expected a list of strings, got a single string; put it in a list")
        extend(getattr(message, name), texts, f"{path}.{name}")
    _set_bias(message.logit_bias, params.logit_bias, f"{path}.logit_bias")
    return message


def _set_bias(message: Any, logit_bias: Mapping[int, float], path: str) -> None:
    if not isinstance(logit_bias, Mapping):
        given = type(logit_bias).__name__
        raise InvalidArgument(f"{path}: expected a dict of token ids and numbers, got {given}")
    for token, bias in logit_bias.items():
        try:
            message[token] = bias
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{path}[{token!r}]: {error}") from None
