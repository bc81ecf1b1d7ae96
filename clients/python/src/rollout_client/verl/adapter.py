"""What lives in the trainer's ranks: it gives the replica's server new weights, and its memory back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from ..client import RolloutClient
from ..errors import InvalidArgument
from .replica import actor_name


class ServerAdapter(BaseRollout):
    """One in each rank. The first rank of a replica pushes; all take every tensor, since gathering is collective."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        """Connects to nothing yet: the server is started after this.

        Args:
            config: verl's `RolloutConfig`.
            model_config: verl's `HFModelConfig`.
            device_mesh: not used.
            replica_rank: number of the replica; -1: that of this rank of the trainer.
        """
        super().__init__(config, model_config, device_mesh)
        world_size = self.config.tensor_model_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // world_size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % world_size == 0
        self._handle: Any = None
        self._client: RolloutClient | None = None

    async def resume(self, tags: list[str]) -> None:
        """Wakes the server's `weights` or `kv_cache`."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server().wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Lets the server sleep."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        global_steps: int | None = None,
        **_options: Any,
    ) -> None:
        """Makes these weights the policy, all at once; a push that fails leaves the one that serves.

        Args:
            weights: names with tensors, gathered as they are taken, by a generator that may be asynchronous.
            wire_format: `named_tensors`.
            peft_config: of a LoRA adapter, whose tensors `weights` then are, if `base_sync_done`.
            base_sync_done: whether the server has the base, so that the adapter's tensors suffice.
            global_steps: the trainer's step, which is the policy's version; None: the one that it has.

        Raises:
            NotImplementedError: the format is another.
            RolloutError: the server does not take the weights. It is raised when all tensors were taken, so that other
                ranks do not wait for this one.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"rollout.name=rollout_server takes named tensors, not wire_format={wire_format!r}: "
                "set rollout.checkpoint_engine.backend to another than delta_sharded"
            )
        pairs = _gathered(weights)
        try:
            if self.is_leader_rank:
                await self._push(pairs, peft_config if base_sync_done else None, global_steps)
        finally:
            async for _name, _tensor in pairs:
                pass

    async def _push(
        self, pairs: AsyncIterator[Any], peft_config: dict[str, Any] | None, global_steps: int | None
    ) -> None:
        server, client = self._server(), await self._connected()
        version = await server.get_global_steps.remote() if global_steps is None else global_steps
        # In place where both policies do not fit: verl sends all of one before it samples from it.
        options = {"in_place": True} if peft_config is None else {}
        kind = "full" if peft_config is None else "lora"
        # verl counts: from 0, the same for a base and its adapter, and for what it pushes again.
        with client.begin_push(
            kind, peft_config, version=version, force_version=version is not None, **options
        ) as push:
            async for name, tensor in pairs:
                push.write(name, tensor)
                del tensor  # before the next is gathered
        if version is not None:
            await server.set_global_steps.remote(version)

    def _server(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(actor_name(self.replica_rank))
        return self._handle

    async def _connected(self) -> RolloutClient:
        if self._client is None:
            target = await self._server().get_push_target.remote()
            node = target.pop("node")
            if target["address"].startswith("127.") and node not in (None, ray.get_runtime_context().get_node_id()):
                raise InvalidArgument(
                    f"replica {self.replica_rank} listens on {target['address']} of another machine than this rank's; "
                    "give its server a host that this one reaches, and tokens (docs/verl.md)"
                )
            self._client = RolloutClient(**target)
        return self._client


async def _gathered(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    """The pairs, with sharded tensors made whole, which all ranks do together."""
    async for name, tensor in ensure_async_iterator(weights):
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        del tensor
