"""The keyword options of the clients' calls. Any of them may be left out; each says what it then is.

`RolloutClient` and `AsyncRolloutClient` take the same. A wrapper takes them as the clients do, with
`**options: Unpack[GenerateOptions]`, or keeps them in a dict of that type.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from ._progress import ProgressArgument, SampleProgressArgument
from ._segment import SharedBuffer
from .errors import InvalidArgument
from .types import RunningPolicy, SamplingParams


class CallOptions(TypedDict, total=False):
    """Options of every call that is listed here."""

    timeout: float | None
    """Seconds; None, the default, is the client's, `math.inf` no limit. When it passes, `generate` ends with what there
    is: samples that have not finished are `FinishReason.ABORTED` and have the tokens so far. Any other call raises
    `DeadlineExceeded`: the server drops the work, and after a push the policy is as it was, unless the commit was just
    being applied: `status().weight_version` tells."""


class RequestOptions(CallOptions, total=False):
    """Options of requests to a policy."""

    top_logprobs: int
    """Also the log-probabilities of this many most likely tokens per position, at most 100; default 0."""
    adapter: str | None
    """Name of a resident adapter; None, the default, is the policy itself."""
    if_weight_version: int | None
    """Raise `Aborted` unless the policy has this version when the request starts; default None."""
    min_weight_version: int | None
    """Wait (until the timeout) for a policy of at least this version; default None."""


class SampleOptions(RequestOptions, total=False):
    """Options of requests for samples."""

    prompt_logprobs: bool
    """Also the log-probabilities of the prompts' tokens; default False."""
    top_logprobs_of: Literal["raw", "processed"]
    """The distribution of the samples' `top_logprobs` and `ranks`: `"raw"`, the default, the model's own (those of the
    prompts always are), or `"processed"`, the one that is sampled from."""
    return_text: bool
    """Also the texts; default True. A model without a tokenizer needs False."""
    request_id: str | None
    """For `abort`; unique among running requests. None, the default, makes one."""


class GenerateOptions(SampleOptions, total=False):
    """Options of `generate`."""

    progress: SampleProgressArgument
    """Called with samples finished, samples in total and the tokens of those that are finished; True is a bar with
    tokens per second on a terminal, and a line at the end; False, the default, nothing."""


class GenerateStreamOptions(SampleOptions, total=False):
    """Options of `generate_stream`."""

    stream_tokens: bool
    """Also a `TokenDelta` for every token as it is made; default False."""


class ScoreOptions(RequestOptions, total=False):
    """Options of `score`."""

    sampling: SamplingParams | None
    """The distribution of the processed `logprobs`; None, the default, is temperature 1. Only `temperature`, `top_k`,
    `top_p`, `min_p`, `logit_bias` and `allowed_token_ids` have a meaning here; the server refuses others."""


class UpdateOptions(CallOptions, total=False):
    """Options of every push."""

    version: int | None
    """The policy's version afterwards, usually the trainer's step; None, the default, is one more than now.
    `FailedPrecondition` if it is not above the policy's: a server starts with version 0, so count pushes from 1."""
    force_version: bool
    """Take `version` even if it goes back or repeats, for a trainer that begins again beside a running server; default
    False."""
    running: RunningPolicy
    """What happens to requests that run; default `"keep"`."""


class TransportOptions(TypedDict, total=False):
    """Options of pushes whose tensors the client sends."""

    transport: str
    """`"inline"` through the connection; `"shared_memory"` for a server on this host; `"device_memory"` for one that
    computes on the same GPU and reads the tensors where they lie (CUDA IPC): they must not change until the push is
    committed, and cannot be a delta. `"auto"`, the default, is device memory for a model or mapping on a GPU of the
    server's, shared memory for other large pushes to a local server that can see it, else inline."""
    progress: ProgressArgument
    """Called with bytes done and bytes in total; True is a bar on a terminal; None, the default, a line on standard
    error after a push of more than two seconds; False nothing."""


class ExpectedVersionOption(TypedDict, total=False):
    """Options of pushes that do not build on a certain version."""

    expected_version: int | None
    """Raise `Aborted` unless the policy has this version when the push is applied; default None."""


class AdapterOptions(TypedDict, total=False):
    """Options of pushes that may be an adapter."""

    name: str | None
    """Keep the adapter resident, unmerged, under this name, for `generate(adapter=name)`; None, the default, merges
    it."""
    expected_generation: int | None
    """With `name`: raise `Aborted` unless the name has this generation; 0 is a free name; default None."""


class InPlaceOption(TypedDict, total=False):
    """Options of pushes that may be a whole policy."""

    in_place: bool
    """Where both policies do not fit, write over the serving one; only while paused or asleep. A push that breaks then
    leaves `Lifecycle.WEIGHTS_MISSING`. Default False."""


class TotalBytesOption(TypedDict, total=False):
    """Options of pushes of a whole policy whose tensors the client sends."""

    total_bytes: int | None
    """Bytes of all tensors, to set memory aside; None, the default, is their sum, or, where they come one by one, what
    the model takes."""


class PushDeltaOptions(UpdateOptions, TransportOptions, total=False):
    """Options of `push_delta`."""


class PushLoraOptions(UpdateOptions, TransportOptions, ExpectedVersionOption, AdapterOptions, total=False):
    """Options of `push_lora`."""


class PushFullOptions(
    UpdateOptions, TransportOptions, ExpectedVersionOption, InPlaceOption, TotalBytesOption, total=False
):
    """Options of `push_full`."""

    buffer: SharedBuffer | None
    """Shared memory in which all the tensors lie: they are not copied. Instead of `transport="shared_memory"`; default
    None."""


class BeginPushOptions(
    UpdateOptions,
    TransportOptions,
    ExpectedVersionOption,
    AdapterOptions,
    InPlaceOption,
    TotalBytesOption,
    total=False,
):
    """Options of `begin_push`: of each kind those of the method that pushes it in one call."""

    base_version: int | None
    """For a delta, which needs it: the policy's version that the old tensors are. Default None."""


class PushDirectoryOptions(UpdateOptions, ExpectedVersionOption, AdapterOptions, InPlaceOption, total=False):
    """Options of `push_directory`."""


PushKind = Literal["full", "lora", "delta"]
"""What a push brings: every parameter, an adapter, or the changed elements of some parameters."""

_KINDS: dict[str, PushKind] = {
    "config": "lora",
    "name": "lora",
    "expected_generation": "lora",
    "in_place": "full",
    "total_bytes": "full",
    "base_version": "delta",
}


def check_begin_push(kind: str, config: object, options: BeginPushOptions) -> None:
    """Raises `TypeError` or `InvalidArgument` for arguments of `begin_push` that do not fit its kind."""
    refuse_unknown("begin_push", options, BeginPushOptions)
    if kind not in ("full", "lora", "delta"):
        raise InvalidArgument(f"kind: expected 'full', 'lora' or 'delta', got {kind!r}")
    for option, value in {"config": config, **options}.items():
        if value and _KINDS.get(option, kind) != kind:
            raise InvalidArgument(f"{option}: is for {_KINDS[option]!r} pushes only, this is {kind!r}; leave it out")
    if kind == "delta" and options.get("expected_version") is not None:
        raise InvalidArgument("expected_version: a delta has base_version instead; leave it out")
    if kind == "delta" and options.get("base_version") is None:
        raise InvalidArgument("base_version: missing; name the version that the old tensors are")


def refuse_unknown(method: str, options: Mapping[str, object], known: type[Any]) -> None:
    """Raises the `TypeError` of a call of `method` with an unknown argument if an option is no key of `known`."""
    names = known.__optional_keys__
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{hint}")
