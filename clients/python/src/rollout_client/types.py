"""The arguments and results of the clients: plain dataclasses, without protobuf.

Log-probabilities are natural logarithms. `T` is the number of tokens of a sample, `P` that of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from .images import ImageInfo, PromptImage
from .returns import PolicyScore, Returned
from .routing import Routing, RoutingInfo

ChatMessage = Mapping[str, Any]
"""A chat message as templates take it: `role`, `content` (text, None or a list of parts of text and images), and other
keys of the template. Message objects of the `openai` package work too, in a `Chat` or after a first message as dict."""


@dataclass(frozen=True)
class Chat:
    """A chat prompt with the other inputs of the model's chat template: JSON values, whose order is kept."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    """`{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`, the format that
    transformers' `get_json_schema` returns."""
    documents: Sequence[Mapping[str, Any]] = ()
    """Objects with `title` and `text`."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `{"enable_thinking": False}`."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where the answer begins; None means yes, unless `continue_final_message` is set."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    chat_template: str = ""
    """A template to use instead of the model's, if the server has `--trust-request-chat-template`."""


TokenIds = Sequence[int] | npt.NDArray[np.integer]
"""Token ids: a list, a tuple or a one-dimensional integer array (anything with `tolist`, so tensors too)."""

PromptInput = str | TokenIds | Sequence[ChatMessage] | Chat
"""A prompt: text, token ids, chat messages, or chat messages with tools."""


class FinishReason(str, Enum):
    """Why a sample ended."""

    EOS = "eos"
    """The model's end-of-sequence token, the last of `token_ids`."""
    STOP_TOKEN = "stop_token"
    """A requested stop token, the last of `token_ids`."""
    STOP_STRING = "stop_string"
    """A requested stop string; `text` ends before it, `token_ids` has all sampled tokens."""
    LENGTH = "length"
    """`max_tokens` or the context length was reached."""
    GRAMMAR = "grammar"
    """No token may follow: the text is complete for `structured_outputs` and no end token can be sampled."""
    ABORTED = "aborted"
    """Ended by `abort`, a timeout, a push, pause or sleep with `"abort"`, or a shutdown. Its tokens are valid."""

    def __str__(self) -> str:
        """The plain value, e.g. `length`."""
        return self.value


class StructuredOutputs(TypedDict, total=False):
    """The texts that a sample may have. Set exactly one key."""

    regex: str
    """Texts that this regular expression matches from begin to end."""
    json: str | Mapping[str, Any] | bool
    """JSON that matches this JSON schema, given as a dict or as text."""
    choice: Sequence[str]
    """One of these texts."""
    grammar: str
    """Texts of this grammar, in llguidance's dialect of Lark."""
    json_object: bool
    """True allows any JSON object."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a sample ends."""

    temperature: float = 1.0
    """At least 0; 0 is greedy decoding."""
    top_k: int = 0
    """Keep the `k` most likely tokens; 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the best token's probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Above 0; applied to tokens that occur in the prompt or the output."""
    presence_penalty: float = 0.0
    """In [-2, 2]; applied once to tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; applied for each occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Finite numbers, added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be sampled; None allows all."""
    min_tokens: int = 0
    """A sample cannot end before this many tokens; at most `max_tokens`."""
    max_tokens: int = 16
    """At least 1."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a sample, in addition to the model's own."""
    stop: Sequence[str] = ()
    """Strings that end a sample."""
    ignore_eos: bool = False
    """Do not end samples at the model's end-of-sequence tokens."""
    seed: int | None = None
    """Each sample's seed is derived from it and the indices of its prompt and sample; the first sample of the first
    prompt uses it unchanged. None lets the server choose. `SamplingInput` explains seeds in a list."""
    structured_outputs: StructuredOutputs | None = None
    """A constraint on the text; None allows any text."""
    skip_special_tokens: bool = True
    """Whether texts leave out special tokens; `stop` is searched for in the text as it is returned."""
    bad_words: Sequence[str] = ()
    """Texts that are not generated: the last token of a text is not sampled where the output ends with its others."""
    thinking_token_budget: int | None = None
    """Tokens of reasoning after which the token `</think>` follows without a draw; None does not limit it."""


SamplingInput = SamplingParams | Sequence[SamplingParams] | None
"""Parameters for all prompts, or a list with one `SamplingParams` for each, so that each trajectory of a multi-turn
rollout can have its own budget; None is `SamplingParams()`.

In a list, a seed belongs to its prompt: the prompt gets the samples that it gets alone, at any position in the list.
Give equal prompts different seeds there. The server chooses a different seed for each prompt without one."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `[start, end)` of a sample were sampled from this version of the policy."""

    weight_version: int
    start: int
    end: int


TopLogprobs = dict[int, float]
"""The most likely token ids at one position and their log-probabilities, most likely first."""


