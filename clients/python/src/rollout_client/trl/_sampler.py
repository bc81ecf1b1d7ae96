"""Generation as TRL asks for it: what `VLLMGeneration` and its trainers use of TRL's `VLLMClient`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NoReturn

from ..client import RolloutClient
from ..errors import Aborted
from ..types import FinishReason, PromptOutput, SamplingParams

logger = logging.getLogger(__name__)

_OFF = (None, -1)
"""Values of `top_k` that trainers write for "keep all"; TRL's own is 0."""

_KNOWN = tuple(field.name for field in dataclasses.fields(SamplingParams))


class Sampler:
    """Samples on the server with TRL's arguments; stands where a trainer looks for its `vllm_client`."""

    def __init__(self, client: RolloutClient) -> None:
        """Takes the connection; the version to ask for is set after each push."""
        self.client = client
        self.weight_version: int | None = None
        """What was pushed last. Requests ask for it, so that samples of another policy never train this one."""

    def get_server_info(self) -> dict[str, Any]:
        """What TRL asks before it corrects by importance sampling: which log-probabilities come."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def image_features(self, images: object) -> NoReturn:
        """Refuses prompts with images.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "prompts with images: rollout-server serves text models; train this model with vLLM, or drop the images"
        )

    def generate(
        self,
        prompts: list[list[int]],
        *,
        features: object = None,
        n: int = 1,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Samples `n` completions of each prompt.

        Args:
            prompts: token ids.
            features: of images; only None is served.
            n: completions per prompt.
            logprobs: how many of the most likely tokens TRL wants besides the sampled one; 0 and None are served.
            structured_outputs_regex: what each completion must match.
            generation_kwargs: further sampling parameters, which take precedence.
            sampling: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_tokens`.

        Returns:
            `prompt_ids` by prompt, and by completion `completion_ids`, `logprobs` and `logprob_token_ids`, which have a
            list of one for each token.

        Raises:
            ValueError: something is asked for that the server does not have.
            RolloutError: the server says no.
        """
        if features is not None:
            self.image_features(features)
        if logprobs not in (0, None):
            raise ValueError(f"logprobs={logprobs}: only the sampled token's log-probability is served here; use 0")
        outputs = self.sample(prompts, n, sampling_params(sampling, structured_outputs_regex, generation_kwargs))
        samples = [sample for output in outputs for sample in output.samples]
        return {
            "prompt_ids": prompts,
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [[[value] for value in sample.logprobs.tolist()] for sample in samples],
            "logprob_token_ids": [[[token] for token in sample.token_ids] for sample in samples],
        }

    def sample(self, prompts: list[list[int]], n: int, sampling: SamplingParams) -> list[PromptOutput]:
        """Samples of the policy that was pushed last, without texts.

        Raises:
            Aborted: some were cut from outside.
        """
        outputs = self.client.generate(prompts, n, sampling, return_text=False, if_weight_version=self.weight_version)
        for output in outputs:
            cut = sum(sample.finish_reason is FinishReason.ABORTED for sample in output.samples)
            if cut:
                raise Aborted(
                    f"prompts[{output.prompt_index}]: {cut} of {n} samples were cut from outside, and would be trained "
                    "on as if the model had ended them: by an abort, a pause, a push with running='abort', the end of "
                    "the server, or the timeout that the client was made with"
                )
        return outputs


def sampling_params(
    given: dict[str, Any], regex: str | None = None, generation_kwargs: dict[str, Any] | None = None
) -> SamplingParams:
    """`SamplingParams` of TRL's arguments, with `generation_kwargs` over them as TRL does.

    Raises:
        ValueError: a key of `generation_kwargs` is no sampling parameter of the server.
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
                f"generation_kwargs: {name!r} is no sampling parameter here; there are {', '.join(_KNOWN)}"
            )
    merged = {**given, **further}
    if merged.get("top_k") in _OFF:
        merged["top_k"] = 0
    if merged.get("min_p") is None:
        merged["min_p"] = 0.0
    return SamplingParams(**merged)
