"""TRL's `VLLMGeneration` backed by rollout-server."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from .._served_names import served_parameters
from .._tensors import checksum_of
from ..client import RolloutClient
from ..errors import RolloutError, Unavailable
from ..images import Pixels
from ..types import Lifecycle, MemoryTag, UpdateResult
from ._references import INITIAL, POLICY, TRLS_INITIAL, Resident, is_lora
from ._sampler import Sampler

logger = logging.getLogger(__name__)

GRPC_PORT = 50051
_HTTP_PROBE_SECONDS = 5


class RolloutGeneration(VLLMGeneration):
    """Pushes with `push_lora` or `push_full` and samples over gRPC, instead of vLLM's NCCL and HTTP.

    The rest of TRL's `generate` stays: rank 0 gathers the prompts of all ranks, sends one request with a group for each
    prompt, and distributes the completions.
    """

    def __init__(
        self,
        *args: Any,
        client: RolloutClient | None = None,
        server_reference: bool | str = False,
        **options: Any,
    ) -> None:
        """Connects on rank 0.

        Args:
            args, options: of TRL's `VLLMGeneration`; `mode` must be `"server"`.
            client: a client with a token or TLS; None connects to `server_base_url`, or to `server_host` and
                `server_port`.
            server_reference: keep the trained adapter resident beside its base, and let the server score the samples
                under the base (True) or under another resident adapter, which is named.
        """
        self._given_client = client
        self.server_reference = server_reference
        self._rollouts = 0
        self._base_is_known = False
        self._initial_is_pushed = False
        self.last_push: UpdateResult | None = None
        """The receipt of the last push, on rank 0."""
        self.resident: Resident | None = None
        """With `server_reference`: the adapter of the last push, on rank 0."""
        super().__init__(*args, **options)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            raise ValueError(
                f"vllm_mode={self.mode!r}: rollout-server runs as a separate process; set vllm_mode='server' and "
                "vllm_server_base_url to its gRPC address"
            )
        if self.accelerator.is_main_process:
            client = self._given_client or connect(self.server_base_url or f"{self.server_host}:{self.server_port}")
            wait_for_server(client, self.server_timeout)
            self._warn_of_another_dtype(client)
            self.vllm_client = Sampler(client, self.processing_class)
        self.accelerator.wait_for_everyone()
        self._sleep()

    def sync_weights(self) -> None:
        """Pushes the model: only the adapter if it is a LoRA, else every parameter. All ranks must call it."""
        # A resident adapter can only be pushed to a server that is wholly awake.
        self.wake(None if self.server_reference else ["weights"])
        model = self.accelerator.unwrap_model(self.model)
        if is_lora(model):
            self._check_base(model)
            if self.server_reference:
                self._push_resident(model)
            else:
                self._push_adapter(model, model.active_adapters[0])
        else:
            self._push_full()
        self.accelerator.wait_for_everyone()

    def generate(self, *args: Any, **options: Any) -> tuple:
        """Samples like TRL's, from the policy that was pushed last; wakes a sleeping server."""
        with self.rollout():
            self.wake()
            return super().generate(*args, **options)

    def _place_features(self, features: list[Pixels] | None, prompt_ids: list[int]) -> list[Pixels] | None:
        """Returns them unchanged: the server finds the placeholders of each image."""
        return features

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """With `enable_sleep_mode`, puts the server to sleep at the end of the outermost of these blocks.

        The turns of one rollout stay in one block, so that each finds its prefix in the prefix cache. All ranks enter
        and leave together; an exception aborts the requests on the server.
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
        """With `enable_sleep_mode`, wakes the server; `tags` as for `RolloutClient.wake`. All ranks must call it."""
        if self.enable_sleep_mode:
            empty_cache()
            self.accelerator.wait_for_everyone()  # every rank has freed its memory before the server takes it
            if self.accelerator.is_main_process:
                self.vllm_client.client.wake(tags)
            self.accelerator.wait_for_everyone()

    def _sleep(self) -> None:
        if self.enable_sleep_mode:
            self.accelerator.wait_for_everyone()  # no rank has a request in flight
            if self.accelerator.is_main_process:
                self.vllm_client.client.sleep()
            self.accelerator.wait_for_everyone()  # no rank trains before the server's memory is free

    def _check_base(self, model: Any) -> None:
        """Checks once, before the first adapter, that the server has the base that the adapter is trained on.

        Raises:
            ValueError: it has another: an earlier run has pushed a whole policy, or `--model` is another checkpoint.
        """
        if self._base_is_known:
            return
        if self._dist.fsdp_version == 1:
            if self.server_reference and self.accelerator.is_main_process:
                self.vllm_client.client.push_lora(None)  # an adapter that an earlier run has merged
            self._base_is_known = True
            return
        parts = base_samples(model)
        with self._dist.gather_params(list(parts.values())):
            named = self._tensors(parts)
            if self.accelerator.is_main_process:
                client = self.vllm_client.client
                tensors = dict(part for name, tensor in named.items() for part in served_parameters(name, tensor))
                client.push_lora(None)
                known = {parameter.name for parameter in client.parameters()}
                dtype, served = client.info().dtype, client.checksum(known.intersection(tensors))
                for name, tensor in tensors.items():
                    if served.get(name) != checksum_of(tensor, dtype):
                        raise ValueError(
                            f"{name} differs between the server and the model that is trained: the server's --model is "
                            "another checkpoint, or an earlier run has pushed a whole policy. Restart the server, or "
                            "make it read its checkpoint again: client.sleep(2); client.wake(reload=True)"
                        )
        self._base_is_known = True

    def _push_resident(self, model: Any) -> None:
        """Pushes the adapter beside the base, and before the first one also that with which the training began."""
        reference = self.server_reference if isinstance(self.server_reference, str) else None
        if reference is None and TRLS_INITIAL in model.peft_config:
            reference = INITIAL
            if not self._initial_is_pushed:
                self._push_adapter(model, TRLS_INITIAL, name=INITIAL)
                self._initial_is_pushed = True
        generation = None if self.resident is None else self.resident.generation
        self._push_adapter(model, model.active_adapters[0], name=POLICY, expected_generation=generation)
        if self.accelerator.is_main_process:
            self.resident = Resident(self.last_push.adapter_generation, reference)
            self.vllm_client.resident = self.resident

    def _push_adapter(self, model: Any, adapter: str, **options: Any) -> None:
        # Names with `lora_` include frozen parts of an adapter, such as the A matrices of LoRA-FA.
        parts = {name: part for name, part in model.named_parameters() if "lora_" in name or part.requires_grad}
        with self._dist.gather_params(list(parts.values())):
            state = self._fsdp1_tensors(model, parts) if self._dist.fsdp_version == 1 else self._tensors(parts)
            if self.accelerator.is_main_process:
                # Untrained embeddings belong to the base, which the server has.
                tensors = get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=False)
                self._note(self.vllm_client.client.push_lora(tensors, model.peft_config[adapter], **options))

    def _tensors(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by PEFT's names; with FSDP 2 every rank takes part in gathering each."""
        return {self._fix_param_name_to_vllm(name): self._whole(part.detach()) for name, part in parts.items()}

    def _fsdp1_tensors(self, model: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same for FSDP 1, where a module's tensors are whole only while it is summoned."""
        names = {self._fix_param_name_to_vllm(name, ["_fsdp_wrapped_module."]) for name in parts}
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._iter_fsdp1_params(model) if name in names}

    def _push_full(self) -> None:
        named_tensors = ((name, tensor.detach()) for name, tensor in self._iter_named_params())
        if self.accelerator.is_main_process:
            # A server that sleeps around generation has no room for two policies, and no request needs the old one.
            self._note(
                self.vllm_client.client.push_full(
                    named_tensors, total_bytes=self._total_bytes(), in_place=self.enable_sleep_mode
                )
            )
        else:
            for _ in named_tensors:  # takes part in the gathering
                pass

    def _total_bytes(self) -> int | None:
        """Bytes of all parameters; None if this rank sees only parts, so that the client estimates them."""
        if self._dist.fsdp_version == 1:
            return None
        # With ZeRO-3, `ds_numel` is the size of the whole parameter.
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.model.parameters())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            # Offloaded parameters must be on the device through which the ranks exchange them.
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
                "The server computes in %s and the trainer in %s, which adds to sampling/sampling_logp_difference and "
                "distorts importance ratios: start the server with --dtype %s, or train in %s.",
                *(served, trained, trained, served),
            )


