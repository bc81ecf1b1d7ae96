"""Images over HTTP: in chats, messages and responses, rendered beside token ids, and beside gRPC to the bit."""

from __future__ import annotations

import base64
import hashlib
import re

import numpy as np
import pytest

from models import random_adapter, read_model
from rollout_client import RolloutClient, SamplingParams, ServerProcess
from serving import FIXTURES, PUSH_MODEL, SMALL_CACHE
from test_images import PAD, png_file
from vllm_answers import ask

CHAT, RENDER, GENERATE = "/v1/chat/completions", "/v1/chat/completions/render", "/inference/v1/generate"
PICTURES = [png_file(61, 30, (10, 20, 30)), png_file(112, 112, (200, 100, 0))]
CHANGED = {
    "qwen2_5_vl": ("model.layers.0.mlp.up_proj.weight", "visual.blocks.1.mlp.up_proj.bias"),
    "internvl3": ("language_model.model.layers.0.mlp.up_proj.weight", "vision_tower.encoder.layer.1.mlp.fc1.bias"),
}
"""Parameters of each model's decoder and of its tower."""
SAMPLING = {"max_tokens": 6, "seed": 3, "n": 2}


@pytest.fixture(scope="module", params=CHANGED)
def model(request):
    """The name of a fixture."""
    return request.param


@pytest.fixture(scope="module")
def served(pytestconfig, model):
    flags = [*SMALL_CACHE, "--limit-mm-per-prompt", "image=2"]
    with ServerProcess(pytestconfig.getoption("--server"), FIXTURES / model, flags) as server:
        yield server


def data_url(file):
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def parts_of(pictures=PICTURES):
    images = [{"type": "image_url", "image_url": {"url": data_url(file), "detail": "low"}} for file in pictures]
    return [images[0], {"type": "text", "text": "What is this?"}, *images[1:]]


def chat_of(parts=None):
    return [{"role": "user", "content": parts or parts_of()}]


def ok(served, path, body):
    answer = ask(served.http_address, "POST", path, body)
    assert answer.status == 200, answer.body
    return answer.body


def refused(served, path, body, param, says):
    answer = ask(served.http_address, "POST", path, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param), answer.body
    assert says in answer.body["error"]["message"]


def metric(served, name):
    text = ask(served.http_address, "GET", "/metrics").body
    return float(re.search(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)[1])


def test_a_chat_has_the_samples_of_grpc(served):
    body = {"messages": chat_of(), "logprobs": True, "return_token_ids": True, **SAMPLING}
    answer = ok(served, CHAT, body)
    parts = [{"type": "image"} if part["type"] == "image_url" else part for part in parts_of()]
    with RolloutClient(served.address) as client:
        sampling = SamplingParams(max_tokens=6, seed=3)
        (output,) = client.generate([chat_of(parts)], n=2, sampling=sampling, images=[PICTURES])
    assert answer["prompt_token_ids"] == output.prompt_token_ids and PAD in output.prompt_token_ids
    for choice, sample in zip(answer["choices"], output.samples, strict=True):
        assert choice["token_ids"] == sample.token_ids
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(list(sample.logprobs), abs=1e-6)
    counted = ok(served, "/tokenize", {"messages": chat_of()})
    assert (counted["tokens"], counted["count"]) == (output.prompt_token_ids, len(output.prompt_token_ids))


@pytest.mark.parametrize("path", [CHAT, RENDER, "/tokenize"])
def test_members_without_effect_are_listed(served, path):
    image, text, other = parts_of()
    named = {"type": "image_url", "image_url": {"url": other["image_url"]["url"]}, "uuid": "mine"}
    message = {"role": "user", "content": [image, text, named]}
    answer = ask(served.http_address, "POST", path, {"messages": [message]})
    assert answer.headers["x-ignored-members"] == "messages.0.content.0.image_url.detail, messages.0.content.2.uuid"


