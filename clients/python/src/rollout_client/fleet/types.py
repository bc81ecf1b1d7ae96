"""The status of a fleet, and the receipts of its pushes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import Unavailable
from ..status import ServerStatus
from ..types import Lifecycle, UpdateResult


class ReplicaState(str, Enum):
    """Whether a replica takes requests."""

    CURRENT = "current"
    """It has the fleet's policy, proved by digest, and takes requests."""
    BEHIND = "behind"
    """It can be reached, but does not have the policy. It takes no requests until it has caught up."""
    LOST = "lost"
    """It cannot be reached. The fleet keeps trying, and it catches up when it answers."""

    def __str__(self) -> str:
        """The plain value, e.g. `current`."""
        return self.value


@dataclass(frozen=True)
class ReplicaStatus:
    """The state of one replica."""

    number: int
    """Its index in the fleet, from 0."""
    address: str
    """The last known `host:port` of its server."""
    state: ReplicaState
    reason: str
    """Why it is not current; empty if it is."""
    samples: int
    """Samples of this fleet that run on it."""
    server: ServerStatus | None
    """The server's status; None if it cannot be reached."""


@dataclass(frozen=True)
class FleetStatus:
    """The state of a fleet."""

    lifecycle: Lifecycle
    """That of the first current replica, else of the first that can be reached; `shutting_down` if none can."""
    weight_version: int
    """The version of the policy that all current replicas serve."""
    quorum: int
    replicas: list[ReplicaStatus]


@dataclass(frozen=True)
class ReplicaReceipt:
    """The result of a push on one replica."""

    number: int
    address: str
    digest: str | None
    """Digest of the tensors that the replica received; None if it missed the push."""
    result: UpdateResult | None
    """The replica's receipt; None if it missed the push."""
    error: str
    """Why it missed the push; empty if it did not."""


@dataclass(frozen=True)
class FleetReceipt(UpdateResult):
    """The receipt of a push into all replicas.

    The fields of `UpdateResult` are the same on all replicas that took the push, except that `pause_ms` and
    `staging_ms` are the largest, and `adapter_generation` is that of the first, as each replica counts its own.
    """

    replicas: tuple[ReplicaReceipt, ...]
    """The receipt of each replica, by number."""

    @property
    def missed(self) -> list[int]:
        """Numbers of the replicas that missed the push; they take no requests until they have caught up."""
        return [replica.number for replica in self.replicas if replica.digest is None]


class PartialCommit(Unavailable):
    """A push that was committed, but fewer replicas than the quorum have confirmed it.

    A quorum of replicas had received the push, and some of them were lost during the commit. The fleet has the new
    policy, and no replica serves the old one: `receipt.missed` lists the replicas that take no requests until they have
    caught up. Do not repeat the push: continue, or wait for the replicas with `wait_until_ready`.
    """

    def __init__(self, message: str, receipt: FleetReceipt) -> None:
        """Keeps the receipt of the push."""
        super().__init__(message)
        self.receipt = receipt
