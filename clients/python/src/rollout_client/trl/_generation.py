"""`VLLMGeneration` of TRL with a rollout-server behind it."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import is_peft_model
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from .._tensors import checksum_of
from ..client import RolloutClient
from ..errors import RolloutError, Unavailable
from ..types import Lifecycle, MemoryTag, UpdateResult
from ._sampler import Sampler

logger = logging.getLogger(__name__)

GRPC_PORT = 50051
_HTTP_PROBE_SECONDS = 5


class RolloutGeneration(VLLMGeneration):
    """Pushes with `push_lora` or `push_full` and samples over gRPC, in place of vLLM's NCCL and HTTP.

    What TRL's `generate` does around it stays: rank 0 gathers the prompts of all ranks, asks once for each group, and
    hands the completions out.
    """

    def __init__(self, *args: Any, client: RolloutClient | None = None, **options: Any) -> None:
        """Connects on rank 0.

        Args:
            args, options: of TRL's `VLLMGeneration`; `mode` must be `"server"`.
            client: a connection with a token or TLS; None makes one of `server_base_url`, or of `server_host` and
                `server_port`.
        """
        self._given_client = client
        self._rollouts = 0
        self._base_is_known = False
        self.last_push: UpdateResult | None = None
        """The receipt of the last push, on rank 0."""
        super().__init__(*args, **options)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            raise ValueError(
                f"vllm_mode={self.mode!r}: rollout-server is a process of its own; set vllm_mode='server' and "
                "vllm_server_base_url to its gRPC address"
            )
        if self.accelerator.is_main_process:
            client = self._given_client or connect(self.server_base_url or f"{self.server_host}:{self.server_port}")
            wait_for_server(client, self.server_timeout)
            self._warn_of_another_dtype(client)
            self.vllm_client = Sampler(client)
        self.accelerator.wait_for_everyone()
        self._sleep()

    def sync_weights(self) -> None:
        """Pushes the model: the adapter alone if it is a LoRA, else every parameter. All ranks call it together."""
        self.wake(["weights"])
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model) and model.peft_config[model.active_adapters[0]].peft_type == "LORA":
            self._check_base(model)
            self._push_adapter(model)
        else:
            self._push_full()
        self.accelerator.wait_for_everyone()

    def generate(self, *args: Any, **options: Any) -> tuple:
        """As TRL's, of the policy that was pushed last; a server that sleeps is woken for it."""
        with self.rollout():
            self.wake()
            return super().generate(*args, **options)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """With `enable_sleep_mode` the server sleeps again at the end of the outermost of these blocks, not before.

        The turns of one rollout stay in one block, so that each finds its prefix in the cache. All ranks enter and
        leave together; an exception ends what runs on the server.
        """
        self._rollouts += 1
        try:
            yield
        except BaseException:
            self._rollouts -= 1
            if not self._rollouts and self.enable_sleep_mode and self.accelerator.is_main_process:
                with suppress(RolloutError):
                    self.vllm_client.client.sleep(mode="abort")
            raise
        self._rollouts -= 1
        if not self._rollouts:
            self._sleep()

    def wake(self, tags: list[MemoryTag] | None = None) -> None:
        """With `enable_sleep_mode`: wakes the server, `tags` as for `RolloutClient.wake`. All ranks call it at once."""
        if self.enable_sleep_mode:
            empty_cache()
            self.accelerator.wait_for_everyone()  # every rank's memory is free before the server takes its own
            if self.accelerator.is_main_process:
                self.vllm_client.client.wake(tags)
            self.accelerator.wait_for_everyone()

    def _sleep(self) -> None:
        if self.enable_sleep_mode:
            self.accelerator.wait_for_everyone()  # no rank's request meets a server that sleeps
            if self.accelerator.is_main_process:
                self.vllm_client.client.sleep()
            self.accelerator.wait_for_everyone()  # no rank trains before the server's memory is free

    def _check_base(self, model: Any) -> None:
        """Once, before the first adapter: what it is merged into there must be what it is trained on here.

        Raises:
            ValueError: it is not; an earlier run has pushed a whole policy, or the server has another checkpoint.
        """
        if self._base_is_known or self._dist.fsdp_version == 1:
            return
        parts = base_samples(model)
        with self._dist.gather_params(list(parts.values())):
            tensors = self._tensors(parts)
            if self.accelerator.is_main_process:
                client = self.vllm_client.client
                client.push_lora(None)
                known = {parameter.name for parameter in client.parameters()}
                dtype, served = client.info().dtype, client.checksum(known.intersection(tensors))
                for name, tensor in tensors.items():
                    if served.get(name) != checksum_of(tensor, dtype):
                        raise ValueError(
                            f"{name} is another on the server than in the model that is trained: its --model is "
                            "another checkpoint, or an earlier run has pushed a whole policy. Restart the server, or "
                            "have it read its checkpoint again: client.sleep(2); client.wake(reload=True)"
                        )
        self._base_is_known = True

    def _push_adapter(self, model: Any) -> None:
        # `lora_` is also what is frozen of an adapter, such as the A matrices of LoRA-FA.
        parts = {name: part for name, part in model.named_parameters() if "lora_" in name or part.requires_grad}
        with self._dist.gather_params(list(parts.values())):
            state = self._fsdp1_tensors(model, parts) if self._dist.fsdp_version == 1 else self._tensors(parts)
            if self.accelerator.is_main_process:
                name = model.active_adapters[0]
                # Embeddings that are not trained are the base's, which the server has.
                tensors = get_peft_model_state_dict(model, state, adapter_name=name, save_embedding_layers=False)
                self._note(self.vllm_client.client.push_lora(tensors, model.peft_config[name]))

    def _tensors(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by PEFT's names; of FSDP 2 every rank takes part in gathering each."""
        return {self._fix_param_name_to_vllm(name): self._whole(part.detach()) for name, part in parts.items()}

    def _fsdp1_tensors(self, model: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same of FSDP 1, which has a module's tensors whole only while it is summoned."""
        names = {self._fix_param_name_to_vllm(name, ["_fsdp_wrapped_module."]) for name in parts}
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._iter_fsdp1_params(model) if name in names}

    def _push_full(self) -> None:
        named_tensors = ((name, tensor.detach()) for name, tensor in self._iter_named_params())
        if self.accelerator.is_main_process:
            # A server that sleeps around generation has no room for two policies, nor a request that needs the old one.
            self._note(
                self.vllm_client.client.push_full(
                    named_tensors, total_bytes=self._total_bytes(), in_place=self.enable_sleep_mode
                )
            )
        else:
            for _ in named_tensors:  # takes part in the gathering
                pass

    def _total_bytes(self) -> int | None:
        """Of all parameters; None where this rank sees parts only, and the client makes an estimate."""
        if self._dist.fsdp_version == 1:
            return None
        # ZeRO-3 keeps the size of the whole beside the part.
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.model.parameters())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            # Parameters that are offloaded must be where the ranks can exchange them.
            return tensor.to(self.accelerator.device).full_tensor()
        return tensor

    def _note(self, pushed: UpdateResult) -> None:
        self.last_push = pushed
        self.vllm_client.weight_version = pushed.weight_version

    def _warn_of_another_dtype(self, client: RolloutClient) -> None:
        computed = {"bf16": "bfloat16", "fp16": "float16"}.get(self.accelerator.mixed_precision)
        trained = computed or str(next(self.model.parameters()).dtype).removeprefix("torch.")
        served = client.info().dtype
        if served != trained:
            logger.warning(
                "The server computes in %s and the trainer in %s, which shows in sampling/sampling_logp_difference and "
                "in importance ratios: start the server with --dtype %s, or train in %s.",
                *(served, trained, trained, served),
            )


