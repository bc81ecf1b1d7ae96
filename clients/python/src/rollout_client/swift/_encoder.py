"""Converts between ms-swift and the server: messages to token ids by its template, samples to its responses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import numpy.typing as npt
import torch
from swift.infer_engine.infer_engine import InferEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
)
from swift.template.templates.internvl import InternvlTemplate
from swift.template.vision_utils import IMAGENET_MEAN, IMAGENET_STD

from ..errors import InvalidArgument
from ..images import Pixels, pixels_of_tiles
from ..types import FinishReason, Sample

_REFUSED = ("audios", "videos")


@dataclass(frozen=True)
class EncodedRequest:
    """A request whose prompt is token ids and pixels."""

    request_id: str
    prompt: list[int]
    """With one placeholder for each image, or one for each of its tokens."""
    images: list[Pixels]
    """As the template has resized them: those that the trainer scores with."""
    template_inputs: Any
    """The template's inputs from the messages, for decoding."""


class TemplateEncoder:
    """Applies ms-swift's template, stop words and tool-call parser, as a server of ms-swift would."""

    def __init__(self, template: Any) -> None:
        """Takes the trainer's template; a copy of it encodes like ms-swift's own engine."""
        template = copy(template)
        template.padding_free = False
        template.sequence_parallel_size = 1
        self._makes_tiles = isinstance(template, InternvlTemplate)
        if self._makes_tiles:
            # For vLLM these templates leave images to vLLM, and their text differs from the one that is trained on.
            template.set_mode("transformers")
            # Otherwise the pixels are rounded to the model's dtype.
            template.model_info = copy(template.model_info)
            template.model_info.torch_dtype = torch.float32
        else:
            template.set_mode("vllm")
        self._engine = _Engine(template)

    def encode(self, request: Mapping[str, Any] | RolloutInferRequest) -> EncodedRequest:
        """Encodes a request as token ids and pixels.

        Raises:
            InvalidArgument: the request has audio or videos.
        """
        if not isinstance(request, RolloutInferRequest):
            known = {field.name for field in fields(RolloutInferRequest)}
            request = RolloutInferRequest(**{name: value for name, value in request.items() if name in known})
        for name in _REFUSED:
            if getattr(request, name):
                raise _refused(name)
        inputs = self._engine.template.encode(request, return_template_inputs=True)
        for name in _REFUSED:
            if inputs.get(name):
                raise _refused(name)
        if self._makes_tiles:
            images = self._tiles(inputs)
        else:
            images = [Pixels.of(image, f"images[{i}]") for i, image in enumerate(inputs.get("images") or ())]
        return EncodedRequest(request.uuid or "", list(inputs["input_ids"]), images, inputs["template_inputs"])

    def _tiles(self, inputs: Mapping[str, Any]) -> list[Pixels]:
        """The pixels of each image, whose placeholders are together, as many for each of the tiles."""
        if inputs.get("pixel_values") is None:
            return []
        template, tiles = self._engine.template, inputs["pixel_values"]
        (placeholder,) = template.tokenizer.encode("<IMG_CONTEXT>", add_special_tokens=False)
        runs = itertools.groupby(inputs["input_ids"], lambda token: token == placeholder)
        tokens = [len(list(run)) for is_image, run in runs if is_image]
        counts = [count * len(tiles) // sum(tokens) for count in tokens]
        # The templates of InternVL's own layout have no processor of images.
        processor = getattr(template.processor, "image_processor", None)
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if processor is None else (processor.image_mean, processor.image_std)
        return [pixels_of_tiles(of_image.numpy(), mean, std) for of_image in tiles.split(counts)]

    def stops(self, words: Sequence[str]) -> tuple[list[str], list[int]]:
        """Strings and token ids that end a sample, from the template and the request."""
        engine = self._engine
        all_words = [*words, *engine.template.template_meta.stop_words]
        return engine._get_stop_words(all_words), engine._get_stop_token_ids(all_words)

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, with those that have no experts."""
        return self._engine.template.config.get_text_config().num_hidden_layers

    def output(
        self,
        request: EncodedRequest,
        prompt_token_ids: list[int],
        sample: Sample,
        routed_experts: npt.NDArray[Any] | None = None,
    ) -> RolloutOutput:
        """Converts a sample to the response of ms-swift's engine, with the request's id and the expanded prompt.

        `routed_experts` are those of prompt and sample, `[P + T - 1, num_hidden_layers, top_k]`.
        """
        engine, token_ids = self._engine, sample.token_ids
        text = engine.template.decode_generate_ids(token_ids, template_inputs=request.template_inputs)
        tool_calls = engine._get_toolcall(text, template_inputs=request.template_inputs)
        logprobs = [{token: value} for token, value in zip(token_ids, sample.logprobs.tolist(), strict=True)]
        choice = ChatCompletionResponseChoice(
            index=0,
            message=ChatMessage(role="assistant", content=text, tool_calls=tool_calls),
            finish_reason="length" if sample.finish_reason is FinishReason.LENGTH else "stop",
            logprobs=engine._get_logprobs(logprobs, token_ids),
            token_ids=token_ids,
            routed_experts=routed_experts,
        )
        response = ChatCompletionResponse(
            model=engine.model_name,
            choices=[choice],
            usage=engine._get_usage_info(len(prompt_token_ids), len(token_ids)),
            id=request.request_id,
            prompt_token_ids=prompt_token_ids,
            images_size=[image.size for image in request.template_inputs.images],
        )
        versions = [[span.weight_version, span.start, span.end] for span in sample.weight_versions]
        return RolloutOutput(response=response, rollout_infos={"weight_versions": versions})


def _refused(name: str) -> InvalidArgument:
    return InvalidArgument(f"{name}: rollout-server takes text and images only")


class _Engine(InferEngine):  # type: ignore[misc]
    """Reuses the steps of ms-swift's engines before and after inference."""

    async def infer_async(self, *_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError("requests go through RolloutVLLMClient.infer")
