"""A `rollout_func` for TRL's `GRPOTrainer`."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from .._ratios import ratio_logprobs
from ..client import RolloutClient
from ..images import Pixels
from ..types import Sample, SamplingParams
from ._generation import RolloutGeneration, connect
from ._sampler import Sampler, sampling_params, token_ids

RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]
"""Takes prompts and the trainer, returns one completion per prompt, like `trl.trainer.grpo_trainer.RolloutFunc`."""


def rollout_func(server: str | RolloutClient, sampling: SamplingParams | None = None) -> RolloutFunc:
    """Returns a `rollout_func` that pushes when the trainer's step has changed, and samples on the server.

    TRL repeats each prompt `num_generations` times before the call; the repetitions become one group. The result also
    has `weight_version`, `finish_reason` and `cached_tokens`, which reward functions get as columns.

    Args:
        server: the gRPC address as `host:port`, or a client.
        sampling: sampling parameters; None takes the trainer's settings.
    """
    client = connect(server) if isinstance(server, str) else server
    policy = _Policy(client)

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        generation = policy.of(trainer)
        with generation.rollout():
            sampler = policy.pushed(trainer)
            generation.wake()
            prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
            pixels = sampler.image_features(images or [None] * len(prompt_ids))
            wanted = _seeded(sampling or _settings(trainer), trainer)
            samples = _samples(sampler, prompt_ids, pixels, wanted)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [token_ids(sample) for sample in samples],
            "logprobs": [ratio_logprobs(sample, wanted).tolist() for sample in samples],
            "weight_version": [sample.weight_versions[0].weight_version for sample in samples],
            "finish_reason": [str(sample.finish_reason) for sample in samples],
            "cached_tokens": [sample.cached_tokens for sample in samples],
        }

    return roll_out


class _Policy:
    """The policy on the server, and the trainer's step that it comes from."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._sampler: Sampler | None = None
        self._generation: RolloutGeneration | None = None
        self._step: int | None = None

    def of(self, trainer: Any) -> RolloutGeneration:
        """The generation that pushes: the trainer's own if it has one (`use_vllm`), else one created here."""
        own = getattr(trainer, "vllm_generation", None)
        if isinstance(own, RolloutGeneration):
            return own
        if self._generation is None:
            self._generation = RolloutGeneration(
                model=trainer.model,
                accelerator=trainer.accelerator,
                processing_class=trainer.processing_class,
                mode="server",
                server_timeout=trainer.args.vllm_server_timeout,
                enable_sleep_mode=trainer.args.vllm_enable_sleep_mode,
                client=self._client,
            )
        return self._generation

    def pushed(self, trainer: Any) -> Sampler:
        """Pushes if the trainer has made a step since the last push; every rank then requires that version."""
        generation = self.of(trainer)
        if self._sampler is None:
            self._sampler = Sampler(self._client, trainer.processing_class)
        if trainer.state.global_step != self._step:
            if generation is self._generation:  # TRL itself pushes with the trainer's own
                generation.sync_weights()
            main = trainer.accelerator.is_main_process
            pushed = [generation.last_push.weight_version, generation.resident] if main else [None, None]
            self._sampler.weight_version, self._sampler.resident = broadcast_object_list(pushed, from_process=0)
            self._step = trainer.state.global_step
        return self._sampler


def _samples(
    sampler: Sampler, prompts: list[list[int]], images: list[list[Pixels] | None], sampling: SamplingParams
) -> list[Sample]:
    """One sample per prompt, in order; consecutive prompts with equal tokens and images are a group."""
    repeated = list(zip(prompts, images, strict=True))
    groups = [(prompt, len(list(equal))) for prompt, equal in itertools.groupby(repeated)]
    sizes = {size for _, size in groups}
    n = sizes.pop() if len(sizes) == 1 else 1
    sent = repeated[::n]
    outputs = sampler.sample([tokens for tokens, _ in sent], n, sampling, [pixels for _, pixels in sent])
    return [sample for output in outputs for sample in output.samples]


def _seeded(sampling: SamplingParams, trainer: Any) -> SamplingParams:
    """Derives a seed for this rank and step, if one was given: a group may be split over ranks with own requests."""
    if sampling.seed is None:
        return sampling
    place = f"{sampling.seed} {trainer.state.global_step} {trainer.accelerator.process_index}"
    seed = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little")
    return dataclasses.replace(sampling, seed=seed)


def _settings(trainer: Any) -> SamplingParams:
    given = {name: getattr(trainer, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    regex, further = trainer.args.vllm_structured_outputs_regex, trainer.args.generation_kwargs
    return sampling_params({**given, "max_tokens": trainer.max_completion_length}, regex, further)
