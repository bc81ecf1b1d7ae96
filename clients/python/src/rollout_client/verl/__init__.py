"""Rollouts for verl from rollout-server: `actor_rollout_ref.rollout.name=rollout_server`.

verl imports this module through its entry point group `verl.plugins`, in every process that imports verl. So the module
only registers names; the classes behind them are imported on use.
"""

from __future__ import annotations

import logging

NAME = "rollout_server"
"""The value of `actor_rollout_ref.rollout.name`."""


def register() -> None:
    """Registers `NAME` with verl. Importing this module calls it; further calls change nothing."""
    from verl.workers.rollout import base, replica  # noqa: PLC0415 verl may be imported only in part

    base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.adapter.ServerAdapter"  # verl has no function for it
    replica.RolloutReplicaRegistry.register(NAME, _replica_class)


def _replica_class() -> type:
    from .replica import RolloutServerReplica  # noqa: PLC0415 see above

    return RolloutServerReplica


try:
    register()
except Exception:
    # verl itself does not report a plug-in that fails; it later fails with an unknown name.
    logging.getLogger(__name__).exception("rollout.name=%s is not available: the plug-in does not fit this verl", NAME)
    raise
