"""The fleet's way to new weights: the pushes of a client, into all replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._lora import adapter_parts
from .._segment import SegmentPool
from .._tensors import bytes_of
from .._weights import NamedTensors, WeightSync
from ..errors import FailedPrecondition, InvalidArgument
from ..options import PushDeltaOptions, PushDirectoryOptions, PushFullOptions, PushLoraOptions, refuse_unknown
from ..types import AdapterInfo, ParameterInfo
from ._fanout import FanOut
from ._loop import Loop
from ._policy import Redo
from ._pushes import Pushes, Pushing
from ._replicas import Roster
from .types import FleetReceipt

if TYPE_CHECKING:
    from typing_extensions import Unpack

Resupply = Callable[[], NamedTensors]
"""Gives the tensors of the last full push once more."""

# What stands for the address of all replicas: shared memory reaches the first.
_THIS_HOST, _OTHER_HOSTS = "localhost:0", "fleet:0"


class _Sender(WeightSync):
    """A client whose pushes go to all replicas of one push of the fleet."""

    def __init__(
        self, pushing: Pushing, segments: SegmentPool, timeout: float | None, start: Callable[[float | None], FanOut]
    ) -> None:
        self.address = _THIS_HOST if pushing.is_local else _OTHER_HOSTS
        self._segments, self._timeout, self._start_update = segments, timeout, start
        self._first = pushing.clients[min(pushing.clients)]

    def parameters(self) -> list[ParameterInfo]:
        return self._first.parameters()


class FleetWeights:
    """Pushes of new weights into all replicas: each takes effect on all that take part, or on none.

    The guarantees are in `docs/ray.md`. A push that fails raises what the push of a client raises, and leaves the
    policy as it was, on all replicas; `PartialCommit` alone says that it is the fleet's policy nevertheless.
    """

    _loop: Loop
    _roster: Roster
    _pushes: Pushes
    _segments: SegmentPool
    _timeout: float | None
    _resupply: Resupply | None

    def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> FleetReceipt:
        """As `RolloutClient.push_lora`, into all replicas.

        The tensors are copied and kept until the next push, for replicas that miss this one: they get them as soon as
        they can be reached.
        """
        refuse_unknown("push_lora", options, PushLoraOptions)
        tensors, adapter_config = adapter_parts(adapter, config)
        kept = {name: _copied(name, tensor) for name, tensor in tensors.items()}
        again: PushLoraOptions = {"name": options.get("name"), "progress": False}

        def redo(client: Any, version: int) -> Any:
            return client.push_lora(kept, adapter_config or None, **again, **_versioned(again, version))

        with self._pushing("lora", dict(options), redo) as (sender, asked, receipts):
            sender.push_lora(kept, adapter_config or None, **asked)
        return receipts[0]

    def push_full(self, named_tensors: NamedTensors, **options: Unpack[PushFullOptions]) -> FleetReceipt:
        """As `RolloutClient.push_full`, into all replicas. Each tensor is taken once, and sent to all.

        A replica that misses the push takes no requests until the next full push, or gets the tensors from the
        `resupply` that the fleet was made with.
        """
        refuse_unknown("push_full", options, PushFullOptions)
        resupply = self._resupply

        def redo(client: Any, version: int) -> Any:
            return client.push_full(resupply(), version=version, progress=False)

        with self._pushing("full", dict(options), None if resupply is None else redo) as (sender, asked, receipts):
            sender.push_full(named_tensors, **asked)
        return receipts[0]

    def push_delta(
        self,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        base_version: int,
        **options: Unpack[PushDeltaOptions],
    ) -> FleetReceipt:
        """As `RolloutClient.push_delta`, into all replicas that have the base version.

        A replica that misses the push takes no requests until the next full push.
        """
        refuse_unknown("push_delta", options, PushDeltaOptions)
        given = {**options, "expected_version": base_version}
        with self._pushing("delta", given, None) as (sender, asked, receipts):
            sender.push_delta(old, new, base_version=base_version, **asked)
        return receipts[0]

    def push_directory(
        self, path: str | os.PathLike[str], kind: str = "lora", **options: Unpack[PushDirectoryOptions]
    ) -> FleetReceipt:
        """As `RolloutClient.push_directory`: each replica reads the directory on its own machine."""
        refuse_unknown("push_directory", options, PushDirectoryOptions)
        if kind not in ("lora", "full"):
            raise InvalidArgument(f"kind: expected 'lora' or 'full', got {kind!r}")
        again: PushDirectoryOptions = {"name": options.get("name")}

        def redo(client: Any, version: int) -> Any:
            return client.push_directory(path, kind, **again, **_versioned(again, version))

        with self._pushing(kind, dict(options), redo) as (sender, asked, receipts):
            sender.push_directory(path, kind, **asked)
        return receipts[0]

    def cancel_update(self) -> None:
        """Ends the push that is under way, on all replicas: there `Cancelled` is raised, and it never happened."""
        self._loop.make(self._pushes.cancel)

    def parameters(self) -> list[ParameterInfo]:
        """As `RolloutClient.parameters`; they are the same for all replicas."""
        return self._loop.run(self._roster.first(lambda client: client.parameters()))

    def checksum(self, names: Iterable[str] | None = None) -> dict[int, dict[str, str]]:
        """As `RolloutClient.checksum`, of every replica that can be reached, by its number."""
        checked = None if names is None else list(names)
        return self._loop.run(self._roster.each(lambda client: client.checksum(checked)))

    def adapters(self) -> dict[int, list[AdapterInfo]]:
        """As `RolloutClient.adapters`, of every replica that can be reached, by its number."""
        return self._loop.run(self._roster.each(lambda client: client.adapters()))

    def remove_adapter(self, name: str) -> None:
        """As `RolloutClient.remove_adapter`, on all replicas; those that cannot be reached follow when they can."""
        self._loop.run(self._pushes.remove_adapter(name))

    @contextmanager
    def _pushing(
        self, kind: str, options: dict[str, Any], redo: Redo | None
    ) -> Iterator[tuple[_Sender, dict[str, Any], list[FleetReceipt]]]:
        """One push of the fleet: what sends it, the options to send it with, and where its receipt will be."""
        if options.get("expected_generation") is not None:
            raise InvalidArgument("expected_generation: replicas count generations by themselves; leave it out")
        version, expected = options.pop("version", None), options.pop("expected_version", None)
        name, loop = options.get("name"), self._loop
        pushing = loop.run(self._pushes.begin(kind, version, expected, name))
        receipts: list[FleetReceipt] = []
        ended = False
        try:
            sender = _Sender(
                pushing,
                self._segments,
                self._timeout,
                lambda timeout: self._pushes.start_call(pushing, timeout, loop.run),
            )
            asked = options if name is not None else {**options, "version": pushing.change.version}
            yield sender, asked, receipts
            ended = True
            receipt = loop.run(self._pushes.end(pushing, redo))
            if receipt is None:
                raise FailedPrecondition("the push ended without a commit")
            receipts.append(receipt)
        finally:
            if not ended:
                loop.run(self._pushes.end(pushing, redo))
            for client in pushing.clients.values():
                client.close()


def _versioned(options: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The version of a push that is made again; an adapter that stays resident has none."""
    return {} if options.get("name") is not None else {"version": version}


def _copied(name: str, tensor: Any) -> tuple[bytes, str, tuple[int, ...]]:
    """A tensor as it is now, whatever the trainer does to it afterwards."""
    given = bytes_of(name, tensor)
    return bytes(given.data), given.layout.dtype, given.layout.shape
