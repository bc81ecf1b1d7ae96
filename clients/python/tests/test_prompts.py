"""What each prompt of a request has for itself: its token ids in the reply, its sampling, its seeds."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from rollout_client import (
    AsyncRolloutClient,
    Chat,
    FinishReason,
    InvalidArgument,
    PromptTokens,
    ResourceExhausted,
    Sample,
    SamplingParams,
    Summary,
)
from serving import bits

CHAT = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def random_prompts(rng, count):
    return [[rng.randrange(3, 512) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def test_every_output_has_its_prompt_s_token_ids(client, running):
    prompts = [[7, 8, 9], "some text", CHAT, Chat(CHAT, add_generation_prompt=False)]
    sampling = SamplingParams(max_tokens=2)
    outputs = client.generate(prompts, n=3, sampling=sampling)
    scored = client.generate(prompts, sampling=sampling, prompt_logprobs=True)
    assert [output.prompt_token_ids for output in outputs] == [output.prompt_logprobs.token_ids for output in scored]
    assert [output.prompt_token_ids for output in scored] == [output.prompt_token_ids for output in outputs]
    ids = [output.prompt_token_ids for output in outputs]
    assert ids[0] == [7, 8, 9] and len(ids[2]) > len(ids[3])
    # The token ids are the prompt: they give the same samples.
    again = client.generate(ids, n=3, sampling=dataclasses.replace(sampling, seed=5))
    texts = client.generate(prompts, n=3, sampling=dataclasses.replace(sampling, seed=5))
    assert [[bits(s) for s in o.samples] for o in again] == [[bits(s) for s in o.samples] for o in texts]

    async def main():
        async with AsyncRolloutClient(running.address, timeout=60) as other:
            return await other.generate(prompts, n=2, sampling=sampling)

    assert [output.prompt_token_ids for output in asyncio.run(main())] == ids


def test_a_stream_has_each_prompt_once_before_all_else_of_it(client):
    options = {"n": 4, "sampling": SamplingParams(max_tokens=5), "stream_tokens": True, "prompt_logprobs": True}
    prompts = [[index + 3] * 20 for index in range(5)]
    known = {}
    for event in client.generate_stream(prompts, **options):
        if isinstance(event, PromptTokens):
            assert event.prompt_index not in known
            known[event.prompt_index] = event.token_ids
        elif not isinstance(event, Summary):
            assert event.prompt_index in known, event
    assert known == dict(enumerate(prompts))


def test_a_batch_with_sampling_per_prompt_is_its_prompts_alone(client, rng):
    prompts = random_prompts(rng, 12)
    sampling = [
        SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([0.9, 1.0]),
            stop_token_ids=rng.sample(range(3, 512), 40),
            stop=rng.choice([[], ["e"]]),
            structured_outputs=rng.choice([None, None, {"regex": "[a-z ]{3,30}"}]),
            seed=rng.randrange(2**64),
        )
        for _ in prompts
    ]
    together = client.generate(prompts, n=3, sampling=sampling)
    for prompt, params, output in zip(prompts, sampling, together, strict=True):
        client.reset_prefix_cache()
        (alone,) = client.generate([prompt], n=3, sampling=params)
        assert [(*bits(s), s.text, s.seed) for s in output.samples] == [
            (*bits(s), s.text, s.seed) for s in alone.samples
        ]
    assert len({len(sample.token_ids) for output in together for sample in output.samples}) > 3


def test_budgets_of_trajectories(client):
    """The next turn of trajectories that have used up different parts of their budgets."""
    budgets = [3, 17, 1, 30]
    sampling = [SamplingParams(max_tokens=budget, ignore_eos=True) for budget in budgets]
    outputs = client.generate([[5, 6, 7]] * 4, sampling=sampling)
    assert [len(output.samples[0].token_ids) for output in outputs] == budgets
    assert all(output.samples[0].finish_reason is FinishReason.LENGTH for output in outputs)
    # Without seeds of their own, equal prompts go different ways.
    assert outputs[1].samples[0].token_ids != outputs[3].samples[0].token_ids[:17]


def test_equal_prompts_of_one_request_are_no_clones(client):
    """As trainers send them that repeat each prompt; equal sample indices of different prompts agree by chance only."""
    sampling = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    outputs = client.generate([[5, 6, 7]] * 32, n=2, sampling=sampling)
    samples = [sample for output in outputs for sample in output.samples]
    assert len({sample.seed for sample in samples}) == len({tuple(sample.token_ids) for sample in samples}) == 64
    # One step from different prompts: were it the same draw for all of them, they would agree far more often.
    sampling = SamplingParams(max_tokens=1, temperature=3.0, seed=4)
    outputs = client.generate([[5, 6, 7]] * 256, sampling=sampling)
    assert len({output.samples[0].token_ids[0] for output in outputs}) > 64


def test_what_is_wrong_with_one_prompt_s_sampling_is_named(client):
    good = SamplingParams(max_tokens=2)
    for wrong, field in [
        (SamplingParams(temperature=-1.0), r"prompts\[1\]\.sampling\.temperature: "),
        (SamplingParams(max_tokens=0), r"prompts\[1\]\.sampling\.max_tokens: "),
        (SamplingParams(top_k=-2), r"prompts\[1\]\.sampling\.top_k: -2 is neither -1 nor a count"),
        (SamplingParams(structured_outputs={"regex": "("}), r"prompts\[1\]\.sampling\.structured_outputs\.regex: "),
    ]:
        with pytest.raises(InvalidArgument, match=field):
            client.generate([[1], [2]], sampling=[good, wrong])


def test_a_grammar_that_cannot_go_on_is_named_with_its_prompt(client):
    bomb = SamplingParams(max_tokens=900, ignore_eos=True, structured_outputs={"grammar": 'start: start start | "a"'})
    with pytest.raises(ResourceExhausted, match=r"^prompts\[1\]\.sampling\.structured_outputs: .*processor time"):
        client.generate([[1], [2]], sampling=[SamplingParams(max_tokens=2), bomb])


def test_top_k_of_minus_one_is_off_as_0_is(client, rng):
    (prompt,) = random_prompts(rng, 1)

    def ask(top_k):
        sampling = SamplingParams(max_tokens=30, top_k=top_k, seed=1, ignore_eos=True)
        stream = client.generate_stream([prompt], n=2, sampling=sampling)
        return sorted(bits(event) for event in stream if isinstance(event, Sample))

    assert ask(-1) == ask(0) != ask(2)
    scores = [client.score([prompt], sampling=SamplingParams(top_k=top_k))[0].logprobs for top_k in (-1, 0)]
    assert scores[0] == scores[1]