@dataclass(frozen=True)
class Sample:
    """One completion of one prompt."""

    prompt_index: int
    sample_index: int
    """Index of the sample in its group, `[0, n)`."""
    token_ids: list[int]
    """`[T]`."""
    logprobs: npt.NDArray[np.float32]
    """`[T]`, under the distribution sampled from: temperature, penalties and filters applied, renormalised."""
    raw_logprobs: npt.NDArray[np.float32]
    """`[T]`, under the model's own distribution."""
    text: str | None
    """The decoded tokens; None without `return_text`."""
    finish_reason: FinishReason
    weight_versions: list[VersionSpan]
    """The versions of the policy that the tokens were sampled from; the spans cover `[0, T)`."""
    seed: int
    """The sample's own seed: a request with this seed and `n=1` reproduces the sample."""
    cached_tokens: int
    """Prompt tokens whose KV blocks were found in the prefix cache."""
    top_logprobs: list[TopLogprobs]
    """`[T]` if `top_logprobs` was requested, else empty. Raw, or processed with `top_logprobs_of="processed"`."""
    ranks: list[int]
    """`[T]` if `top_logprobs` was requested, else empty: 1 + the number of more likely tokens in its distribution."""
    routing: Routing | None = None
    """`[T - 1]` tokens from token `P` on: the last one was not run. None unless `return_routing` was requested."""
    returned: Returned | None = None
    """Further values for the `T` tokens; None unless `returns` was requested."""
    references: list[PolicyScore] = field(default_factory=list)
    """The scores under `Returns.references`, in their order. Empty if the sample was aborted, or its request ended
    before they were there."""
    current: PolicyScore | None = None
    """The score that `Returns.current` asks for; None where `references` would be empty."""
    base: PolicyScore | None = None
    """The score that `Returns.base` asks for; None where `references` would be empty."""


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt, as the model received them."""

    prompt_index: int
    token_ids: list[int]
    """`[P]`."""
    images: list[PromptImage] = field(default_factory=list)


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, each given the tokens before it."""

    prompt_index: int
    token_ids: list[int]
    """`[P]`."""
    raw_logprobs: list[float | None]
    """`[P]`; None for the first token, and for those without a row if only `prompt_logprob_token_ids` was requested."""
    top_logprobs: list[TopLogprobs]
    """`[P]` (the first one empty) if `top_logprobs` was requested, else empty."""
    ranks: list[int]
    """`[P]` (the first one 0) if `top_logprobs` was requested, else empty."""
    token_id_logprobs: list[TopLogprobs] = field(default_factory=list)
    """`[P]`, the tokens of each row of `prompt_logprob_token_ids`; empty for a prompt without rows."""
    returned: Returned | None = None
    """Further values for the `P` tokens; None unless `returns` was requested."""


@dataclass(frozen=True)
class PromptRouting:
    """The experts of a prompt's tokens."""

    prompt_index: int
    routing: Routing
    """`[P]` tokens."""


@dataclass(frozen=True)
class PromptOutput:
    """All samples of one prompt."""

    prompt_index: int
    prompt_token_ids: list[int]
    """`[P]`, as the model received them; the server encodes texts and chats."""
    samples: list[Sample]
    """`[n]`, by `sample_index`."""
    prompt_logprobs: PromptLogprobs | None
    """None unless `prompt_logprobs` or `prompt_logprob_token_ids` was requested."""
    images: list[PromptImage] = field(default_factory=list)
    routing: Routing | None = None
    """`[P]` tokens; `join_routing` joins it with that of a sample. None unless `return_routing` was requested."""


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of a sample that is still running."""

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    raw_logprobs: npt.NDArray[np.float32]
    text: str | None
    """Text that these tokens complete; may be empty, as in the middle of a character. None without `return_text`."""
    top_logprobs: list[TopLogprobs]
    ranks: list[int]
    returned: Returned | None = None
    """All three as in `Sample`."""


@dataclass(frozen=True)
class Summary:
    """Totals of a request: the last event of its stream."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    """From admission of the request to this event."""


StreamEvent = PromptTokens | TokenDelta | PromptRouting | PromptLogprobs | Sample | Summary
"""An event of a generate stream. Each prompt's `PromptTokens` come once, before its other events; then the requested
events, and each `Sample` as it finishes; one `Summary` at the end."""


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a given sequence of `T` tokens."""

    raw_logprobs: list[float | None]
    """`[T]`, each token given the tokens before it, under the model's own distribution; None for the first."""
    logprobs: list[float | None]
    """`[T]`, under the distribution that `sampling` describes; None for the first."""
    top_logprobs: list[TopLogprobs]
    """`[T]` (the first one empty) if requested, else empty."""
    weight_version: int
    """The version of the policy that computed the score."""
    token_id_logprobs: list[TopLogprobs] = field(default_factory=list)
    """`[T]`, the tokens of each row of `prompt_logprob_token_ids`; empty for a sequence without rows."""
    routing: Routing | None = None
    """`[T - 1]` tokens, as the last one was not run, unless it is the only one. None unless `return_routing` was
    requested."""
    returned: Returned | None = None
    """Further values for the `T` tokens; None unless `returns` was requested."""
    references: list[PolicyScore] = field(default_factory=list)
    """The scores under `Returns.references`, in their order."""
    base: PolicyScore | None = None
    """The score that `Returns.base` asks for."""


