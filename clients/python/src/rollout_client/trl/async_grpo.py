"""TRL's AsyncGRPOTrainer with pushes over gRPC: a `WeightTransferProtocol`, and a trainer that uses it.

To train an adapter, TRL's own trainer works with rollout-server unmodified: docs/trl.md compares the two ways.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from accelerate.utils import is_peft_model
from torch.distributed.tensor import DTensor
from trl.experimental.async_grpo import AsyncGRPOTrainer as TrlAsyncGRPOTrainer
from trl.experimental.async_grpo import async_rollout_worker

from ..client import RolloutClient
from ..errors import InvalidArgument
from ..types import UpdateResult
from ._generation import connect, wait_for_server

READY_SECONDS = 240.0
"""How long training waits for the server to start, like TRL's `vllm_server_timeout`."""

_WITHOUT_VLLM = threading.Lock()


class RolloutWeightTransfer:
    """Pushes the trainer's weights to rollout-server: for `AsyncGRPOTrainer(weight_transfer=...)`.

    Running requests pause for the push and continue under the new policy, as they do with vLLM.
    """

    def __init__(self, server: str | RolloutClient) -> None:
        """Connects at the start of the training.

        Args:
            server: the gRPC address as `host:port`, or a client.
        """
        self.client = connect(server) if isinstance(server, str) else server
        self.trainer: Any = None
        """Set it to the trainer: then only the adapter is pushed, not every merged parameter, and TRL's worker requests
        the model by the server's name for it."""
        self.last_push: UpdateResult | None = None
        """The receipt of the last push."""

    def init_weight_transfer(self) -> None:
        """Waits for the server, and makes TRL's worker request the model by the server's name for it.

        Raises:
            ConnectionError: the server does not answer.
        """
        wait_for_server(self.client, READY_SECONDS)
        worker = getattr(self.trainer, "rollout_worker", None)
        if isinstance(worker, async_rollout_worker.AsyncRolloutWorker):
            worker._loop_kwargs["model_name"] = self.client.info().model  # TRL uses the path or the name on the hub

    def pause(self) -> None:
        """Stops running requests until `resume`."""
        self.client.pause("keep")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Pushes the adapter, or all tensors of the iterator."""
        model = self._adapted()
        if model is None:
            self.last_push = self.client.push_full((name, tensor.detach()) for name, tensor in iterator)
        else:  # the server merges the adapter, from the untouched base
            self.last_push = self.client.push_lora(model)

    def resume(self) -> None:
        """Continues the stopped requests."""
        self.client.resume()

    def destroy(self) -> None:
        """Does nothing: the client belongs to the caller."""

    def _adapted(self) -> Any:
        """The model, if this rank has its whole adapter."""
        if self.trainer is None:
            return None
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if not is_peft_model(model) or model.peft_config[model.active_adapters[0]].peft_type != "LORA":
            return None
        return None if any(isinstance(part, DTensor) for part in model.parameters()) else model


class AsyncGRPOTrainer(TrlAsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with `RolloutWeightTransfer`, which does not need the package vllm."""

    def __init__(self, *args: Any, client: str | RolloutClient, **options: Any) -> None:
        """Takes the arguments of TRL's trainer except `weight_transfer`.

        Args:
            args, options: of TRL's trainer; `vllm_server_base_url` in its configuration is the server's HTTP port.
            client: the gRPC address of the same server as `host:port`, or a client.

        Raises:
            InvalidArgument: the dataset has a column of images, which TRL's trainer would ignore.
        """
        dataset = inspect.signature(TrlAsyncGRPOTrainer).bind_partial(*args, **options).arguments.get("train_dataset")
        for name in ("image", "images"):
            if name in (getattr(dataset, "column_names", None) or ()):
                raise InvalidArgument(
                    f"train_dataset: column {name!r}: AsyncGRPOTrainer of TRL trains on text alone and ignores images; "
                    "use GRPOTrainer, or drop the column"
                )
        transfer = RolloutWeightTransfer(client)
        # The worker requires that vLLM is installed, but uses nothing from it.
        with _WITHOUT_VLLM, mock.patch.object(async_rollout_worker, "is_vllm_available", return_value=True):
            super().__init__(*args, weight_transfer=transfer, **options)
        transfer.trainer = self
