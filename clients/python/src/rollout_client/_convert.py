"""Converts between the dataclasses of `types` and the messages of `rollout.v1`; no other module knows both."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _proto
from ._convert_images import image_info, prompt_image, set_images
from ._convert_returns import (
    distribution,
    policy_score,
    policy_score_of_parts,
    returned,
    returned_of_parts,
    set_returns,
)
from ._convert_routing import routing, routing_info, routing_of_parts, set_routing
from ._convert_sampling import sampling_message, set_sampling_of_prompts
from ._convert_weights import LIFECYCLES, asleep, open_update
from ._fields import extend, known, set_field, set_rows
from .errors import Internal, InvalidArgument
from .options import GenerateStreamOptions, RequestOptions, ScoreOptions, refuse_unknown
from .routing import Routing
from .status import MemoryLedger, ServerStatus, Stall, TenantStatus, ToolCalls
from .types import (
    AbortResult,
    Chat,
    FinishReason,
    PromptInput,
    PromptLogprobs,
    PromptOutput,
    PromptRouting,
    PromptTokens,
    Sample,
    SamplingInput,
    SamplingParams,
    Score,
    ServerInfo,
    StreamEvent,
    Summary,
    TokenDelta,
    TokenIds,
    TopLogprobs,
    VersionSpan,
)

_FINISH_REASONS = {
    1: FinishReason.EOS,
    2: FinishReason.STOP_TOKEN,
    3: FinishReason.STOP_STRING,
    4: FinishReason.LENGTH,
    5: FinishReason.ABORTED,
    6: FinishReason.GRAMMAR,
}


# Requests


def generate_request(
    prompts: Sequence[PromptInput],
    n: int,
    sampling: SamplingInput,
    options: GenerateStreamOptions,
    time_limit: float | None = None,
) -> Any:
    """The `GenerateRequest` of a call of `generate_stream` that may run for `time_limit` seconds.

    Raises:
        TypeError: an option does not exist.
        InvalidArgument: a value has the wrong type or range for its field. The server checks it against the model.
    """
    refuse_unknown("generate_stream", options, GenerateStreamOptions)
    if isinstance(prompts, (str, Mapping)) or (_is_sequence(prompts) and len(prompts) and _is_int(prompts[0])):
        raise InvalidArgument("prompts: expected a list of prompts, got a single prompt; put it in a list")
    request_id = options.get("request_id")
    request = _proto.GENERATE.request(
        request_id=request_id if request_id is not None else new_request_id(),
        prompts=[_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)],
        prompt_logprobs=options.get("prompt_logprobs", False),
        return_text=options.get("return_text", True),
        stream_tokens=options.get("stream_tokens", False),
    )
    if _is_sequence(sampling):
        set_sampling_of_prompts(request, sampling)
    else:
        request.sampling.CopyFrom(sampling_message(SamplingParams() if sampling is None else sampling, "sampling"))
    set_field(request, "n", n, "n")
    if time_limit is not None:
        request.time_limit_seconds = time_limit
    request.top_logprobs_of = distribution(options.get("top_logprobs_of", "raw"), "top_logprobs_of")
    extend(request.logprob_token_ids, options.get("logprob_token_ids", ()), "logprob_token_ids")
    fields = [prompt.logprob_token_ids for prompt in request.prompts]
    set_rows(fields, options.get("prompt_logprob_token_ids", ()), "prompt_logprob_token_ids")
    set_images([prompt.images for prompt in request.prompts], options.get("images", ()))
    routed = options.get("routing", ())
    if len(routed):
        set_routing([prompt.routing for prompt in request.prompts], routed)
    _set_request_options(request, options)
    return request


def score_request(sequences: Sequence[TokenIds], options: ScoreOptions) -> Any:
    """The `ScoreRequest` of a call of `score`; raises as `generate_request`."""
    refuse_unknown("score", options, ScoreOptions)
    request = _proto.SCORE.request()
    for i, sequence in enumerate(sequences):
        if isinstance(sequence, str) or _is_int(sequence):
            raise InvalidArgument(f"sequences[{i}]: expected token ids, got {type(sequence).__name__}")
        extend(request.sequences.add().ids, sequence, f"sequences[{i}]")
    sampling = options.get("sampling")
    if sampling is not None:
        request.sampling.CopyFrom(sampling_message(sampling, "sampling", scoring=True))
    rows = options.get("prompt_logprob_token_ids", ())
    if len(rows):
        set_rows([request.logprob_token_ids.add().rows for _ in request.sequences], rows, "prompt_logprob_token_ids")
    images = options.get("images", ())
    if len(images):
        set_images([request.images.add().images for _ in request.sequences], images)
    routed = options.get("routing", ())
    if len(routed):
        set_routing([request.routing.add() for _ in request.sequences], routed)
    _set_request_options(request, options)
    return request


def abort_request(request_ids: str | Iterable[str], *, all: bool) -> Any:
    """An `AbortRequest` for the named requests, or for all."""
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    if bool(ids) == all:
        raise InvalidArgument("request_ids: name the requests to abort, or pass all=True, but not both")
    return _proto.ABORT.request(request_ids=ids, all=all)


def new_request_id() -> str:
    """A unique request id, generated by the client so that the caller can abort before the first response."""
    return f"py-{os.urandom(8).hex()}"


def _set_request_options(request: Any, options: RequestOptions) -> None:
    set_field(request, "adapter", options.get("adapter") or "", "adapter")
    set_field(request, "top_logprobs", options.get("top_logprobs", 0), "top_logprobs")
    if (returns := options.get("returns")) is not None:
        set_returns(request.returns, returns)
    set_field(request, "return_routing", options.get("return_routing", False), "return_routing")
    set_field(request, "tenant", options.get("tenant") or "", "tenant")
    for name in ("if_weight_version", "min_weight_version"):
        version = options.get(name)
        if version is not None:
            set_field(request, name, version, name)


def _prompt(prompt: PromptInput, path: str) -> Any:
    message = _proto.Prompt()
    if isinstance(prompt, str):
        set_field(message, "text", prompt, path)
    elif isinstance(prompt, Chat):
        _set_chat(message.chat, prompt, path)
    elif isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        _set_chat(message.chat, Chat(prompt), path)
    elif isinstance(prompt, Mapping) or not (_is_sequence(prompt) or hasattr(prompt, "tolist")):
        raise InvalidArgument(
            f"{path}: expected text, token ids, a list of chat messages or a Chat, got {type(prompt).__name__}"
        )
    else:
        message.tokens.SetInParent()
        extend(message.tokens.ids, prompt, path)
    return message


def _set_chat(message: Any, chat: Chat, path: str) -> None:
    if isinstance(chat.messages, (str, Mapping)):
        raise InvalidArgument(f"{path}: expected a list of messages, got {type(chat.messages).__name__}")
    messages = [_chat_message(entry, f"{path}[{i}]") for i, entry in enumerate(chat.messages)]
    if all(set(entry) == {"role", "content"} and isinstance(entry["content"], str) for entry in messages):
        message.SetInParent()
        for i, entry in enumerate(messages):
            sent = message.messages.add()
            for name, text in entry.items():
                set_field(sent, name, text, f"{path}[{i}].{name}")
    else:
        entries = [_json_object(entry, f"{path}[{i}]") for i, entry in enumerate(messages)]
        message.messages_json = f"[{', '.join(entries)}]"
    for name in ("tools", "documents", "template_arguments"):
        value = getattr(chat, name)
        if value:
            _check_container(name, value, f"{path}.{name}")
            plain = dict(value) if isinstance(value, Mapping) else list(value)
            set_field(message, f"{name}_json", _json(plain, f"{path}.{name}"), f"{path}.{name}")
    set_field(message, "chat_template", chat.chat_template, f"{path}.chat_template")
    if chat.add_generation_prompt is not None:
        set_field(message, "add_generation_prompt", chat.add_generation_prompt, f"{path}.add_generation_prompt")
    set_field(message, "continue_final_message", chat.continue_final_message, f"{path}.continue_final_message")


def _chat_message(entry: Any, path: str) -> dict[str, Any]:
    """A message as a dict; a message of OpenAI's package is converted."""
    if hasattr(entry, "model_dump"):
        entry = entry.model_dump(exclude_none=True)
    if not isinstance(entry, Mapping):
        raise InvalidArgument(f'{path}: expected {{"role": ..., "content": ...}}, got {entry!r}')
    if not isinstance(entry.get("role"), str):
        raise InvalidArgument(f"{path}.role: expected a text such as 'user', got {entry.get('role')!r}")
    for name in entry:
        if not isinstance(name, str):
            raise InvalidArgument(f"{path}: {name!r} is not a string, as names of members must be")
    return dict(entry)


