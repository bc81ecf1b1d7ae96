"""Several servers of the same model, used as one: requests are spread over them, and a push reaches all or none.

`Fleet` takes the addresses of servers that run elsewhere (Kubernetes, systemd). `rollout_client.ray.Fleet` starts them
as Ray actors.
"""

from ._fleet import AsyncFleet, Fleet
from .types import (
    FleetReceipt,
    FleetStatus,
    PartialCommit,
    ReplicaReceipt,
    ReplicaState,
    ReplicaStatus,
)

__all__ = [
    "AsyncFleet",
    "Fleet",
    "FleetReceipt",
    "FleetStatus",
    "PartialCommit",
    "ReplicaReceipt",
    "ReplicaState",
    "ReplicaStatus",
]
