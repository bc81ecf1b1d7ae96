"""`/v1/completions`: beside vLLM's recorded answers, beside gRPC, and as trainers and people use it."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess

import numpy as np
import pytest

from rollout_client import SamplingParams, ServerProcess
from serving import FIXTURES, REPOSITORY, SMALL_CACHE
from vllm_answers import RECORDED, ask, assert_like_vllm, events, recorded, same_request

MODEL = str(FIXTURES / "llama")
VOCABULARY = 512
"""Ids of the recorded prompts are taken modulo this, because the fixture's vocabulary is small."""

OTHER_TEXT = "another model: the stop did not come"
DIFFERENCES = {
    "eos": {"choices.0.finish_reason": OTHER_TEXT},
    "json": {"choices.0.finish_reason": OTHER_TEXT},
    "skip_special_tokens": {"choices.0.finish_reason": OTHER_TEXT},
    "stop": {"choices.0.finish_reason": OTHER_TEXT, "choices.0.stop_reason": OTHER_TEXT},
    "stop-included": {"choices.0.finish_reason": OTHER_TEXT, "choices.0.stop_reason": OTHER_TEXT},
    "stop-over-tokens": {"choices.0.finish_reason": OTHER_TEXT, "choices.0.stop_reason": OTHER_TEXT},
    "stop_token_ids": {"choices.0.finish_reason": OTHER_TEXT, "choices.0.stop_reason": OTHER_TEXT},
    "stop_token_ids-included": {"choices.0.finish_reason": OTHER_TEXT, "choices.0.stop_reason": OTHER_TEXT},
    "stream-stop": {"events?0?.2.choices.0.*_reason": OTHER_TEXT},
}
"""Differences that are meant, by the exchange's name; `test_what_stops_is_said` has the stops."""
OTHER_STATUS = {
    "best_of": "vLLM drops best_of in silence, though it changes the samples",
    "max_tokens-too-many": "a sample ends where the context does",
    "logprobs-21": "up to 100 are reported",
    "temperature-2.5": "any temperature is taken",
    "temperature-0-n2": "a greedy group is a group of equal samples",
    "n-null": "null is the default everywhere",
    "guided_regex": "vLLM drops it in silence, and the sample is unconstrained",
    "beam": "not supported, and not dropped in silence",
    "prompt-whole-floats": "an id is an integer",
    "temperature-text": "a number is no text",
    "max_tokens-float": "a count is an integer",
    "stream-text": "a truth value is no text",
}
"""Exchanges that we answer with another status than vLLM, and why."""


