"""What the client takes and gives: plain dataclasses, nothing of protobuf.

Log-probabilities are natural logarithms. `T` is the number of tokens of a sample, `P` of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

ChatMessage = Mapping[str, Any]
"""One message of a chat prompt, as OpenAI's API and chat templates have it: `role`, `content` (text, None or a list of
text parts), and what else the model's template knows (`tool_calls`, `tool_call_id`, `name`, `reasoning_content`). In a
`Chat`, and after a first message that is a dict, messages of OpenAI's package are taken too."""


@dataclass(frozen=True)
class Chat:
    """A chat prompt with what else the model's template shows. JSON values, passed on in their order."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    """`{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`, as `get_json_schema`
    of transformers makes them."""
    documents: Sequence[Mapping[str, Any]] = ()
    """Objects with `title` and `text`."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `{"enable_thinking": False}`."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where the answer begins; None: unless `continue_final_message` is set."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""


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
    """A requested stop string; `text` ends before it, `token_ids` hold what was sampled."""
    LENGTH = "length"
    """`max_tokens` or the context length."""
    GRAMMAR = "grammar"
    """No token may follow: the text is complete for `structured_outputs` and no token that ends a sample may be sampled
    (`ignore_eos`, `min_tokens`, a model without one), or other parameters exclude all that it allows."""
    ABORTED = "aborted"
    """By `abort`, by the timeout of the call, by a push, pause or sleep that aborts what runs, or by the server's
    shutdown; the tokens so far are valid. There are none if nothing had begun."""

    def __str__(self) -> str:
        """The plain value, e.g. `length`."""
        return self.value


class StructuredOutputs(TypedDict, total=False):
    """The texts that a sample may have. Exactly one of the keys is given."""

    regex: str
    """Texts that this regular expression matches whole."""
    json: str | Mapping[str, Any] | bool
    """JSON that this JSON schema accepts: a dict, or its text."""
    choice: Sequence[str]
    """One of these texts."""
    grammar: str
    """Texts of this grammar, in llguidance's variant of Lark."""
    json_object: bool
    """True: a JSON object."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a sample ends."""

    temperature: float = 1.0
    """`>= 0`; 0 is greedy."""
    top_k: int = 0
    """Keep the `k` most likely tokens; 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the best token's probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """`> 0`; of tokens seen in the prompt or the output."""
    presence_penalty: float = 0.0
    """In [-2, 2]; once for tokens seen in the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens; finite."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be sampled; None allows all."""
    min_tokens: int = 0
    """No end before this many tokens; at most `max_tokens`."""
    max_tokens: int = 16
    """`>= 1`."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a sample besides the model's own."""
    stop: Sequence[str] = ()
    """Strings that end a sample."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens."""
    seed: int | None = None
    """Each sample uses one derived from (seed, index of its prompt, index of the sample); the first sample of the first
    prompt the seed itself. So equal prompts of one request get different samples. None: the server draws one. In a list
    of parameters, one for each prompt, it is the prompt's own: see `SamplingInput`."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must match; None is any text."""


SamplingInput = SamplingParams | Sequence[SamplingParams] | None
"""How to sample: the same for all prompts, or a list with one for each of them, so that each trajectory of a multi-turn
rollout has its own budget; None is `SamplingParams()`.

In a list a seed is the prompt's own: its samples are those that the prompt has alone, wherever it stands in the list.
So equal prompts want different seeds there. A prompt without one gets one from the server, different for each."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `[start, end)` of a sample were made by this version of the policy."""

    weight_version: int
    start: int
    end: int


TopLogprobs = dict[int, float]
"""The most likely tokens at one position with their log-probabilities, descending."""


@dataclass(frozen=True)
class Sample:
    """One completion of one prompt."""

    prompt_index: int
    """Index of the prompt in the request."""
    sample_index: int
    """Index of the sample in its group, `[0, n)`."""
    token_ids: list[int]
    """`[T]`."""
    logprobs: npt.NDArray[np.float32]
    """`[T]`, of the distribution sampled from: temperature, penalties and filters applied and renormalised."""
    raw_logprobs: npt.NDArray[np.float32]
    """`[T]`, of the model's own distribution."""
    text: str | None
    """The decoded tokens, if `return_text` was asked."""
    finish_reason: FinishReason
    weight_versions: list[VersionSpan]
    """Which version of the policy made which tokens; the spans cover `[0, T)`."""
    seed: int
    """This sample's own seed: sending it with `n=1` replays the sample."""
    cached_tokens: int
    """Prompt tokens whose KV came from the cache."""
    top_logprobs: list[TopLogprobs]
    """`[T]` if `top_logprobs` was asked, else empty. Raw, unless asked for with `top_logprobs_of="processed"`."""
    ranks: list[int]
    """`[T]` if `top_logprobs` was asked, else empty: 1 + the number of tokens that are more likely, in the distribution
    of `top_logprobs`."""


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt, as the model was given them."""

    prompt_index: int
    token_ids: list[int]
    """`[P]`."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, each given the tokens before it."""

    prompt_index: int
    token_ids: list[int]
    """`[P]`."""
    raw_logprobs: list[float | None]
    """`[P]`; None for the first token."""
    top_logprobs: list[TopLogprobs]
    """`[P]` (the first one empty) if `top_logprobs` was asked, else empty."""
    ranks: list[int]
    """`[P]` (the first one 0) if `top_logprobs` was asked, else empty."""


