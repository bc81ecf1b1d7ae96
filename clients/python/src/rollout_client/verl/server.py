"""The Ray actor of a replica: it runs or connects to one rollout-server, and serves verl's calls with it."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from transformers import AutoConfig
from verl.utils import hf_processor, normalize_token_ids
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from .._ratios import ratio_logprobs, ratio_returns
from .._timeline import trace_events
from .._token import read_token
from ..aio import AsyncRolloutClient
from ..errors import FailedPrecondition, InvalidArgument, RolloutError
from ..images import Pixels, processed_pixels
from ..process import ServerProcess
from ..routing import RoutingInfo
from ._sampling import aborted_fields, output_fields, request_seed, routed_experts, sampling_params, scored_fields
from ._settings import Settings, command_line, find_binary

LOG_LINES = 20
"""Lines of the server's log in the error of a failed start."""


class RolloutServer:
    """The actor's class. verl calls all methods, with these names and arguments."""

    def __init__(self, settings: Settings, rollout_mode: RolloutMode | None) -> None:
        """Does not start the server yet; `launch_server` does.

        Args:
            settings: settings of the replica.
            rollout_mode: whether the server shares memory with a trainer, and so sleeps on request.
        """
        self._settings = settings
        self._mode = rollout_mode
        self._process: ServerProcess | None = None
        self._processor: Any = None
        self._routing: tuple[list[int], int] | None = None
        self._global_steps: int | None = None
        self._running: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._profile_since = 0

    async def launch_server(self) -> None:
        """Starts the server on this machine, or connects to the configured one, and waits until it runs.

        Raises:
            RolloutError: the server exited (the message has the last lines of its log) or cannot be reached.
        """
        settings = self._settings
        token = None if settings.token_file is None else read_token(settings.token_file)
        if settings.address is None:
            await self._start(token)
            assert self._process is not None
            self._address, self._http_address = self._process.address, self._process.http_address
        else:
            self._address = self._http_address = settings.address
        self._token = token
        self._client = AsyncRolloutClient(self._address, token=token, tls=settings.tls)
        info = await self._client.info()
        self._max_model_len = min(settings.max_model_len or info.max_model_len, info.max_model_len)
        if settings.routing_replay:
            self._routing = await self._routing_format(info.routing)
        if info.images is not None:
            model = await asyncio.to_thread(copy_to_local, settings.model)
            self._processor = await asyncio.to_thread(hf_processor, model)

    async def get_server_address(self) -> tuple[str, str]:
        """This machine's address and the server's HTTP port; for a configured server, its gRPC address."""
        host, port = self._http_address.rsplit(":", 1)
        return (ray.util.get_node_ip_address() if self._process else host), port

    async def get_push_target(self) -> dict[str, Any]:
        """The arguments with which the trainer's rank pushes: `address`, `token`, `tls`, and the server's `node`."""
        node = ray.get_runtime_context().get_node_id() if self._process else None
        return {"address": self._address, "token": self._token, "tls": self._settings.tls, "node": node}

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> TokenOutput:
        """Samples one completion. Between `abort_all_requests` and `resume_generation` it waits or is rejected.

        Args:
            prompt_ids: the prompt, followed by the tokens so far if the sample continues after an abort.
            sampling_params: vLLM's sampling parameters.
            request_id: unique among running requests.
            image_data: the prompt's images, before the processor.
            mm_processor_kwargs: options with which verl calls its processor.
            others: videos and audio, which must be empty.

        Returns:
            Tokens, log-probabilities, with `enable_rollout_routing_replay` the experts of prompt and tokens, and, in
            `extra_fields`, the oldest and newest policy that sampled them. With `prompt_logprobs`, which verl sets for
            a teacher, the scores of the prompt instead.

        Raises:
            RolloutError: the server's error.
        """
        for name, value in others.items():
            if value:
                raise InvalidArgument(f"{name}: rollout-server takes token ids and images only")
        prompt_ids = normalize_token_ids(prompt_ids)
        if sampling_params.get("prompt_logprobs") is not None:
            return await self._score(prompt_ids, sampling_params["prompt_logprobs"], image_data)
        images = await self._pixels(image_data or (), mm_processor_kwargs or {})
        wanted = self._sampling(sampling_params, request_id, len(prompt_ids))
        while not self._open.is_set():
            if self._rejecting:
                return TokenOutput(**aborted_fields(self._global_steps))
            await self._open.wait()
        self._running.add(request_id)
        try:
            (output,) = await self._client.generate(
                [prompt_ids],
                sampling=wanted,
                images=[images],
                return_text=False,
                return_routing=self._routing is not None,
                returns=ratio_returns(wanted),
                request_id=request_id,
            )
        finally:
            self._running.discard(request_id)
        wanted_logprobs = sampling_params.get("logprobs")
        logprobs = wanted_logprobs is not None and wanted_logprobs is not False  # 0 requests those of sampled tokens
        sample = dataclasses.replace(output.samples[0], logprobs=ratio_logprobs(output.samples[0], wanted))
        experts = None if self._routing is None else routed_experts(output.routing, sample, *self._routing)
        return TokenOutput(**output_fields(sample, self._settings, logprobs, self._global_steps, experts))

    async def _score(self, token_ids: list[int], top: int, images: Sequence[Any] | None) -> TokenOutput:
        """A teacher's log-probabilities of a student's tokens."""
        if top or images:
            setting = f"prompt_logprobs={top}" if top else "image_data"
            raise InvalidArgument(f"{setting}: a teacher scores the given tokens only, and none with images")
        (score,) = await self._client.score([token_ids])
        return TokenOutput(**scored_fields(token_ids, score))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes the server: all of it, or `weights`, or `kv_cache`."""
        if self._sleeps():
            await self._client.wake(tags)

    async def sleep(self) -> None:
        """Puts the server to sleep."""
        if self._sleeps():
            await self._sleep()

    async def clear_kv_cache(self) -> None:
        """Clears the prefix cache. A push does not need it: a new policy never uses an older one's prefixes."""
        await self._client.reset_prefix_cache()

    async def release_kv_cache(self) -> None:
        """Frees the KV cache until `resume_kv_cache`, so that a push has room."""
        if self._settings.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._sleep()
            await self._client.wake(["weights"])

    async def resume_kv_cache(self) -> None:
        """Allocates the KV cache again."""
        if self._settings.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._client.wake(["kv_cache"])

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Ends in-flight requests with their tokens so far; no request starts before `resume_generation`.

        Args:
            reset_prefix_cache: also clear the prefix cache.
            reject_request: reject requests that arrive meanwhile, instead of letting them wait.

        Returns:
            `aborted_count` and `request_ids`.
        """
        self._rejecting = reject_request
        self._open.clear()
        request_ids = sorted(self._running)
        try:
            # One command, so that no request starts between the abort and the pause.
            await self._unless_asleep(self._client.pause("abort"))
        except BaseException:
            self._rejecting = False
            self._open.set()
            raise
        if reset_prefix_cache:
            await self._client.reset_prefix_cache()
        return {"aborted_count": len(request_ids), "request_ids": request_ids}

    async def resume_generation(self) -> None:
        """Ends `abort_all_requests`."""
        try:
            await self._unless_asleep(self._client.resume())
        finally:
            self._rejecting = False
            self._open.set()

    async def _unless_asleep(self, command: Awaitable[object]) -> None:
        """Sends a command that a sleeping server rejects and does not need."""
        try:
            await command
        except FailedPrecondition:
            if (await self._client.status()).asleep is None:
                raise

    async def set_global_steps(self, global_steps: int) -> None:
        """Stores the trainer's step whose weights serve now."""
        self._global_steps = global_steps

    async def get_global_steps(self) -> int | None:
        """The last `set_global_steps`."""
        return self._global_steps

    async def start_profile(self, **_options: Any) -> None:
        """Marks the start of the timeline that `stop_profile` writes."""
        if self._settings.save_path is not None:
            self._profile_since = (await self._client.timeline(max_spans=1)).now

    async def stop_profile(self) -> None:
        """Writes the server's phases since `start_profile` as a trace for Perfetto."""
        if self._settings.save_path is None:
            return
        timeline = await self._client.timeline(since=self._profile_since)
        rank = self._settings.replica_rank
        folder = Path(self._settings.save_path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rollout_server_replica{rank}_step{self._global_steps}.json"
        (folder / name).write_text(json.dumps(trace_events(timeline, pid=rank, name=f"replica {rank}")))

    async def _start(self, token: str | None) -> None:
        settings = self._settings
        flags = dict(settings.flags)
        host = flags.pop("host", "127.0.0.1")
        binary = find_binary(settings.binary)
        model = await asyncio.to_thread(copy_to_local, settings.model)
        log = _Log()
        self._process = ServerProcess(
            binary, model, command_line(flags), host=host, output=log.sink, token=token, tls=settings.tls
        )
        log.close_sink()
        try:
            await asyncio.to_thread(self._process.wait_until_ready, settings.start_seconds)
        except RolloutError as error:
            await asyncio.to_thread(self._process.stop)
            raise RolloutError(f"replica {settings.replica_rank}: {error}\n{log.tail()}") from None

    async def _routing_format(self, info: RoutingInfo | None) -> tuple[list[int], int]:
        """The layers with experts, and the number of all layers.

        Raises:
            InvalidArgument: the model has no experts.
            FailedPrecondition: the server does not return those that tokens took.
        """
        setting, model = "rollout.enable_rollout_routing_replay=True", self._settings.model
        if info is None:
            raise InvalidArgument(f"{setting}: {model} has no experts; set it to False")
        if not info.returned:
            raise FailedPrecondition(f"{setting}: start the server at {self._address} with --return-routing")
        directory = await asyncio.to_thread(copy_to_local, model)
        config = await asyncio.to_thread(AutoConfig.from_pretrained, directory)
        return info.layers, config.get_text_config().num_hidden_layers

    async def _pixels(self, images: Sequence[Any], options: dict[str, Any]) -> list[Pixels]:
        """The pixels that verl's processor makes of images when it scores the sample."""
        if not images:
            return []
        if self._processor is None:
            message = f"image_data: {self._settings.model} takes no images, or verl has no processor for it"
            raise InvalidArgument(message)
        options = {**options, **options.get("images_kwargs", {})}
        known = self._processor.image_processor.valid_kwargs.__annotations__  # others are of videos and texts
        of_images = {name: value for name, value in options.items() if name in known}
        return await asyncio.to_thread(processed_pixels, images, self._processor, **of_images)

    def _sampling(self, given: dict[str, Any], request_id: str, prompt_tokens: int) -> Any:
        if self._settings.seed is not None:
            seed = request_seed(self._settings.seed, request_id, prompt_tokens, self._global_steps)
            given = {"seed": seed, **given}
        return sampling_params(given, prompt_tokens, self._settings, self._max_model_len)

    def _sleeps(self) -> bool:
        """Whether the server shares memory with a trainer; a standalone one does not sleep."""
        return self._settings.free_cache_engine and self._mode is not RolloutMode.STANDALONE

    async def _sleep(self) -> None:
        # Keep the base of adapters, and weights that no push sends again.
        keeps = self._settings.adapter or self._mode is RolloutMode.COLOCATED
        # Requests that arrived just before the pause would never end; verl sends them again.
        await self._client.sleep(1 if keeps else 2, "wait" if self._open.is_set() else "abort")


class _Log:
    """Forwards the server's log to standard error, where Ray collects it, and keeps the last lines."""

    def __init__(self) -> None:
        source, self.sink = os.pipe()
        self._lines: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._thread = threading.Thread(target=self._pass_on, args=(source,), daemon=True)
        self._thread.start()

    def close_sink(self) -> None:
        """Closes this process's end of the pipe, so that the log ends when the server exits."""
        os.close(self.sink)

    def tail(self) -> str:
        """The last lines of a server that has exited."""
        self._thread.join()
        return "".join(self._lines)

    def _pass_on(self, source: int) -> None:
        with open(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.append(line)
                sys.stderr.write(line)
