"""The comparison with vLLM's answers sees what it is for."""

import copy
import json

import pytest

from vllm_answers import RECORDED, Answer, assert_like_vllm, events, recorded


def names():
    for family in sorted(RECORDED.glob("*.jsonl")):
        for line in family.read_text().splitlines():
            yield json.loads(line)["name"]


def as_sent(answer):
    """The recorded answer, as if it had just come."""
    chunks = []
    if isinstance(answer.body, str):
        chunks = [part + "\n\n" for part in answer.body.split("\n\n") if part]
    return Answer(answer.status, answer.content_type, copy.deepcopy(answer.body), {}, chunks)


@pytest.mark.parametrize("name", list(names()))
def test_an_answer_is_like_itself(name):
    exchange = recorded(name)
    assert_like_vllm(as_sent(exchange.answer), exchange)


def changes():
    def at_choice(change):
        return lambda answer: change(answer.body["choices"][0])

    yield "chat/plain", at_choice(lambda choice: choice.pop("token_ids")), "choices.0.token_ids"
    yield "chat/plain", at_choice(lambda choice: choice.update(more=1)), "choices.0.more"
    yield "chat/plain", at_choice(lambda choice: choice.update(index=choice.pop("index"))), "choices.0.order"
    yield "chat/plain", at_choice(lambda choice: choice.update(finish_reason="stop")), "choices.0.finish_reason"
    yield "chat/plain", at_choice(lambda choice: choice["message"].update(content=None)), "choices.0.message.content"
    yield "chat/plain", lambda answer: answer.body["usage"].update(prompt_tokens="33"), "usage.prompt_tokens"
    yield "chat/plain", lambda answer: answer.body.update(choices=[]), "choices"
    yield "chat/unknown-model", lambda answer: answer.body["error"].update(param=None), "error.param"
    logprobs = "choices.0.logprobs.content.1.bytes"
    yield "chat/top_logprobs", at_choice(lambda c: c["logprobs"]["content"][1].update(bytes=None)), logprobs

    def instead(old, new):
        def change(answer):
            assert old in answer.body
            answer.body = answer.body.replace(old, new)
            answer.chunks = [part + "\n\n" for part in answer.body.split("\n\n") if part]

        return change

    yield "chat/stream", instead('"stop_reason":null,', ""), "events\\[0\\].2.choices.0.stop_reason"
    yield "chat/stream", instead("data: [DONE]\n\n", ""), "no \\[DONE\\]"
    yield "chat/stream", instead('"index":0', '"index": 0'), "spaces"
    yield "chat/stream", instead("\n\ndata: [DONE]", "\ndata: [DONE]"), "data"


@pytest.mark.parametrize("name, change, seen", list(changes()))
def test_a_changed_answer_is_not(name, change, seen):
    exchange = recorded(name)
    answer = as_sent(exchange.answer)
    change(answer)
    with pytest.raises(AssertionError, match=seen):
        assert_like_vllm(answer, exchange)


def test_two_events_in_a_chunk_and_unused_differences_are_seen():
    exchange = recorded("chat/stream")
    answer = as_sent(exchange.answer)
    assert len(events(answer.body)) == 4
    answer.chunks = [answer.chunks[0] + answer.chunks[1], *answer.chunks[2:]]
    with pytest.raises(AssertionError):
        assert_like_vllm(answer, exchange)
    with pytest.raises(AssertionError, match="do not differ"):
        assert_like_vllm(as_sent(exchange.answer), exchange, {"events*.usage": "a reason"})
