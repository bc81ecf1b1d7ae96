"""One push of a fleet, from its start to its receipt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from .._pusher import Pusher
from .._segment import SegmentPool
from .._session import AsyncPush, NamedTensors, Push
from ..errors import FailedPrecondition, InvalidArgument, RolloutError
from ..options import PushKind
from ..types import ParameterInfo
from ._fanout import FanOut
from ._loop import Loop
from ._policy import Redo
from ._pushes import Pushes, Pushing, Wanted
from .types import FleetReceipt

# Addresses that stand for all replicas; pushes to the first one may use shared memory.
_THIS_HOST, _OTHER_HOSTS = "localhost:0", "fleet:0"


class FanOutPusher(Pusher):
    """Sends one push of the fleet to all its replicas."""

    may_use_ipc = False  # each replica is another process, perhaps on another machine

    def __init__(self, pushing: Pushing, segments: SegmentPool, start: Callable[[float | None], FanOut]) -> None:
        """`start` starts the calls, with their timeout in seconds."""
        self.address = _THIS_HOST if pushing.is_local else _OTHER_HOSTS
        self._segments, self._start = segments, start
        self._first = pushing.clients[min(pushing.clients)]

    def start(self, timeout: float | None) -> FanOut:
        """As `Pusher.start`, on all replicas."""
        return self._start(timeout)

    def parameters(self) -> list[ParameterInfo]:
        """As `RolloutClient.parameters`, of one replica."""
        return self._first.parameters()

    def _exporter(self) -> NoReturn:
        raise InvalidArgument('transport: a fleet does not read device memory; use "auto", or push to one server')


class Transaction:
    """A push, from its wait for its turn (`begin`) to its end by `finish` or `abandon`."""

    def __init__(
        self,
        loop: Loop,
        pushes: Pushes,
        segments: SegmentPool,
        *,
        kind: PushKind,
        options: Mapping[str, Any],
        redo: Redo | None,
    ) -> None:
        """Does not wait for its turn yet.

        Args:
            loop, pushes, segments: of the fleet.
            kind: of the push.
            options: of the push.
            redo: repeats the push, for replicas that miss it.
        """
        options = dict(options)
        if options.get("expected_generation") is not None:
            raise InvalidArgument("expected_generation: replicas count generations by themselves; leave it out")
        self._loop, self._pushes, self._redo = loop, pushes, redo
        self._segments = segments
        self._pushing = Pushing(
            Wanted(
                kind,
                options.get("name"),
                options.pop("version", None),
                options.pop("expected_version", None),
                options.pop("force_version", False),
            )
        )
        self.options = options
        """The options for the pusher."""

    def begin(self) -> FanOutPusher:
        """Waits for its turn, and returns the pusher.

        Raises:
            RolloutError: the push cannot start; the policy stays as it was.
        """
        pushing = self._pushing
        try:
            self._loop.run(self._pushes.begin(pushing))
        except BaseException:  # the push may have got its turn just when the wait was interrupted
            with contextlib.suppress(RolloutError):
                self._loop.make(lambda: self._pushes.give_up(pushing))
            raise
        if pushing.wanted.name is None:  # a replica that is behind may have any version
            self.options |= {"version": pushing.change.version, "force_version": True}
        start = lambda timeout: self._pushes.start_call(pushing, timeout, self._loop.run)  # noqa: E731
        return FanOutPusher(pushing, self._segments, start)

    def finish(self) -> FleetReceipt:
        """Ends a committed push, and returns its receipt.

        Raises:
            PartialCommit: fewer replicas than the quorum have confirmed it.
        """
        receipt = self._end()
        if receipt is None:
            raise FailedPrecondition("the push ended without a commit")
        return receipt

    def abandon(self) -> None:
        """Ends a failed push; further errors are dropped in favor of the first."""
        with contextlib.suppress(RolloutError):
            self._end()

    def drop(self, roll_back: Callable[[], None]) -> None:
        """Ends a push that was garbage-collected. Does not block, as the collector calls it in any thread.

        Args:
            roll_back: closes the calls; called in another thread.
        """
        with contextlib.suppress(FailedPrecondition):  # the fleet is closed
            self._loop.submit(self._pushes.drop(self._pushing, roll_back))

    def cancel(self) -> None:
        """Makes its calls raise `Cancelled`; for any thread. Has no effect after the end."""
        if not self._pushing.ended:
            with contextlib.suppress(FailedPrecondition):  # the fleet is closed
                self._loop.make(lambda: self._pushes.cancel(self._pushing))

    def _end(self) -> FleetReceipt | None:
        try:
            # A commit of the replicas changes the fleet's policy, even if this wait is interrupted.
            return self._loop.complete(self._pushes.end(self._pushing, self._redo))
        finally:
            for client in self._pushing.clients.values():
                client.close()


AsyncFleetPush = AsyncPush
"""As `FleetPush`, awaited."""


class FleetPush:
    """An open push into all replicas, as `rollout_client.Push`; `Fleet.begin_push` returns it."""

    def __init__(self, transaction: Transaction, push: Push, keep: Callable[[str, Any], None]) -> None:
        """For `begin_push`.

        Args:
            transaction: its turn.
            push: sends the tensors.
            keep: called with each tensor that was written.
        """
        self._transaction, self._push, self._keep = transaction, push, keep
        self._receipt: FleetReceipt | None = None
        self._ended = False

    @property
    def receipt(self) -> FleetReceipt:
        """The replicas' answers to the commit.

        Raises:
            FailedPrecondition: the push is not committed.
        """
        if self._receipt is None:
            raise FailedPrecondition("receipt: the push is not committed")
        return self._receipt

    @property
    def is_open(self) -> bool:
        """Whether the push was neither committed nor rolled back, and has not failed."""
        return self._push.is_open

    def write(self, name: str, tensor: Any, old: Any = None) -> None:
        """As `Push.write`."""
        self._sent(lambda: self._push.write(name, tensor, old))
        self._keep(name, tensor)

    def write_all(self, named_tensors: NamedTensors) -> None:
        """As `Push.write_all`."""
        for name, tensor in named_tensors.items() if hasattr(named_tensors, "items") else named_tensors:
            self.write(name, tensor)
            del tensor  # before the next one is gathered, so that two are never alive at once

    def commit(self) -> FleetReceipt:
        """As `Push.commit`.

        Raises:
            PartialCommit: fewer replicas than the quorum have confirmed it.
        """
        self._sent(self._push.commit)
        self._ended = True
        self._receipt = self._transaction.finish()
        return self._receipt

    def rollback(self) -> None:
        """As `Push.rollback`."""
        self._push.rollback()
        self._abandon()

    def cancel(self) -> None:
        """Makes its methods raise `Cancelled`; for any thread."""
        self._transaction.cancel()

    def __enter__(self) -> FleetPush:
        """Returns the push."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `Push.__exit__`."""
        if kind is not None:
            if self.is_open:
                self._push.rollback()
            self._abandon()
        elif self.is_open:
            self.commit()
        elif self._receipt is None:
            self._push.__exit__(None, None, None)

    def __del__(self) -> None:
        """Rolls back a push that was garbage-collected while open."""
        if not self._ended:
            self._transaction.drop(self._push.rollback)

    def _sent(self, use: Callable[[], object]) -> None:
        try:
            use()
        except BaseException:
            if not self.is_open:
                self._abandon()
            raise

    def _abandon(self) -> None:
        if not self._ended:
            self._ended = True
            self._transaction.abandon()
