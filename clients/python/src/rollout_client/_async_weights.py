"""The methods of the clients that push weights, and that tell which weights the server has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import _convert_weights, _proto
from ._async_connection import AsyncConnection
from ._async_pusher import AsyncPusher
from ._model import Model
from ._session import AsyncPush, NamedTensors
from .options import (
    BeginPushOptions,
    PushDeltaOptions,
    PushDirectoryOptions,
    PushFullOptions,
    PushKind,
    PushLoraOptions,
)
from .status import OpenUpdate
from .types import AdapterInfo, ParameterInfo, UpdateResult

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncWeightSync:
    """Pushes of new weights. Each push is a transaction: the server applies all of it between two steps, or nothing.

    A push that fails raises an error, and the server keeps the policy that it had:

    - `InvalidArgument`: a tensor is wrong; the message starts with its name.
    - `DataLoss`: bytes changed on the way, or the server's checkpoint was changed in place.
    - `ResourceExhausted`: the server has no memory for it.
    - `Aborted`: another push is open, the policy has another version than the expected one, the push was cancelled by
      `cancel_update`, or nothing of it was sent for the server's `--update-idle-seconds`.

    The blocking client reads tensors and calls `progress` in the caller's thread, the asyncio client in a thread of its
    own; there, cancelling the task that waits ends the push.
    """

    _connection: AsyncConnection
    _pusher: AsyncPusher

    async def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> UpdateResult:
        """Pushes a LoRA adapter: merges it into the base weights, or with `name` keeps it beside them.

        The base is the checkpoint, or the last full push. Every merge starts from the base and gives the bits of PEFT's
        `merge_adapter()`, so repeated pushes do not drift.

        Args:
            adapter: a PEFT model, whose active adapter is pushed, and which may be wrapped as for `push_full`; or a
                mapping from PEFT's names to tensors. None or an empty mapping restores the base.
            config: with a mapping: a `LoraConfig`, a dict, or JSON text.
            options: keyword options; `rollout_client.PushLoraOptions` describes them.

        Returns:
            The new version, the digest of the pushed tensors, and timings.

        >>> result = await client.push_lora(adapter, lora_config, version=1)
        >>> result.weight_version, result.parameters
        (1, 2)
        """
        return await self._pusher.run(lambda pusher: pusher.push_lora(adapter, config, options))

    async def push_full(self, named_tensors: NamedTensors | Model, **options: Unpack[PushFullOptions]) -> UpdateResult:
        """Pushes all parameters of the model.

        Args:
            named_tensors: a model, a state dict, or pairs of name and tensor. Wrappers such as DDP and `torch.compile`
                are unwrapped; a model that is sharded over several ranks raises `InvalidArgument`. Each pair of an
                iterator is sent before the next is taken, so only one tensor need be in memory. Names are those of the
                checkpoint; PEFT's prefixes, `qkv_proj` and `gate_up_proj` are understood.
            options: keyword options; `rollout_client.PushFullOptions` describes them.

        Returns:
            The new version, the digest of the pushed tensors, and timings.

        >>> result = await client.push_full(state_dict, version=2)
        >>> result.weight_version, result.bytes
        (2, 256)
        """
        return await self._pusher.run(lambda pusher: pusher.push_full(named_tensors, options))

    async def push_delta(
        self,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        base_version: int,
        **options: Unpack[PushDeltaOptions],
    ) -> UpdateResult:
        """Pushes only the elements that differ between two states, compressed, in the dtype that the server serves in.

        Args:
            old: tensors by name, as the server has them now.
            new: the tensors that it will have, with the same names and shapes. Leave unchanged parameters out of
                both.
            base_version: the version of the policy that `old` is. The server raises `Aborted` if it has another.
            options: keyword options; `rollout_client.PushDeltaOptions` describes them.

        >>> new = {**state_dict, "lm_head.weight": state_dict["lm_head.weight"] + 1}
        >>> (await client.push_delta(state_dict, new, base_version=2)).weight_version
        3
        """
        return await self._pusher.run(lambda pusher: pusher.push_delta(old, new, base_version, options))

    def begin_push(self, kind: PushKind = "full", config: Any = None, **options: Unpack[BeginPushOptions]) -> AsyncPush:
        """Opens a push to which `write` adds one tensor at a time, for trainers that gather their parameters.

        A full push is open on the server from here on: other pushes raise `Aborted`, and the server ends this one with
        `Aborted` if nothing is written for its `--update-idle-seconds`. Adapters and deltas are sent at the commit. The
        asyncio client sends nothing before the `async with` block, or the first call, begins.

        Args:
            kind: `"full"` for all parameters, `"lora"` for an adapter, `"delta"` for changes of some parameters.
            config: with `"lora"`: a `LoraConfig`, a dict, or JSON text. None, without tensors, restores the base.
            options: keyword options; `rollout_client.BeginPushOptions` describes them.

        >>> async with client.begin_push(version=4) as push:
        ...     for name, tensor in state_dict.items():
        ...         await push.write(name, tensor)
        >>> push.receipt.weight_version
        4
        """
        return self._pusher.begin_push(kind, config, options)

    async def push_directory(
        self, path: str | os.PathLike[str], kind: str = "lora", **options: Unpack[PushDirectoryOptions]
    ) -> UpdateResult:
        """Has the server read weights from its own disk, below its `--weights-dir`.

        Args:
            path: a directory on the server's host, inside `--weights-dir` or relative to it.
            kind: `"lora"` reads `adapter_config.json` and `adapter_model.safetensors`; `"full"` reads `*.safetensors`;
                `"delta"` reads the `version` of a delta store, such as `rollout_client.DeltaStore` writes.
            options: keyword options; `rollout_client.PushDirectoryOptions` describes them.
        """
        return await self._pusher.run(lambda pusher: pusher.push_directory(path, kind, options))

    async def cancel_update(self, update_id: int | None = None) -> OpenUpdate | None:
        """Ends the open push, of any client: its sender gets `Aborted`, and the policy stays as it is.

        Args:
            update_id: cancel only the push with this number (`status().update.id`).

        Returns:
            The push that was ended; None if none was open, or if it was not the one with this number.
        """
        request = _convert_weights.cancel_update_request(update_id)
        return _convert_weights.cancelled_update(await self._connection.call(_proto.CANCEL_UPDATE, request))

    async def parameters(self) -> list[ParameterInfo]:
        """The name, shape and dtype of every parameter, in the model's order: the tensors that `push_full` needs.

        >>> [(p.name, p.shape, p.dtype) for p in await client.parameters()]
        [('model.embed_tokens.weight', (8, 4), 'float32'), ('lm_head.weight', (8, 4), 'float32')]
        """
        return _convert_weights.parameter_infos(await self._connection.call(_proto.LIST_PARAMETERS))

    async def checksum(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """The SHA-256 of parameters as the server has them now, in hexadecimal, by name.

        Compare with `rollout_client.checksum_of` of the trainer's tensor.

        Args:
            names: of the parameters; None is all of them.

        >>> sums = await client.checksum(["lm_head.weight"])
        >>> sums["lm_head.weight"] == checksum_of(state_dict["lm_head.weight"], "float32")
        True
        """
        request = _convert_weights.checksum_request(names)
        return _convert_weights.checksums(await self._connection.call(_proto.CHECKSUM, request))

    async def adapters(self) -> list[AdapterInfo]:
        """The adapters that `push_lora(name=…)` has made resident."""
        return _convert_weights.adapter_infos(await self._connection.call(_proto.LIST_ADAPTERS))

    async def remove_adapter(self, name: str, expected_generation: int | None = None) -> int:
        """Removes a resident adapter, waits for the requests that use it, and returns its generation.

        Args:
            name: of the adapter; new requests can no longer use it.
            expected_generation: raise `Aborted` unless the adapter has this generation.
        """
        request = _convert_weights.remove_adapter_request(name, expected_generation)
        return (await self._connection.call(_proto.REMOVE_ADAPTER, request)).generation
