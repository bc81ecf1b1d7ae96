"""The blocking client."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from . import _convert, _convert_weights, _proto
from ._channel import (
    READY_CALL_SECONDS,
    READY_POLL_SECONDS,
    call_metadata,
    call_timeout,
    generate_timeouts,
    make_channel,
)
from ._http2 import ClientStream
from ._progress import SampleProgress
from ._segment import OWNER_ONLY, SegmentPool
from ._timeline import Timeline, timeline, timeline_request
from ._tls import TlsInput, explained, tls_files
from ._weights import WeightSync
from .errors import DeadlineExceeded, Misdirected, RolloutError, Unavailable, translated
from .options import GenerateOptions, GenerateStreamOptions, ScoreOptions, refuse_unknown
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
    ServerStatus,
    SleepResult,
    StreamEvent,
    TokenIds,
    WakeResult,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RolloutClient(WeightSync):
    """A connection to one rollout-server. Safe to share between threads; not across `fork`.

    Every method raises a subclass of `RolloutError`.
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
        """Connects lazily: nothing is sent before the first call.

        Args:
            address: `host:port`.
            timeout: seconds for each call that does not give its own; None is no limit. When it passes, the server
                drops the work and the call raises `DeadlineExceeded`; `generate` returns what there is.
            token: sent as a bearer token with every call, for a server with `--auth-token-file`. It is taken from no
                environment variable.
            tls: for a server with `--tls-cert`: True trusts the system's authorities, a `Tls` (or a dict of its fields)
                names files.
            segment_mode: who may read the shared memory of pushes, as for `chmod`. A server of another user reads only
                what it is let read: 0o640 lets a server of the same group, 0o644 every user of the machine.
        """
        self.address = address
        self._timeout = timeout
        self._metadata = call_metadata(token)
        self._tls = tls_files(tls)
        self._channel = make_channel(grpc, address, self._tls)
        self._segments = SegmentPool(segment_mode)
        self._updates_lock = threading.Lock()
        self._updates: weakref.WeakSet[ClientStream] = weakref.WeakSet()
        self._closed = False

    def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """Samples `n` completions of each prompt and waits for all of them, or until the timeout.

        When the timeout passes, the samples that have not ended are `FinishReason.ABORTED` and have the tokens so far,
        which is none where nothing had begun. The others are whole. `DeadlineExceeded` is raised only if the server
        does not answer then.

        Args:
            prompts: texts, lists (or arrays) of token ids, or lists of chat messages; they may be mixed.
            n: samples per prompt.
            sampling: how tokens are chosen: a `SamplingParams`, or a list with one for each prompt; None is
                `SamplingParams()`. `rollout_client.SamplingInput` says what a seed means in a list.
            options: by keyword, those that `rollout_client.GenerateOptions` lists and describes.

        Returns:
            One output per prompt, in their order, with `n` samples each.
        """
        refuse_unknown("generate", options, GenerateOptions)
        shown = options.pop("progress", False)
        stream = self.generate_stream(prompts, n, sampling, **options)
        collector = _convert.Collector(len(prompts), n)
        with stream, SampleProgress(len(prompts) * n, shown) as progress:
            for event in stream:
                collector.add(event)
                progress.add(event)
        return collector.outputs()

    def generate_stream(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateStreamOptions],
    ) -> GenerateStream:
        """As `generate`, but gives each prompt's `PromptTokens`, each `Sample` as it finishes, and a `Summary` last.

        The request starts at once. Leaving the stream early (`cancel`, or the end of its `with` block) drops the
        work on the server.

        Args:
            prompts, n, sampling: as for `generate`.
            options: by keyword, those that `rollout_client.GenerateStreamOptions` lists and describes.
        """
        limit, deadline = generate_timeouts(options.get("timeout"), self._timeout)
        request = _convert.generate_request(prompts, n, sampling, options, limit)
        call_options = {"timeout": deadline, "metadata": self._metadata}
        return GenerateStream(self._callable(_proto.GENERATE, stream=True), request, call_options, self._explained)

    def score(self, sequences: Sequence[TokenIds], **options: Unpack[ScoreOptions]) -> list[Score]:
        """Log-probabilities of given tokens, without sampling; the same bits as when they were sampled.

        Args:
            sequences: token ids, each of at least one token.
            options: by keyword, those that `rollout_client.ScoreOptions` lists and describes.

        Returns:
            One score per sequence, in their order.
        """
        request = _convert.score_request(sequences, options)
        return _convert.scores(self._gather(_proto.SCORE, request, options.get("timeout")), len(request.sequences))

    def abort(self, request_ids: str | Iterable[str] = (), *, all: bool = False) -> AbortResult:
        """Ends running requests; whoever waits for them gets the tokens so far, marked `FinishReason.ABORTED`.

        Args:
            request_ids: the requests to end.
            all: instead of `request_ids`: every running request, of other clients too.
        """
        return _convert.abort_result(self._call(_proto.ABORT, _convert.abort_request(request_ids, all=all)))

    def info(self) -> ServerInfo:
        """Facts that do not change while the server lives."""
        return _convert.server_info(self._call(_proto.GET_INFO, _proto.GET_INFO.request()))

    def status(self) -> ServerStatus:
        """Lifecycle, versions, memory, queue and throughput now."""
        return _convert.server_status(self._call(_proto.GET_STATUS, _proto.GET_STATUS.request()))

    def timeline(self, since: int = 0, max_spans: int = 0) -> Timeline:
        """Where the engine's time went: its last phases, some 15 minutes of them, and those of pushes beside it.

        Args:
            since: spans that end after this time, in nanoseconds since 1970. For what is new, the last answer's `now`:
                spans that lasted then come again, with the same id.
            max_spans: most spans of each track, of which the newest are given; 0 means 8192.
        """
        return timeline(self._call(_proto.GET_TIMELINE, timeline_request(since, max_spans)))

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix that no running request uses; returns the number of blocks."""
        return self._call(_proto.RESET_PREFIX_CACHE, _proto.RESET_PREFIX_CACHE.request()).blocks

    def sleep(self, level: int = 1, mode: DrainMode = "wait") -> SleepResult:
        """Gives memory back; returns when the operating system has it. Until `wake`, requests raise.

        Args:
            level: 1 keeps the policy outside the device and drops KV cache and workspace; 2 drops the policy too, and
                a push, or `wake(reload=True)`, must come before serving.
            mode: what happens to requests that run; see `DrainMode`.
        """
        return _convert_weights.sleep_result(self._call(_proto.SLEEP, _convert_weights.sleep_request(level, mode)))

    def wake(self, tags: Iterable[MemoryTag] | None = None, *, reload: bool = False) -> WakeResult:
        """Takes memory again.

        Args:
            tags: what is to wake, so that a push can come between `["weights"]` and `["kv_cache"]`; None is all.
            reload: after level 2: read the checkpoint again instead of waiting for a push.
        """
        return _convert_weights.wake_result(self._call(_proto.WAKE, _convert_weights.wake_request(tags, reload)))

    @contextmanager
    def awake(self, tags: Iterable[MemoryTag] | None = None, level: int = 1) -> Iterator[RolloutClient]:
        """Wakes the server for the time of a `with` block, and lets it sleep afterwards.

        After an exception what runs is aborted, so that the memory is free at once; the exception is raised on, also
        if the sleep fails.

        Args:
            tags: as for `wake`.
            level: as for `sleep`.
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
        """Stops stepping; requests that come meanwhile wait.

        Args:
            mode: what happens to requests that run; see `DrainMode`.
        """
        self._call(_proto.PAUSE, _convert_weights.pause_request(mode))

    def resume(self) -> None:
        """Ends a pause."""
        self._call(_proto.RESUME, _proto.RESUME.request())

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Waits until the server runs.

        Raises:
            Unavailable: it does not within `timeout` seconds, with the last answer in the message.
            Misdirected: something else is at the address; at once.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                left = max(deadline - time.monotonic(), READY_POLL_SECONDS)
                response = self._call(
                    _proto.GET_STATUS, _proto.GET_STATUS.request(), timeout=min(left, READY_CALL_SECONDS)
                )
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
        """Ends the connection, and the calls that run on it; removes the shared memory of pushes."""
        self._end_calls()
        self._segments.close()

    def __enter__(self) -> RolloutClient:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the client."""
        self.close()

    def _call(self, method: _proto.Method, request: Any, timeout: float | None = None) -> Any:
        with translated(self._explained):
            return self._callable(method)(request, **self._call_options(timeout))

    def _gather(self, method: _proto.Method, request: Any, timeout: float | None) -> list[Any]:
        with translated(self._explained):
            call = self._callable(method, stream=True)(request, **self._call_options(timeout))
            try:
                return list(call)
            except BaseException:  # KeyboardInterrupt in the wait: the server must not go on
                call.cancel()
                raise

    def _explained(self, error: RolloutError) -> RolloutError:
        return explained(error, self.address, self._tls)

    def _call_options(self, timeout: float | None) -> dict[str, Any]:
        return {"timeout": call_timeout(timeout, self._timeout), "metadata": self._metadata}

    def _start_update(self, timeout: float | None) -> ClientStream:
        stream = ClientStream(
            self.address, _proto.UPDATE.path, self._metadata, call_timeout(timeout, self._timeout), self._tls
        )
        with self._updates_lock:
            self._updates.add(stream)
            closed = self._closed
        if closed:
            stream.cancel()
        return stream

    def _end_calls(self) -> None:
        with self._updates_lock:
            self._closed = True
            running = list(self._updates)
        for stream in running:
            stream.cancel()
        self._channel.close()

    def _callable(self, method: _proto.Method, stream: bool = False) -> Callable[..., Any]:
        make = self._channel.unary_stream if stream else self._channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


class GenerateStream(Iterator[StreamEvent]):
    """The events of one request as they come. An iterator and a context manager."""

    def __init__(
        self,
        start: Callable[..., Any],
        request: Any,
        options: dict[str, Any],
        explain: Callable[[RolloutError], RolloutError],
    ) -> None:
        """Starts the call; `explain` gives its errors a better message."""
        self.request_id: str = request.request_id
        """For `RolloutClient.abort`."""
        self._explain = explain
        with translated(explain):
            self._call = start(request, **options)

    def __next__(self) -> StreamEvent:
        """The next event; blocks until there is one."""
        with translated(self._explain):
            try:
                event = None
                while event is None:
                    event = _convert.stream_event(next(self._call))
                return event
            except (StopIteration, grpc.RpcError):
                raise
            except BaseException:  # KeyboardInterrupt in the wait, or an answer that makes no sense
                self.cancel()
                raise

    def cancel(self) -> None:
        """Drops the request on the server, if it still runs."""
        self._call.cancel()

    def __enter__(self) -> GenerateStream:
        """The stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what still runs."""
        self.cancel()
