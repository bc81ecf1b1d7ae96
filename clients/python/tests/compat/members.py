"""The members of vLLM 0.33's requests, each with a value and what it must change in the answer."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_answers import Answer, events

GREEDY = {"temperature": 0}
LONG = {**GREEDY, "max_tokens": 48}
BEGIN, END, TOKEN, OTHER = 1, 2, 300, 301
"""Token ids of the model: two special ones, of which the second ends a sample, and two plain ones."""
LETTERS = [74, 75]
ENDS = {"logit_bias": {str(END): 100}}
SPECIAL = {"allowed_token_ids": [BEGIN], "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "description": "counts", "parameters": SCHEMA}}
ROOM = {"max_tokens": 80, "logit_bias": {"200": -100, "201": -100, "204": -100, "223": -100}}
"""For JSON, with few tokens for white space, which a random model would not stop writing."""

THINKS = {"temperature": 0, "max_tokens": 9, "prompt": "So?\n", "token_ids": [201]}
"""For the model that thinks after a line feed; each route takes the prompt that it knows."""


class Reply:
    """An answer of one of the three routes, read alike. A stream's parts are joined."""

    def __init__(self, answer: Answer):
        self.answer = answer
        self.is_stream = answer.content_type.startswith("text/event-stream")
        self.events = events(answer.body) if self.is_stream and answer.status == 200 else []
        body = answer.body if isinstance(answer.body, dict) else {}
        self.body = {**(self.events[0] if self.events else {}), **body}
        self.choices = body.get("choices", [])
        self.choice = self.choices[0] if self.choices else {}
        self.message = self.choice.get("message") or {}
        self.tokens = self.choice.get("token_ids") or []
        self.text = self.choice.get("text", self.message.get("content"))
        self.finish = self.choice.get("finish_reason")
        self.prompt = self.choice.get("prompt_token_ids") or self.body.get("prompt_token_ids") or []

    @property
    def logprobs(self) -> list[dict[str, float]]:
        """For each sampled token the log-probabilities that are reported, by token."""
        reported = self.choice.get("logprobs") or {}
        if "content" not in reported:
            return reported.get("top_logprobs") or []
        entries = [[entry, *(entry["top_logprobs"] or [])] for entry in reported["content"]]
        return [{str(entry.get("token", entry.get("token_id"))): entry["logprob"] for entry in row} for row in entries]

    @property
    def prompt_logprobs(self) -> list[Any]:
        return self.choice.get("prompt_logprobs") or self.body.get("prompt_logprobs") or []


Effect = Callable[[Reply, Reply], bool]


@dataclass(frozen=True)
class Case:
    """A member's value, which may depend on the answer without it, and its effect on the answer.

    Without an effect the member changes nothing here that a client could see. `also` are the members that both requests
    have, `routes` those that know the member in vLLM: C for completions, H for chats, G for token ids. `model` is one
    of those that test_members.py makes.
    """

    value: Any
    effect: Effect | None = None
    also: dict[str, Any] = field(default_factory=dict)
    routes: str = "CHG"
    model: str = "probe"


def changed(reply: Reply, base: Reply) -> bool:
    return reply.tokens != base.tokens


def content(pattern: Callable[[str], bool]) -> Effect:
    """The text is as wanted; where there is none, the tokens are others."""
    return lambda reply, base: changed(reply, base) and (reply.text is None or pattern(reply.text))


def is_json(text: str) -> bool:
    return json.loads(text).keys() == {"n"}


def longer_prompt(reply: Reply, base: Reply) -> bool:
    return len(reply.prompt) > len(base.prompt) > 0


def kept(side: slice) -> Effect:
    return lambda reply, base: len(reply.prompt) == 3 and reply.prompt == base.prompt[side]


def usage_in(count: Callable[[int], int]) -> Effect:
    """So many of a stream's events have the usage."""
    return lambda reply, _: sum(bool(event.get("usage")) for event in reply.events) == count(len(reply.events))


def called(reply: Reply, _: Reply) -> bool:
    return [call["function"]["name"] for call in reply.message.get("tool_calls") or []][:1] == ["f"]


def other_prompt(reply: Reply, base: Reply) -> bool:
    return reply.prompt != base.prompt


def has_table(*shape: int) -> Effect:
    """The log-probabilities of named tokens have this shape."""

    def effect(reply: Reply, _: Reply) -> bool:
        return np.load(io.BytesIO(base64.b64decode(reply.body["prompt_token_id_logprobs"]))).shape == shape

    return effect


def experts(reply: Reply) -> list[Any]:
    """The experts of each token."""
    return np.load(io.BytesIO(base64.b64decode(reply.choice["routed_experts"]))).tolist()


