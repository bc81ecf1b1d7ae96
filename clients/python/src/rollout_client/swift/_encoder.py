"""Between ms-swift's requests and ours: messages become token ids by its template, samples its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from swift.infer_engine.infer_engine import InferEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
)

from ..errors import InvalidArgument
from ..types import FinishReason, Sample

_MEDIA = ("images", "audios", "videos")


@dataclass(frozen=True)
class EncodedRequest:
    """A request whose prompt is token ids."""

    request_id: str
    prompt: list[int]
    template_inputs: Any
    """What the template has made of the messages, for the way back."""


class TemplateEncoder:
    """Does on this side what a server of ms-swift would do: its template, its stop words, its calls of tools."""

    def __init__(self, template: Any) -> None:
        """With the trainer's template; a copy of it encodes as ms-swift's own engine does."""
        template = copy(template)
        template.padding_free = False
        template.sequence_parallel_size = 1
        template.set_mode("vllm")
        self._engine = _Engine(template)

    def encode(self, request: Mapping[str, Any] | RolloutInferRequest) -> EncodedRequest:
        """The request as token ids.

        Raises:
            InvalidArgument: it has images, audios or videos.
        """
        if not isinstance(request, RolloutInferRequest):
            known = {field.name for field in fields(RolloutInferRequest)}
            request = RolloutInferRequest(**{name: value for name, value in request.items() if name in known})
        inputs = self._engine.template.encode(request, return_template_inputs=True)
        for name in _MEDIA:
            if getattr(request, name) or inputs.get(name):
                raise InvalidArgument(f"{name}: rollout-server takes text only")
        return EncodedRequest(request.uuid or "", list(inputs["input_ids"]), inputs["template_inputs"])

    def stops(self, words: Sequence[str]) -> tuple[list[str], list[int]]:
        """Strings and token ids that end a sample: the template's and those of the request."""
        engine = self._engine
        all_words = [*words, *engine.template.template_meta.stop_words]
        return engine._get_stop_words(all_words), engine._get_stop_token_ids(all_words)

    def output(self, request: EncodedRequest, sample: Sample) -> RolloutOutput:
        """A sample as ms-swift's engine answers a request, with the id of that request."""
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
        )
        response = ChatCompletionResponse(
            model=engine.model_name,
            choices=[choice],
            usage=engine._get_usage_info(len(request.prompt), len(token_ids)),
            id=request.request_id,
            prompt_token_ids=request.prompt,
        )
        versions = [[span.weight_version, span.start, span.end] for span in sample.weight_versions]
        return RolloutOutput(response=response, rollout_infos={"weight_versions": versions})


class _Engine(InferEngine):  # type: ignore[misc]
    """For what engines of ms-swift do before and after inference."""

    async def infer_async(self, *_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError("requests go through RolloutVLLMClient.infer")
