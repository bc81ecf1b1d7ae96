# Generated from aio.py by scripts/blocking_client.py: change that file, and run the script.
"""The client of one rollout-server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from . import _convert, _convert_weights, _proto
from ._channel import READY_CALL_SECONDS, READY_POLL_SECONDS, generate_timeouts
from ._connection import Connection
from ._parts import Parts
from ._progress import SampleProgress
from ._pusher import Pusher
from ._segment import OWNER_ONLY, SegmentPool
from ._stream import GenerateStream
from ._timeline import Timeline, timeline, timeline_request
from ._tls import TlsInput
from ._weights import WeightSync
from .errors import DeadlineExceeded, Misdirected, RolloutError, Unavailable
from .options import GenerateOptions, GenerateStreamOptions, ScoreOptions, refuse_unknown
from .status import ServerStatus
from .types import (
    AbortResult,
    DrainMode,
    Lifecycle,
    MemoryTag,
    PromptInput,
    PromptOutput,
    SamplingInput,
    Score,
    ServerInfo,
    SleepResult,
    TokenIds,
    WakeResult,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RolloutClient(WeightSync):
    """A connection to one rollout-server. Every method raises a subclass of `RolloutError`.

    Threads may share the blocking client; it does not survive `fork`. The asyncio client belongs to the event loop that
    runs when it is made, and cancelling a task that waits for a call ends the call on the server.

    >>> with RolloutClient(address) as client:
    ...     outputs = client.generate(["The capital of France is"], n=2)
    >>> [sample.text for sample in outputs[0].samples]
    [' Paris', ' Paris']
    """

    def __init__(
        self,
        address: str,
        timeout: float | None = None,
        token: str | None = None,
        *,
        tls: TlsInput = None,
        segment_mode: int = OWNER_ONLY,
    ) -> None:
        """Sends nothing: the first call connects.

        Args:
            address: `host:port`.
            timeout: seconds for each call that does not set its own; None means no limit. When it passes, the server
                drops the work and the call raises `DeadlineExceeded`; `generate` returns the tokens so far.
            token: sent as a bearer token with every call, for a server with `--auth-token-file`. No environment
                variable is read.
            tls: for a server with `--tls-cert`: True trusts the system's authorities, a `Tls` (or a dict of its fields)
                names files.
            segment_mode: who may read the shared memory of pushes, as for `chmod`. A server of another user needs read
                permission: 0o640 gives it to a server of the same group, 0o644 to every user of the machine.
        """
        self.address = address
        self._timeout = timeout
        self._connection = Connection(address, timeout, token, tls)
        self._segments = SegmentPool(segment_mode)
        self._pusher = Pusher(self._connection, self._segments)

    def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """Samples `n` completions of each prompt, and returns when all have finished or the timeout has passed.

        At the timeout, samples that have not finished are returned with `FinishReason.ABORTED` and the tokens so far,
        or none if they had not started. `DeadlineExceeded` is raised only if the server does not answer then.

        Prompts that do not fit in a message of 64 MiB, such as those with many images, are sent in several, one after
        the other; the samples do not depend on it.

        Args:
            prompts: texts, lists (or arrays) of token ids, or lists of chat messages; they may be mixed.
            n: samples per prompt.
            sampling: a `SamplingParams` for all prompts, or a list with one for each; None is `SamplingParams()`.
                `rollout_client.SamplingInput` explains seeds in a list.
            options: keyword options; `rollout_client.GenerateOptions` describes them.

        Returns:
            One output per prompt, in the order of the prompts, with `n` samples each.

        >>> sampling = SamplingParams(temperature=0.7, max_tokens=1, seed=1)
        >>> outputs = client.generate(["The capital of France is"], n=2, sampling=sampling)
        >>> sample = outputs[0].samples[0]
        >>> sample.text, sample.token_ids, sample.logprobs.shape, str(sample.finish_reason)
        (' Paris', [5], (1,), 'length')
        """
        refuse_unknown("generate", options, GenerateOptions)
        shown = options.pop("progress", False)
        limit, _ = generate_timeouts(options.get("timeout"), self._timeout)
        parts = Parts(_convert.generate_request(prompts, n, sampling, options, limit), limit)
        collector = _convert.Collector(len(prompts), n)
        with SampleProgress(len(prompts) * n, shown) as progress, parts.whole_errors():
            for request, deadline in parts:
                with GenerateStream(self._connection, request, deadline) as stream:
                    for event in stream:
                        collector.add(parts.whole(event))
                        progress.add(event)
        return collector.outputs()

    def generate_stream(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateStreamOptions],
    ) -> GenerateStream:
        """As `generate`, but yields the `PromptTokens` of each prompt, each `Sample` as it finishes, and a `Summary`.

        The request is sent at once, as one message, in which all prompts must fit. Leaving the stream early, by
        `cancel` or the end of its `with` block, aborts the request on the server.

        Args:
            prompts, n, sampling: as for `generate`.
            options: keyword options; `rollout_client.GenerateStreamOptions` describes them.

        >>> with client.generate_stream([[1, 2, 3]], n=2) as stream:
        ...     for event in stream:
        ...         print(type(event).__name__)
        PromptTokens
        Sample
        Sample
        Summary
        """
        limit, deadline = generate_timeouts(options.get("timeout"), self._timeout)
        request = _convert.generate_request(prompts, n, sampling, options, limit)
        return GenerateStream(self._connection, request, deadline)

    def score(self, sequences: Sequence[TokenIds], **options: Unpack[ScoreOptions]) -> list[Score]:
        """Computes log-probabilities of given tokens: the same bits as when they were sampled.

        Args:
            sequences: token ids, at least one per sequence.
            options: keyword options; `rollout_client.ScoreOptions` describes them.

        Returns:
            One score per sequence, in the order of the sequences. Its lists have one element per token; the first is
            None, as nothing precedes the first token.

        >>> score = (client.score([[1, 2, 3]]))[0]
        >>> score.raw_logprobs
        [None, -0.5, -0.25]
        """
        request = _convert.score_request(sequences, options)
        responses = self._connection.gather(_proto.SCORE, request, options.get("timeout"))
        return _convert.scores(responses, len(request.sequences))

    def abort(self, request_ids: str | Iterable[str] = (), *, all: bool = False) -> AbortResult:
        """Ends running requests: their callers get the tokens so far, marked `FinishReason.ABORTED`.

        Args:
            request_ids: the requests to end.
            all: instead of `request_ids`: end every running request, also those of other clients.

        >>> (client.abort("my-request")).unknown
        ['my-request']
        """
        request = _convert.abort_request(request_ids, all=all)
        return _convert.abort_result(self._connection.call(_proto.ABORT, request))

    def info(self) -> ServerInfo:
        """Facts that do not change while the server runs: its model, dtype, limits and version.

        >>> (client.info()).dtype
        'bfloat16'
        """
        return _convert.server_info(self._connection.call(_proto.GET_INFO))

    def status(self) -> ServerStatus:
        """The server's lifecycle, weight version, memory, queue and throughput now.

        >>> status = client.status()
        >>> str(status.lifecycle), status.weight_version, status.running_samples
        ('running', 4, 2)
        """
        return _convert.server_status(self._connection.call(_proto.GET_STATUS))

    def timeline(self, since: int = 0, max_spans: int = 0) -> Timeline:
        """How the engine spent its time: its last phases, about 15 minutes of them, and those of pushes beside it.

        Args:
            since: only spans that end after this time, in nanoseconds since 1970. To poll, pass the last answer's
                `now`: spans that were unfinished then are returned again, with the same id.
            max_spans: the most spans of each track; the newest are returned. 0 means 8192.
        """
        request = timeline_request(since, max_spans)
        return timeline(self._connection.call(_proto.GET_TIMELINE, request))

    def reset_prefix_cache(self) -> int:
        """Drops every KV block of the prefix cache that no running request uses; returns their number."""
        return (self._connection.call(_proto.RESET_PREFIX_CACHE)).blocks

    def sleep(self, level: int = 1, mode: DrainMode = "wait") -> SleepResult:
        """Frees the device's memory; returns when the operating system has it. Until `wake`, requests raise errors.

        Args:
            level: 1 keeps the policy in host memory and drops KV cache and workspace; 2 drops the policy too, and
                `wake` must be followed by a push, or be called with `reload=True`.
            mode: what happens to running requests; see `DrainMode`.

        >>> (client.sleep(level=1)).released
        {'kv_cache': 1048576}
        """
        request = _convert_weights.sleep_request(level, mode)
        return _convert_weights.sleep_result(self._connection.call(_proto.SLEEP, request))

    def wake(self, tags: Iterable[MemoryTag] | None = None, *, reload: bool = False) -> WakeResult:
        """Allocates the memory again.

        Args:
            tags: the parts to wake, so that a push can come between `["weights"]` and `["kv_cache"]`; None is all.
            reload: after level 2: read the checkpoint again instead of waiting for a push.

        >>> str((client.wake()).lifecycle)
        'running'
        """
        request = _convert_weights.wake_request(tags, reload)
        return _convert_weights.wake_result(self._connection.call(_proto.WAKE, request))

    @contextmanager
    def awake(self, tags: Iterable[MemoryTag] | None = None, level: int = 1) -> Iterator[RolloutClient]:
        """Wakes the server for the duration of a `with` block, then puts it to sleep.

        If the block raises, running requests are aborted so that the memory is free at once, and the exception is
        raised again, even if the sleep fails.

        Args:
            tags: as for `wake`.
            level: as for `sleep`.

        >>> with client.awake() as server:
        ...     outputs = server.generate([[1, 2, 3]])
        """
        self.wake(tags)
        try:
            yield self
        except BaseException:
            with suppress(RolloutError):
                self.sleep(level, "abort")
            raise
        self.sleep(level)

    def pause(self, mode: DrainMode = "wait") -> None:
        """Stops the engine's steps; requests that arrive until `resume` wait.

        Args:
            mode: what happens to running requests; see `DrainMode`.

        >>> client.pause(mode="keep")
        >>> client.resume()
        """
        self._connection.call(_proto.PAUSE, _convert_weights.pause_request(mode))

    def resume(self) -> None:
        """Ends a pause."""
        self._connection.call(_proto.RESUME)

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Waits until the server's lifecycle is `running`.

        Args:
            timeout: in seconds.

        Raises:
            Unavailable: it is not running after `timeout` seconds; the message has the last answer.
            Misdirected: something else listens at the address; raised at once.

        >>> client.wait_until_ready(timeout=5)
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                left = max(deadline - time.monotonic(), READY_POLL_SECONDS)
                response = self._connection.call(_proto.GET_STATUS, timeout=min(left, READY_CALL_SECONDS))
                state = _convert.server_status(response).lifecycle
                if state is Lifecycle.RUNNING:
                    return
                last = f"the server is {state}"
            except Misdirected:
                raise
            except (Unavailable, DeadlineExceeded) as error:
                last = str(error)
            if time.monotonic() >= deadline:
                raise Unavailable(f"{self.address} is not ready after {timeout:g} s: {last}")
            time.sleep(READY_POLL_SECONDS)

    def close(self) -> None:
        """Closes the connection, which ends its calls, and removes the shared memory of pushes."""
        self._pusher.cancel()
        self._connection.close()
        self._segments.close()

    def __enter__(self) -> RolloutClient:
        """Returns the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the client."""
        self.close()
