"""One push of a fleet, from its start to its receipt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .._progress import Progress
from .._pusher import Pusher
from .._segment import SegmentPool
from .._senders import OutgoingTensor, Sender
from .._session import AsyncPush, Push
from ..errors import FailedPrecondition, InvalidArgument, RolloutError
from ..options import PushKind
from ..types import ParameterInfo
from ._fanout import FanOut
from ._loop import Loop
from ._policy import Repush
from ._pushes import OpenPush, Pushes, PushRequest
from .types import FleetReceipt

# Addresses that stand for all replicas; pushes to the first one may use shared memory.
_THIS_HOST, _OTHER_HOSTS = "localhost:0", "fleet:0"


class FanOutPusher(Pusher):
    """Sends one push of the fleet to all its replicas."""

    may_use_ipc = False  # each replica is another process, perhaps on another machine

    def __init__(
        self, transaction: Transaction, push: OpenPush, segments: SegmentPool, keep: Callable[[str, Any], None]
    ) -> None:
        """Sends nothing yet.

        Args:
            transaction: of the push.
            push: the push, whose turn it is.
            segments: of the fleet.
            keep: called with each tensor that is written to an open push.
        """
        self.address = _THIS_HOST if push.is_local else _OTHER_HOSTS
        self._transaction, self._segments, self._keep = transaction, segments, keep
        self._first = push.clients[min(push.clients)]

    def start(self, timeout: float | None) -> FanOut:
        """As `Pusher.start`, on all replicas."""
        return self._transaction.start(timeout)

    def parameters(self) -> list[ParameterInfo]:
        """As `RolloutClient.parameters`, of one replica."""
        return self._first.parameters()

    def _open(self, sender: Sender, outgoing: Callable[..., OutgoingTensor | None], progress: Progress) -> FleetPush:
        return FleetPush(sender, outgoing, progress, transaction=self._transaction, keep=self._keep)

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
        repush: Repush | None,
    ) -> None:
        """Does not wait for its turn yet.

        Args:
            loop, pushes, segments: of the fleet.
            kind: of the push.
            options: of the push.
            repush: repeats the push, for replicas that miss it.
        """
        options = dict(options)
        if options.get("expected_generation") is not None:
            raise InvalidArgument("expected_generation: replicas count generations by themselves; leave it out")
        self._loop, self._pushes, self._repush = loop, pushes, repush
        self._segments = segments
        self._push = OpenPush(
            PushRequest(
                kind,
                options.get("name"),
                options.pop("version", None),
                options.pop("expected_version", None),
                options.pop("force_version", False),
            )
        )
        self.options = options
        """The options for the pusher."""

    def begin(self, keep: Callable[[str, Any], None]) -> FanOutPusher:
        """Waits for its turn, and returns the pusher.

        Args:
            keep: called with each tensor that is written to an open push.

        Raises:
            RolloutError: the push cannot start; the policy stays as it was.
        """
        push = self._push
        try:
            self._loop.run(self._pushes.begin(push))
        except BaseException:  # the push may have got its turn just when the wait was interrupted
            with contextlib.suppress(RolloutError):
                self._loop.make(lambda: self._pushes.withdraw(push))
            raise
        if push.request.name is None:  # a replica that is behind may have any version
            self.options |= {"version": push.change.version, "force_version": True}
        return FanOutPusher(self, push, self._segments, keep)

    def start(self, timeout: float | None) -> FanOut:
        """Starts the calls, which may take `timeout` seconds each."""
        return self._pushes.start_call(self._push, timeout, self._loop.run)

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
            self._loop.submit(self._pushes.drop(self._push, roll_back))

    def cancel(self) -> None:
        """Makes its calls raise `Cancelled`; for any thread. Has no effect after the end."""
        if not self._push.ended:
            with contextlib.suppress(FailedPrecondition):  # the fleet is closed
                self._loop.make(lambda: self._pushes.cancel(self._push))

    def _end(self) -> FleetReceipt | None:
        try:
            # A commit of the replicas changes the fleet's policy, even if this wait is interrupted.
            return self._loop.complete(self._pushes.end(self._push, self._repush))
        finally:
            for client in self._push.clients.values():
                client.close()


class FleetPush(Push):
    """An open push into all replicas, as `rollout_client.Push`; `Fleet.begin_push` returns it."""

    def __init__(
        self,
        sender: Sender,
        outgoing: Callable[[str, Any, Any], OutgoingTensor | None],
        progress: Progress,
        *,
        transaction: Transaction,
        keep: Callable[[str, Any], None],
    ) -> None:
        """As `Push`.

        Args:
            sender, outgoing, progress: as for `Push`.
            transaction: of the push.
            keep: called with each tensor that was written.
        """
        super().__init__(sender, outgoing, progress)
        self._transaction, self._keep = transaction, keep

    def write(self, name: str, tensor: Any, old: Any = None) -> None:
        """As `Push.write`."""
        super().write(name, tensor, old)
        self._keep(name, tensor)

    def commit(self) -> FleetReceipt:
        """As `Push.commit`.

        Raises:
            PartialCommit: fewer replicas than the quorum have confirmed it.
        """
        super().commit()
        self._receipt = None
        self._receipt = self._transaction.finish()
        return self._receipt

    def cancel(self) -> None:
        """Makes its methods raise `Cancelled`; for any thread."""
        self._transaction.cancel()

    def __del__(self) -> None:
        """Rolls back a push that was garbage-collected while open."""
        if self.is_open:
            self._transaction.drop(self._sender.close)

    def _end(self, how: str) -> None:
        super()._end(how)
        if self._receipt is None:
            self._transaction.abandon()


AsyncFleetPush = AsyncPush
"""As `FleetPush`, awaited."""
