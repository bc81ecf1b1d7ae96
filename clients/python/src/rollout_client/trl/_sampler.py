"""The part of TRL's `VLLMClient` that `VLLMGeneration` and its trainers use."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from .._ratios import ratio_logprobs, ratio_returns
from ..client import RolloutClient
from ..errors import Aborted
from ..images import Pixels, processed_pixels
from ..options import GenerateOptions
from ..returns import Returns
from ..types import FinishReason, PromptOutput, Sample, SamplingParams
from ._references import POLICY, Resident, scored_tokens

logger = logging.getLogger(__name__)

_OFF = (None, -1)
"""Values of `top_k` that mean "keep all", beside TRL's 0."""

_KNOWN = tuple(field.name for field in dataclasses.fields(SamplingParams))


class Sampler:
    """Samples on the server with TRL's arguments; the trainer's `vllm_client`."""

    def __init__(self, client: RolloutClient, processing_class: Any) -> None:
        """Takes the client and the trainer's processor or tokenizer; `weight_version` is set after each push."""
        self.client = client
        self._processing_class = processing_class
        self.weight_version: int | None = None
        """The last pushed version. Requests require it, so that samples of another policy never train this one."""
        self.resident: Resident | None = None
        """The adapter that was pushed last, if it is resident; None if it is merged."""

    def get_server_info(self) -> dict[str, Any]:
        """The kind of log-probabilities, which TRL checks before it corrects by importance sampling."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def image_features(self, images: Sequence[Sequence[Any] | None]) -> list[list[Pixels] | None]:
        """The pixels of each prompt's images, as the trainer's processor makes them; None for a prompt without.

        Raises:
            InvalidArgument: the processor is not of a supported model.
        """
        return [processed_pixels(of_prompt, self._processing_class) if of_prompt else None for of_prompt in images]

    def generate(
        self,
        prompts: list[list[int]],
        *,
        features: Sequence[Sequence[Pixels] | None] | None = None,
        n: int = 1,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Samples `n` completions of each prompt.

        Args:
            prompts: token ids, with a placeholder for each token of an image.
            features: of each prompt what `image_features` returns.
            n: completions per prompt.
            logprobs: number of most likely tokens that TRL wants beside the sampled one; must be 0 or None.
            structured_outputs_regex: regular expression that each completion must match.
            generation_kwargs: further sampling parameters, which take precedence.
            sampling: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_tokens`.

        Returns:
            `prompt_ids` by prompt, and `completion_ids`, `logprobs` and `logprob_token_ids` by completion; the last two
            have a list of one element for each token.

        Raises:
            ValueError: the server does not support an argument.
            RolloutError: the server rejects the request.
        """
        if logprobs not in (0, None):
            raise ValueError(f"logprobs={logprobs}: only the sampled token's log-probability is supported; use 0")
        wanted = sampling_params(sampling, structured_outputs_regex, generation_kwargs)
        outputs = self.sample(prompts, n, wanted, features)
        samples = [sample for output in outputs for sample in output.samples]
        return {
            "prompt_ids": prompts,
            "completion_ids": [token_ids(sample) for sample in samples],
            "logprobs": [[[value] for value in ratio_logprobs(sample, wanted).tolist()] for sample in samples],
            "logprob_token_ids": [[[token] for token in sample.token_ids] for sample in samples],
        }

    def sample(
        self,
        prompts: list[list[int]],
        n: int,
        sampling: SamplingParams,
        images: Sequence[Sequence[Pixels] | None] | None = None,
    ) -> list[PromptOutput]:
        """Samples from the policy that was pushed last, without texts; if it is resident, with references.

        Raises:
            Aborted: some samples were aborted, or are of another policy.
        """
        outputs = self.client.generate(
            prompts, n, sampling, images=images or (), return_text=False, **self._options(sampling)
        )
        for output in outputs:
            cut = sum(sample.finish_reason is FinishReason.ABORTED for sample in output.samples)
            if cut:
                raise Aborted(
                    f"prompts[{output.prompt_index}]: {cut} of {n} samples were aborted, and must not be trained on as "
                    "if the model had ended them. The cause is an abort, a pause, a push with running='abort', the "
                    "server's shutdown, or the client's timeout"
                )
        if self.resident is not None:
            self._check_resident(outputs)
        return outputs

    def _options(self, sampling: SamplingParams) -> GenerateOptions:
        options = GenerateOptions(if_weight_version=self.weight_version)
        returns = ratio_returns(sampling)
        if self.resident is not None:
            options["adapter"] = POLICY
            returns = dataclasses.replace(returns, references=[self.resident.reference])
        if returns != Returns():
            options["returns"] = returns
        return options

    def _check_resident(self, outputs: list[PromptOutput]) -> None:
        """Generations are never reused: if the adapter still has the one that was pushed, all samples are of it."""
        serving = {adapter.name: adapter.generation for adapter in self.client.adapters() if not adapter.retired}
        if serving.get(POLICY) != self.resident.generation:
            raise Aborted(
                f"the resident adapter {POLICY!r} is no longer the one that was pushed: another client has pushed or "
                "removed it. One trainer with server_reference at a time can use a server"
            )
        if not all(sample.references for output in outputs for sample in output.samples):
            raise Aborted("the request ended before all samples were scored under the reference: raise the timeout")


def token_ids(sample: Sample) -> list[int]:
    """The tokens of a sample, as `ScoredToken` if it has a reference."""
    return scored_tokens(sample) if sample.references else sample.token_ids


def sampling_params(
    given: dict[str, Any], regex: str | None = None, generation_kwargs: dict[str, Any] | None = None
) -> SamplingParams:
    """`SamplingParams` from TRL's arguments; `generation_kwargs` take precedence, as in TRL.

    Raises:
        ValueError: the server has no such sampling parameter as a key of `generation_kwargs`.
    """
    further = dict(generation_kwargs or {})
    if regex is not None:
        if further.get("structured_outputs") is not None:
            logger.warning(
                "vllm_structured_outputs_regex takes precedence over generation_kwargs['structured_outputs']"
            )
        further["structured_outputs"] = {"regex": regex}
    for name in further:
        if name not in _KNOWN:
            raise ValueError(
                f"generation_kwargs: unknown sampling parameter {name!r}; the server has {', '.join(_KNOWN)}"
            )
    merged = {**given, **further}
    if merged.get("top_k") in _OFF:
        merged["top_k"] = 0
    if merged.get("min_p") is None:
        merged["min_p"] = 0.0
    return SamplingParams(**merged)
