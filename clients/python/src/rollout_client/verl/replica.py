"""A replica: one rollout-server and the Ray actor that connects verl to it."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutReplica

from ..errors import InvalidArgument
from . import NAME
from ._settings import read_settings
from .server import RolloutServer


def actor_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """Name of a replica's actor. `kind` is empty for the trained policy, else `reward_` or `teacher_`."""
    return f"{NAME}_{kind}{replica_rank}{suffix}"


class RolloutServerReplica(RolloutReplica):
    """One replica for each `tensor_model_parallel_size` ranks of the trainer."""

    async def launch_servers(self) -> None:
        """Starts the actor on the machine of the replica's workers, and the server in it.

        Raises:
            InvalidArgument: the server does not support verl's settings, or there are too few ranks.
            RolloutError: the server does not start.
        """
        if self.nnodes > 1:
            raise InvalidArgument(
                f"rollout.tensor_model_parallel_size={self.world_size}: a rollout-server runs on one machine, and "
                f"each has {self.gpus_per_node} ranks"
            )
        if self.workers and len(self.workers) < self.world_size:
            raise InvalidArgument(
                f"rollout.tensor_model_parallel_size={self.world_size}: replica {self.replica_rank} has "
                f"{len(self.workers)} ranks of the trainer; with rollout.name={NAME} it may be 1"
            )
        replicas_per_node = max(1, self.gpus_per_node // self.world_size)
        settings = read_settings(self.config, self.model_config, self.replica_rank, replicas_per_node)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        actor = ray.remote(RolloutServer).options(
            name=actor_name(self.replica_rank, kind, self.name_suffix),
            max_concurrency=self.max_concurrency,
            num_cpus=0,
            **await self._placement(),
        )
        server = actor.remote(settings, self.rollout_mode)
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self.servers, self._server_handle, self._server_address = [server], server, f"{host}:{port}"

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends in-flight requests; returns `aborted_count` and `request_ids`."""
        return await self._server_handle.abort_all_requests.remote(reject_request=reject_request)

    async def _placement(self) -> dict[str, Any]:
        if not self.workers:
            return {}
        node = await self.workers[0].__ray_call__.remote(lambda _worker: ray.get_runtime_context().get_node_id())
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}
