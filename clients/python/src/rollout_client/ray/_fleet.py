"""A fleet whose servers run in Ray actors."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .._segment import OWNER_ONLY
from .._tls import TlsInput
from ..errors import InvalidArgument, ResourceExhausted, RolloutError, Unavailable
from ..fleet import Fleet as AddressFleet
from ..fleet._core import CAPACITY, PATIENCE_SECONDS, Core
from ..fleet._pusher import Resupply
from ..fleet._replica import ResolvedEndpoint
from ..process import STOP_SECONDS
from ._actor import ReplicaActor, Settings, Started

if TYPE_CHECKING:
    from ray.actor import ActorHandle

START_SECONDS = 600.0
"""Default limit for a server's start: reading a large model takes minutes."""


class ActorEndpoint:
    """Finds the server of an actor, whose address changes with each start."""

    def __init__(self, actor: ActorHandle, node_id: str) -> None:
        """`node_id` is the node of this process."""
        self._actor, self._node_id = actor, node_id
        self._asked: asyncio.Future[Started] | None = None

    async def resolve(self) -> ResolvedEndpoint:
        """Asks the actor, which answers once its server is ready; a later call may get the answer of this one."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._ask())
        try:
            started = await asyncio.shield(self._asked)
        finally:
            if self._asked.done():
                self._asked = None
        return ResolvedEndpoint(started.address, started.instance, is_local=started.node_id == self._node_id)

    async def _ask(self) -> Started:
        if not ray.is_initialized():  # a call would start another Ray
            raise Unavailable("Ray was shut down")
        try:
            return await self._actor.started.remote()
        except RayError as error:
            raise Unavailable(f"the actor does not answer: {_reason(error)}") from None


class Fleet(AddressFleet):
    """Several servers of the same model in Ray actors, used as one; see `rollout_client.fleet.Fleet`.

    Ray places the servers and restarts them when a server, its actor or its node is lost; a restarted server gets the
    policy that it missed. The servers require a token that this fleet draws. They exit with `close` or with this
    process.

    ```python
    with Fleet("rollout-server", "path/to/model", replicas=2, num_gpus=1) as fleet:
        fleet.generate(["Hello"], n=8)
    ```
    """

    def __init__(
        self,
        binary: str | Path | None,
        model: str | Path,
        replicas: int = 2,
        flags: Sequence[str] = (),
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        placement_group: PlacementGroup | None = None,
        bundle_indices: Sequence[int] | None = None,
        strategy: str = "SPREAD",
        max_restarts: int = -1,
        start_seconds: float = START_SECONDS,
        timeout: float | None = None,
        tls: TlsInput = None,
        segment_mode: int = OWNER_ONLY,
        quorum: int | None = None,
        capacity: int = CAPACITY,
        patience: float = PATIENCE_SECONDS,
        resupply: Resupply | None = None,
    ) -> None:
        """Starts the actors; `wait_until_ready` waits for their servers.

        Args:
            binary: the server's program, a path or a name in `PATH`, on every node; None is the installed one.
            model: the value of `--model`, on every node.
            replicas: number of servers.
            flags: further flags of each server. The fleet sets host, ports and token file.
            num_cpus, num_gpus: resources that each replica takes from its bundle.
            placement_group: placement group of the replicas, such as the trainer's; None creates one with `replicas`
                bundles, which `close` removes.
            bundle_indices: with `placement_group`, the bundle of each replica; None takes the first ones.
            strategy: without `placement_group`, `"SPREAD"`, `"STRICT_SPREAD"`, `"PACK"` or `"STRICT_PACK"`.
            max_restarts: how often Ray restarts a replica; -1 is unlimited.
            start_seconds: the longest time that a server's start may take.
            tls: TLS settings for servers whose `flags` have `--tls-cert`; files must be on every node.
            timeout, segment_mode, quorum, capacity, patience, resupply: as for `rollout_client.fleet.Fleet`.

        Raises:
            ResourceExhausted: the cluster has no room for the bundles.
        """
        if replicas < 1:
            raise InvalidArgument(f"replicas: expected at least 1, got {replicas}")
        indices = list(range(replicas) if bundle_indices is None else bundle_indices)
        if len(indices) != replicas:
            raise InvalidArgument(f"bundle_indices: expected {replicas}, one for each replica, got {len(indices)}")
        if bundle_indices is not None and placement_group is None:
            raise InvalidArgument("bundle_indices: needs placement_group")
        self._own_group: PlacementGroup | None = None
        self._start_seconds = start_seconds
        self.token = secrets.token_hex(32)
        """The token of all servers, for further clients."""
        program = None if binary is None else str(binary)
        settings = Settings(program, str(model), tuple(map(str, flags)), self.token, tls, start_seconds)
        self.actors: list[ActorHandle] = []
        """The actor of each replica, by number."""
        try:
            if placement_group is None:
                resources = {name: amount for name, amount in (("CPU", num_cpus), ("GPU", num_gpus)) if amount}
                placement_group = self._own_group = _reserved([resources] * replicas, strategy, start_seconds)
            actor = ray.remote(ReplicaActor)
            for index in indices:
                where = PlacementGroupSchedulingStrategy(placement_group, index)
                wants = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": max_restarts}
                self.actors.append(actor.options(**wants, scheduling_strategy=where).remote(settings))
            self._core = _ActorCore(
                self.actors,
                start_seconds,
                {"timeout": timeout, "token": self.token, "tls": tls, "segment_mode": segment_mode},
                quorum=quorum,
                capacity=capacity,
                patience=patience,
                resupply=resupply,
            )
        except BaseException:
            self._end_actors(0.0)
            raise

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until all replicas are current.

        Args:
            timeout: in seconds; None takes the fleet's `start_seconds`.

        Raises:
            RolloutError: a server does not start.
            Unavailable: fewer than the quorum are current within the timeout.
        """
        super().wait_until_ready(timeout)

    def started(self) -> list[Started]:
        """The server of each replica, by number.

        Raises:
            Unavailable: an actor is gone, or is being restarted.
        """
        try:
            return ray.get([actor.started.remote() for actor in self.actors], timeout=self._start_seconds)
        except (RayActorError, GetTimeoutError) as error:
            raise Unavailable(_reason(error)) from None

    def close(self) -> None:
        """Ends calls, connections and servers, and removes the placement group that this fleet created."""
        super().close()
        self._end_actors(STOP_SECONDS)

    def _end_actors(self, seconds: float) -> None:
        """Stops the servers, and kills them after this time."""
        if not ray.is_initialized():
            return
        stopping = [actor.stop.remote() for actor in self.actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=seconds)
        for actor in self.actors:
            ray.kill(actor)
        if self._own_group is not None:
            remove_placement_group(self._own_group)


