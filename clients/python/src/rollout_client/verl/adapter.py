"""The part in the trainer's ranks: it pushes weights to the replica's server, and lets it sleep and wake."""

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
    """One for each rank. A replica's first rank pushes; all ranks take every tensor, as gathering is collective."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        """Does not connect yet: the server is started later.

        Args:
            config: verl's `RolloutConfig`.
            model_config: verl's `HFModelConfig`.
            device_mesh: not used.
            replica_rank: number of the replica; -1 takes that of this rank.
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
        """Puts the server to sleep."""
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
        """Pushes the weights in one transaction; if the push fails, the serving policy stays.

        Args:
            weights: pairs of name and tensor from a generator, which may be asynchronous and gathers each tensor.
            wire_format: must be `named_tensors`.
            peft_config: configuration of the LoRA adapter that `weights` contains if `base_sync_done`.
            base_sync_done: whether the server has the base, so that the adapter's tensors suffice.
            global_steps: the trainer's step, which becomes the weight version; None keeps the current one.

        Raises:
            NotImplementedError: another `wire_format`.
            RolloutError: the server rejects the weights. It is raised after all tensors have been taken, so that other
                ranks do not hang.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"rollout.name=rollout_server takes named tensors, not wire_format={wire_format!r}: "
                "set rollout.checkpoint_engine.backend to a value other than delta_sharded"
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
        # In place if both policies do not fit: verl sends a whole policy before it samples from it.
        options = {"in_place": True} if peft_config is None else {}
        kind = "full" if peft_config is None else "lora"
        # verl's count starts at 0, and does not change between a base and its adapter or when it repeats a push.
        with client.begin_push(
            kind, peft_config, version=version, force_version=version is not None, **options
        ) as push:
            async for name, tensor in pairs:
                push.write(name, tensor)
                del tensor  # frees it before the next is gathered
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
                    f"replica {self.replica_rank} listens on {target['address']} of another machine; "
                    "set host to an address that this machine can reach, and use tokens (docs/verl.md)"
                )
            self._client = RolloutClient(**target)
        return self._client


async def _gathered(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    """The pairs with whole tensors; all ranks gather sharded ones together."""
    async for name, tensor in ensure_async_iterator(weights):
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        del tensor