def base_samples(model: Any) -> dict[str, torch.Tensor]:
    """The vectors of an adapted model and its smallest matrix, by the checkpoint's names: they tell its base."""
    frozen = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): part
        for name, part in model.named_parameters()
        if not part.requires_grad and part.is_floating_point() and "lora_" not in name and "original_module" not in name
    }
    sizes = {name: getattr(part, "ds_shape", part.shape) for name, part in frozen.items()}  # ds_shape: whole, of ZeRO-3
    vectors = [name for name, shape in sizes.items() if len(shape) == 1]
    matrices = [name for name, shape in sizes.items() if len(shape) > 1]
    return {name: frozen[name] for name in (*vectors, *sorted(matrices, key=lambda name: sizes[name].numel())[:1])}


def connect(address: str) -> RolloutClient:
    """A client of `host:port`, `http://host:port` or, with TLS, `https://host:port`: gRPC's port, 50051 if none."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    # TRL's default host means this machine; as an address only the server uses it, to listen everywhere.
    host = "127.0.0.1" if parts.hostname in (None, "0.0.0.0") else parts.hostname
    host = f"[{host}]" if ":" in host else host
    return RolloutClient(f"{host}:{parts.port or GRPC_PORT}", tls=True if parts.scheme in ("https", "grpcs") else None)


def wait_for_server(client: RolloutClient, timeout: float) -> None:
    """Waits until the server answers, asleep or not.

    Raises:
        ConnectionError: it does not within `timeout` seconds, or its HTTP port was given.
    """
    with suppress(Unavailable):
        # Asleep from an earlier run is as good as running: a rollout wakes it, and without sleep mode this does. One
        # that was killed during a push may have left it paused.
        client.wake()
        if client.status().lifecycle is Lifecycle.PAUSED:
            client.resume()
        return
    if _answers_http(client.address):
        raise ConnectionError(
            f"{client.address} is an HTTP port: vllm_server_base_url (or vllm_server_port) takes the port of gRPC, "
            f"{GRPC_PORT} unless the server was started with --port"
        )
    try:
        client.wait_until_ready(timeout)
    except Unavailable as error:
        raise ConnectionError(f"no rollout-server at {client.address}: {error}") from None


def _answers_http(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=_HTTP_PROBE_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().version > 0
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
