"""The memory ceiling beside clients whose small files are large images."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import pytest

from raw_http import ask, post
from rollout_client import InvalidArgument, ResourceExhausted, RolloutClient, SamplingParams
from test_images import MODEL, PAD, png_file
from test_memory_ceiling import CEILING, bounded, limited

__all__ = ["bounded"]

SIDE = 5000
CLIENTS = 8


@pytest.fixture(scope="module")
def server(binary):
    with limited(binary, CEILING, model=MODEL) as process:
        yield process


@pytest.fixture(scope="module")
def large():
    """75 MB of pixels in a file a thousand times smaller."""
    file = png_file(SIDE, SIDE, (1, 2, 3))
    assert len(file) < SIDE * SIDE * 3 / 500
    return file


def test_many_large_images_at_once(bounded, large):
    def generate(_):
        with RolloutClient(bounded.address, timeout=120) as client:
            try:
                sampling = SamplingParams(max_tokens=2)
                client.generate([[5, PAD]], images=[[large]], sampling=sampling, return_text=False)
            except ResourceExhausted:
                return "refused"
        return "served"

    url = f"data:image/png;base64,{base64.b64encode(large).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    chat = post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 2})
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        calls = pool.map(generate, range(CLIENTS))
        answers = pool.map(lambda _: ask(bounded.http_address, chat), range(CLIENTS))
        ended, statuses = list(calls), [answer.status for answer in answers]
    print(ended, statuses)
    assert set(ended) <= {"served", "refused"} and set(statuses) <= {200, 429}
    assert "served" in ended or 200 in statuses


def test_images_that_are_too_large_are_rejected_unread(bounded):
    """The headers alone are there: a decoder would find nothing to read."""
    whole = png_file(64, 64, (1, 2, 3))
    for size, says in [((16385, 16), "a side has at most"), ((16384, 16384), "at most"), ((16000, 60), "at most 200")]:
        sizes = b"".join(side.to_bytes(4, "big") for side in size)
        file = whole[:16] + sizes + whole[24:]
        with pytest.raises(InvalidArgument, match=says):
            bounded.client.generate([[5, PAD]], images=[[file]], return_text=False)
