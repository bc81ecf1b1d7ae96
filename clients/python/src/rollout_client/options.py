"""The keyword options of the clients' methods. All are optional; each description has the default.

`RolloutClient` and `AsyncRolloutClient` take the same options. A wrapper can take `**options:
Unpack[GenerateOptions]`, or keep them in a dict of that type.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ._progress import ProgressArgument, SampleProgressArgument
from ._segment import SharedBuffer
from .errors import InvalidArgument
from .images import ImageInput
from .returns import Returns
from .routing import Routing
from .types import RunningPolicy, SamplingParams, TokenIds


class CallOptions(TypedDict, total=False):
    """Options of all these methods."""

    timeout: float | None
    """Seconds; None, the default, is the client's timeout, and `math.inf` means no limit. When it passes, `generate`
    returns unfinished samples with `FinishReason.ABORTED` and the tokens so far. Other calls raise `DeadlineExceeded`,
    and the server drops the work. A push is then not applied, unless its commit was just being applied: check
    `status().weight_version`."""


class RequestOptions(CallOptions, total=False):
    """Options of requests to the policy."""

    top_logprobs: int
    """Also return the log-probabilities of this many most likely tokens per position, at most 100; default 0."""
    prompt_logprob_token_ids: Sequence[Sequence[TokenIds]]
    """For each prompt (of `score`: each sequence) rows of tokens, at most 128 in a row, whose log-probabilities are
    also returned: the last row beside the prompt's last token, the row before it beside the token before, and so on;
    an empty list for a prompt without rows; default ()."""
    images: Sequence[Sequence[ImageInput] | None]
    """For each prompt (of `score`: each sequence) its images, in the order of their placeholders; None for a prompt
    without. `rollout_client.processed_pixels` makes them as a trainer's processor does; default ()."""
    returns: Returns | None
    """Further values of each token, such as entropies: the `returned` of samples and scores; default None."""
    return_routing: bool
    """Also return the experts that tokens took: the `routing` of outputs, samples and scores. The server must have been
    started with `--return-routing`; default False."""
    routing: Sequence[Routing | None]
    """For each prompt (of `score`: each sequence) the experts that some of its tokens take, in place of those that the
    routers would choose; None leaves all to the routers; default ()."""
    adapter: str | None
    """Name of a resident adapter to use; None, the default, uses the policy itself."""
    if_weight_version: int | None
    """Raise `Aborted` unless the policy has this version when the request starts; default None."""
    min_weight_version: int | None
    """Wait (until the timeout) for a policy of at least this version; default None."""
    tenant: str | None
    """The tenant whose share of the server the request uses, at most 64 printable ASCII characters without spaces;
    None, the default, is that of the client's token. A token of the role `generate` that names another gets
    `PermissionDenied`."""


class SampleOptions(RequestOptions, total=False):
    """Options of requests for samples."""

    prompt_logprobs: bool
    """Also return the log-probabilities of the prompts' tokens; default False."""
    logprob_token_ids: Sequence[int]
    """Return the log-probabilities of these tokens, at most 128, in the samples' `top_logprobs` and in this order,
    instead of the most likely ones; default ()."""
    top_logprobs_of: Literal["raw", "processed"]
    """The distribution of the samples' `top_logprobs` and `ranks`: `"raw"`, the default, is the model's own, and
    `"processed"` the one that tokens are sampled from. For prompts it is always `"raw"`."""
    return_text: bool
    """Also return the texts; default True. A model without a tokenizer requires False."""
    request_id: str | None
    """The id that `abort` takes, unique among running requests; None, the default, generates one."""


class GenerateOptions(SampleOptions, total=False):
    """Options of `generate`."""

    progress: SampleProgressArgument
    """A function of finished samples, all samples, and tokens of the finished ones; True shows a bar with tokens per
    second on a terminal, and a line at the end; False, the default, shows nothing."""


class GenerateStreamOptions(SampleOptions, total=False):
    """Options of `generate_stream`."""

    stream_tokens: bool
    """Also yield a `TokenDelta` for every token as it is sampled; default False."""


class ScoreOptions(RequestOptions, total=False):
    """Options of `score`."""

    sampling: SamplingParams | None
    """The distribution of the processed `logprobs`; None, the default, is temperature 1. The server rejects parameters
    other than `temperature`, `top_k`, `top_p`, `min_p`, `logit_bias` and `allowed_token_ids`."""


class UpdateOptions(CallOptions, total=False):
    """Options of every push."""

    version: int | None
    """The policy's new version, usually the trainer's step; None, the default, adds one. `FailedPrecondition` if it is
    not above the current version: a server starts with version 0, so count pushes from 1."""
    force_version: bool
    """Accept a `version` that is not above the current one, for a trainer that restarts beside a running server;
    default False."""
    running: RunningPolicy
    """The fate of running requests, see `RunningPolicy`; default `"keep"`."""