def _check_container(name: str, value: Any, path: str) -> None:
    wanted, what = (Mapping, "a dict") if name == "template_arguments" else (Sequence, "a list of dicts")
    if not isinstance(value, wanted) or isinstance(value, str):
        raise InvalidArgument(f"{path}: expected {what}, got {type(value).__name__}")


def _json_object(members: Mapping[str, Any], path: str) -> str:
    """The JSON of an object. Each member is encoded separately, so that an error names it."""
    parts = (f"{_json(name, path)}: {_json(value, f'{path}.{name}')}" for name, value in members.items())
    return "{" + ", ".join(parts) + "}"


def _json(value: Any, path: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # a lone surrogate cannot be sent
        return text
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from None


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer))


# Responses


class Events:
    """Converts the responses of one generate stream, in order."""

    def __init__(self) -> None:
        self._prompt_lengths: dict[int, int] = {}

    def event(self, response: Any) -> StreamEvent | None:
        """The event of one `GenerateResponse`; None for an event of a newer server that this client does not know."""
        kind = response.WhichOneof("event")
        if kind == "prompt":
            self._prompt_lengths[response.prompt.prompt_index] = len(response.prompt.token_ids)
        if kind == "prompt_routing":
            index, message = response.prompt_routing.prompt_index, response.prompt_routing.routing
            return PromptRouting(index, routing(message, self._prompt_lengths.get(index, 0)))
        return _EVENTS[kind](getattr(response, kind)) if kind in _EVENTS else None


