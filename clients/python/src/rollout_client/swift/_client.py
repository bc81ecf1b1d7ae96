"""The client that replaces ms-swift's `VLLMClient`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from .._ratios import ratio_logprobs, ratio_returns
from .._tls import ADDRESS, Tls
from .._token import read_token
from ..client import RolloutClient
from ..errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    Misdirected,
    RolloutError,
    Unauthenticated,
    Unavailable,
)
from ..images import Pixels
from ..routing import join_routing
from ..types import FinishReason, Lifecycle, MemoryTag, PromptOutput, Sample, SamplingParams
from ._pushes import BaseCheck, FullPush, adapter_tensors, in_all, parameter_name, pushes_base, unflattened

if TYPE_CHECKING:
    from ._encoder import TemplateEncoder

_T = TypeVar("_T")
_Prompt = tuple[tuple[int, ...], tuple[Pixels, ...]]
"""Token ids and images."""
_Sampled = tuple[PromptOutput, Sample]
"""The output of the prompt, which has its token ids with all placeholders, and a sample of it."""

_POLL_SECONDS = 0.5
_CALL_SECONDS = 5.0
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "n": (1,),
    "num_beams": (1,),
    "prompt_logprobs": (None,),
    "stream": (False,),
    "top_logprobs": (None, 0),
}
"""Fields of a `RequestConfig` that rollouts do not use, with the values that have no effect."""


class RolloutVLLMClient:
    """The client that ms-swift's trainers call, for one or several servers.

    Requests are spread over the servers, with equal ones as one group; pushes go to all. When an adapter is trained,
    only the adapter is pushed; the base that ms-swift sends at its first synchronisation is compared with the servers'.
    """

    def __init__(
        self,
        base_urls: Sequence[str] | None = None,
        hosts: Sequence[str] = ("127.0.0.1",),
        server_ports: Sequence[int] = (50051,),
        group_ports: object = None,
        connection_timeout: float = 240.0,
    ) -> None:
        """Waits until all servers answer.

        Args:
            base_urls: `http://host:port` with the gRPC port, or `https` for TLS; replaces `hosts` and `server_ports`.
            hosts, server_ports: hosts and gRPC ports of the servers.
            group_ports: ignored, because pushes do not use NCCL.
            connection_timeout: seconds.

        Raises:
            Unavailable: a server does not answer within that time.
            Misdirected: the port is not the gRPC port, or the TLS settings do not match the server's.
        """
        del group_ports
        token, tls = _credentials()
        addresses = _addresses(base_urls, hosts, server_ports)
        if tls is None and any(url.startswith("https:") for url in base_urls or ()):
            tls = Tls()
        self._clients = [RolloutClient(address, token=token, tls=tls) for address in addresses]
        self._asleep = False
        self._base: FullPush | BaseCheck | None = None
        self.takes_adapters = True
        """Whether adapters are pushed alone; otherwise ms-swift merges them and pushes the whole policy."""
        self.return_routing = False
        """Whether answers have `routed_experts`, for a trainer that replays them (R3). The servers must have been
        started with `--return-routing`."""
        self.encoder: TemplateEncoder | None = None
        """Set by the trainer."""
        deadline = time.monotonic() + connection_timeout
        for address in addresses:
            with RolloutClient(address, timeout=_CALL_SECONDS, token=token, tls=tls) as probe:
                # A killed run may have left the server asleep or paused.
                lifecycle = _wait(probe, deadline)
                self._asleep |= lifecycle in (Lifecycle.ASLEEP, Lifecycle.WEIGHTS_MISSING)
                if lifecycle is Lifecycle.PAUSED:
                    probe.resume()
        infos = [client.info() for client in self._clients]
        self._max_model_len = min(info.max_model_len for info in infos)
        self._routing_info = infos[0].routing

    def init_communicator(self, device: object = 0) -> None:
        """Does nothing: pushes need no communicator."""

    def close_communicator(self) -> None:
        """Rolls back an open push."""
        if self._base is not None:
            self._base.rollback()
            self._base = None

    def get_engine_type(self) -> dict[str, Any]:
        """Sets and returns the server's features for ms-swift: the trainer runs the turns, adapters are accepted."""
        self.use_async_engine, self.enable_multi_turn, self.use_gym_env = True, False, False
        self.enable_lora = self.takes_adapters
        return {
            "engine_type": "AsyncLLMEngine",
            "enable_multi_turn": False,
            "use_gym_env": False,
            "enable_lora": self.enable_lora,
        }

    def get_model_state_keys(self) -> list[str]:
        """Names of the parameters."""
        return [parameter.name for parameter in self._clients[0].parameters()]

    def reset_prefix_cache(self) -> None:
        """Does nothing: a new policy never uses an older one's prefixes."""

    def reset_encoder_cache(self) -> None:
        """Does nothing: a push drops the embeddings of images, unless it leaves the vision tower as it is."""

    def reset_mm_cache(self) -> None:
        """Does nothing: the server keeps no processed images."""

    def update_named_param(self, name: str, weights: Any) -> None:
        """Takes one tensor of a policy; `process_weights_after_loading` commits the push."""
        self._take([(name, weights)])

    def update_flattened_params(self, metadatas: Sequence[Any], flattened_tensor: Any) -> None:
        """Takes a bucket of tensors of a policy; `process_weights_after_loading` commits the push."""
        self._take(unflattened(metadatas, flattened_tensor))

    def update_model_params(self, model: Any) -> None:
        """Takes all parameters of a model; `process_weights_after_loading` commits the push."""
        self._take((name, parameter.data) for name, parameter in model.named_parameters())

    def process_weights_after_loading(self) -> None:
        """Commits the tensors that were taken."""
        base, self._base = self._base, None
        if base is not None:
            with _no_attribute_error():
                base.commit()

    def update_adapter_flattened_param(self, peft_config: Any, metadatas: Sequence[Any], flattened_tensor: Any) -> None:
        """Pushes an adapter from a bucket."""
        self.update_adapter_param(peft_config, dict(unflattened(metadatas, flattened_tensor)))

    def update_adapter_param(self, peft_config: Any, lora_params: Mapping[str, Any]) -> None:
        """Pushes an adapter, which the servers merge into the base."""
        with _no_attribute_error():
            tensors = adapter_tensors(lora_params.items())
            self._wake(["weights"])
            self._each(lambda client: client.push_lora(tensors, peft_config))

    def infer(
        self,
        infer_requests: Sequence[Any],
        request_config: Any = None,
        metrics: object = None,
        *,
        use_tqdm: bool | None = None,
        adapter_request: object = None,
    ) -> list[Any]:
        """Returns one sample for each request, in order; equal requests get different samples.

        Args:
            infer_requests: ms-swift's requests, or dicts of their fields.
            request_config: its `RequestConfig`, or a dict.
            metrics, use_tqdm: ignored.
            adapter_request: must be None, because the adapter is merged into the policy.

        Returns:
            A `RolloutOutput` for each request.
        """
        del metrics, use_tqdm
        if adapter_request is not None:
            raise InvalidArgument("adapter_request: the adapter is merged into the policy; leave it out")
        if self.encoder is None:
            raise RolloutError(
                "the template is not known: start with python -m rollout_client.swift, or call install()"
            )
        if not infer_requests:
            return []
        sampling = self._sampling(request_config)
        self._wake()
        encoded = [self.encoder.encode(request) for request in infer_requests]
        groups: dict[_Prompt, list[int]] = {}
        for index, request in enumerate(encoded):
            groups.setdefault((tuple(request.prompt), tuple(request.images)), []).append(index)
        samples = self._generate(list(groups.items()), sampling)
        return [self._output(request, *samples[index]) for index, request in enumerate(encoded)]

    def sleep(self, level: int) -> None:
        """Puts the servers to sleep until the next push or request."""
        self._each(lambda client: client.sleep(level))
        self._asleep = True

    def _wake(self, tags: Iterable[MemoryTag] | None = None, *, reload: bool = False) -> None:
        if self._asleep:
            self._each(lambda client: client.wake(tags, reload=reload))
            self._asleep = tags is not None

    def _take(self, named_tensors: Iterable[tuple[str, Any]]) -> None:
        with _no_attribute_error():
            try:
                if self._base is None:
                    self._base = self._begin()
                for name, tensor in named_tensors:
                    self._base.write(parameter_name(name), tensor)
            except BaseException:
                self.close_communicator()
                raise

    def _begin(self) -> FullPush | BaseCheck:
        check = self.takes_adapters and not pushes_base()
        self._wake(["weights"], reload=check)
        return BaseCheck(self._clients) if check else FullPush(self._clients, in_place=self._asleep)

    def _sampling(self, request_config: Any) -> SamplingParams:
        config = asdict(request_config) if is_dataclass(request_config) else dict(request_config or {})  # type: ignore[arg-type]
        for name, allowed in _REFUSED.items():
            if config.get(name, allowed[0]) not in allowed:
                raise InvalidArgument(f"{name}: {config[name]!r} is not supported in rollouts; leave it out")
        stop, stop_token_ids = self.encoder.stops(config.get("stop") or [])  # type: ignore[union-attr]
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
        given = {name: config[name] for name in names if config.get(name) is not None}
        regex = config.get("structured_outputs_regex")
        return SamplingParams(
            **given,
            top_k=max(config.get("top_k") or 0, 0),
            max_tokens=config.get("max_tokens") or self._max_model_len,
            stop=stop,
            stop_token_ids=stop_token_ids,
            structured_outputs=None if regex is None else {"regex": regex},
        )

    def _generate(self, groups: Sequence[tuple[_Prompt, list[int]]], sampling: SamplingParams) -> list[_Sampled]:
        """Prompts and samples by the request's index; a group of equal prompts goes to one server."""
        share = -(-len(groups) // len(self._clients))
        parts = [groups[start : start + share] for start in range(0, len(groups), share)]
        work = [(client, part) for client, part in zip(self._clients, parts, strict=False)]
        samples: dict[int, _Sampled] = {}
        for found in in_all(lambda item: _samples(*item, sampling, self.return_routing), work):
            samples.update(found)
        return [samples[index] for index in range(len(samples))]

    def _output(self, request: Any, output: PromptOutput, sample: Sample) -> Any:
        encoder, experts = self.encoder, None
        assert encoder is not None
        if output.routing is not None and sample.routing is not None and self._routing_info is not None:
            routing = join_routing(output.routing, sample.routing)
            experts = routing.routed_experts(self._routing_info.layers, encoder.num_hidden_layers)
        return encoder.output(request, output.prompt_token_ids, sample, experts)

    def _each(self, use: Callable[[RolloutClient], _T]) -> list[_T]:
        return in_all(use, self._clients)


def _samples(
    client: RolloutClient,
    groups: Sequence[tuple[_Prompt, list[int]]],
    sampling: SamplingParams,
    return_routing: bool,
) -> dict[int, _Sampled]:
    """Prompts and samples of one server by the request's index; `logprobs` are those of importance ratios."""
    if len({len(members) for _, members in groups}) > 1:
        groups = [(prompt, [index]) for prompt, members in groups for index in members]
    prompts, images = [list(tokens) for (tokens, _), _ in groups], [pixels for (_, pixels), _ in groups]
    outputs = client.generate(
        prompts,
        len(groups[0][1]),
        sampling,
        images=images,
        return_text=False,
        return_routing=return_routing,
        returns=ratio_returns(sampling),
    )
    samples: dict[int, _Sampled] = {}
    for (_, members), output in zip(groups, outputs, strict=True):
        for index, sample in zip(members, output.samples, strict=True):
            if sample.finish_reason is FinishReason.ABORTED:
                raise Aborted(f"{client.address}: a sample was ended by another client or a shutdown")
            samples[index] = output, replace(sample, logprobs=ratio_logprobs(sample, sampling))
    return samples


@contextmanager
def _no_attribute_error() -> Iterator[None]:
    """Converts `AttributeError`, which ms-swift would take for an older server of its own and repeat the push."""
    try:
        yield
    except AttributeError as error:
        raise RuntimeError(f"the push failed: {error}") from error


def _addresses(base_urls: Sequence[str] | None, hosts: Sequence[str], ports: Sequence[int]) -> list[str]:
    if base_urls is not None:
        addresses = [urlsplit(url if "://" in url else f"//{url}").netloc for url in base_urls]
        for url, address in zip(base_urls, addresses, strict=True):
            if not ADDRESS.fullmatch(address):
                raise InvalidArgument(f"vllm_server_base_url: {url!r} is not a gRPC address such as http://HOST:50051")
        return addresses
    if len(hosts) != len(ports):
        raise InvalidArgument(f"vllm_server_port: {len(ports)} ports for {len(hosts)} hosts; name one for each")
    # 0.0.0.0 is an address to listen on; connect to this machine instead.
    hosts = ["127.0.0.1" if host == "0.0.0.0" else host for host in hosts]
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]


def _wait(client: RolloutClient, deadline: float) -> Lifecycle:
    """Waits until a server answers, and returns its state."""
    while True:
        try:
            return client.status().lifecycle
        except Misdirected as error:
            raise Misdirected(f"{error} (set the port with --vllm_server_port, and TLS with ROLLOUT_TLS_CA)") from None
        except Unauthenticated as error:
            raise Unauthenticated(f"{client.address}: {error}; set ROLLOUT_TOKEN_FILE to a file with a token") from None
        except (Unavailable, DeadlineExceeded) as error:
            if time.monotonic() >= deadline:
                raise Unavailable(f"{client.address} does not answer: {error}") from None
            time.sleep(_POLL_SECONDS)


def _credentials() -> tuple[str | None, Tls | None]:
    """Token and TLS settings from the environment."""
    token_file = os.environ.get("ROLLOUT_TOKEN_FILE")
    tls = {field.name: os.environ.get(f"ROLLOUT_TLS_{field.name.upper()}") or None for field in fields(Tls)}
    return read_token(token_file) if token_file else None, Tls(**tls) if any(tls.values()) else None
