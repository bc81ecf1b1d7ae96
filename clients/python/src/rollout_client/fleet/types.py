"""What a fleet tells of itself and of its pushes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import Unavailable
from ..types import Lifecycle, ServerStatus, UpdateResult


class ReplicaState(str, Enum):
    """Whether a replica takes requests."""

    CURRENT = "current"
    """It has the fleet's policy, by the digest that it reported, and takes requests."""
    BEHIND = "behind"
    """It can be reached, but has another policy. It takes no requests until it has caught up."""
    LOST = "lost"
    """It cannot be reached. It is looked for all the time, and catches up when it is found."""

    def __str__(self) -> str:
        """The plain value, e.g. `current`."""
        return self.value


@dataclass(frozen=True)
class ReplicaStatus:
    """How one replica is doing."""

    number: int
    """Its place in the fleet, from 0."""
    address: str
    """`host:port` of its server, the last one that is known."""
    state: ReplicaState
    reason: str
    """Why it is not current; empty if it is."""
    samples: int
    """Samples that this fleet waits for from it."""
    server: ServerStatus | None
    """What the server says; None if it cannot be reached."""


@dataclass(frozen=True)
class FleetStatus:
    """How a fleet is doing."""

    lifecycle: Lifecycle
    """Of the first replica that is current, or else of the first that can be reached; `shutting_down` if none can."""
    weight_version: int
    """The version of the policy that all current replicas serve."""
    quorum: int
    replicas: list[ReplicaStatus]


@dataclass(frozen=True)
class ReplicaReceipt:
    """What a push has come to on one replica."""

    number: int
    address: str
    digest: str | None
    """Of the tensors as this replica took them; None if it missed the push."""
    result: UpdateResult | None
    """What the replica said; None if it missed the push."""
    error: str
    """Why it missed the push; empty if it did not."""


@dataclass(frozen=True)
class FleetReceipt(UpdateResult):
    """What a push has done on all replicas.

    The fields of `UpdateResult` are those that all replicas which have the push agree on; of `pause_ms` and
    `staging_ms` the most. `adapter_generation` is the first one's, as each replica counts its own.
    """

    replicas: tuple[ReplicaReceipt, ...]
    """One for each replica of the fleet, by number."""

    @property
    def missed(self) -> list[int]:
        """Numbers of the replicas that missed the push: they take no requests until they have caught up."""
        return [replica.number for replica in self.replicas if replica.digest is None]


class PartialCommit(Unavailable):
    """A push that was committed, but fewer replicas than the quorum have confirmed it.

    All replicas of the quorum had taken the push, and some were lost in the moment of the commit. The new policy is
    the fleet's: `receipt.missed` names the replicas that are kept out until they have caught up. Nothing is served by
    the older policy. Do not push the same again: go on, or wait for the replicas (`wait_until_ready`).
    """

    def __init__(self, message: str, receipt: FleetReceipt) -> None:
        """With the receipt of the push."""
        super().__init__(message)
        self.receipt = receipt