class Collector:
    """Collects the events of one generate stream into groups."""

    def __init__(self, num_prompts: int, n: int) -> None:
        """`n` samples of each of `num_prompts` prompts are expected."""
        self._num_prompts, self._n = num_prompts, n
        self._samples: dict[tuple[int, int], Sample] = {}
        self._prompts: dict[int, PromptTokens] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._prompt_routing: dict[int, Routing] = {}

    def add(self, event: StreamEvent) -> None:
        """Takes one event; token deltas and the summary do not change the result."""
        if isinstance(event, Sample):
            self._samples[event.prompt_index, event.sample_index] = event
        elif isinstance(event, PromptTokens):
            self._prompts[event.prompt_index] = event
        elif isinstance(event, PromptLogprobs):
            self._prompt_logprobs[event.prompt_index] = event
        elif isinstance(event, PromptRouting):
            self._prompt_routing[event.prompt_index] = event.routing

    def outputs(self) -> list[PromptOutput]:
        """The groups, by prompt; raises `Internal` if a sample or a prompt's tokens are missing."""
        expected = {(p, s) for p in range(self._num_prompts) for s in range(self._n)}
        if self._samples.keys() != expected:
            raise Internal(
                f"the stream ended with {len(self._samples)} of {len(expected)} samples; "
                f"first mismatch (prompt, sample): {min(expected ^ self._samples.keys())}"
            )
        if not self._prompts and self._num_prompts:
            raise Internal("no token ids of prompts came: the server is older than this client: update rollout-server")
        if self._prompts.keys() != set(range(self._num_prompts)):
            raise Internal(
                f"the stream ended with the token ids of {len(self._prompts)} of {self._num_prompts} prompts"
            )
        return [
            PromptOutput(
                prompt_index=p,
                prompt_token_ids=self._prompts[p].token_ids,
                samples=[self._samples[p, s] for s in range(self._n)],
                prompt_logprobs=self._prompt_logprobs.get(p),
                images=self._prompts[p].images,
                routing=self._prompt_routing.get(p),
            )
            for p in range(self._num_prompts)
        ]


