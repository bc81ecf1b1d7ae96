"""TRL's AsyncGRPOTrainer with pushes over gRPC: a `WeightTransferProtocol`, and the trainer with it built in.

TRL's own trainer works with rollout-server too, unmodified, if it trains an adapter: docs/trl.md compares the two ways.
"""

from __future__ import annotations

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
from ..types import UpdateResult
from ._generation import connect, wait_for_server

READY_SECONDS = 240.0
"""How long training waits for the server to come up, as TRL's `vllm_server_timeout` does."""

_WITHOUT_VLLM = threading.Lock()


class RolloutWeightTransfer:
    """Brings the trainer's weights to a rollout-server: for `AsyncGRPOTrainer(weight_transfer=...)`.

    Requests that run stand still for the push and go on under the new policy, as TRL has it with vLLM.
    """

    def __init__(self, server: str | RolloutClient) -> None:
        """Connects at the start of the training.

        Args:
            server: `host:port` of gRPC, or a client.
        """
        self.client = connect(server) if isinstance(server, str) else server
        self.trainer: Any = None
        """Set it to the trainer: an adapter is then pushed alone, not every merged parameter, and TRL's worker asks for
        the model by the server's name of it."""
        self.last_push: UpdateResult | None = None
        """The receipt of the last push."""

    def init_weight_transfer(self) -> None:
        """Waits for the server, and has TRL's worker ask for its model by the name that the server gives it.

        Raises:
            ConnectionError: it does not answer.
        """
        wait_for_server(self.client, READY_SECONDS)
        worker = getattr(self.trainer, "rollout_worker", None)
        if isinstance(worker, async_rollout_worker.AsyncRolloutWorker):
            worker._loop_kwargs["model_name"] = self.client.info().model  # TRL's is the path or the name on the hub

    def pause(self) -> None:
        """Requests that run stand still."""
        self.client.pause("keep")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Pushes the adapter, or all that the iterator gives."""
        model = self._adapted()
        if model is None:
            self.last_push = self.client.push_full((name, tensor.detach()) for name, tensor in iterator)
        else:  # the merge that the iterator would show is made on the server, from the untouched base
            self.last_push = self.client.push_lora(model)

    def resume(self) -> None:
        """Requests go on."""
        self.client.resume()

    def destroy(self) -> None:
        """Nothing is left to release: the client stays the caller's."""

    def _adapted(self) -> Any:
        """The model, if its adapter can be read on this rank alone."""
        if self.trainer is None:
            return None
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if not is_peft_model(model) or model.peft_config[model.active_adapters[0]].peft_type != "LORA":
            return None
        return None if any(isinstance(part, DTensor) for part in model.parameters()) else model


class AsyncGRPOTrainer(TrlAsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with `RolloutWeightTransfer`, and without the vllm package."""

    def __init__(self, *args: Any, client: str | RolloutClient, **options: Any) -> None:
        """Takes what TRL's takes but `weight_transfer`.

        Args:
            args, options: of TRL's trainer; `vllm_server_base_url` of its configuration is the server's HTTP port.
            client: `host:port` of the same server's gRPC port, or a client.
        """
        transfer = RolloutWeightTransfer(client)
        # The worker asks for vLLM to be installed, and uses nothing of it.
        with _WITHOUT_VLLM, mock.patch.object(async_rollout_worker, "is_vllm_available", return_value=True):
            super().__init__(*args, weight_transfer=transfer, **options)
        transfer.trainer = self