@pytest.fixture(scope="module")
def http(binary):
    with ServerProcess(binary, FIXTURES / MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server


def names():
    for line in (RECORDED / "completions.jsonl").read_text().splitlines():
        yield json.loads(line)["name"]


def smaller(prompt):
    if isinstance(prompt, list):
        return [smaller(part) for part in prompt]
    is_id = isinstance(prompt, int) and not isinstance(prompt, bool) and 0 <= prompt < 49152
    return prompt % VOCABULARY if is_id else prompt


@pytest.mark.parametrize("name", list(names()))
def test_answers_are_like_vllms(http, name):
    exchange = recorded(name)
    short, body = name.partition("/")[2], exchange.request.get("body")
    changes = {"prompt": smaller(body["prompt"])} if isinstance(body, dict) and "prompt" in body else {}
    if isinstance(body, dict) and "seed" not in body:
        # How a sample ends must not be left to chance.
        changes["seed"] = 4
    ours, theirs = same_request(http.http_address, exchange, MODEL, changes), exchange.answer
    if short in OTHER_STATUS:
        assert ours.status != theirs.status and {ours.status, theirs.status} == {200, 400}, ours
    elif ours.status == 200:
        assert_like_vllm(ours, exchange, DIFFERENCES.get(short))
    else:
        # Our errors all have one type, and name the member by its path where vLLM often names none.
        assert (ours.status, list(ours.body)) == (theirs.status, list(theirs.body)), ours
        assert list(ours.body["error"]) == list(theirs.body["error"]) and ours.body["error"]["code"] == ours.status
        assert (
            ours.body["error"]["param"]
            or ours.content_type != "application/json"
            or short in ("no-body", "content-type")
        )


def texts_of(http, tokens):
    return ask(http.http_address, "POST", "/detokenize", {"tokens": tokens}).body["prompt"]


def encoded(http, text):
    return ask(http.http_address, "POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).body["tokens"]


def complete(http, **members):
    answer = ask(http.http_address, "POST", "/v1/completions", members)
    assert answer.status == 200, answer.body
    return answer


def test_http_and_grpc_give_the_same_bits(http):
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(max_tokens=12, temperature=temperature, top_p=0.9, seed=7, min_tokens=2, stop=["qu"])
        groups = http.client.generate(prompts, n=3, sampling=sampling, top_logprobs=2)
        members = {
            "prompt": prompts,
            "n": 3,
            "max_tokens": 12,
            "temperature": temperature,
            "top_p": 0.9,
            "seed": 7,
            "min_tokens": 2,
            "stop": "qu",
            "return_token_ids": True,
        }
        for mode, of in (("processed", "logprobs"), ("raw", "raw_logprobs")):
            answer = complete(http, logprobs=2, logprobs_mode=mode, **members).body
            for choice, sample in zip(answer["choices"], (s for g in groups for s in g.samples), strict=True):
                assert (choice["token_ids"], choice["text"]) == (sample.token_ids, sample.text)
                theirs = np.array([-np.inf if p == -9999 else p for p in choice["logprobs"]["token_logprobs"]])
                assert theirs.astype(np.float32).tobytes() == getattr(sample, of).tobytes()
        stream = events(complete(http, stream=True, logprobs=0, **members).body)
        for index, sample in enumerate(s for g in groups for s in g.samples):
            parts = [event["choices"][0] for event in stream if event["choices"][0]["index"] == index]
            assert [id for part in parts for id in part["token_ids"]] == sample.token_ids
            assert "".join(part["text"] for part in parts) == sample.text
            assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1]["finish_reason"] == ("length" if sample.finish_reason.name == "LENGTH" else "stop")


def test_a_prompt_is_scored_by_echo(http):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    score = http.client.score([prompt])[0].raw_logprobs
    members = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    choice = complete(http, temperature=0, **members).body["choices"][0]
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None and np.float32(values[1:]).tobytes() == np.float32(score[1:]).tobytes()
    assert choice["token_ids"] == [] and choice["prompt_token_ids"] == prompt
    streamed = events(complete(http, stream=True, **members).body)[0]["choices"][0]
    assert (streamed["text"], streamed["logprobs"]) == (choice["text"], choice["logprobs"])


def test_what_stops_is_said(http):
    free = complete(http, prompt=[3, 1, 4], max_tokens=24, temperature=1, seed=3, return_token_ids=True).body[
        "choices"
    ][0]
    text, token = free["text"], free["token_ids"][5]
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii() and text[i : i + 2].isalpha())
    members = {"prompt": [3, 1, 4], "max_tokens": 24, "temperature": 1, "seed": 3}
    choice = complete(http, stop=["nothing", stop], **members).body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", stop, text[: text.index(stop)])
    included = complete(http, stop=stop, include_stop_str_in_output=True, **members).body["choices"][0]
    assert included["text"] == choice["text"] + stop
    parts = events(complete(http, stop=stop, include_stop_str_in_output=True, stream=True, **members).body)
    assert "".join(part["choices"][0]["text"] for part in parts) == included["text"]
    assert parts[-1]["choices"][0]["stop_reason"] == stop
    ended = complete(http, stop_token_ids=[token], return_token_ids=True, **members).body["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"], ended["token_ids"][-1]) == ("stop", token, token)


def test_members_that_nothing_reads_are_named(http):
    answer = complete(http, prompt="a", max_tokens=1, user="me", temprature=0.5, stream_options=None)
    assert answer.headers["x-ignored-members"] == "user, temprature"
    assert "x-ignored-members" not in complete(http, prompt="a", max_tokens=1).headers


def test_versions_and_request_ids(http):
    body = {"prompt": [1, 2], "max_tokens": 3, "return_weight_versions": True, "ignore_eos": True}
    answer = ask(http.http_address, "POST", "/v1/completions", body, {"X-Request-Id": "mine"})
    assert answer.body["id"] == "cmpl-mine"
    assert answer.body["choices"][0]["weight_versions"] == [{"version": 0, "start": 0, "end": 3}]
    refused = ask(http.http_address, "POST", "/v1/completions", body | {"if_weight_version": 5})
    assert refused.status == 409 and "version" in refused.body["error"]["message"]


