"""Converts verl's sampling parameters and outputs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument
from ..routing import Routing, join_routing
from ..types import FinishReason, Sample, SamplingParams, Score
from ._settings import Settings

_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
# vLLM's further parameters, with the values that match this server's behaviour.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "prompt_logprobs": (None,),
    "include_stop_str_in_output": (False, True),  # affects only the text, which verl ignores
    "skip_special_tokens": (False, True),
    "spaces_between_special_tokens": (False, True),
    "detokenize": (False, True),
}


def sampling_params(
    given: Mapping[str, Any], prompt_tokens: int, settings: Settings, max_model_len: int
) -> SamplingParams:
    """The sampling parameters of one of verl's requests.

    `max_tokens` (or `max_new_tokens`) is limited to the room in the context. The default is `response_length`, but at
    most the room that `prompt_length + response_length` leaves.

    Raises:
        InvalidArgument: the server has no such parameter, or the prompt fills the context.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise InvalidArgument(
            f"prompt_ids: {prompt_tokens} tokens leave no room for an answer in a context of {max_model_len}"
        )
    values = {**settings.sampling_defaults, **given}
    values.pop("logprobs", None)
    new_tokens = values.pop("max_new_tokens", None)
    wanted = values.pop("max_tokens", None)
    if wanted is None:
        wanted = new_tokens
    if wanted is None:
        wanted = min(settings.response_length, settings.prompt_length + settings.response_length - prompt_tokens)
    for name, allowed in _ONLY.items():
        value = values.pop(name, allowed[0])
        if value not in allowed:
            raise InvalidArgument(f"sampling_params[{name!r}]: {value!r} is not supported by rollout-server's plug-in")
    unknown = sorted(values.keys() - _FIELDS)
    if unknown:
        raise InvalidArgument(f"sampling_params[{unknown[0]!r}]: rollout-server has no such parameter")
    if values.get("top_k") == -1:
        values["top_k"] = 0
    stop = values.get("stop")
    values["stop"] = [stop] if isinstance(stop, str) else stop or ()
    values["stop_token_ids"] = values.get("stop_token_ids") or ()
    values["logit_bias"] = values.get("logit_bias") or {}
    return SamplingParams(max_tokens=max(1, min(wanted, room)), **values)


def request_seed(seed: int, request_id: str, prompt_tokens: int, global_steps: int | None) -> int:
    """The seed of a request with `full_determinism`, where a second run must return the same samples.

    A group's samples are separate requests, so each gets its own seed, whichever replica it runs on. Turns of one
    conversation differ by the length of their prompts.
    """
    text = f"{seed}/{request_id}/{prompt_tokens}/{global_steps}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1  # 63 bits, as elsewhere


def output_fields(
    sample: Sample,
    settings: Settings,
    logprobs: bool,
    global_steps: int | None,
    experts: npt.NDArray[Any] | None = None,
) -> dict[str, Any]:
    """The fields of verl's `TokenOutput` for a sample.

    Args:
        sample: the sample.
        settings: settings of the replica.
        logprobs: whether verl requested log-probabilities.
        global_steps: version of the policy, for a sample without tokens.
        experts: `routed_experts` of the sample.
    """
    versions = [span.weight_version for span in sample.weight_versions] or [global_steps]
    return {
        "token_ids": sample.token_ids,
        "log_probs": getattr(sample, settings.logprobs_field).tolist() if logprobs else None,
        "routed_experts": experts,
        "stop_reason": "aborted" if sample.finish_reason is FinishReason.ABORTED else "completed",
        "extra_fields": {
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "num_cached_tokens": sample.cached_tokens,
        },
    }


def scored_fields(token_ids: list[int], score: Score) -> dict[str, Any]:
    """The fields of verl's `TokenOutput` for a teacher's score: each row is of the next token, and the last is none."""
    ids, logprobs = [*token_ids[1:], 0], [*score.raw_logprobs[1:], 0.0]
    extra = {"prompt_ids": [[token] for token in ids], "prompt_logprobs": [[value] for value in logprobs]}
    return {"token_ids": [], "stop_reason": "completed", "extra_fields": extra}


def routed_experts(
    prompt: Routing | None, sample: Sample, layers: Sequence[int], num_hidden_layers: int
) -> npt.NDArray[Any] | None:
    """verl's `routed_experts` of a sample: the experts of prompt and sample.

    verl gives the tokens without a row, such as the last one, rows of zeros, and joins the parts of a sample that was
    interrupted: it takes as many of the last rows as the new part has tokens.

    Returns:
        `[P + T - 1, num_hidden_layers, top_k]` of uint8 or int16, verl's own types; None if nothing was run.
    """
    if prompt is None or sample.routing is None:
        return None
    experts = join_routing(prompt, sample.routing).routed_experts(layers, num_hidden_layers)
    return experts if experts.dtype == np.uint8 else experts.astype(np.int16)


def aborted_fields(global_steps: int | None) -> dict[str, Any]:
    """The fields of verl's `TokenOutput` for a rejected request."""
    extra = {"global_steps": global_steps, "min_global_steps": global_steps, "max_global_steps": global_steps}
    return {"token_ids": [], "log_probs": None, "stop_reason": "aborted", "extra_fields": extra}
