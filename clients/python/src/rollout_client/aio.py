"""The asyncio client: the methods of `client.py`, awaited."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from . import _convert, _convert_weights, _proto
from ._aio_weights import AsyncWeightSync
from ._channel import (
    READY_CALL_SECONDS,
    READY_POLL_SECONDS,
    call_metadata,
    call_timeout,
    generate_timeouts,
    make_channel,
)
from ._progress import SampleProgress
from ._segment import OWNER_ONLY, SegmentPool
from ._timeline import Timeline, timeline, timeline_request
from ._tls import TlsInput, explained, tls_files
from .errors import Cancelled, DeadlineExceeded, Misdirected, RolloutError, Unavailable, translated
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


class AsyncRolloutClient(AsyncWeightSync):
    """A connection to one rollout-server, for one event loop. As `RolloutClient`, with methods to await.

    Make it inside the running loop. Cancelling a task that waits for a call drops the work on the server.
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
        """As `RolloutClient`."""
        self.address = address
        self._timeout = timeout
        self._token = token
        self._metadata = call_metadata(token)
        self._segments = SegmentPool(segment_mode)
        self._pushing = weakref.WeakSet()
        self._tls = tls_files(tls)
        self._channel = make_channel(grpc.aio, address, self._tls)

    async def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """As `RolloutClient.generate`."""
        refuse_unknown("generate", options, GenerateOptions)
        shown = options.pop("progress", False)
        stream = self.generate_stream(prompts, n, sampling, **options)
        collector = _convert.Collector(len(prompts), n)
        with SampleProgress(len(prompts) * n, shown) as progress:
            async with stream:
                async for event in stream:
                    collector.add(event)
                    progress.add(event)
        return collector.outputs()

    def generate_stream(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateStreamOptions],
    ) -> AsyncGenerateStream:
        """As `RolloutClient.generate_stream`."""
        limit, deadline = generate_timeouts(options.get("timeout"), self._timeout)
        request = _convert.generate_request(prompts, n, sampling, options, limit)
        call_options = {"timeout": deadline, "metadata": self._metadata}
        return AsyncGenerateStream(
            self._callable(_proto.GENERATE, stream=True), request, call_options, self._translated
        )

    async def score(self, sequences: Sequence[TokenIds], **options: Unpack[ScoreOptions]) -> list[Score]:
        """As `RolloutClient.score`."""
        request = _convert.score_request(sequences, options)
        responses = await self._gather(_proto.SCORE, request, options.get("timeout"))
        return _convert.scores(responses, len(request.sequences))

    async def abort(self, request_ids: str | Iterable[str] = (), *, all: bool = False) -> AbortResult:
        """As `RolloutClient.abort`."""
        return _convert.abort_result(await self._call(_proto.ABORT, _convert.abort_request(request_ids, all=all)))

    async def info(self) -> ServerInfo:
        """As `RolloutClient.info`."""
        return _convert.server_info(await self._call(_proto.GET_INFO, _proto.GET_INFO.request()))

    async def status(self) -> ServerStatus:
        """As `RolloutClient.status`."""
        return _convert.server_status(await self._call(_proto.GET_STATUS, _proto.GET_STATUS.request()))

    async def timeline(self, since: int = 0, max_spans: int = 0) -> Timeline:
        """As `RolloutClient.timeline`."""
        return timeline(await self._call(_proto.GET_TIMELINE, timeline_request(since, max_spans)))

    async def reset_prefix_cache(self) -> int:
        """As `RolloutClient.reset_prefix_cache`."""
        return (await self._call(_proto.RESET_PREFIX_CACHE, _proto.RESET_PREFIX_CACHE.request())).blocks

    async def sleep(self, level: int = 1, mode: DrainMode = "wait") -> SleepResult:
        """As `RolloutClient.sleep`."""
        return _convert_weights.sleep_result(
            await self._call(_proto.SLEEP, _convert_weights.sleep_request(level, mode))
        )

    async def wake(self, tags: Iterable[MemoryTag] | None = None, *, reload: bool = False) -> WakeResult:
        """As `RolloutClient.wake`."""
        return _convert_weights.wake_result(await self._call(_proto.WAKE, _convert_weights.wake_request(tags, reload)))

    @asynccontextmanager
    async def awake(self, tags: Iterable[MemoryTag] | None = None, level: int = 1) -> AsyncIterator[AsyncRolloutClient]:
        """As `RolloutClient.awake`."""
        await self.wake(tags)
        try:
            yield self
        except BaseException:
            with suppress(RolloutError):
                await self.sleep(level, "abort")
            raise
        await self.sleep(level)

    async def pause(self, mode: DrainMode = "wait") -> None:
        """As `RolloutClient.pause`."""
        await self._call(_proto.PAUSE, _convert_weights.pause_request(mode))

    async def resume(self) -> None:
        """As `RolloutClient.resume`."""
        await self._call(_proto.RESUME, _proto.RESUME.request())

    async def wait_until_ready(self, timeout: float = 60.0) -> None:
        """As `RolloutClient.wait_until_ready`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                left = max(deadline - time.monotonic(), READY_POLL_SECONDS)
                response = await self._call(
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
            await asyncio.sleep(READY_POLL_SECONDS)

    async def close(self) -> None:
        """As `RolloutClient.close`."""
        self._end_pushes()
        await self._channel.close()
        await asyncio.to_thread(self._segments.close)

    async def __aenter__(self) -> AsyncRolloutClient:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the client."""
        await self.close()

    async def _call(self, method: _proto.Method, request: Any, timeout: float | None = None) -> Any:
        async with self._translated():
            return await self._callable(method)(request, **self._call_options(timeout))

    async def _gather(self, method: _proto.Method, request: Any, timeout: float | None) -> list[Any]:
        async with self._translated():
            call = self._callable(method, stream=True)(request, **self._call_options(timeout))
            try:
                return [response async for response in call]
            except BaseException:  # the task is cancelled: the server must not go on
                call.cancel()
                raise

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """As `translated`, with better messages for connections that failed."""
        try:
            with translated():
                yield
        except Unavailable as error:
            raise await asyncio.to_thread(explained, error, self.address, self._tls) from error

    def _call_options(self, timeout: float | None) -> dict[str, Any]:
        return {"timeout": call_timeout(timeout, self._timeout), "metadata": self._metadata}

    def _callable(self, method: _proto.Method, stream: bool = False) -> Callable[..., Any]:
        make = self._channel.unary_stream if stream else self._channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