@dataclass(frozen=True)
class AbortResult:
    """The result of `abort`."""

    aborted: list[str]
    """Requests that were running."""
    unknown: list[str]
    """Named requests that were not running: unknown or finished."""


@dataclass(frozen=True)
class ServerInfo:
    """Facts that do not change while the server runs."""

    server_version: str
    model: str
    architecture: str
    dtype: str
    device: str
    tensor_parallel_size: int
    vocab_size: int
    max_model_len: int
    """The most tokens of prompt and completion together."""
    max_num_seqs: int
    max_batch_tokens: int
    block_size: int
    """Tokens per KV block."""
    eos_token_ids: list[int]
    parameters: int
    kernel: str
    """The instruction set that `--kernel` chose; on a GPU `cuda`, or `cuda_flash` with `--attention flash`."""
    has_tokenizer: bool
    has_chat_template: bool
    max_adapters: int
    """Maximum number of resident adapters; 0 if they are disabled."""
    max_lora_rank: int
    device_uuids: list[str]
    """UUIDs of the GPUs that the server computes on, whose memory pushes may share; empty on the CPU."""
    batch_invariant: bool
    """Whether results have the same bits in every batch: false with `--attention flash` and `--all-reduce nccl`."""
    images: ImageInfo | None = None
    routing: RoutingInfo | None = None
    """None for a dense model."""


class Lifecycle(str, Enum):
    """The state of the server."""

    RUNNING = "running"
    SHUTTING_DOWN = "shutting_down"
    """Running requests finish; new ones are rejected."""
    PAUSED = "paused"
    """The engine does not step; requests wait."""
    ASLEEP = "asleep"
    """Memory is freed; `ServerStatus.asleep` says which."""
    WEIGHTS_MISSING = "weights_missing"
    """The weights are incomplete; the server needs a full push."""

    def __str__(self) -> str:
        """The plain value, e.g. `running`."""
        return self.value


MemoryTag = Literal["weights", "kv_cache"]
"""Memory that can sleep and wake; the workspace belongs to the KV cache."""

RunningPolicy = Literal["keep", "recompute", "wait", "abort"]
"""The fate of running requests when a push is applied. `keep`: they continue with their KV. `recompute`: they continue
with their tokens, and their KV is recomputed. `wait`: they finish first. `abort`: they end with the tokens so far."""

DrainMode = Literal["wait", "abort", "keep"]
"""The fate of running requests at a sleep or a pause. `wait`: they finish first. `abort`: they end with the tokens so
far. `keep`: they stop, and continue afterwards."""

DtypeName = Literal["float32", "bfloat16", "float16"]
"""The dtypes of tensors that can be pushed, and of the server's parameters."""


@dataclass(frozen=True)
class Asleep:
    """The state of a server that sleeps."""

    level: int
    """1: the policy is kept in host memory; 2: it was dropped."""
    resident: list[MemoryTag]
    """The parts that were woken."""
    pending_update: bool
    """Whether a push waits for the weights to be woken."""


@dataclass(frozen=True)
class SleepResult:
    """The memory that a sleep has freed."""

    released: dict[MemoryTag, int]
    """Bytes by which the process's resident memory fell."""
    resident_bytes: int
    """Resident memory of the process afterwards."""
    seconds: float


@dataclass(frozen=True)
class WakeResult:
    """The result of `wake`."""

    lifecycle: Lifecycle
    seconds: float


@dataclass(frozen=True)
class UpdateResult:
    """The receipt of a push."""

    weight_version: int
    """The policy's new version. While the weights sleep, that of the policy that waits for `wake`."""
    digest: str
    """XXH3-128 of the digests of all tensors, sorted by name, in hexadecimal."""
    parameters: int
    """Parameters written."""
    bytes: int
    """Bytes of the tensors, as sent."""
    pause_ms: float
    """How long the engine did not step because of it."""
    staging_ms: float
    """From the arrival of the header until all tensors were verified."""
    pending: bool
    """Whether it is applied by the next `wake`."""
    adapter_generation: int | None
    """Generation of the resident adapter; None for other pushes."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName
    """The dtype that the server computes with."""


@dataclass(frozen=True)
class AdapterInfo:
    """A resident adapter, whose generation is never reused."""

    name: str
    generation: int
    rank: int
    bytes: int
    leases: int
    """Running requests that use it."""
    retired: bool
    """Replaced or removed; its memory is freed when its last request ends."""