class TransportOptions(TypedDict, total=False):
    """Options of pushes whose tensors the client sends."""

    transport: str
    """`"inline"` sends tensors through the connection; `"shared_memory"` requires a server on this host;
    `"device_memory"` requires a server on the same GPU, which reads the tensors in place (CUDA IPC): they must not
    change until the commit, and cannot be a delta. `"auto"`, the default, uses device memory for a model or mapping on
    one of the server's GPUs, shared memory for other large pushes to a local server that can see it, else inline."""
    progress: ProgressArgument
    """A function of bytes sent and all bytes; True shows a bar on a terminal; None, the default, prints a line on
    standard error after a push of more than two seconds; False shows nothing."""


class ExpectedVersionOption(TypedDict, total=False):
    """Options of pushes that are not deltas."""

    expected_version: int | None
    """Raise `Aborted` unless the policy has this version when the push is applied; default None."""


class AdapterOptions(TypedDict, total=False):
    """Options of pushes that may be an adapter."""

    name: str | None
    """Keep the adapter resident under this name, unmerged, for `generate(adapter=name)`; None, the default, merges it
    into the policy."""
    expected_generation: int | None
    """With `name`: raise `Aborted` unless the adapter has this generation; 0 means a free name; default None."""
    evict: bool
    """With `name`: if no slot is free, remove the least recently used adapter that no request uses, unless the push
    fails. Default False: `ResourceExhausted` is raised."""


class WholePolicyOptions(TypedDict, total=False):
    """Options of pushes that may be a whole policy."""

    in_place: bool
    """Overwrite the serving policy if memory cannot hold two. Requires a paused or sleeping server. If such a push
    fails, the server's lifecycle becomes `Lifecycle.WEIGHTS_MISSING`. Default False."""
    keep_missing: bool
    """Parameters of the vision tower and its projector may be missing, and keep their values, without an adapter that
    was merged into them: for trainers that freeze the tower. Not together with `in_place`. Default False."""


class TotalBytesOption(TypedDict, total=False):
    """Options of pushes of a whole policy whose tensors the client sends."""

    total_bytes: int | None
    """Bytes of all tensors, for which the server reserves memory; None, the default, is their sum, or the size of the
    model if they come from an iterator."""


class PushDeltaOptions(UpdateOptions, TransportOptions, total=False):
    """Options of `push_delta`."""


class PushLoraOptions(UpdateOptions, TransportOptions, ExpectedVersionOption, AdapterOptions, total=False):
    """Options of `push_lora`."""


class PushFullOptions(
    UpdateOptions, TransportOptions, ExpectedVersionOption, WholePolicyOptions, TotalBytesOption, total=False
):
    """Options of `push_full`."""

    buffer: SharedBuffer | None
    """Shared memory that contains all the tensors, which are then not copied; replaces `transport="shared_memory"`.
    Default None."""


class BeginPushOptions(
    UpdateOptions,
    TransportOptions,
    ExpectedVersionOption,
    AdapterOptions,
    WholePolicyOptions,
    TotalBytesOption,
    total=False,
):
    """Options of `begin_push`: for each kind, those of the method that pushes it in one call."""

    base_version: int | None
    """Required for a delta: the version of the policy that the old tensors are. Default None."""


class PushDirectoryOptions(UpdateOptions, ExpectedVersionOption, AdapterOptions, WholePolicyOptions, total=False):
    """Options of `push_directory`."""


PushKind = Literal["full", "lora", "delta"]
"""The contents of a push: every parameter, an adapter, or the changed elements of some parameters."""

_KINDS: dict[str, PushKind] = {
    "config": "lora",
    "name": "lora",
    "expected_generation": "lora",
    "evict": "lora",
    "in_place": "full",
    "keep_missing": "full",
    "total_bytes": "full",
    "base_version": "delta",
}


def check_begin_push(kind: str, config: object, options: BeginPushOptions) -> None:
    """Raises `TypeError` or `InvalidArgument` if arguments of `begin_push` do not belong to its kind."""
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


def check_push_directory(kind: str, options: PushDirectoryOptions) -> None:
    """Raises `InvalidArgument` if arguments of `push_directory` do not belong to its kind."""
    if kind not in ("lora", "full", "delta"):
        raise InvalidArgument(f"kind: expected 'lora', 'full' or 'delta', got {kind!r}")
    if kind == "delta" and options.get("version") is None:
        raise InvalidArgument("version: missing; name the version of the delta store")


def refuse_unknown(method: str, options: Mapping[str, object], known: type[Any]) -> None:
    """Raises the `TypeError` of an unknown argument of `method` if an option is not a key of `known`."""
    names = known.__optional_keys__
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{hint}")