def part(**members: Any) -> dict[str, Any]:
    """A message of one part."""
    return {"role": "user", "content": [members]}


IMAGE = "data:image/png;base64,AAAA"
STREAM = {"stream": True, "return_token_ids": False}
CASES = {
    # Members of OpenAI's API.
    "model": Case("probe", lambda reply, _: reply.body["model"] == "probe", routes="CH"),
    "prompt": Case("Say more.", other_prompt, routes="C"),
    "messages": Case([{"role": "user", "content": "More"}], other_prompt, routes="H"),
    "token_ids": Case([5, 6], lambda reply, base: reply.prompt == [5, 6] and changed(reply, base), routes="G"),
    "messages: parts of text": Case([part(type="text", text="More")], other_prompt, routes="H"),
    "messages: image_url": Case([part(type="image_url", image_url={"url": IMAGE})], other_prompt, routes="H"),
    "messages: input_audio": Case(
        [part(type="input_audio", input_audio={"data": "AAAA", "format": "wav"})], other_prompt, routes="H"
    ),
    "messages: video_url": Case([part(type="video_url", video_url={"url": "file:///a.mp4"})], other_prompt, routes="H"),
    "echo": Case(
        True, lambda reply, base: len(reply.text) > len(base.text) and reply.text.endswith(base.text), routes="C"
    ),
    "frequency_penalty": Case(2.0, changed, LONG),
    "presence_penalty": Case(2.0, changed, LONG),
    "logit_bias": Case({str(TOKEN): 100}, lambda reply, _: set(reply.tokens) == {TOKEN}),
    "logprobs": Case(True, lambda reply, _: len(reply.logprobs) == len(reply.tokens), routes="H"),
    "top_logprobs": Case(
        2, lambda reply, _: min(map(len, reply.logprobs)) == 2, {"logprobs": True, **GREEDY}, routes="H"
    ),
    "top_logprobs: -1": Case(-1, lambda reply, _: min(map(len, reply.logprobs)) > 100, {"logprobs": True}, routes="H"),
    "max_tokens": Case(3, lambda reply, _: len(reply.tokens) == 3),
    "max_completion_tokens": Case(3, lambda reply, _: len(reply.tokens) == 3, routes="H"),
    "n": Case(2, lambda reply, _: len(reply.choices) == 2),
    "seed": Case(5, changed),
    "stop": Case(
        lambda base: base.text[2:4],
        lambda reply, base: base.text.startswith(reply.text) and reply.finish == "stop",
        routes="CH",
    ),
    "stream": Case(True, lambda reply, _: len(reply.events) > 1),
    "stream_options.include_usage": Case({"include_usage": True}, usage_in(lambda events: 1), STREAM),
    "stream_options.continuous_usage_stats": Case(
        {"include_usage": True, "continuous_usage_stats": True}, usage_in(lambda events: events), STREAM
    ),
    "suffix": Case("The end.", changed, routes="C"),
    "temperature": Case(0, changed),
    "top_p": Case(1e-3, changed),
    "user": Case("me", routes="CH"),
    "parallel_tool_calls": Case(False, called, {"tools": [TOOL], "tool_choice": "required", **ROOM}, routes="H"),
    "tools": Case([TOOL], longer_prompt, routes="H"),
    "tool_choice: auto": Case("auto", lambda reply, base: reply.prompt == base.prompt, {"tools": [TOOL]}, routes="H"),
    "tool_choice: none": Case(
        "none", lambda reply, base: not reply.message.get("tool_calls"), {"tools": [TOOL]}, routes="H"
    ),
    "tool_choice: required": Case("required", called, {"tools": [TOOL], **ROOM}, routes="H"),
    "tool_choice: a function": Case(
        {"type": "function", "function": {"name": "f"}}, called, {"tools": [TOOL], **ROOM}, routes="H"
    ),
    "response_format: text": Case({"type": "text"}, lambda reply, base: not changed(reply, base), routes="CH"),
    "response_format: json_object": Case(
        {"type": "json_object"}, content(lambda text: text.lstrip().startswith("{")), routes="CH"
    ),
    "response_format: json_schema": Case(
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, content(is_json), ROOM, routes="CH"
    ),
    "response_format: structural_tag": Case(
        {
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
            "triggers": ["<a>"],
        },
        content(lambda text: "<a>" in text),
        routes="CH",
    ),
    # vLLM's own, for sampling.
    "use_beam_search": Case(True, changed, {"n": 2}, routes="CH"),
    "top_k": Case(1, changed),
    "min_p": Case(1.0, changed),
    "repetition_penalty": Case(2.0, changed, LONG),
    "watermarking": Case(True),
    "length_penalty": Case(2.0, changed, routes="CH"),
    "stop_token_ids": Case(
        lambda base: [base.tokens[3]], lambda reply, base: reply.finish == "stop" and len(reply.tokens) <= 4
    ),
    "include_stop_str_in_output": Case(
        True,
        lambda reply, base: len(reply.text) > len(base.text),
        {"allowed_token_ids": [TOKEN], "stop": " of of"},
        routes="CH",
    ),
    "ignore_eos": Case(True, lambda reply, base: len(reply.tokens) > len(base.tokens), ENDS),
    "min_tokens": Case(4, lambda reply, base: len(reply.tokens) >= 4 > len(base.tokens), ENDS),
    "skip_special_tokens": Case(
        False, lambda reply, base: "<|im_start|>" in reply.text and not base.text, SPECIAL, routes="CH"
    ),
    "spaces_between_special_tokens": Case(False),
    "truncate_prompt_tokens": Case(3, kept(slice(-3, None)), routes="CH"),
    "truncation_side: left": Case(
        "left",
        lambda reply, _: len(reply.prompt) == 3,
        {"truncate_prompt_tokens": 3, "prompt": [5, 6, 7, 8]},
        routes="C",
    ),
    "truncation_side: right": Case(
        "right",
        lambda reply, _: reply.prompt == [5, 6, 7],
        {"truncate_prompt_tokens": 3, "prompt": [5, 6, 7, 8]},
        routes="C",
    ),
    "allowed_token_ids": Case([TOKEN, OTHER], lambda reply, _: set(reply.tokens) <= {TOKEN, OTHER}),
    "prompt_logprobs": Case(1, lambda reply, _: len(reply.prompt_logprobs) == len(reply.prompt)),
    "prompt_logprobs: -1": Case(-1, lambda reply, _: len(reply.prompt_logprobs[1]) > 100),
    "prompt_logprob_token_ids": Case([[TOKEN], [OTHER, TOKEN], []], has_table(3, 2), routes="G"),
    "bad_words": Case(
        lambda base: [base.text],
        changed,
        {"max_tokens": 1, "allowed_token_ids": LETTERS},
        routes="CH",
    ),
    "repetition_detection": Case(
        {"max_pattern_size": 1, "min_count": 2},
        lambda reply, base: len(reply.tokens) < len(base.tokens),
        {"allowed_token_ids": [TOKEN]},
    ),
    "thinking_token_budget": Case(
        2, lambda reply, base: 0 < len(reply.tokens) < len(base.tokens), THINKS, model="thinker"
    ),
    "structured_outputs.json": Case({"json": SCHEMA}, content(is_json), ROOM),
    "structured_outputs.regex": Case({"regex": "[0-9]{3}"}, content(lambda text: text.isdigit()), ROOM),
    "structured_outputs.choice": Case({"choice": ["yes", "no"]}, content(lambda text: text in ("yes", "no")), ROOM),
    "structured_outputs.grammar": Case({"grammar": 'start: "a" "b"'}, content(lambda text: text == "ab"), ROOM),
    "structured_outputs.json_object": Case({"json_object": True}, content(lambda text: text.lstrip()[:1] == "{")),
    "structured_outputs.structural_tag": Case({"structural_tag": "{}"}, changed),
    "structured_outputs.disable_any_whitespace": Case(
        {"json": SCHEMA, "disable_any_whitespace": True}, content(is_json), {"max_tokens": 80}
    ),
    "structured_outputs.disable_additional_properties": Case(
        {"json": SCHEMA, "disable_additional_properties": True}, content(is_json), ROOM
    ),
    "structured_outputs.whitespace_pattern": Case(
        {"json": SCHEMA, "whitespace_pattern": " ?"}, content(is_json), {"max_tokens": 80}
    ),
    # Chats.
    "add_generation_prompt": Case(False, lambda reply, base: len(reply.prompt) < len(base.prompt), routes="H"),
    "continue_final_message": Case(
        True,
        lambda reply, base: len(reply.prompt) < len(base.prompt),
        {"messages": [{"role": "assistant", "content": "So"}], "add_generation_prompt": False},
        routes="H",
    ),
    "echo (chat)": Case(
        True,
        lambda reply, base: reply.text == "So" + base.text,
        {
            "messages": [{"role": "assistant", "content": "So"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        routes="H",
    ),
    "add_special_tokens": Case(lambda base: base.prompt[0] != 0, other_prompt, routes="CH"),
    "documents": Case([{"title": "a", "text": "b"}], longer_prompt, routes="H"),
    "chat_template": Case("{{ 'Hello' }}", other_prompt, routes="H"),
    "chat_template_kwargs": Case({"mood": "very good"}, longer_prompt, routes="H"),
    "reasoning_effort": Case("high", longer_prompt, routes="H"),
    "include_reasoning": Case(
        False,
        lambda reply, base: base.message.get("reasoning") and not reply.message.get("reasoning"),
        THINKS,
        routes="H",
        model="thinker",
    ),
    "media_io_kwargs": Case({"image": {}}, routes="H"),
    "mm_processor_kwargs": Case({"num_crops": 4}, routes="H"),
    # The report.
    "logprobs: a number": Case(1, lambda reply, _: len(reply.logprobs) == len(reply.tokens), GREEDY, routes="CG"),
    "logprob_token_ids": Case(
        [TOKEN, OTHER], lambda reply, _: all(len(row) >= 2 for row in reply.logprobs), {"logprobs": 1, **GREEDY}
    ),
    "return_tokens_as_token_ids": Case(
        True,
        lambda reply, _: all(token.startswith("token_id:") for row in reply.logprobs for token in row),
        {"logprobs": 1},
        routes="CH",
    ),
    "return_token_ids": Case(True, lambda reply, base: bool(reply.tokens and reply.prompt), routes="CHG"),
    "return_weight_versions": Case(True, lambda reply, _: len(reply.choice["weight_versions"]) == 1, routes="CH"),
    "return_prompt_text": Case(True, lambda reply, _: "<|im_start|>" in reply.body["prompt_text"], routes="H"),
    "return_token_offsets": Case(True, routes="CH"),
    "request_id": Case("mine", lambda reply, _: reply.body.get("id", reply.body.get("request_id")).endswith("mine")),
    # Scheduling, caches, transfers.
    "priority": Case(1),
    "session_id": Case("mine", routes="CH"),
    "stream_interval": Case(4, lambda reply, base: len(reply.events) < len(base.events), STREAM, routes="CH"),
    "cache_salt": Case("salt", lambda reply, base: reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0),
    "kv_transfer_params": Case({"do_remote_decode": True}),
    "ec_transfer_params": Case({"x": 1}, routes="CH"),
    "vllm_xargs": Case({"x": 1}, routes="CH"),
    "routed_experts_prompt_start": Case(
        1, lambda reply, base: experts(reply) == experts(base)[1:], routes="CH", model="experts"
    ),
    "prompt_embeds": Case("AAAA", changed, routes="C"),
    "mm_payload": Case("none", routes="CH"),
    "return_mm_kwargs": Case(False, routes="CH"),
    # Token ids in, token ids out.
    "features": Case(
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}, routes="G"
    ),
    "content_parts": Case([{"type": "image_url", "url": IMAGE}], routes="G"),
    "token_offsets": Case([[0, 1]], routes="G"),
    "reasoning_ended": Case(
        False, changed, {**THINKS, "structured_outputs": {"regex": "[0-9]{3}"}}, routes="G", model="thinker"
    ),
    "reasoning_parser_kwargs": Case({"chat_template_kwargs": {}}, routes="G"),
    "output_mode: text": Case("text", lambda reply, _: bool(reply.text), routes="G"),
    "output_mode: derender": Case("derender", lambda reply, _: bool(reply.message), routes="G"),
    "parse_context": Case({"tools": None}, routes="G"),
    "prompt_logprob_start": Case(0, has_table(3, 1), {"prompt_logprob_token_ids": [[TOKEN]] * 3}, routes="G"),
    "flat_logprobs": Case(True, routes="G"),
    "detokenize": Case(False, routes="G"),
    "extra_args": Case({"x": 1}, routes="G"),
    "skip_reading_prefix_cache": Case(True, routes="G"),
    # Members of OpenAI's API that vLLM ignores.
    "best_of": Case(2, routes="C"),
    "functions": Case([TOOL["function"]], routes="H"),
    "function_call": Case({"name": "f"}, routes="H"),
    "modalities": Case(["text", "audio"], routes="H"),
    "audio": Case({"voice": "a", "format": "wav"}, routes="H"),
    "prediction": Case({"type": "content", "content": "a"}, routes="H"),
    "web_search_options": Case({"search_context_size": "low"}, routes="H"),
    "metadata": Case({"a": "b"}, routes="H"),
    "store": Case(True, routes="H"),
    "service_tier": Case("flex", routes="H"),
    "verbosity": Case("low", routes="H"),
    "prompt_cache_key": Case("a", routes="H"),
    "safety_identifier": Case("a", routes="H"),
}
"""By the member's name; after it may come the value, or a word that tells two cases of a name apart."""