def base_samples(model: Any) -> dict[str, torch.Tensor]:
    """The vectors and the smallest matrix of an adapted model by the checkpoint's names, which identify its base."""
    frozen = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): part
        for name, part in model.named_parameters()
        if not part.requires_grad and part.is_floating_point() and "lora_" not in name and "original_module" not in name
    }
    sizes = {
        name: getattr(part, "ds_shape", part.shape) for name, part in frozen.items()
    }  # ZeRO-3: ds_shape is the whole
    vectors = [name for name, shape in sizes.items() if len(shape) == 1]
    matrices = [name for name, shape in sizes.items() if len(shape) > 1]
    return {name: frozen[name] for name in (*vectors, *sorted(matrices, key=lambda name: sizes[name].numel())[:1])}


def connect(address: str) -> RolloutClient:
    """A client for `host:port`, `http://host:port` or, with TLS, `https://host:port`; the default port is 50051."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    # TRL's default host, 0.0.0.0, means this machine; it is an address to listen on, not one to connect to.
    host = "127.0.0.1" if parts.hostname in (None, "0.0.0.0") else parts.hostname
    host = f"[{host}]" if ":" in host else host
    return RolloutClient(f"{host}:{parts.port or GRPC_PORT}", tls=True if parts.scheme in ("https", "grpcs") else None)


def wait_for_server(client: RolloutClient, timeout: float) -> None:
    """Waits until the server answers, and wakes or resumes it.

    Raises:
        ConnectionError: the server does not answer within `timeout` seconds, or the address is its HTTP port.
    """
    with suppress(Unavailable):
        # An earlier run may have left the server asleep, or paused if it was killed during a push.
        client.wake()
        if client.status().lifecycle is Lifecycle.PAUSED:
            client.resume()
        return
    if _answers_http(client.address):
        raise ConnectionError(
            f"{client.address} is an HTTP port: vllm_server_base_url (or vllm_server_port) takes the gRPC port, "
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
