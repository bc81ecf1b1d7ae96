"""The client against a real server of a tiny model: what it samples, scores and refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import threading

import numpy as np
import pytest

import rollout_client
from rollout_client import (
    AsyncRolloutClient,
    DeadlineExceeded,
    FinishReason,
    InvalidArgument,
    NotFound,
    PromptLogprobs,
    RolloutClient,
    Sample,
    SamplingParams,
    Summary,
    TokenDelta,
    VersionSpan,
)
from serving import wait_for

VOCAB = 512
CHAT = [{"role": "user", "content": "Hello there"}]
# Far more than any test waits for.
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
LONG_PROMPTS, LONG_N = [[i + 3, 5, 7] for i in range(16)], 64


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def random_prompt(rng, low=1, high=100):
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]


def bits(sample: Sample):
    """Everything about a sample that must not depend on what ran beside it."""
    return (sample.token_ids, sample.logprobs.tobytes(), sample.raw_logprobs.tobytes(), sample.finish_reason)


def float32_bits(values):
    return np.array(values, dtype=np.float32).tobytes()


def test_groups_of_tokens_text_and_chat(client):
    sampling = SamplingParams(max_tokens=12, seed=5)
    outputs = client.generate([[1, 2, 3], "some text", CHAT], n=4, sampling=sampling, top_logprobs=3)
    assert [output.prompt_index for output in outputs] == [0, 1, 2]
    for output in outputs:
        assert [sample.sample_index for sample in output.samples] == [0, 1, 2, 3]
        assert len({sample.seed for sample in output.samples}) == 4
        for sample in output.samples:
            assert 1 <= len(sample.token_ids) <= 12 and all(token < VOCAB for token in sample.token_ids)
            assert len(sample.logprobs) == len(sample.raw_logprobs) == len(sample.token_ids)
            assert (sample.logprobs <= 0).all() and (sample.raw_logprobs <= 0).all()
            # Nothing is applied, so that the two distributions are one.
            np.testing.assert_allclose(sample.logprobs, sample.raw_logprobs, rtol=0, atol=1e-5)
            assert sample.weight_versions == [VersionSpan(0, 0, len(sample.token_ids))]
            assert isinstance(sample.text, str)
            expected = FinishReason.LENGTH if len(sample.token_ids) == 12 else FinishReason.EOS
            assert sample.finish_reason in (expected, FinishReason.EOS)


def test_top_logprobs_are_the_most_likely_of_the_raw_distribution(client, rng):
    sampling = SamplingParams(max_tokens=16, temperature=2.0, ignore_eos=True)
    sample = client.generate([random_prompt(rng)], sampling=sampling, top_logprobs=5)[0].samples[0]
    assert len(sample.top_logprobs) == len(sample.token_ids)
    for token, raw, top in zip(sample.token_ids, sample.raw_logprobs, sample.top_logprobs, strict=True):
        values = list(top.values())
        assert len(top) == 5 and values == sorted(values, reverse=True)
        assert raw == top[token] if token in top else raw <= values[-1]
    for rank, token, top in zip(sample.ranks, sample.token_ids, sample.top_logprobs, strict=True):
        assert [token] == list(top)[rank - 1 : rank] if rank <= 5 else token not in top


def test_processed_top_logprobs_are_those_of_the_tokens_that_could_be_drawn(client, rng):
    prompt, sampling = (
        random_prompt(rng),
        SamplingParams(max_tokens=16, temperature=2.0, top_k=3, ignore_eos=True, seed=1),
    )
    sample = client.generate([prompt], sampling=sampling, top_logprobs=5, top_logprobs_of="processed")[0].samples[0]
    plain = client.generate([prompt], sampling=sampling)[0].samples[0]
    assert bits(sample) == bits(plain) and plain.ranks == []
    for token, processed, rank, top in zip(
        sample.token_ids, sample.logprobs, sample.ranks, sample.top_logprobs, strict=True
    ):
        assert len(top) == 3 and top[token] == processed and list(top)[rank - 1] == token
        assert abs(sum(math.exp(value) for value in top.values()) - 1) < 1e-5
    greedy = dataclasses.replace(sampling, temperature=0)
    sample = client.generate([prompt], sampling=greedy, top_logprobs=5, top_logprobs_of="processed")[0].samples[0]
    assert sample.top_logprobs == [{token: 0.0} for token in sample.token_ids] and sample.ranks == [1] * 16


def test_streamed_tokens_have_the_ranks_of_the_sample(client, rng):
    events = client.generate_stream(
        [random_prompt(rng)],
        sampling=SamplingParams(max_tokens=8),
        top_logprobs=2,
        prompt_logprobs=True,
        stream_tokens=True,
    )
    events = list(events)
    deltas = [event for event in events if isinstance(event, TokenDelta) and event.token_ids]
    (sample,) = (event for event in events if isinstance(event, Sample))
    (prompt,) = (event for event in events if isinstance(event, PromptLogprobs))
    assert [rank for delta in deltas for rank in delta.ranks] == sample.ranks
    assert [top for delta in deltas for top in delta.top_logprobs] == sample.top_logprobs
    assert len(prompt.ranks) == len(prompt.token_ids) and prompt.ranks[0] == 0 and min(prompt.ranks[1:]) >= 1


def test_same_seed_same_bits_and_another_seed_others(client, rng):
    prompt, seed = random_prompt(rng), rng.randrange(2**64)

    def ask(seed):
        sampling = SamplingParams(max_tokens=24, seed=seed, ignore_eos=True)
        return [bits(sample) for sample in client.generate([prompt], n=4, sampling=sampling)[0].samples]

    first = ask(seed)
    assert ask(seed) == first
    assert ask(seed ^ 1) != first


def test_every_sample_of_an_unseeded_group_replays_alone_from_its_seed(client, rng):
    prompts = [random_prompt(rng), random_prompt(rng)]
    sampling = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, min_p=0.01, presence_penalty=0.5)
    for prompt, output in zip(prompts, client.generate(prompts, n=6, sampling=sampling), strict=True):
        for sample in output.samples:
            again = SamplingParams(
                max_tokens=24, temperature=0.8, top_p=0.9, min_p=0.01, presence_penalty=0.5, seed=sample.seed
            )
            assert bits(client.generate([prompt], sampling=again)[0].samples[0]) == bits(sample)


def test_unseeded_requests_draw_different_seeds(client):
    seeds = {client.generate([[1]], sampling=SamplingParams(max_tokens=1))[0].samples[0].seed for _ in range(4)}
    assert len(seeds) == 4


def test_alone_and_among_others_the_same_bits(client, rng):
    """Sixteen requests at once, from as many threads, against each alone with a cold cache."""
    prompts = [random_prompt(rng, 1, 300) for _ in range(16)]
    sampling = [SamplingParams(max_tokens=rng.randint(1, 40), seed=rng.randrange(2**64)) for _ in prompts]

    def ask(i):
        return [bits(sample) for sample in client.generate([prompts[i]], n=3, sampling=sampling[i])[0].samples]

    together = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: ask(i)})) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(len(prompts)):
        client.reset_prefix_cache()
        assert together[i] == ask(i)


def test_cached_prefix_is_used_reported_and_changes_no_bit(client, rng):
    prompt = random_prompt(rng, 200, 300)
    sampling = SamplingParams(max_tokens=16, seed=3)
    client.reset_prefix_cache()
    cold, warm = (client.generate([prompt], sampling=sampling)[0].samples[0] for _ in range(2))
    assert cold.cached_tokens == 0 and warm.cached_tokens >= len(prompt) // 2
    assert bits(cold) == bits(warm)
    assert client.reset_prefix_cache() > 0
    assert client.status().cached_blocks == 0


def test_scored_is_sampled_bit_for_bit(client, rng):
    prompts = [random_prompt(rng) for _ in range(3)]
    changed = {"temperature": 0.7, "top_k": 40, "top_p": 0.95}
    outputs = client.generate(prompts, n=3, sampling=SamplingParams(max_tokens=32, **changed))
    pairs = [(p, sample) for p, output in zip(prompts, outputs, strict=True) for sample in output.samples]
    scores = client.score([p + sample.token_ids for p, sample in pairs], sampling=SamplingParams(**changed))
    for (prompt, sample), score in zip(pairs, scores, strict=True):
        assert score.raw_logprobs[0] is None and score.logprobs[0] is None
        assert len(score.raw_logprobs) == len(prompt) + len(sample.token_ids)
        assert float32_bits(score.raw_logprobs[len(prompt) :]) == sample.raw_logprobs.tobytes()
        assert float32_bits(score.logprobs[len(prompt) :]) == sample.logprobs.tobytes()
        assert score.weight_version == 0


def test_prompt_logprobs_are_the_scores_of_the_prompt(client, rng):
    prompts = [random_prompt(rng, 2) for _ in range(3)]
    sampling = SamplingParams(max_tokens=1)
    outputs = client.generate(prompts, sampling=sampling, prompt_logprobs=True, top_logprobs=2)
    for prompt, output, score in zip(prompts, outputs, client.score(prompts, top_logprobs=2), strict=True):
        assert output.prompt_logprobs.token_ids == prompt
        assert output.prompt_logprobs.raw_logprobs == score.raw_logprobs
        assert output.prompt_logprobs.top_logprobs == score.top_logprobs
        assert score.top_logprobs[0] == {} and all(len(top) == 2 for top in score.top_logprobs[1:])


def test_score_of_one_token_is_none(client):
    (score,) = client.score([[7]])
    assert (score.raw_logprobs, score.logprobs) == ([None], [None])


def test_greedy_takes_the_most_likely_and_is_certain(client, rng):
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    sample, again = client.generate([random_prompt(rng)], n=2, sampling=sampling, top_logprobs=1)[0].samples
    assert bits(sample) == bits(again)
    assert sample.logprobs.tolist() == [0.0] * 16
    assert [[token] for token in sample.token_ids] == [list(top) for top in sample.top_logprobs]


def test_finish_reasons(client, rng):
    prompt = random_prompt(rng)
    greedy = {"temperature": 0, "max_tokens": 16}

    def ask(**fields):
        return client.generate([prompt], sampling=SamplingParams(**{**greedy, **fields}))[0].samples[0]

    whole = ask(ignore_eos=True)
    assert whole.finish_reason is FinishReason.LENGTH and len(whole.token_ids) == 16
    stop_token = whole.token_ids[5]
    cut = whole.token_ids.index(stop_token) + 1
    stopped = ask(ignore_eos=True, stop_token_ids=[stop_token])
    assert stopped.finish_reason is FinishReason.STOP_TOKEN and stopped.token_ids == whole.token_ids[:cut]
    later = ask(ignore_eos=True, stop_token_ids=[stop_token], min_tokens=cut)
    assert len(later.token_ids) >= cut and later.token_ids[: cut - 1] == whole.token_ids[: cut - 1]
    (eos, *_) = client.info().eos_token_ids
    ended = ask(allowed_token_ids=[eos])
    assert ended.finish_reason is FinishReason.EOS and ended.token_ids == [eos]
    # Certain, once only one token is allowed; the model itself has its doubts.
    assert ended.logprobs.tolist() == [0.0] and ended.raw_logprobs[0] < 0


def test_stop_string_ends_the_text_before_it(client):
    sampling = SamplingParams(max_tokens=200, seed=11, ignore_eos=True)
    whole = client.generate(["Once"], sampling=sampling)[0].samples[0]
    readable = [i for i in range(20, len(whole.text) - 1) if whole.text[i : i + 2].isascii()]
    stop = whole.text[readable[0] : readable[0] + 2]
    sampling = SamplingParams(max_tokens=200, seed=11, ignore_eos=True, stop=[stop])
    sample = client.generate(["Once"], sampling=sampling)[0].samples[0]
    assert sample.finish_reason is FinishReason.STOP_STRING
    assert sample.text == whole.text[: whole.text.index(stop)]
    assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]


@pytest.mark.parametrize("stop", [(), ("e",)], ids=["no stop string", "stop string"])
def test_token_deltas_add_up_to_the_samples(client, stop):
    sampling = SamplingParams(max_tokens=40, seed=2, stop=stop)
    deltas, samples, events = {}, {}, []
    for event in client.generate_stream(["one", CHAT], n=3, sampling=sampling, stream_tokens=True):
        events.append(event)
        if isinstance(event, TokenDelta):
            key = (event.prompt_index, event.sample_index)
            assert key not in samples, "a delta after its sample"
            deltas.setdefault(key, []).append(event)
        elif isinstance(event, Sample):
            samples[event.prompt_index, event.sample_index] = event
    assert sum(isinstance(event, Summary) for event in events) == 1 and isinstance(events[-1], Summary)
    assert events[-1].completion_tokens == sum(len(sample.token_ids) for sample in samples.values())
    assert set(samples) == {(p, s) for p in range(2) for s in range(3)}
    for key, sample in samples.items():
        assert [token for delta in deltas[key] for token in delta.token_ids] == sample.token_ids
        assert np.concatenate([delta.logprobs for delta in deltas[key]]).tobytes() == sample.logprobs.tobytes()
        assert np.concatenate([delta.raw_logprobs for delta in deltas[key]]).tobytes() == sample.raw_logprobs.tobytes()
        assert "".join(delta.text for delta in deltas[key]) == sample.text


def test_async_client_gathers(running, rng):
    prompts = [random_prompt(rng) for _ in range(8)]
    sampling = SamplingParams(max_tokens=16, seed=4)

    async def main():
        async with AsyncRolloutClient(running.address, timeout=60) as client:
            together = await asyncio.gather(*(client.generate([p], n=2, sampling=sampling) for p in prompts))
            return together, [await client.generate([p], n=2, sampling=sampling) for p in prompts]

    together, one_by_one = asyncio.run(main())
    samples = [[[bits(s) for s in output.samples] for (output,) in replies] for replies in (together, one_by_one)]
    assert samples[0] == samples[1]


def test_info_and_status(client):
    info = client.info()
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("LlamaForCausalLM", VOCAB, 1024)
    assert info.device == "cpu" and info.dtype in ("float32", "bfloat16") and info.tensor_parallel_size == 1
    assert info.has_tokenizer and info.has_chat_template and info.parameters > 0
    before = client.status()
    client.generate([[1, 2, 3]], n=2, sampling=SamplingParams(max_tokens=5, ignore_eos=True))
    after = client.status()
    assert after.generated_tokens - before.generated_tokens == 10
    assert after.finished_requests - before.finished_requests == 1
    assert after.steps > before.steps and after.uptime_seconds > before.uptime_seconds
    memory = after.memory
    assert {"weights", "kv_cache"} <= memory.entries.keys()
    assert sum(memory.entries.values()) <= memory.ceiling_bytes < memory.total_bytes
    assert 0 < memory.resident_bytes < memory.ceiling_bytes


def start_long(client, **options):
    stream = client.generate_stream(LONG_PROMPTS, n=LONG_N, sampling=LONG, return_text=False, **options)
    wait_for(client, lambda status: status.running_samples > 0, "running")
    return stream


@pytest.mark.parametrize("everything", [True, False], ids=["all", "by id"])
def test_abort_gives_the_tokens_so_far(client, everything):
    with start_long(client) as stream:
        wait_for(client, lambda status: status.generated_tokens > 0, "generating")
        result = client.abort(all=True) if everything else client.abort([stream.request_id, "unheard of"])
        assert result.aborted == [stream.request_id]
        assert result.unknown == ([] if everything else ["unheard of"])
        *events, summary = stream
    samples = [event for event in events if isinstance(event, Sample)]
    assert isinstance(summary, Summary) and len(samples) == len(LONG_PROMPTS) * LONG_N
    aborted = [sample for sample in samples if sample.finish_reason is FinishReason.ABORTED]
    assert aborted
    for sample in aborted:
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.raw_logprobs) < LONG.max_tokens
    assert any(sample.token_ids for sample in aborted)


def test_abort_of_nothing(client):
    assert client.abort("unheard of") == rollout_client.AbortResult([], ["unheard of"])
    assert client.abort(all=True) == rollout_client.AbortResult([], [])


def test_leaving_a_stream_frees_everything(client):
    with start_long(client):
        pass


def test_deadline_frees_everything(client, monkeypatch):
    monkeypatch.setattr("rollout_client._channel.ANSWER_SECONDS", 0.0)
    with pytest.raises(DeadlineExceeded):
        client.score([[token % 500 for token in range(1000)]] * 2000, timeout=0.2)


def test_what_ran_beside_an_abort_is_unharmed(client, rng):
    prompt, sampling = random_prompt(rng), SamplingParams(max_tokens=64, seed=9)
    alone = bits(client.generate([prompt], sampling=sampling)[0].samples[0])
    with start_long(client) as stream:
        client.abort(stream.request_id)
        assert bits(client.generate([prompt], sampling=sampling)[0].samples[0]) == alone


def test_a_request_id_in_use_is_refused(client):
    with start_long(client, request_id="taken"), pytest.raises(rollout_client.AlreadyExists, match="taken"):
        client.generate([[1]], request_id="taken")


def test_weight_versions_are_insisted_on_or_waited_for(client):
    assert client.generate([[1]], if_weight_version=0, min_weight_version=0)
    with pytest.raises(rollout_client.Aborted, match="1"):
        client.generate([[1]], if_weight_version=1)
    ((sample,),) = (output.samples for output in client.generate([[1]], min_weight_version=1, timeout=0.3))
    assert (sample.finish_reason, sample.token_ids) == (FinishReason.ABORTED, [])
    with pytest.raises(DeadlineExceeded):
        client.score([[1]], min_weight_version=1, timeout=0.3)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("prompts", {"prompts": []}),
        ("prompts[1]", {"prompts": [[1], []]}),
        ("prompts[0]", {"prompts": [[1, VOCAB]]}),
        ("prompts[0]", {"prompts": [[1] * 1024]}),
        ("n", {"n": 0}),
        ("n", {"n": 2**32 - 1}),
        ("top_logprobs", {"top_logprobs": 101}),
        ("request_id", {"request_id": "x" * 10_000}),
        ("if_weight_version", {"if_weight_version": 1, "min_weight_version": 2}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=math.nan)}),
        ("sampling.temperature", {"sampling": SamplingParams(temperature=-1)}),
        ("sampling.top_p", {"sampling": SamplingParams(top_p=0)}),
        ("sampling.min_p", {"sampling": SamplingParams(min_p=1.5)}),
        ("sampling.repetition_penalty", {"sampling": SamplingParams(repetition_penalty=0)}),
        ("sampling.presence_penalty", {"sampling": SamplingParams(presence_penalty=3)}),
        ("sampling.frequency_penalty", {"sampling": SamplingParams(frequency_penalty=math.inf)}),
        ("sampling.logit_bias", {"sampling": SamplingParams(logit_bias={1: math.inf})}),
        ("sampling.logit_bias", {"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}),
        ("sampling.allowed_token_ids", {"sampling": SamplingParams(allowed_token_ids=[VOCAB])}),
        ("sampling.min_tokens", {"sampling": SamplingParams(min_tokens=5, max_tokens=4)}),
        ("sampling.max_tokens", {"sampling": SamplingParams(max_tokens=0)}),
        ("sampling.stop_token_ids", {"sampling": SamplingParams(stop_token_ids=[VOCAB])}),
        ("sampling.stop", {"sampling": SamplingParams(stop=[""])}),
    ],
)
def test_bad_input_is_refused_by_name(client, field, arguments):
    with pytest.raises(InvalidArgument) as error:
        client.generate(**{"prompts": [[1, 2]], **arguments})
    assert error.value.code.name == "INVALID_ARGUMENT" and str(error.value).startswith(field)


def test_an_adapter_that_is_not_resident_is_not_found(client):
    with pytest.raises(NotFound, match="unheard-of"):
        client.generate([[1, 2]], adapter="unheard-of")


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("sequences", {"sequences": []}),
        ("sequences[0]", {"sequences": [[]]}),
        ("sequences[1]", {"sequences": [[1], [VOCAB]]}),
        ("sequences[0]", {"sequences": [[1] * 1025]}),
        ("sampling.max_tokens", {"sequences": [[1]], "sampling": SamplingParams(max_tokens=3)}),
    ],
)
def test_bad_scores_are_refused_by_name(client, field, arguments):
    with pytest.raises(InvalidArgument) as error:
        client.score(**arguments)
    assert str(error.value).startswith(field)


def test_a_second_client_sees_the_first_ones_work(running, client):
    with start_long(client) as stream, RolloutClient(running.address) as other:
        assert other.status().running_requests == 1
        assert other.abort(stream.request_id).aborted == [stream.request_id]
