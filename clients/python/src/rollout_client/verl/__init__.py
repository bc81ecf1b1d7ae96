"""verl's rollouts by rollout-server: `actor_rollout_ref.rollout.name=rollout_server`.

verl imports this module by its entry point group `verl.plugins`, in every process, whenever verl itself is imported; so
it only registers names, and what they stand for is imported when it is used.
"""

from __future__ import annotations

import logging

NAME = "rollout_server"
"""What `actor_rollout_ref.rollout.name` is."""


def register() -> None:
    """Makes `NAME` known to verl. Called when this module is imported; calling it again changes nothing."""
    from verl.workers.rollout import base, replica  # noqa: PLC0415 half of verl may be imported yet

    base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.adapter.ServerAdapter"  # verl has no function for it
    replica.RolloutReplicaRegistry.register(NAME, _replica_class)


def _replica_class() -> type:
    from .replica import RolloutServerReplica  # noqa: PLC0415 see above

    return RolloutServerReplica


try:
    register()
except Exception:
    # verl itself says nothing of plug-ins that fail, and later that there is no rollout of this name.
    logging.getLogger(__name__).exception("rollout.name=%s is not there: this verl could not be extended", NAME)
    raise