def test_special_tokens_are_text_where_they_are_not_skipped(http):
    start, end = "<|im_start|>", "<|endoftext|>"
    members = {"prompt": [1, 5], "max_tokens": 3, "allowed_token_ids": [1]}

    def text(**more):
        whole = complete(http, **members | more).body["choices"][0]
        parts = [event["choices"][0] for event in events(complete(http, stream=True, **members | more).body)]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert parts[-1]["finish_reason"] == whole["finish_reason"]
        return whole["text"]

    assert (text(), text(skip_special_tokens=False)) == ("", 3 * start)
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False) == 3 * start
    assert text(skip_special_tokens=False, stop="start|><|im") == "<|im_"
    assert text(stop="start|><|im") == "", "skipped text stops nothing"
    ends = {"allowed_token_ids": [0], "skip_special_tokens": False}
    assert (text(**ends), text(**ends, include_stop_str_in_output=True)) == ("", end)
    word = complete(http, prompt=[1, 5], max_tokens=1, allowed_token_ids=[70]).body["choices"][0]["text"]
    stops = {"allowed_token_ids": [70], "stop_token_ids": [70]}
    assert (text(**stops), text(**stops, include_stop_str_in_output=True)) == ("", word)
    assert text(echo=True, max_tokens=0).startswith(start)
    given = f"a {start}b "
    assert text(prompt=given, echo=True, max_tokens=0) == given
    sampling = SamplingParams(max_tokens=3, allowed_token_ids=[1], skip_special_tokens=False)
    assert http.client.generate([[1, 5]], sampling=sampling)[0].samples[0].text == 3 * start


def test_bad_words_are_not_generated(http):
    texts = {token: texts_of(http, [token]) for token in range(3, 300)}
    words = [t for t, text in texts.items() if text.isalpha() and encoded(http, text) == [t]]
    first, second = next(
        (a, b) for a in words for b in words if a != b and encoded(http, texts[a] + texts[b]) == [a, b]
    )
    members = {"prompt": [3, 1], "max_tokens": 16, "n": 8, "seed": 5, "return_token_ids": True}
    members |= {"allowed_token_ids": [first, second], "temperature": 5}

    def made(**more):
        choices = complete(http, **members, **more).body["choices"]
        stream = events(complete(http, stream=True, **members, **more).body)
        for choice in choices:
            parts = [e["choices"][0] for e in stream if e["choices"][0]["index"] == choice["index"]]
            assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        return [choice["token_ids"] for choice in choices]

    def pairs(samples):
        return {pair for sample in samples for pair in itertools.pairwise(sample)}

    assert (first, second) in pairs(made())
    two = made(bad_words=[texts[first] + texts[second]])
    assert (first, second) not in pairs(two) and {first, second} == {token for sample in two for token in sample}
    sampling = SamplingParams(
        max_tokens=16,
        seed=5,
        temperature=5,
        allowed_token_ids=[first, second],
        bad_words=[texts[first] + texts[second]],
    )
    (group,) = http.client.generate([[3, 1]], n=8, sampling=sampling)
    assert [sample.token_ids for sample in group.samples] == two
    assert {token for sample in made(bad_words=[texts[second]]) for token in sample} == {first}
    reported = {"bad_words": [texts[second]], "logprobs": 0}
    processed = complete(http, **members, **reported).body["choices"][0]["logprobs"]["token_logprobs"]
    raw = complete(http, **members, **reported, logprobs_mode="raw").body["choices"][0]["logprobs"]["token_logprobs"]
    assert set(processed) == {0.0} and max(raw) < 0, "the model's own distribution does not change"
    for wrong in ([texts[first], texts[second]], ["a", " "], [texts[first]] * 129):
        answer = ask(http.http_address, "POST", "/v1/completions", members | {"bad_words": wrong})
        assert answer.status == 400 and answer.body["error"]["param"].startswith("bad_words"), answer.body