@dataclass(frozen=True)
class PromptOutput:
    """All samples of one prompt."""

    prompt_index: int
    prompt_token_ids: list[int]
    """`[P]`, as the model was given them: for a text or a chat what the server's tokenizer made of it."""
    samples: list[Sample]
    """`[n]`, by `sample_index`."""
    prompt_logprobs: PromptLogprobs | None
    """If asked."""


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of a sample that still runs."""

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    raw_logprobs: npt.NDArray[np.float32]
    text: str | None
    """Text that these tokens complete, if asked; may be empty in the middle of a character or of a stop string."""
    top_logprobs: list[TopLogprobs]
    """As those of the sample."""
    ranks: list[int]
    """As those of the sample."""


@dataclass(frozen=True)
class Summary:
    """Totals of a request, the last event of its stream."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    """From admission to the summary."""


StreamEvent = PromptTokens | TokenDelta | PromptLogprobs | Sample | Summary
"""What a generate stream carries: for each prompt its `PromptTokens` once, before all else of it; then what was asked
for, and a `Sample` as each finishes; one `Summary` at the end."""


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a given sequence of `T` tokens."""

    raw_logprobs: list[float | None]
    """`[T]`, each token given the tokens before it, of the model's own distribution; None for the first."""
    logprobs: list[float | None]
    """`[T]`, of the distribution that `sampling` describes; None for the first."""
    top_logprobs: list[TopLogprobs]
    """`[T]` (the first one empty) if asked, else empty."""
    weight_version: int
    """The version of the policy that scored."""


@dataclass(frozen=True)
class AbortResult:
    """What an abort found."""

    aborted: list[str]
    """Requests that were running."""
    unknown: list[str]
    """Named requests that were not (unknown or finished)."""


@dataclass(frozen=True)
class ServerInfo:
    """Facts that do not change while the server lives. See `Control.GetInfo` in `proto/`."""

    server_version: str
    model: str
    architecture: str
    dtype: str
    device: str
    tensor_parallel_size: int
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and completion together."""
    max_num_seqs: int
    max_batch_tokens: int
    block_size: int
    """Tokens per KV block."""
    eos_token_ids: list[int]
    parameters: int
    kernel: str
    """The instruction set of the kernels: what `--kernel` chose. `cuda`, or `cuda_flash` with `--attention flash`."""
    has_tokenizer: bool
    has_chat_template: bool
    max_adapters: int
    """Most resident adapters; 0 if there is no room for any."""
    max_lora_rank: int
    device_uuids: list[str]
    """UUIDs of the GPUs that the server computes on, in whose memory pushes may lie; empty on the CPU."""
    batch_invariant: bool
    """Whether a result is the same bits whatever is computed beside it: not with `--attention flash`, nor with
    `--all-reduce nccl` on several ranks."""


class Lifecycle(str, Enum):
    """What the server is doing."""

    RUNNING = "running"
    SHUTTING_DOWN = "shutting_down"
    """Running requests finish, new ones are refused."""
    PAUSED = "paused"
    """Nothing steps; requests wait."""
    ASLEEP = "asleep"
    """Memory is given back; `ServerStatus.asleep` says what."""
    WEIGHTS_MISSING = "weights_missing"
    """The weights are those of no policy: a complete push must come."""

    def __str__(self) -> str:
        """The plain value, e.g. `running`."""
        return self.value


MemoryTag = Literal["weights", "kv_cache"]
"""What can sleep and wake; the workspace of a step goes with the KV cache."""

RunningPolicy = Literal["keep", "recompute", "wait", "abort"]
"""What happens to requests that run when an update is applied.

`keep`: they go on with the KV they have. `recompute`: they go on with their tokens, their KV is computed again.
`wait`: they finish first. `abort`: they end with the tokens so far.
"""

DrainMode = Literal["wait", "abort", "keep"]
"""What happens to requests that run at a sleep or a pause.