def test_messages_and_responses_take_images(served):
    """Both are the chat of the same texts and images."""
    greedy = {"temperature": 0}
    chat = ok(served, CHAT, {"messages": chat_of(), "max_tokens": 6, **greedy})
    texts = [base64.b64encode(file).decode() for file in PICTURES]
    sources = [{"type": "base64", "media_type": "image/png", "data": text} for text in texts]
    blocks = [{"type": "image", "source": source} for source in sources]
    content = [blocks[0], {"type": "text", "text": "What is this?"}, blocks[1]]
    messages = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **greedy}
    message = ok(served, "/v1/messages", messages)
    parts = [
        {"type": "input_image", "image_url": data_url(PICTURES[0])},
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": data_url(PICTURES[1])},
    ]
    response = ok(served, "/v1/responses", {"input": chat_of(parts), "max_output_tokens": 6, **greedy})
    prompt_tokens = chat["usage"]["prompt_tokens"]
    assert message["usage"]["input_tokens"] == response["usage"]["input_tokens"] == prompt_tokens
    assert ok(served, "/v1/messages/count_tokens", {"messages": messages["messages"]})["input_tokens"] == prompt_tokens
    text = chat["choices"][0]["message"]["content"]
    assert message["content"][0]["text"] == response["output"][-1]["content"][0]["text"] == text
    source = {"type": "url", "url": "https://example.com/a.png"}
    wrong = {**messages, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    answer = ask(served.http_address, "POST", "/v1/messages", wrong)
    assert answer.status == 400 and "opens no files or URLs" in answer.body["error"]["message"]


def test_a_rendered_chat_has_its_images_beside_the_token_ids(served):
    body = {"messages": chat_of(), "logprobs": True, "return_token_ids": True, **SAMPLING}
    rendered = ok(served, RENDER, body)
    features = rendered["features"]
    for hash_, data, at in zip(
        *(features[name]["image"] for name in ("mm_hashes", "kwargs_data", "mm_placeholders")), strict=True
    ):
        assert hashlib.sha256(base64.b64decode(data)).hexdigest() == hash_
        assert rendered["token_ids"][at["offset"] :][: at["length"]] == [PAD] * at["length"]
    samples = ok(served, GENERATE, rendered)["choices"]
    chat = ok(served, CHAT, body)["choices"]
    assert [choice["token_ids"] for choice in samples] == [choice["token_ids"] for choice in chat]
    # Files beside token ids that are not expanded.
    expanded = rendered["token_ids"]
    ids = [token for before, token in zip([0, *expanded], expanded, strict=False) if (before, token) != (PAD, PAD)]
    parts = [{"type": "image_url", "url": data_url(file)} for file in PICTURES]
    collapsed = {**rendered, "token_ids": ids, "features": None, "content_parts": parts}
    assert [choice["token_ids"] for choice in ok(served, GENERATE, collapsed)["choices"]] == [
        choice["token_ids"] for choice in chat
    ]
    assert ok(served, RENDER, {**body, "mm_payload": "none"})["features"] == {**features, "kwargs_data": None}
    assert ok(served, RENDER, {"messages": [{"role": "user", "content": "Hello"}]})["features"] is None


def test_features_that_do_not_belong_to_the_prompt_are_rejected(served):
    rendered = ok(served, RENDER, {"messages": chat_of(), **SAMPLING})
    features = rendered["features"]
    hashes, places, data = (features[name]["image"] for name in ("mm_hashes", "mm_placeholders", "kwargs_data"))
    moved = [{**places[0], "offset": places[0]["offset"] + 1}, places[1]]
    first_place = "features.mm_placeholders.image[0]"
    for changes, param, says in [
        ({"kwargs_data": None}, "features.kwargs_data", "a picture is missing"),
        ({"kwargs_data": {"image": [data[0], None]}}, "features.kwargs_data", "a picture is missing"),
        ({"kwargs_data": {"image": data[:1]}}, "features", "2 mm_hashes, 2 mm_placeholders and 1 kwargs_data"),
        ({"kwargs_data": {"image": ["AAAA", data[1]]}}, "features.kwargs_data.image[0]", "is not a picture"),
        ({"kwargs_data": {"image": ["?", data[1]]}}, "features.kwargs_data.image[0]", "is not base64"),
        ({"kwargs_data": {"image": data[::-1]}}, "features.mm_hashes.image[0]", f"which is {hashes[1]}"),
        ({"mm_hashes": {"video": []}}, "features.mm_hashes.video", "unknown field `video`"),
        ({"mm_placeholders": {"image": moved}}, first_place, "are not all placeholders"),
        ({"mm_placeholders": {"image": places[::-1]}}, first_place, "the picture has"),
    ]:
        refused(served, GENERATE, {**rendered, "features": {**features, **changes}}, param, says)
    alike = parts_of([png_file(56, 56, colour) for colour in ((1, 2, 3), (200, 2, 3))])
    rendered = ok(served, RENDER, {"messages": chat_of(alike), **SAMPLING})
    exchanged = {"mm_placeholders": {"image": rendered["features"]["mm_placeholders"]["image"][::-1]}}
    refused(
        served,
        GENERATE,
        {**rendered, "features": {**rendered["features"], **exchanged}},
        "features.mm_placeholders.image[1]",
        "where the image before it ends",
    )
    both = {**rendered, "content_parts": [{"type": "image_url", "url": data_url(PICTURES[0])}]}
    refused(served, GENERATE, both, "content_parts", "cannot be combined with features")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/a.png", "is not a data: URL"),
        ("file:///etc/hostname", "is not a data: URL"),
        ("/etc/hostname", "is not a data: URL"),
        ("data:image/png,AAAA", "is not in base64"),
        ("data:image/png;base64,A A", "is not base64"),
        ("data:image/png;base64,R0lGODlh", "GIF"),
        (3, "is neither a URL nor an object with a url"),
    ],
)
def test_no_other_url_is_opened(served, url, says):
    body = {"messages": chat_of([{"type": "image_url", "image_url": {"url": url}}])}
    refused(served, CHAT, body, "messages[0].content[0].image_url", says)