class _ActorCore(Core):
    """The parts of a fleet whose servers are actors."""

    def __init__(
        self, actors: Sequence[ActorHandle], start_seconds: float, connection: dict[str, Any], **settings: Any
    ) -> None:
        self._actors, self._start_seconds = actors, start_seconds
        node_id = ray.get_runtime_context().get_node_id()
        super().__init__([ActorEndpoint(actor, node_id) for actor in actors], connection, **settings)

    async def until_ready(self, timeout: float | None) -> None:
        """As `Fleet.wait_until_ready`."""
        timeout = self._start_seconds if timeout is None else timeout
        deadline = time.monotonic() + timeout
        asked = [asyncio.ensure_future(_answer(actor.started.remote())) for actor in self._actors]
        try:
            await asyncio.wait(asked, timeout=timeout)
            for number, answer in enumerate(asked):
                error = answer.exception() if answer.done() else None
                # An unavailable actor is being restarted.
                if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                    raise RolloutError(f"replica {number} does not start: {_reason(error)}") from None
        finally:
            for answer in asked:
                answer.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await self.until_current(timeout, deadline)


async def _answer(asked: Awaitable[Started]) -> Started:
    return await asked


def _reserved(bundles: list[dict[str, float]], strategy: str, seconds: float) -> PlacementGroup:
    group = placement_group(bundles, strategy=strategy)
    try:
        has_room = group.wait(seconds)
    except BaseException:  # KeyboardInterrupt in the wait
        remove_placement_group(group)
        raise
    if not has_room:
        remove_placement_group(group)
        have: dict[str, Any] = {
            name: amount for name, amount in ray.available_resources().items() if name in bundles[0]
        }
        raise ResourceExhausted(
            f"replicas: the cluster has no room for {len(bundles)} bundles of {bundles[0]} after {seconds:g} s; it has "
            f"{have} free"
        )
    return group


def _reason(error: Exception) -> str:
    """The last line of one of Ray's errors, after the actor's traceback; the log, which Ray shows, has more."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