def scores(responses: Iterable[Any], num_sequences: int) -> list[Score]:
    """The scores of a stream of `ScoreResponse`, one per sequence; raises `Internal` if one is missing."""
    parts: dict[int, list[Any]] = {}
    for part in responses:
        parts.setdefault(part.sequence_index, []).append(part)
    if parts.keys() != set(range(num_sequences)):
        raise Internal(f"the stream ended with scores of {len(parts)} of {num_sequences} sequences")
    return [_score(sorted(parts[i], key=lambda part: part.start)) for i in range(num_sequences)]


def _score(parts: list[Any]) -> Score:
    scores = [part.score for part in parts]
    return Score(
        raw_logprobs=_after_first(value for score in scores for value in score.raw_logprobs),
        logprobs=_after_first(value for score in scores for value in score.logprobs),
        top_logprobs=_top_logprobs(top for score in scores for top in score.top_logprobs),
        weight_version=scores[0].weight_version,
        token_id_logprobs=_top_logprobs(named for score in scores for named in score.token_id_logprobs),
        routing=_score_routing(scores),
        returned=returned_of_parts(scores, [len(score.raw_logprobs) for score in scores]),
        references=[
            policy_score_of_parts([score.references[i] for score in scores]) for i in range(len(scores[0].references))
        ],
        base=policy_score_of_parts([score.base for score in scores]) if scores[0].HasField("base") else None,
    )


def _score_routing(scores: list[Any]) -> Routing | None:
    if not scores[0].HasField("routing"):
        return None
    tokens = sum(len(score.raw_logprobs) for score in scores)
    return routing_of_parts([score.routing for score in scores], max(tokens - 1, 1))


def abort_result(response: Any) -> AbortResult:
    """The result of an abort."""
    return AbortResult(aborted=list(response.aborted), unknown=list(response.unknown))


def server_info(response: Any) -> ServerInfo:
    """The facts of a `GetInfoResponse`."""
    values = {name: getattr(response, name) for name in ServerInfo.__dataclass_fields__}
    lists = {name: list(values[name]) for name in ("eos_token_ids", "device_uuids")}
    images = image_info(response.images) if response.HasField("images") else None
    experts = routing_info(response.routing) if response.HasField("routing") else None
    return ServerInfo(**{**values, **lists, "images": images, "routing": experts})


def server_status(response: Any) -> ServerStatus:
    """The state of a `GetStatusResponse`."""
    values = {name: getattr(response, name) for name in ServerStatus.__dataclass_fields__}
    values["memory"] = _ledger(response.memory)
    values["host_memory"] = _ledger(response.host_memory) if response.HasField("host_memory") else None
    values["lifecycle"] = known(LIFECYCLES, response.lifecycle)
    values["update"] = open_update(response.update) if response.HasField("update") else None
    values["asleep"] = asleep(response.asleep) if response.HasField("asleep") else None
    values["tool_calls"] = {
        calls.format: ToolCalls(calls.parsed, calls.unknown_tool, calls.invalid, calls.unclosed)
        for calls in response.tool_calls
    }
    values["tenants"] = {
        tenant.name: TenantStatus(
            tenant.running_samples,
            tenant.waiting_samples,
            tenant.kv_blocks,
            tenant.prompt_tokens,
            tenant.generated_tokens,
        )
        for tenant in response.tenants
    }
    values["stall"] = _stall(response.stall) if response.HasField("stall") else None
    return ServerStatus(**values)


def _stall(stall: Any) -> Stall:
    push = stall.push if stall.HasField("push") else None
    return Stall(stall.reported, stall.phase, push, stall.seconds, stall.over)


