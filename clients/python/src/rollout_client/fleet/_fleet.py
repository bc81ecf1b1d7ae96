"""The blocking fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._segment import OWNER_ONLY, SegmentPool
from .._tls import TlsInput
from ..aio import AsyncRolloutClient
from ..client import RolloutClient
from ..errors import InvalidArgument, RolloutError, Unavailable
from ..options import GenerateOptions, ScoreOptions, refuse_unknown
from ..types import (
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
from ._lifecycle import LifecycleOrders
from ._loop import Loop
from ._pushes import Pushes
from ._replica import FixedPlace, Place
from ._requests import Requests
from ._roster import Roster
from ._weights import FleetWeights, Resupply
from .types import FleetStatus, ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

CAPACITY = 512
"""Samples that a replica is given at once: twice what a server runs at once by default, so that its queue is never
empty, and few enough that a replica which is slow leaves prompts to the others."""
PATIENCE_SECONDS = 300.0
"""How long requests wait when no replica can be reached: a server of a large model takes minutes to start."""
READY_POLL_SECONDS = 0.2


class Fleet(FleetWeights):
    """Several servers of the same model, used as one. Safe to share between threads; not across `fork`.

    Prompts are spread over the replicas, each with all its samples on one of them, and come back in order, with the
    bits that one server gives for the same seed. A push reaches all replicas: once it has returned, nothing is served
    by an older policy. Methods are those of `RolloutClient`, with the same errors.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout: float | None = None,
        token: str | None = None,
        *,
        tls: TlsInput = None,
        segment_mode: int = OWNER_ONLY,
        quorum: int | None = None,
        capacity: int = CAPACITY,
        patience: float = PATIENCE_SECONDS,
        resupply: Resupply | None = None,
    ) -> None:
        """Begins to look for the replicas; `wait_until_ready` waits for them.

        Args:
            addresses: `host:port` of each replica's server. Whoever runs the servers starts them again.
            timeout, token, tls, segment_mode: as for `RolloutClient`, for all replicas.
            quorum: how many replicas must take a push; with fewer it fails, and the policy is as it was. None is half
                of them, rounded up.
            capacity: samples that a replica is given at once. Prompts above that wait in this process for the replica
                that has room first.
            patience: seconds for which requests wait when no replica can be reached, before they raise `Unavailable`.
            resupply: gives the tensors of the last full push once more (a mapping, or pairs one by one), for a replica
                that missed it. It is called in a thread of its own, while the trainer goes on: what it gives must be
                what was pushed, which the digest proves. None lets such a replica wait for the next full push.
        """
        self._begin(
            [FixedPlace(address) for address in addresses],
            {"timeout": timeout, "token": token, "tls": tls, "segment_mode": segment_mode},
            quorum=quorum,
            capacity=capacity,
            patience=patience,
            resupply=resupply,
        )

    def _begin(
        self,
        places: Sequence[Place],
        connection: dict[str, Any],
        *,
        quorum: int | None,
        capacity: int,
        patience: float,
        resupply: Resupply | None,
    ) -> None:
        """Begins to look for the replicas at these places."""
        if not places:
            raise InvalidArgument("addresses: expected those of at least one server")
        quorum = (len(places) + 1) // 2 if quorum is None else quorum
        if not 1 <= quorum <= len(places):
            raise InvalidArgument(f"quorum: expected a number from 1 to {len(places)}, got {quorum}")
        if capacity < 1:
            raise InvalidArgument(f"capacity: expected at least 1, got {capacity}")
        self._timeout, self._resupply, self._patience = connection["timeout"], resupply, patience
        self._segments = SegmentPool(connection["segment_mode"])
        loop = self._loop = Loop()

        def make() -> Roster:
            roster = Roster(places, capacity, lambda address: AsyncRolloutClient(address, **connection), quorum)
            self._requests = Requests(roster, patience, connection["timeout"])
            self._pushes = Pushes(roster, lambda address: RolloutClient(address, **connection))
            self._orders = LifecycleOrders(roster, self._requests)
            roster.start()
            return roster

        self._roster = loop.make(make)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until all replicas are current.

        Args:
            timeout: in seconds; None is the fleet's `patience`.

        Raises:
            RolloutError: none can become so by itself, for example for want of a token.
            Unavailable: fewer than the quorum are within the timeout. With at least the quorum it returns then, and the
                others follow when they can.
        """
        self._loop.run(self._until_ready(timeout))

    def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """As `RolloutClient.generate`, spread over the replicas: the same samples as one server gives for the seed.

        A prompt whose replica is lost, or misses a push, goes to another one, and is begun anew there. `progress`
        counts the samples of whole prompts, and is called in the fleet's thread.
        """
        return self._loop.run(self._generate(prompts, n, sampling, options))

    def score(self, sequences: Sequence[TokenIds], **options: Unpack[ScoreOptions]) -> list[Score]:
        """As `RolloutClient.score`, spread over the replicas."""
        return self._loop.run(self._score(sequences, options))

    def abort(self, request_ids: str | Iterable[str] = (), *, all: bool = False) -> AbortResult:
        """As `RolloutClient.abort`, of requests of this fleet; with `all` of other clients of the servers too."""
        return self._loop.run(self._abort(request_ids, all))

    def info(self) -> ServerInfo:
        """As `RolloutClient.info`, of one replica."""
        return self._loop.run(self._info())

    def status(self) -> FleetStatus:
        """The policy's version, and every replica's state; asks each server that can be reached."""
        return self._loop.run(self._status())

    def reset_prefix_cache(self) -> int:
        """As `RolloutClient.reset_prefix_cache`, of all replicas; returns the sum of the blocks."""
        return self._loop.run(self._reset_prefix_cache())

    def sleep(self, level: int = 1, mode: DrainMode = "wait") -> dict[int, SleepResult]:
        """As `RolloutClient.sleep`, of all replicas; returns what each says, by its number.

        A replica that starts again while the fleet sleeps is put to sleep too.
        """
        return self._loop.run(self._orders.sleep(level, mode))

    def wake(self, tags: Iterable[MemoryTag] | None = None, *, reload: bool = False) -> dict[int, WakeResult]:
        """As `RolloutClient.wake`, of all replicas; returns what each says, by its number."""
        return self._loop.run(self._orders.wake(None if tags is None else list(tags), reload))

    @contextmanager
    def awake(self, tags: Iterable[MemoryTag] | None = None, level: int = 1) -> Iterator[Self]:
        """As `RolloutClient.awake`, of all replicas."""
        self.wake(tags)
        try:
            yield self
        except BaseException:
            with suppress(RolloutError):
                self.sleep(level, "abort")
            raise
        self.sleep(level)

    def pause(self, mode: DrainMode = "wait") -> None:
        """As `RolloutClient.pause`, of all replicas."""
        self._loop.run(self._orders.pause(mode))

    def resume(self) -> None:
        """As `RolloutClient.resume`, of all replicas."""
        self._loop.run(self._orders.resume())

    def close(self) -> None:
        """Ends the calls that run, and all connections; the servers go on."""
        with suppress(RolloutError):  # it is closed already
            self.cancel_update()
        self._loop.close(self._roster.close)
        self._segments.close()

    def __enter__(self) -> Self:
        """The fleet, ready."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the fleet."""
        self.close()

    async def _generate(
        self, prompts: Sequence[PromptInput], n: int, sampling: SamplingInput, options: GenerateOptions
    ) -> list[PromptOutput]:
        refuse_unknown("generate", options, GenerateOptions)
        if isinstance(prompts, str):
            raise InvalidArgument("prompts: expected a list of prompts, got a single prompt; put it in a list")
        return await self._requests.generate(prompts, n, sampling, dict(options))

    async def _score(self, sequences: Sequence[TokenIds], options: ScoreOptions) -> list[Score]:
        refuse_unknown("score", options, ScoreOptions)
        return await self._requests.score(sequences, dict(options))

    async def _abort(self, request_ids: str | Iterable[str], all: bool) -> AbortResult:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        if bool(ids) == all:
            raise InvalidArgument("request_ids: name the requests to abort, or pass all=True, but not both")
        return await self._requests.abort(ids, all=all)

    async def _info(self) -> ServerInfo:
        return await self._roster.first(lambda client: client.info())

    async def _reset_prefix_cache(self) -> int:
        return sum((await self._roster.each(lambda client: client.reset_prefix_cache())).values())

    async def _status(self) -> FleetStatus:
        roster = self._roster
        await asyncio.gather(*(roster.refresh(replica) for replica in roster.replicas))
        replicas = [
            ReplicaStatus(r.number, r.address, r.state, r.reason, r.route.samples, r.status) for r in roster.replicas
        ]
        known = sorted((r for r in replicas if r.server is not None), key=lambda r: r.state is not ReplicaState.CURRENT)
        lifecycle = known[0].server.lifecycle if known else Lifecycle.SHUTTING_DOWN
        version = 0 if roster.policy is None else roster.policy.version
        return FleetStatus(lifecycle, version, roster.quorum, replicas)

    async def _until_ready(self, timeout: float | None) -> None:
        timeout = self._patience if timeout is None else timeout
        await self._until_current(timeout, time.monotonic() + timeout)

    async def _until_current(self, timeout: float, deadline: float) -> None:
        """Waits for the replicas until the deadline, which is after `timeout` seconds."""
        roster = self._roster
        while (ready := len(roster.numbers(ReplicaState.CURRENT))) < len(roster.replicas):
            if time.monotonic() >= deadline:
                break
            if (error := roster.hopeless()) is not None:
                raise error
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(roster.changed.wait(), READY_POLL_SECONDS)
        if ready < roster.quorum:
            raise Unavailable(
                f"{ready} of {len(roster.replicas)} replicas are ready after {timeout:g} s: {roster.describe()}"
            )
