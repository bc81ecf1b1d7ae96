"""A generate call whose timeout passes returns what there is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout_client import (
    AsyncRolloutClient,
    DeadlineExceeded,
    FinishReason,
    PromptTokens,
    Sample,
    SamplingParams,
    Summary,
)
from serving import bits

PROMPTS, N = [[i + 3, 5, 7] for i in range(16)], 64
# The first prompt's samples end at once; those of the others would take minutes.
SAMPLING = [SamplingParams(max_tokens=1, seed=1)] + [SamplingParams(max_tokens=900, seed=2, ignore_eos=True)] * 15


def ask(client, address, how, timeout):
    """The token ids of the prompts and the samples of a request that cannot finish in time, both by prompt."""
    arguments = {"n": N, "sampling": SAMPLING, "return_text": False, "timeout": timeout}
    if how == "stream":
        with client.generate_stream(PROMPTS, **arguments) as stream:
            *events, summary = stream
        samples = [event for event in events if isinstance(event, Sample)]
        assert isinstance(summary, Summary)
        assert summary.completion_tokens == sum(len(sample.token_ids) for sample in samples)
        prompts = {event.prompt_index: event.token_ids for event in events if isinstance(event, PromptTokens)}
        return [prompts[i] for i in range(16)], [[s for s in samples if s.prompt_index == i] for i in range(16)]

    async def main():
        async with AsyncRolloutClient(address) as other:
            return await other.generate(PROMPTS, **arguments)

    outputs = client.generate(PROMPTS, **arguments) if how == "sync" else asyncio.run(main())
    return [output.prompt_token_ids for output in outputs], [output.samples for output in outputs]


@pytest.mark.parametrize("how", ["sync", "async", "stream"])
def test_what_there_is_at_the_timeout_comes_back(client, running, how):
    for doublings in range(9):
        prompts, groups = ask(client, running.address, how, 0.1 * 2**doublings)
        assert prompts == PROMPTS and [len(group) for group in groups] == [N] * 16
        samples = [sample for group in groups for sample in group]
        reasons = {sample.finish_reason for sample in samples}
        assert reasons <= {FinishReason.EOS, FinishReason.LENGTH, FinishReason.ABORTED}, reasons
        begun = [s for s in samples if s.finish_reason is FinishReason.ABORTED and s.token_ids]
        # However slow the machine is, at one of the timeouts the short samples have ended and others have begun.
        if begun and all(sample.finish_reason is not FinishReason.ABORTED for sample in groups[0]):
            break
    else:
        pytest.fail("nothing was computed")
    for sample in samples:
        assert len(sample.logprobs) == len(sample.raw_logprobs) == len(sample.token_ids) <= 900
        assert sum(span.end - span.start for span in sample.weight_versions) == len(sample.token_ids)
    # The tokens so far are those that the sample has without a timeout.
    longest = max(begun, key=lambda sample: len(sample.token_ids))
    params = SamplingParams(max_tokens=len(longest.token_ids), seed=longest.seed, ignore_eos=True)
    (again,) = client.generate([PROMPTS[longest.prompt_index]], sampling=params)[0].samples
    assert bits(again)[:3] == bits(longest)[:3]


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_request_of_which_nothing_has_begun_has_samples_without_tokens(client, timeout):
    client.pause()
    outputs = client.generate([[5, 6], "text"], n=3, timeout=timeout, prompt_logprobs=True)
    client.resume()
    assert outputs[0].prompt_token_ids == [5, 6] and outputs[1].prompt_token_ids
    for output in outputs:
        assert output.prompt_logprobs is None and len({sample.seed for sample in output.samples}) == 3
        for sample in output.samples:
            assert (sample.finish_reason, sample.token_ids, sample.text) == (FinishReason.ABORTED, [], "")
            assert sample.weight_versions == [] and sample.logprobs.dtype == np.float32 and sample.logprobs.size == 0


def test_a_request_that_is_done_in_time_is_whole(client):
    sampling = SamplingParams(max_tokens=5, seed=3, ignore_eos=True)
    (first,) = client.generate([[5, 6]], sampling=sampling, timeout=100)[0].samples
    (second,) = client.generate([[5, 6]], sampling=sampling)[0].samples
    assert bits(first) == bits(second) and first.finish_reason is FinishReason.LENGTH


def test_a_deadline_that_passes_on_this_side_first_has_the_words_of_the_server(fake, call):
    def never(request, context):
        fake.cancelled.wait(20)
        yield from ()

    fake.answers["Score"] = never
    with pytest.raises(DeadlineExceeded, match=r"^the deadline passed before the work was done"):
        call(lambda client: client.score([[1]], timeout=0.05))
    fake.cancelled.set()