def _ledger(memory: Any) -> MemoryLedger:
    return MemoryLedger(
        total_bytes=memory.total_bytes,
        ceiling_bytes=memory.ceiling_bytes,
        entries={entry.name: entry.bytes for entry in memory.entries},
        resident_bytes=memory.resident_bytes,
        traffic_bytes=memory.traffic_bytes,
    )


def _sample(completion: Any) -> Sample:
    return Sample(
        prompt_index=completion.prompt_index,
        sample_index=completion.sample_index,
        token_ids=list(completion.token_ids),
        logprobs=np.array(completion.logprobs, dtype=np.float32),
        raw_logprobs=np.array(completion.raw_logprobs, dtype=np.float32),
        text=completion.text if completion.HasField("text") else None,
        finish_reason=known(_FINISH_REASONS, completion.finish_reason),
        weight_versions=[VersionSpan(s.weight_version, s.start, s.end) for s in completion.weight_versions],
        seed=completion.seed,
        cached_tokens=completion.cached_tokens,
        top_logprobs=_top_logprobs(completion.top_logprobs),
        ranks=list(completion.ranks),
        routing=_sample_routing(completion),
        returned=returned(completion, len(completion.token_ids)),
        references=[policy_score(score) for score in completion.references],
        current=policy_score(completion.current) if completion.HasField("current") else None,
        base=policy_score(completion.base) if completion.HasField("base") else None,
    )


def _sample_routing(completion: Any) -> Routing | None:
    if not completion.HasField("routing"):
        return None
    return routing(completion.routing, max(len(completion.token_ids) - 1, 0))


def _summary(summary: Any) -> Summary:
    return Summary(
        request_id=summary.request_id,
        prompt_tokens=summary.prompt_tokens,
        cached_tokens=summary.cached_tokens,
        completion_tokens=summary.completion_tokens,
        seconds=summary.seconds,
    )


def _prompt_tokens(prompt: Any) -> PromptTokens:
    return PromptTokens(prompt.prompt_index, list(prompt.token_ids), [prompt_image(i) for i in prompt.images])


def _token_delta(delta: Any) -> TokenDelta:
    return TokenDelta(
        prompt_index=delta.prompt_index,
        sample_index=delta.sample_index,
        token_ids=list(delta.token_ids),
        logprobs=np.array(delta.logprobs, dtype=np.float32),
        raw_logprobs=np.array(delta.raw_logprobs, dtype=np.float32),
        text=delta.text if delta.HasField("text") else None,
        top_logprobs=_top_logprobs(delta.top_logprobs),
        ranks=list(delta.ranks),
        returned=returned(delta, len(delta.token_ids)),
    )


def _prompt_logprobs(message: Any) -> PromptLogprobs:
    unscored = 1
    if message.token_id_logprobs:
        unscored = sum(1 for _ in itertools.takewhile(math.isnan, message.raw_logprobs))
    return PromptLogprobs(
        prompt_index=message.prompt_index,
        token_ids=list(message.token_ids),
        raw_logprobs=_after_first(message.raw_logprobs, unscored),
        top_logprobs=_top_logprobs(message.top_logprobs),
        ranks=list(message.ranks),
        token_id_logprobs=_top_logprobs(message.token_id_logprobs),
        returned=returned(message, len(message.token_ids)),
    )


_EVENTS: Mapping[str, Callable[[Any], StreamEvent]] = {
    "completion": _sample,
    "delta": _token_delta,
    "prompt": _prompt_tokens,
    "prompt_logprobs": _prompt_logprobs,
    "summary": _summary,
}


def _top_logprobs(positions: Any) -> list[TopLogprobs]:
    return [dict(zip(position.token_ids, position.logprobs, strict=True)) for position in positions]


def _after_first(logprobs: Iterable[float], unscored: int = 1) -> list[float | None]:
    """Log-probabilities with None for the first tokens, which are NaN in the message."""
    values: list[float | None] = list(logprobs)
    values[:unscored] = [None] * min(unscored, len(values))
    return values