def test_more_images_than_the_limit_are_rejected(served):
    parts = parts_of([*PICTURES, PICTURES[0]])
    refused(served, CHAT, {"messages": chat_of(parts)}, "messages[0].content[3].image_url", "3 images are more than 2")
    cut = {"messages": chat_of(), "truncate_prompt_tokens": 5}
    refused(served, CHAT, cut, "messages[0].content[0].image_url", "cannot be cut")


def test_an_image_is_encoded_once_until_the_encoder_cache_is_reset(served):
    body = {"messages": chat_of(parts_of([png_file(56, 56, (1, 2, 3))])), **SAMPLING}
    names = ("rollout:images_encoded_total", "vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total")
    counts = lambda: [metric(served, name) for name in names]  # noqa: E731
    ask(served.http_address, "POST", "/reset_prefix_cache")
    before = counts()
    ok(served, CHAT, body)
    ask(served.http_address, "POST", "/reset_prefix_cache")
    ok(served, CHAT, body)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 2, 1]
    for path in ("/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache"):
        assert ask(served.http_address, "POST", path).status == 200
    ok(served, CHAT, body)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 3, 1]
    with RolloutClient(served.address) as client:
        status = client.status()
    assert [status.encoded_images, status.queried_images, status.reused_images] == counts()
    assert status.held_images == 1, "the reset dropped all others"


def test_a_push_that_leaves_the_tower_as_it_is_keeps_the_embeddings(served, model, rng):
    state = read_model(FIXTURES / model)
    decoder, tower = dict(state), dict(state)
    for changed, name in zip((decoder, tower), CHANGED[model], strict=True):
        changed[name] = (state[name].astype(np.float32) * 2).astype(state[name].dtype)
    adapter = random_adapter(rng, {name: array for name, array in state.items() if "model.layers." in name})
    body = {"messages": chat_of(), "logprobs": True, **SAMPLING}

    def encoded(push):
        before = metric(served, "rollout:images_encoded_total")
        push()
        choices = ok(served, CHAT, body)["choices"]
        count = metric(served, "rollout:images_encoded_total") - before
        for path in ("/reset_prefix_cache", "/reset_encoder_cache"):
            ask(served.http_address, "POST", path)
        assert ok(served, CHAT, body)["choices"] == choices, "encoded again"
        return count

    with RolloutClient(served.address) as client:
        assert encoded(lambda: client.push_full(state)) == 2, "the checkpoint's tower has no digest"
        assert encoded(lambda: client.push_full(decoder)) == 0
        assert encoded(lambda: client.push_lora(*adapter)) == 0
        assert encoded(lambda: client.push_full(tower)) == 2
        assert encoded(lambda: client.push_full(tower)) == 0
        assert encoded(lambda: client.push_full(state)) == 2


def test_the_limit_is_in_the_servers_configuration(served):
    config = ask(served.http_address, "GET", "/server_info?config_format=json").body["vllm_config"]
    assert config["model_config"]["multimodal_config"] == {"limit_per_prompt": {"image": 2}}


def test_a_text_model_rejects_images(pytestconfig):
    with ServerProcess(pytestconfig.getoption("--server"), FIXTURES / PUSH_MODEL, SMALL_CACHE) as server:
        refused(server, CHAT, {"messages": chat_of()}, "messages[0].content[0].type", "this model takes text")
        parts = [{"type": "image_url", "url": data_url(PICTURES[0])}]
        body = {"token_ids": [1], "sampling_params": {}, "content_parts": parts}
        refused(server, GENERATE, body, "images[0]", "this model takes no images")
