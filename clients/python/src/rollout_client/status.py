"""The state of a server, as `status` returns it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .types import Asleep, Lifecycle


@dataclass(frozen=True)
class MemoryLedger:
    """The use of the server's memory, in bytes: of the device, or of the host."""

    total_bytes: int
    """The device's memory; on the CPU, the smallest of the machine's memory, its cgroup's and the process's limits."""
    ceiling_bytes: int
    """The limit that `--mem-util` sets; for the host's ledger, `--host-memory`."""
    entries: dict[str, int]
    """Reservations by name ("weights", "kv_cache", ...); their sum is at most the ceiling."""
    resident_bytes: int
    """Resident memory of the process now, as the operating system counts it."""
    traffic_bytes: int = 0
    """The part of the entry "requests" that current requests and replies use."""


@dataclass(frozen=True)
class OpenUpdate:
    """A push that is open. No id is used twice while the server runs."""

    id: int
    peer: str
    """Address of its sender, as the server sees it."""
    kind: str
    """`"lora"`, `"full"` or `"delta"`."""
    adapter: str | None
    """Name of the adapter that becomes resident. Also None if the caller's token has the role `generate`."""
    new_version: int | None
    open_seconds: float
    idle_seconds: float
    """Since the server last received a part of it, or worked on it."""
    committed: bool
    """Whether it is complete, and waits for requests to end (`running="wait"`)."""


@dataclass(frozen=True)
class Stall:
    """Work that made no progress for `--watchdog-seconds`. The server's log has the stack of each thread."""

    reported: int
    """Wall clock at the report, in nanoseconds since 1970."""
    phase: str
    """Phase of the engine or of the push, as in the timeline."""
    push: int | None
    """Number of the push, if the work is for one beside the engine."""
    seconds: float
    """Time without progress: until the report, or until the work went on."""
    over: bool
    """Whether the work has gone on, or has ended."""


@dataclass(frozen=True)
class ToolCalls:
    """Counts of tool calls in one format, in chats over HTTP whose text was searched for calls."""

    parsed: int
    """Calls of tools that the request offers."""
    unknown_tool: int
    """Calls that name another tool."""
    invalid: int
    """Marks of a call without a call behind them: the JSON is invalid, or it has no name."""
    unclosed: int
    """Calls that the text ends within."""

    @property
    def malformed(self) -> int:
        """All calls but the parsed ones."""
        return self.unknown_tool + self.invalid + self.unclosed


@dataclass(frozen=True)
class TenantStatus:
    """Numbers of one tenant."""

    running_samples: int
    waiting_samples: int
    kv_blocks: int
    """KV blocks that its samples hold. Those that another tenant holds too count for both."""
    prompt_tokens: int
    """Tokens of its prompts, once per prompt, whether computed or found in the prefix cache."""
    generated_tokens: int
    """Tokens sampled for it."""


@dataclass(frozen=True)
class ServerStatus:
    """The state of the server and its counters."""

    lifecycle: Lifecycle
    weight_version: int
    memory: MemoryLedger
    total_blocks: int
    free_blocks: int
    """KV blocks that no sequence holds, including cached prefixes."""
    cached_blocks: int
    """Free KV blocks that still hold a cached prefix."""
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
    """Generated tokens per second, over the last ten seconds in which the engine stepped."""
    uptime_seconds: float
    asleep: Asleep | None
    """None while awake."""
    held_requests: int
    """Requests that wait for a newer policy, for `resume`, or for the end of a drain."""
    updating: bool
    """Whether a push is open."""
    updates: int
    """Pushes that were applied since the server started."""
    drafted_tokens: int
    """Draft tokens that speculation has verified."""
    accepted_tokens: int
    """Draft tokens that were accepted; `generated_tokens` includes them."""
    update: OpenUpdate | None
    """The push that is open."""
    internal_errors: int
    """Requests that ended with INTERNAL because the server panicked: a bug; the log has details."""
    host_memory: MemoryLedger | None = None
    """The ledger of host memory, if the device has memory of its own; else None, as from older servers."""
    encoded_images: int = 0
    """Images that the vision tower has encoded."""
    queried_images: int = 0
    """Images whose embeddings prompts have needed, once for each image of a prompt."""
    reused_images: int = 0
    """Those of `queried_images` that were not encoded again, because another prompt had needed them before."""
    held_images: int = 0
    """Images whose embeddings are held or being made."""
    named_images: int = 0
    """Images that calls may name by their hashes, because the server holds their pixels."""
    tool_calls: dict[str, ToolCalls] = field(default_factory=dict)
    """Tool calls by format (`"hermes"`, `"qwen3_coder"`, …), without formats that no sample has used."""
    tenants: dict[str, TenantStatus] = field(default_factory=dict)
    """Tenants that have asked for something, by name; `""` is the requests of no named tenant. At most 64: the last,
    `"other"`, stands for all further ones."""
    stall: Stall | None = None
    """The last work that the watchdog has reported."""