`wait`: they finish first. `abort`: they end with the tokens so far. `keep`: they stand still and go on later.
"""

DtypeName = Literal["float32", "bfloat16", "float16"]
"""The types of tensors that can be pushed, and of parameters as they serve."""


@dataclass(frozen=True)
class Asleep:
    """How a server sleeps."""

    level: int
    """1: the policy is kept outside the device; 2: it is gone."""
    resident: list[MemoryTag]
    """What is awake again."""
    pending_update: bool
    """Whether a push waits for the weights to wake."""


@dataclass(frozen=True)
class SleepResult:
    """What a sleep has given back."""

    released: dict[MemoryTag, int]
    """Bytes by which the process's resident memory fell."""
    resident_bytes: int
    """Of the process, after."""
    seconds: float


@dataclass(frozen=True)
class WakeResult:
    """What a wake has come to."""

    lifecycle: Lifecycle
    seconds: float


@dataclass(frozen=True)
class UpdateResult:
    """What a push has done."""

    weight_version: int
    """The policy's version now; while the weights are asleep, of the policy that waits for them to wake."""
    digest: str
    """XXH3-128 over the digests of all tensors in the order of their names, in hexadecimal."""
    parameters: int
    """Parameters written."""
    bytes: int
    """Bytes of the tensors as transported."""
    pause_ms: float
    """How long generation stood still for it."""
    staging_ms: float
    """From the header's arrival to the end of the check."""
    pending: bool
    """Whether it waits for `wake` to be applied."""
    adapter_generation: int | None
    """Of a resident adapter."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName
    """In which it serves."""


@dataclass(frozen=True)
class AdapterInfo:
    """A resident adapter."""

    name: str
    generation: int
    """Never used twice."""
    rank: int
    bytes: int
    leases: int
    """Running requests that use it."""
    retired: bool
    """Replaced or removed; goes when its last request ends."""


@dataclass(frozen=True)
class MemoryLedger:
    """Where the server's memory goes, in bytes: that of the device, or that of the host beside it."""

    total_bytes: int
    """Of the device, or the smallest of the machine's, its cgroup's and the process's resource limits."""
    ceiling_bytes: int
    """What `--mem-util` allows; of the host's ledger, `--host-memory`."""
    entries: dict[str, int]
    """Reservations by name ("weights", "kv_cache", ...); their sum is at most the ceiling."""
    resident_bytes: int
    """Resident memory of the process now, as the operating system counts it."""
    traffic_bytes: int = 0
    """Of the entry "requests", what requests and replies under way take now."""


@dataclass(frozen=True)
class OpenUpdate:
    """A push that is under way."""

    id: int
    """Never used twice while the server lives."""
    peer: str
    """Address of its sender, as the server sees it."""
    kind: str
    """`"lora"`, `"full"` or `"delta"`."""
    adapter: str | None
    """Name under which an adapter is to become resident. None too for callers of the role `generate`."""
    new_version: int | None
    """As its sender gave it."""
    open_seconds: float
    idle_seconds: float
    """Since anything of it came, or the server worked on it."""
    committed: bool
    """It is whole and waits for requests to end (`running="wait"`)."""


@dataclass(frozen=True)
class ServerStatus:
    """How the server is doing now."""

    lifecycle: Lifecycle
    weight_version: int
    memory: MemoryLedger
    total_blocks: int
    free_blocks: int
    """Blocks that no sequence holds (cached prefixes among them)."""
    cached_blocks: int
    """Free blocks that still hold a cached prefix."""
    running_requests: int
    running_samples: int
    waiting_samples: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    finished_requests: int
    aborted_requests: int
    tokens_per_second: float
    """Generated tokens per second over the last ten seconds of stepping."""
    uptime_seconds: float
    asleep: Asleep | None
    """Set while asleep."""
    held_requests: int
    """Requests that wait for a newer policy, for `resume`, or for a drain to end."""
    updating: bool
    """Whether a push is under way."""
    updates: int
    """Pushes applied since the start."""
    drafted_tokens: int
    """Tokens that speculation has tried behind a sample's next one."""
    accepted_tokens: int
    """Of these, those that turned out right (`generated_tokens` has them too)."""
    update: OpenUpdate | None
    """The push that is under way."""
    internal_errors: int
    """Requests that ended with INTERNAL because answering them panicked: a bug, of which the log has more."""
    host_memory: MemoryLedger | None = None
    """The ledger of the host's memory where the device has memory of its own; None where they are one, and from servers
    that do not tell."""