def test_log_probabilities_of_named_tokens(http):
    """They are those that the tokens are scored with, on all routes and over gRPC."""
    prompt, named = [3, 1, 4, 1, 5], [9, 200, 7]
    scores = [http.client.score([[*prompt, token]])[0].raw_logprobs[-1] for token in named]
    members = {"max_tokens": 1, "temperature": 0, "logprob_token_ids": named, "logprobs_mode": "raw"}
    by_id = {"return_tokens_as_token_ids": True, **members}
    of = complete(http, prompt=prompt, logprobs=0, **by_id).body["choices"][0]["logprobs"]
    sampled = of["tokens"][0]
    expected = {sampled: of["token_logprobs"][0]} | {f"token_id:{t}": s for t, s in zip(named, scores, strict=True)}
    found = of["top_logprobs"][0]
    assert np.float32([found[name] for name in expected]).tobytes() == np.float32([*expected.values()]).tobytes()
    assert list(of["top_logprobs"][0]) == [sampled, *(f"token_id:{token}" for token in named)]
    body = {"token_ids": prompt, "sampling_params": {"logprobs": 0, **members}}
    (entry,) = ask(http.http_address, "POST", "/inference/v1/generate", body).body["choices"][0]["logprobs"]["content"]
    assert [f"token_id:{top['token_id']}" for top in entry["top_logprobs"]] == list(expected)
    values = [top["logprob"] for top in entry["top_logprobs"][1:]]
    assert np.float32(values).tobytes() == np.float32(scores).tobytes()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, **by_id}
    answer = ask(http.http_address, "POST", "/v1/chat/completions", chat)
    (entry,) = answer.body["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"], *(f"token_id:{t}" for t in named)]
    sampling = SamplingParams(max_tokens=1, temperature=0)
    (group,) = http.client.generate([prompt], sampling=sampling, logprob_token_ids=named)
    (top,) = group.samples[0].top_logprobs
    assert list(top.items()) == list(zip(named, scores, strict=True))
    for wrong in ({}, {"logprobs": 1, "echo": True}, {"logprobs": 1, "logprob_token_ids": [512]}):
        answer = ask(http.http_address, "POST", "/v1/completions", {"prompt": prompt, **members, **wrong})
        assert answer.status == 400 and answer.body["error"]["param"].startswith("logprob_token_ids"), answer.body


