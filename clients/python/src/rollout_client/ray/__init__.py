"""A fleet of servers as Ray actors. Needs `pip install 'rollout-client[ray]'`."""

from ..fleet import (
    AsyncFleet,
    FleetReceipt,
    FleetStatus,
    PartialCommit,
    ReplicaReceipt,
    ReplicaState,
    ReplicaStatus,
)
from ._actor import Started
from ._fleet import Fleet

__all__ = [
    "AsyncFleet",
    "Fleet",
    "FleetReceipt",
    "FleetStatus",
    "PartialCommit",
    "ReplicaReceipt",
    "ReplicaState",
    "ReplicaStatus",
    "Started",
]
