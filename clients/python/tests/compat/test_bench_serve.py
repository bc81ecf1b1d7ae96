"""The requests of `vllm bench serve`, sent as it sends them and read as it reads them: with aiohttp, as streams.

It counts a request as failed that has not the status 200 or no event with a choice, takes the time to the first token
and between tokens from the events, and the number of tokens from the usage of the last one.
"""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS = 24, 16, 12
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETIONS = (
    "/v1/completions",
    {"prompt": list(range(100, 100 + PROMPT_TOKENS)), "repetition_penalty": 1.0, "max_tokens": OUTPUT_TOKENS,
     "logprobs": None, **USAGE},
)  # fmt: skip
CHATS = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Count to a hundred."}]}],
     "max_completion_tokens": OUTPUT_TOKENS, **USAGE},
)  # fmt: skip


async def measure(session, url, body, name):
    """Whether the request has ended well, the times of its events with a choice, and its usage."""
    times, usage = [], {}
    async with session.post(url, json=body, headers={"x-request-id": name}) as response:
        assert response.status == 200, await response.text()
        buffer = ""
        async for part in response.content.iter_any():
            *messages, buffer = (buffer + part.decode()).split("\n\n")
            for message in messages:
                text = message.removeprefix("data: ")
                event = {} if text == "[DONE]" else json.loads(text)
                if event.get("choices"):
                    times.append(time.perf_counter())
                elif event.get("usage"):
                    usage = event["usage"]
    assert buffer == ""
    return times, usage


@pytest.mark.parametrize(("route", "body"), [COMPLETIONS, CHATS], ids=["completions", "chats"])
def test_a_run(smollm2, route, body):
    body = {"model": "smollm2", "temperature": 0, "ignore_eos": True, **body}

    async def run():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=REQUESTS)) as session:
            async with session.get(f"{smollm2}/v1/models") as models:
                assert (await models.json())["data"][0]["id"] == "smollm2"
            calls = [measure(session, smollm2 + route, body, f"bench-{route}-{i}") for i in range(REQUESTS)]
            return await asyncio.gather(*calls)

    for times, usage in asyncio.run(run()):
        assert usage["completion_tokens"] == OUTPUT_TOKENS
        if route == "/v1/completions":
            assert usage["prompt_tokens"] == PROMPT_TOKENS
        # One event for each token, at most: the times between them are those between tokens. A token may end in the
        # middle of a character, and a chat's first event has the role alone.
        assert 1 < len(times) <= OUTPUT_TOKENS + 1
        assert times == sorted(times)


def test_metrics_that_it_reads_before_and_after(smollm2):
    async def read():
        async with aiohttp.ClientSession() as session, session.get(f"{smollm2}/metrics") as response:
            return response.status, await response.text()

    status, text = asyncio.run(read())
    assert status == 200 and text.startswith("#")
