"""Reasoning in `/v1/chat/completions`: what stands in `<think>`, apart from the answer and from calls of tools."""

from __future__ import annotations

import subprocess

import numpy as np
import openai
import pytest

from rollout_client import InvalidArgument, SamplingParams, ServerProcess
from scripted import PREFERRED, write_scripted
from serving import FIXTURES, SMALL_CACHE
from test_http_tools import TOOLS
from vllm_answers import ask, events

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]
# Written like Qwen3's, which closes the reasoning for enable_thinking=false; with `opens`, like DeepSeek-R1's.
TEMPLATE = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n' }}
{%- elif opens %}{{ '<think>\n' }}{% endif %}
{%- if reasoning_effort %}{{ reasoning_effort + '\n' }}{% endif %}{# calls are <tool_call>{}</tool_call> #}
"""
ANSWERS = {
    "marked": ["<think>", "\nOne and", " two.\n", "</think>", "\n\nThree."],
    "opened": [" One plus two.\n</th", "ink>", "\nIt is three."],
    "call": ["<think>Add", " them.", "</think>\n<tool", '_call>{"name": "add", "arguments": {"a": 1}}', "</tool_call>"],
    "early": ["<think>Hm. ", '<tool_call>{"name": "sub"}', " </tool_call>"],
    "plain": ["Three it", " is."],
    "endless": ["<think>And so", " on and on"],
}
SPLIT = {
    "marked": ("\nOne and two.\n", "\n\nThree.", []),
    "opened": (None, " One plus two.\n</think>\nIt is three.", []),
    "call": ("Add them.", None, [("add", '{"a": 1}')]),
    "early": ("Hm. ", None, [("sub", "{}")]),
    "plain": (None, "Three it is.", []),
    "endless": ("And so on and on", None, []),
}
"""The reasoning, content and calls of each answer, where neither a flag nor the prompt says more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that reasons, and the first token of each of its answers."""
    directory = tmp_path_factory.mktemp("models") / "thinking"
    starts = write_scripted(directory, TEMPLATE, list(ANSWERS.values()))
    return directory, dict(zip(ANSWERS, starts, strict=True))


@pytest.fixture(scope="module")
def server(binary, model):
    with ServerProcess(binary, model[0], [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server


@pytest.fixture
def address(server):
    return server.http_address


def body(model, name, **members):
    chosen = {"temperature": 0, "max_tokens": 30, "logit_bias": {str(model[1][name]): 2 * PREFERRED}}
    return {"messages": QUESTION, "tools": TOOLS, **chosen, **members}


def choice_of(address, request):
    answer = ask(address, "POST", CHAT, request)
    assert answer.status == 200, answer.body
    (choice,) = answer.body["choices"]
    return choice


def parts(choice):
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert message.get("reasoning_content") == message["reasoning"]
    return message["reasoning"], message["content"], calls


def streamed(address, request):
    """The parts of a streamed message, its finish reason, and its tokens and their log-probabilities."""
    reasoning, content, calls, ids, logprobs, reason = "", "", [], [], [], None
    for event in events(ask(address, "POST", CHAT, request | {"stream": True}).body):
        (choice,) = event["choices"]
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        assert not (content or calls) or "reasoning" not in delta, "reasoning comes first"
        reasoning += delta.get("reasoning") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls.append((call["function"]["name"], ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + call["function"]["arguments"])
        ids += choice.get("token_ids") or []
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        reason = choice["finish_reason"] or reason
    return (reasoning or None, content or None, calls), reason, ids, logprobs


@pytest.mark.parametrize("name", ANSWERS)
def test_reasoning_stands_apart_and_no_token_is_lost(address, model, name):
    request = body(model, name, logprobs=True, top_logprobs=1, return_token_ids=True)
    choice = choice_of(address, request)
    assert parts(choice) == SPLIT[name]
    assert choice["finish_reason"] == ("tool_calls" if SPLIT[name][2] else "stop")
    found, reason, ids, logprobs = streamed(address, request)
    assert (found, reason) == (SPLIT[name], choice["finish_reason"])
    assert ids == choice["token_ids"] and len(ids) == len(ANSWERS[name]) + 1
    assert logprobs == choice["logprobs"]["content"]
    assert streamed(address, body(model, name))[0] == SPLIT[name]


def test_the_prompt_opens_or_closes_it(address, model):
    opened = {"chat_template_kwargs": {"opens": True}}
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    reasoning, answer = " One plus two.\n", "\nIt is three."
    for name, members, expected in (
        ("opened", opened, (reasoning, answer, [])),
        ("marked", opened, SPLIT["marked"]),
        ("plain", opened, ("Three it is.", None, [])),
        ("opened", closed, (None, "".join(ANSWERS["opened"]), [])),
        ("opened", {"reasoning_effort": "none"} | opened, (None, "".join(ANSWERS["opened"]), [])),
        ("opened", {"reasoning_effort": "low"} | opened, (reasoning, answer, [])),
    ):
        request = body(model, name, **members)
        assert parts(choice_of(address, request)) == expected, (name, members)
        assert streamed(address, request)[0] == expected, (name, members)


def test_the_effort_is_a_variable_of_the_template(address):
    prompt = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    for members, rest in (
        ({}, ""),
        ({"reasoning_effort": "high"}, "high\n"),
        ({"reasoning_effort": "none"}, "<think>\n\n</think>\nnone\n"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none\n"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"opens": True}}, "<think>\nlow\n"),
    ):
        tokens = ask(address, "POST", "/tokenize", {"messages": QUESTION, **members}).body["tokens"]
        assert ask(address, "POST", "/detokenize", {"tokens": tokens}).body["prompt"] == prompt + rest, members
        assert ask(address, "POST", f"{CHAT}/render", {"messages": QUESTION, **members}).body["token_ids"] == tokens
    refused = ask(address, "POST", CHAT, {"messages": QUESTION, "reasoning_effort": "much"})
    assert (refused.status, refused.body["error"]["param"]) == (400, "reasoning_effort"), refused.body


def test_reasoning_can_be_left_out(address, model):
    for name, (_, content, calls) in SPLIT.items():
        request = body(model, name, include_reasoning=False, logprobs=True, return_token_ids=True)
        choice = choice_of(address, request)
        assert parts(choice) == (None, content, calls) and "reasoning_content" not in choice["message"]
        found, _, ids, logprobs = streamed(address, request)
        assert found == (None, content, calls)
        assert (ids, logprobs) == (choice["token_ids"], choice["logprobs"]["content"]), "all tokens are reported"


def test_a_grammar_is_for_the_whole_text(address, model):
    for members in ({"opens": True}, {}):
        request = body(model, "plain", structured_outputs={"choice": ["Three it is."]}, chat_template_kwargs=members)
        assert parts(choice_of(address, request)) == (None, "Three it is.", [])
    request = body(model, "marked", structured_outputs={"regex": "<think>[^<]*</think>[^<]*"})
    assert parts(choice_of(address, request)) == SPLIT["marked"]


def test_a_forced_call_takes_the_place_of_the_response_format(address, model):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for form in (schema, {"type": "json_object"}, {"type": "text"}):
        for forced in ("required", {"type": "function", "function": {"name": "add"}}):
            members = {"tool_choice": forced, "max_tokens": 300, "seed": 5, "temperature": 1}
            alone = choice_of(address, body(model, "plain", **members))
            both = choice_of(address, body(model, "plain", response_format=form, **members))
            assert parts(both) == parts(alone) and both["finish_reason"] == alone["finish_reason"]
    refused = ask(address, "POST", CHAT, body(model, "plain", tool_choice="required", response_format={"type": "xml"}))
    assert (refused.status, refused.body["error"]["param"]) == (400, "response_format.type")


def test_openais_package(address, model):
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
        request = {"model": "", "messages": QUESTION, "temperature": 0}
        request["logit_bias"] = {str(model[1]["marked"]): 2 * PREFERRED}
        message = ai.chat.completions.create(**request).choices[0].message
        assert (message.reasoning, message.reasoning_content, message.content) == (
            *[SPLIT["marked"][0]] * 2,
            "\n\nThree.",
        )
        deltas = [chunk.choices[0].delta for chunk in ai.chat.completions.create(**request, stream=True)]
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
        assert "".join(delta.content or "" for delta in deltas) == message.content
        history = [*QUESTION, message.model_dump(), *QUESTION]
        assert ai.chat.completions.create(**request | {"messages": history}).choices[0].message.content


def test_the_budget_closes_the_reasoning(server, address, model):
    open_, first, second, close, answer = (model[1]["marked"] + i for i in range(5))
    start, opened = model[1]["opened"], {"chat_template_kwargs": {"opens": True}}
    for budget, members, ids, expected in (
        (-1, {}, [open_, first, second, close, answer], SPLIT["marked"]),
        (2, {}, [open_, first, second, close, answer], SPLIT["marked"]),
        (1, {}, [open_, first, close, answer], ("\nOne and", "\n\nThree.", [])),
        (0, {}, [open_, close, answer], (None, "\n\nThree.", [])),
        # The line feed behind the prompt's mark counts.
        (2, opened, [start, close, answer], (" One plus two.\n</th", "\n\nThree.", [])),
        (1, opened, [close, answer], (None, "\n\nThree.", [])),
    ):
        name = "opened" if members else "marked"
        request = body(model, name, logprobs=True, return_token_ids=True, thinking_token_budget=budget, **members)
        answered = ask(address, "POST", CHAT, request | {"n": 2}).body
        for choice in answered["choices"]:
            assert (choice["token_ids"][:-1], parts(choice)) == (ids, expected), (budget, members)
        found, _, streamed_ids, logprobs = streamed(address, request)
        assert (found, streamed_ids[:-1]) == (expected, ids) and logprobs == choice["logprobs"]["content"]
        # The forced token has the policy's own log-probability, as each other one.
        sequence = answered["prompt_token_ids"] + streamed_ids
        scored = server.client.score([sequence])[0].raw_logprobs[-len(streamed_ids) :]
        assert [np.float32(entry["logprob"]) for entry in logprobs] == list(scored)


def test_the_budget_is_the_same_on_every_route(server, address, model):
    open_, first, _, close, answer = (model[1]["marked"] + i for i in range(5))
    prompt = ask(address, "POST", "/tokenize", {"messages": QUESTION}).body["tokens"]
    chosen = {"max_tokens": 4, "temperature": 1.0, "seed": 7, "logit_bias": {str(open_): 4 * PREFERRED}}
    chosen |= {"thinking_token_budget": 1}
    ids = [open_, first, close, answer]
    completed = ask(address, "POST", "/v1/completions", {"prompt": prompt, "return_token_ids": True, **chosen}).body
    assert completed["choices"][0]["token_ids"] == ids
    generated = ask(address, "POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": chosen}).body
    assert generated["choices"][0]["token_ids"] == ids
    chosen["logit_bias"] = {open_: 4 * PREFERRED}
    sample = server.client.generate([prompt], sampling=SamplingParams(**chosen))[0].samples[0]
    assert sample.token_ids == ids
    assert sample.logprobs[2] == pytest.approx(sample.raw_logprobs[2], abs=1e-3) and sample.raw_logprobs[2] < -30
    rendered = ask(address, "POST", f"{CHAT}/render", {"messages": QUESTION, "thinking_token_budget": 3}).body
    assert rendered["sampling_params"]["thinking_token_budget"] == 3


def test_a_wrong_budget_is_named(server, address, binary):
    for members, param in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "structured_outputs": {"regex": "a"}}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ):
        refused = ask(address, "POST", CHAT, {"messages": QUESTION, **members})
        assert (refused.status, refused.body["error"]["param"]) == (400, param), refused.body
    with pytest.raises(InvalidArgument, match=r"sampling\.thinking_token_budget: has no meaning in Score"):
        server.client.score([[1, 2]], sampling=SamplingParams(thinking_token_budget=1))
    with ServerProcess(binary, FIXTURES / "llama", [*SMALL_CACHE, "--mem-util", "0.2"]) as other:
        budget = SamplingParams(thinking_token_budget=1)
        with pytest.raises(InvalidArgument, match=r"sampling\.thinking_token_budget: .* does not have <think>"):
            other.client.generate([[1, 2]], sampling=budget)


@pytest.mark.parametrize("parser", ["none", "deepseek_r1", "qwen3"])
def test_the_flag_says_which_text_is_reasoning(binary, model, parser):
    whole = {name: "".join(texts) for name, texts in ANSWERS.items()}
    unmarked = {
        "opened": (" One plus two.\n", "\nIt is three.", []),
        "plain": (whole["plain"], None, []),
    }
    expected = {
        "none": {
            "marked": (None, whole["marked"], []),
            "opened": (None, whole["opened"], []),
            "call": (None, "<think>Add them.</think>", SPLIT["call"][2]),
            "early": (None, "<think>Hm.", SPLIT["early"][2]),
            "plain": SPLIT["plain"],
            "endless": (None, whole["endless"], []),
        },
        "deepseek_r1": SPLIT | unmarked | {"early": (whole["early"].removeprefix("<think>"), None, [])},
        "qwen3": SPLIT | unmarked,
    }[parser]
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--reasoning-parser", parser]
    with ServerProcess(binary, model[0], flags) as server:
        for name, parts_ in expected.items():
            request = body(model, name)
            assert parts(choice_of(server.http_address, request)) == parts_, name
            assert streamed(server.http_address, request)[0] == parts_, name
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = choice_of(server.http_address, body(model, "plain", **closed))
        assert parts(answer) == SPLIT["plain"], "the prompt has closed it"


def test_marks_that_texts_leave_out_are_refused(binary, tmp_path):
    write_scripted(tmp_path / "model", TEMPLATE, [["<think>", "</think>", "Three"]], special=["<think>", "</think>"])
    flags = [*SMALL_CACHE, "--mem-util", "0.2"]
    with ServerProcess(binary, tmp_path / "model", flags) as server:
        choice = choice_of(server.http_address, {"messages": QUESTION, "temperature": 0})
        assert parts(choice) == (None, "Three", []), "without the flag the text is the answer"
    command = [binary, tmp_path / "model", *flags, "--port", "0", "--http-port", "0", "--reasoning-parser", "qwen3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended
    assert "--reasoning-parser qwen3: <think> and </think> are special tokens of this model" in ended.stderr