class AsyncGenerateStream(AsyncIterator[StreamEvent]):
    """The events of one request as they come. An asynchronous iterator and a context manager."""

    def __init__(
        self,
        start: Callable[..., Any],
        request: Any,
        options: dict[str, Any],
        in_call: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """Starts the call; `in_call` turns the errors inside it into those of this package."""
        self.request_id: str = request.request_id
        """For `AsyncRolloutClient.abort`."""
        self._cancelled = False
        self._in_call = in_call
        with translated():
            self._call = start(request, **options)
        self._messages = self._call.__aiter__()

    async def __anext__(self) -> StreamEvent:
        """The next event; waits until there is one."""
        async with self._in_call():
            try:
                event = None
                while event is None:
                    event = _convert.stream_event(await self._messages.__anext__())
                return event
            except (StopAsyncIteration, grpc.RpcError):
                raise
            except BaseException as error:  # the task is cancelled, or an answer makes no sense
                if self._cancelled:  # by `cancel`: not the task's own cancellation, though gRPC raises it alike
                    raise Cancelled("the stream was cancelled on this side") from error
                self.cancel()
                raise

    def cancel(self) -> None:
        """Drops the request on the server, if it still runs."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncGenerateStream:
        """The stream itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what still runs."""
        self.cancel()
