"""One push of a fleet, from its turn to its receipt."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from .._segment import SegmentPool
from .._session import NamedTensors, Push
from .._weights import WeightSync
from ..errors import FailedPrecondition, InvalidArgument
from ..types import ParameterInfo
from ._fanout import FanOut
from ._loop import Loop
from ._policy import Redo
from ._pushes import Pushes, Pushing, Wanted
from .types import FleetReceipt

# What stands for the address of all replicas: shared memory reaches the first.
_THIS_HOST, _OTHER_HOSTS = "localhost:0", "fleet:0"


class Sender(WeightSync):
    """A client whose pushes go to all replicas of one push of the fleet."""

    def __init__(
        self, pushing: Pushing, segments: SegmentPool, timeout: float | None, start: Callable[[float | None], FanOut]
    ) -> None:
        """`start` begins the calls, with the seconds that they may take."""
        self.address = _THIS_HOST if pushing.is_local else _OTHER_HOSTS
        self._segments, self._timeout, self._start_update = segments, timeout, start
        self._first = pushing.clients[min(pushing.clients)]

    def parameters(self) -> list[ParameterInfo]:
        """As `RolloutClient.parameters`, of one replica."""
        return self._first.parameters()


class Transaction:
    """A push that has its turn. Ends once, with `finish` or `abandon`."""

    def __init__(
        self,
        loop: Loop,
        pushes: Pushes,
        kind: str,
        options: dict[str, Any],
        *,
        segments: SegmentPool,
        timeout: float | None,
    ) -> None:
        """Waits for the turn.

        Raises:
            RolloutError: the push cannot begin; the policy is as it was.
        """
        options = dict(options)
        if options.get("expected_generation") is not None:
            raise InvalidArgument("expected_generation: replicas count generations by themselves; leave it out")
        wanted = Wanted(
            kind,
            options.get("name"),
            options.pop("version", None),
            options.pop("expected_version", None),
            options.pop("force_version", False),
        )
        self._loop, self._pushes = loop, pushes
        pushing = self._pushing = loop.run(pushes.begin(wanted))
        self.sender = Sender(pushing, segments, timeout, lambda left: pushes.start_call(pushing, left, loop.run))
        # A replica that is behind may have any version.
        versions = {} if wanted.name is not None else {"version": pushing.change.version, "force_version": True}
        self.options = {**options, **versions}
        """For the sender."""

    def finish(self, redo: Redo | None) -> FleetReceipt:
        """Ends a push that was committed.

        Args:
            redo: pushes the same again, for replicas that missed it.

        Raises:
            PartialCommit: by fewer replicas than the quorum.
        """
        receipt = self._end(redo)
        if receipt is None:
            raise FailedPrecondition("the push ended without a commit")
        return receipt

    def abandon(self) -> None:
        """Ends a push that was not committed."""
        self._end(None)

    def cancel(self) -> None:
        """Makes whatever the sender does raise `Cancelled`; for any thread."""
        if self._pushing.fan_out is not None:
            self._pushing.fan_out.cancel()

    def _end(self, redo: Redo | None) -> FleetReceipt | None:
        try:
            return self._loop.run(self._pushes.end(self._pushing, redo))
        finally:
            for client in self._pushing.clients.values():
                client.close()


class FleetPush:
    """A push that is under way: `Fleet.begin_push` makes it. As `rollout_client.Push`, into all replicas."""

    def __init__(
        self, transaction: Transaction, push: Push, redo: Redo | None, keep: Callable[[str, Any], None]
    ) -> None:
        """For `begin_push`.

        Args:
            transaction: its turn.
            push: what sends the tensors.
            redo: pushes the same again.
            keep: is given each tensor that was written.
        """
        self._transaction, self._push, self._redo, self._keep = transaction, push, redo, keep
        self._receipt: FleetReceipt | None = None
        self._ended = False

    @property
    def receipt(self) -> FleetReceipt:
        """What the replicas said of the commit.

        Raises:
            FailedPrecondition: the push is not committed.
        """
        if self._receipt is None:
            raise FailedPrecondition("receipt: the push is not committed")
        return self._receipt

    @property
    def is_open(self) -> bool:
        """Whether it can be written to, committed and rolled back."""
        return self._push.is_open

    def write(self, name: str, tensor: Any, old: Any = None) -> None:
        """As `Push.write`."""
        self._sent(lambda: self._push.write(name, tensor, old))
        self._keep(name, tensor)

    def write_all(self, named_tensors: NamedTensors) -> None:
        """As `Push.write_all`."""
        for name, tensor in named_tensors.items() if hasattr(named_tensors, "items") else named_tensors:
            self.write(name, tensor)
            del tensor  # before the next is gathered, so that never two are held

    def commit(self) -> FleetReceipt:
        """As `Push.commit`.

        Raises:
            PartialCommit: by fewer replicas than the quorum.
        """
        self._sent(self._push.commit)
        self._ended = True
        self._receipt = self._transaction.finish(self._redo)
        return self._receipt

    def rollback(self) -> None:
        """As `Push.rollback`."""
        self._push.rollback()
        self._abandon()

    def cancel(self) -> None:
        """Makes whatever is done to it raise `Cancelled`; for any thread."""
        self._transaction.cancel()

    def __enter__(self) -> FleetPush:
        """The push itself."""
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