@pytest.mark.parametrize("member", ["logprobs", "prompt_logprobs"])
def test_all_logprobs_are_more_than_the_limit(http, member):
    answer = ask(http.http_address, "POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 1, member: -1})
    assert (answer.status, answer.body["error"]["param"]) == (400, member)
    assert answer.body["error"]["message"].endswith("-1, all 512 tokens, is more than 100; ask for fewer")


def test_prompts_are_cut_at_either_side(http):
    text = "The capital of France is the city of Paris, of course. " * 100
    tokens = encoded(http, text)
    context = ask(http.http_address, "POST", "/tokenize", {"prompt": "a"}).body["max_model_len"]
    assert len(tokens) > context, "it would be refused whole"

    def kept(path="/v1/completions", **members):
        body = {"max_tokens": 3, "return_token_ids": True, "add_special_tokens": False, **members}
        answer = ask(http.http_address, "POST", path, body)
        assert answer.status == 200, answer.body
        return answer.body.get("prompt_token_ids") or answer.body["choices"][0]["prompt_token_ids"]

    for prompt in (text, tokens):
        assert kept(prompt=prompt, truncate_prompt_tokens=5) == tokens[-5:]
        assert kept(prompt=prompt, truncate_prompt_tokens=5, truncation_side="left") == tokens[-5:]
        assert kept(prompt=prompt, truncate_prompt_tokens=5, truncation_side="right") == tokens[:5]
        assert kept(prompt=prompt, truncate_prompt_tokens=-1) == tokens[3 - context :]
    messages = [{"role": "user", "content": text}]
    whole = ask(http.http_address, "POST", "/tokenize", {"messages": messages}).body["tokens"]
    assert kept("/v1/chat/completions", messages=messages, truncate_prompt_tokens=7) == whole[-7:]
    assert kept(prompt="a", truncation_side="right") == encoded(http, "a"), "without a number it has no effect"


def usages(http, path="/v1/completions", **members):
    """Whether each event of a stream has usage figures."""
    body = {"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True, "stream": True, **members}
    answer = ask(http.http_address, "POST", path, body)
    assert answer.status == 200, answer.body
    return [event.get("usage") is not None for event in events(answer.body)]


def test_usage_in_streams(http):
    assert complete(http, prompt=[1, 2], max_tokens=1).body["metrics"] is None
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    assert usages(http) == [False, False]
    assert usages(http, stream_options={"include_usage": True}) == [False, False, True]
    assert usages(http, stream_options=continuous) == [True, True, True]
    assert usages(http, stream_options={"include_usage": None, "continuous_usage_stats": True}) == [False, False]


def test_usage_and_times_in_all_answers(binary):
    asked = ["--enable-force-include-usage", "--enable-per-request-metrics", "--enable-prompt-tokens-details"]
    flags = [*SMALL_CACHE, "--mem-util", "0.2", *asked]
    with ServerProcess(binary, FIXTURES / MODEL, flags) as server:
        assert usages(server) == [True, True, True]
        assert usages(server, stream_options={"include_usage": False}) == [True, True, True]
        tokens = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
        assert usages(server, "/inference/v1/generate", **tokens) == [False, False]
        body = {"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}
        times = complete(server, **body).body["metrics"]
        assert times["queue_time_ms"] >= 0 and times["time_to_first_token_ms"] > 0
        assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 3)
        assert times["tokens_per_second"] > 0 and times["speculative_decoding"] is None
        streamed = events(complete(server, stream=True, **body).body)
        assert [*streamed[-1]["metrics"], "speculative_decoding"] == list(times) and "metrics" not in streamed[0]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        times = ask(server.http_address, "POST", "/v1/chat/completions", chat).body["metrics"]
        assert times["mean_itl_ms"] is None and times["generation_time_ms"] == 0
        assert complete(server, n=2, **body).body["metrics"] is None, "whose would they be?"
        long = {"prompt": [3] * 33, "max_tokens": 2, "ignore_eos": True}
        found = [complete(server, **long).body["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert found[0] == {"cached_tokens": 0} and found[1]["cached_tokens"] > 0
        *before, last = events(complete(server, stream=True, **long).body)
        assert last["usage"]["prompt_tokens_details"] == found[1]
        assert not any("prompt_tokens_details" in event["usage"] for event in before)
        tokens = {"token_ids": [3] * 33, "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
        answer = ask(server.http_address, "POST", "/inference/v1/generate", tokens).body
        assert answer["usage"]["prompt_tokens_details"] == found[1]


def test_parts_of_a_chats_prompt(binary):
    """The tokens that a chat and a message find in the prefix cache, and those that they add to it."""
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--enable-prompt-tokens-details"]
    with ServerProcess(binary, FIXTURES / MODEL, flags) as server:
        block = server.client.info().block_size

        def usage(route, text, stream):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream and route == "/v1/chat/completions" else {}
            answer = ask(server.http_address, "POST", route, body).body
            if not stream:
                return answer["usage"]
            lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
            return [event["usage"] for event in map(json.loads, lines) if event.get("usage")][-1]

        for index, stream in enumerate((False, True)):
            text = f"{index} and " * 20
            first, second = (usage("/v1/chat/completions", text, stream) for _ in range(2))
            tokens = first["prompt_tokens"]
            added, found = first["prompt_tokens_details"], second["prompt_tokens_details"]
            assert added["cached_tokens"] + added["created_cache_tokens"] == tokens // block * block
            assert found["cached_tokens"] >= tokens - block > 0
            assert found["cached_tokens"] + found["created_cache_tokens"] == tokens // block * block
            parts = usage("/v1/messages", text, stream)
            assert parts["cache_read_input_tokens"] == found["cached_tokens"]
            assert parts["cache_creation_input_tokens"] == found["created_cache_tokens"]
            assert parts["input_tokens"] == tokens % block


def test_a_load_balancer_gets_the_load(http):
    """ORCA's header, if a request asks for it in a known format."""
    chat = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    text = ("/v1/completions", {"prompt": [1, 2]})

    def load(route, body, **headers):
        answer = ask(http.http_address, "POST", route, body | {"max_tokens": 1}, headers=headers)
        return answer.headers.get("endpoint-load-metrics")

    for route, body in (text, chat):
        kind, rest = load(route, body, **{"endpoint-load-metrics-format": "JSON"}).split(" ", 1)
        metrics = json.loads(rest)["named_metrics"]
        assert kind == "JSON" and list(metrics) == ["kv_cache_usage_perc", "num_requests_waiting"]
        assert 0 <= metrics["kv_cache_usage_perc"] <= 1
        said = load(route, body | {"stream": True}, **{"endpoint-load-metrics-format": "text"})
        assert said.startswith("TEXT named_metrics.kv_cache_usage_perc=0."), said
        assert load(route, body) is load(route, body, **{"endpoint-load-metrics-format": "XML"}) is None
    assert load("/v1/completions", {"prompt": []}, **{"endpoint-load-metrics-format": "JSON"}) is None, "an error"


def test_the_readmes_curl_command(http):
    (line,) = [line for line in (REPOSITORY / "README.md").read_text().splitlines() if line.startswith("curl ")]
    command = shlex.split(line.replace("127.0.0.1:8000", http.http_address))
    said = subprocess.run([*command, "--silent", "--show-error"], capture_output=True, timeout=60, check=True).stdout
    assert json.loads(said)["usage"]["completion_tokens"] == 8
