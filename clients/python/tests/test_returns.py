"""What requests return beside log-probabilities: entropies, supports and arrays of most likely tokens."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from models import read_model, read_safetensors
from rollout_client import (
    Internal,
    InvalidArgument,
    NotFound,
    PromptLogprobs,
    PromptTokens,
    Returned,
    Returns,
    Sample,
    SamplingParams,
    TokenDelta,
    _proto,
)
from rollout_client._convert_returns import returned, returned_of_parts
from rollout_client.returns import NO_TOKEN
from serving import FIXTURES, assert_idle, bits, server

VOCABULARY = 512
PROMPTS = [[(7 * i * i + 3) % 500 for i in range(40)], [5, 6, 7], [9]]
SAMPLING = SamplingParams(max_tokens=8, seed=3, temperature=0.8, top_p=0.9, top_k=50, ignore_eos=True)
ALL = Returns(entropy=True, support=True, top=VOCABULARY, top_of="processed")


@pytest.fixture(scope="module")
def served(binary):
    """A client of a server that the tests share."""
    with server(binary, FIXTURES / "qwen2", "--dtype", "float32") as client:
        yield client
        assert_idle(client)


def arrays(found):
    """The bytes of all arrays, to be compared."""
    values = [getattr(found, field.name) for field in fields(Returned)]
    return [[part.tobytes() for part in value] if isinstance(value, tuple) else value.tobytes() for value in values]


def samples(client, returns=ALL, sampling=SAMPLING, prompts=PROMPTS, **options):
    outputs = client.generate(prompts, 2, sampling, return_text=False, returns=returns, **options)
    return [(output.prompt_token_ids, sample) for output in outputs for sample in output.samples]


def test_returns_describe_the_distribution_that_tokens_are_sampled_from(served):
    for _, sample in samples(served):
        found = sample.returned
        assert found.entropies.shape == found.support_sizes.shape == (SAMPLING.max_tokens,)
        assert found.top_ids.shape == found.top_logprobs.shape == (SAMPLING.max_tokens, VOCABULARY)
        for t, (token, ids, size) in enumerate(
            zip(sample.token_ids, found.support_ids, found.support_sizes.tolist(), strict=True)
        ):
            # All tokens of the support are listed, with their probabilities, and no others.
            listed, logprobs = found.top_ids[t][:size], found.top_logprobs[t][:size].astype(np.float64)
            assert token in ids.tolist() and np.array_equal(np.sort(listed), ids) and size <= SAMPLING.top_k
            assert (found.top_ids[t][size:] == NO_TOKEN).all() and (found.top_logprobs[t][size:] == -np.inf).all()
            assert logprobs[listed == token] == sample.logprobs[t]
            assert math.isclose(np.exp(logprobs).sum(), 1, abs_tol=1e-5)
            assert math.isclose(-(np.exp(logprobs) * logprobs).sum(), found.entropies[t], abs_tol=1e-5)
            assert sample.ranks[t] == 1 + (logprobs > sample.logprobs[t]).sum()


def test_the_raw_distribution_at_the_temperature_gives_entropy_and_mass(served):
    raw = replace(ALL, top_of="raw")
    for _, sample in samples(served, raw):
        found = sample.returned
        logprobs = found.top_logprobs.astype(np.float64)
        assert np.allclose(-(np.exp(logprobs) * logprobs).sum(1), found.raw_entropies, atol=1e-5)
        for t, ids in enumerate(found.support_ids):
            heated = logprobs[t] / SAMPLING.temperature
            heated -= np.log(np.exp(heated).sum())
            in_support = np.isin(found.top_ids[t], ids)
            log_mass = np.log(np.exp(heated[in_support]).sum())
            assert math.isclose(log_mass, found.support_log_masses[t], abs_tol=1e-5)
            drawn = heated[found.top_ids[t] == sample.token_ids[t]][0]
            assert math.isclose(drawn - found.support_log_masses[t], sample.logprobs[t], abs_tol=1e-5)


def test_scores_and_single_prompts_have_the_same_returns(served):
    together = samples(served)
    sequences = [[*prompt, *sample.token_ids] for prompt, sample in together]
    distribution = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)
    scores = served.score(sequences, sampling=distribution, returns=ALL)
    for (prompt, sample), score in zip(together, scores, strict=True):
        scored = score.returned
        first = len(prompt)
        assert np.isnan(scored.entropies[0]) and scored.support_sizes[0] == 0 and (scored.top_ids[0] == NO_TOKEN).all()
        tail = {field.name: getattr(scored, field.name)[first:] for field in fields(Returned)}
        assert arrays(Returned(**tail)) == arrays(sample.returned)
        alone = replace(SAMPLING, seed=sample.seed)
        [again] = served.generate([prompt], 1, alone, return_text=False, returns=ALL)[0].samples
        assert bits(again) == bits(sample) and arrays(again.returned) == arrays(sample.returned)


def test_returns_change_no_sample_and_are_absent_unless_asked_for(served):
    plain = [sample for _, sample in samples(served, returns=None)]
    asked = [sample for _, sample in samples(served)]
    assert [bits(sample) for sample in plain] == [bits(sample) for sample in asked]
    assert all(sample.returned is None for sample in plain)
    [entropies] = {
        tuple(name for name in vars(s.returned) if getattr(s.returned, name) is not None)
        for _, s in samples(served, Returns(entropy=True))
    }
    assert entropies == ("raw_entropies", "entropies")


def test_log_probabilities_in_bfloat16_are_rounded(served):
    exact = [sample.returned for _, sample in samples(served)]
    rounded = [sample.returned for _, sample in samples(served, replace(ALL, top_dtype="bfloat16"))]
    for a, b in zip(exact, rounded, strict=True):
        assert np.array_equal(a.top_ids, b.top_ids) and b.top_logprobs.dtype == np.float32
        finite = np.isfinite(a.top_logprobs)
        assert np.array_equal(finite, np.isfinite(b.top_logprobs))
        given, sent = a.top_logprobs[finite], b.top_logprobs[finite]
        assert (np.abs(given - sent) <= np.abs(given) / 256).all() and (given != sent).any()
        assert (sent.view(np.uint32) & 0xFFFF == 0).all()


def test_streams_and_prompts_have_returns(served):
    """The deltas of a sample add up to it, and a prompt's own tokens have returns where their scores are asked for."""
    options = {"stream_tokens": True, "prompt_logprobs": True, "return_text": False, "returns": ALL}
    with served.generate_stream(PROMPTS[:1], 1, SAMPLING, **options) as stream:
        events = list(stream)
    [sample] = [event for event in events if isinstance(event, Sample)]
    deltas = [event.returned for event in events if isinstance(event, TokenDelta)]
    assert np.concatenate([delta.entropies for delta in deltas]).tobytes() == sample.returned.entropies.tobytes()
    assert np.concatenate([delta.top_ids for delta in deltas]).tobytes() == sample.returned.top_ids.tobytes()
    [prompt] = [event for event in events if isinstance(event, PromptLogprobs)]
    assert len(prompt.returned.entropies) == len(PROMPTS[0]) and np.isnan(prompt.returned.entropies[0])
    assert prompt.top_logprobs == [] and len(prompt.ranks) == len(PROMPTS[0])
    [score] = served.score(PROMPTS[:1], returns=replace(ALL, top_of="raw"))
    assert prompt.returned.top_logprobs.tobytes() == score.returned.top_logprobs.tobytes()


def test_a_long_score_arrives_in_parts(served):
    sequence = [(11 * i * i + 5) % 500 for i in range(1000)]
    [score] = served.score([sequence], returns=Returns(entropy=True, support=True, top=VOCABULARY))
    found = score.returned
    assert (
        found.entropies.shape == (1000,)
        and found.top_ids.shape == (1000, VOCABULARY)
        and len(found.support_ids) == 1000
    )
    assert found.support_sizes[1:].tolist() == [VOCABULARY] * 999
    [tail] = served.score([sequence[:40]], returns=Returns(entropy=True))
    assert tail.returned.entropies[1:].tobytes() == found.entropies[1:40].tobytes()


def test_a_mask_covers_the_support(served):
    [(_, sample), *_] = samples(served, Returns(support=True))
    mask = sample.returned.support_mask(VOCABULARY)
    assert mask.shape == (SAMPLING.max_tokens, VOCABULARY)
    assert np.array_equal(mask.sum(1), sample.returned.support_sizes)
    whole = samples(served, Returns(support=True, max_support_ids=0), SamplingParams(max_tokens=2, seed=1))
    assert whole[0][1].returned.support_mask(VOCABULARY).all(), "nothing was filtered"
    cut = samples(served, Returns(support=True, max_support_ids=2))[0][1].returned
    assert any(len(ids) == 0 for ids in cut.support_ids)
    with pytest.raises(InvalidArgument, match=r"support of \d+ tokens whose ids were not returned"):
        cut.support_mask(VOCABULARY)
    with pytest.raises(InvalidArgument, match=r"ask for Returns\(support=True\)"):
        Returned().support_mask(VOCABULARY)


def test_references_and_the_current_policy_score_the_samples(binary):
    """Each is what `score` says of the sample, under that adapter or version."""
    state = read_model(FIXTURES / "llama-tied")
    tuned = FIXTURES / "peft" / "plain"
    heated = SamplingParams(temperature=0.8)
    distribution = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)
    returns = Returns(references=["tuned", None], current=True)
    with server(binary, FIXTURES / "llama-tied", "--dtype", "float32", "--max-adapters", "2") as client:
        config = (tuned / "adapter_config.json").read_text()
        client.push_lora(read_safetensors(tuned / "adapter_model.safetensors"), config, name="tuned")
        long = replace(SAMPLING, max_tokens=400)
        with client.generate_stream(PROMPTS, 2, long, stream_tokens=True, return_text=False, returns=returns) as stream:
            events = [next(stream) for _ in range(40)]
            client.push_full({name: array * 0.9 for name, array in state.items()}, version=7)
            events.extend(stream)
        found = [event for event in events if isinstance(event, Sample)]
        prompts = {event.prompt_index: event.token_ids for event in events if isinstance(event, PromptTokens)}
        assert len(found) == 2 * len(PROMPTS)
        assert any(len(sample.weight_versions) == 2 for sample in found), "no sample ran during the push"
        for sample in found:
            first = len(prompts[sample.prompt_index])
            sequence = [*prompts[sample.prompt_index], *sample.token_ids]
            expected = [
                client.score([sequence], sampling=heated, adapter="tuned")[0],
                client.score([sequence], sampling=heated)[0],
                client.score([sequence], sampling=distribution)[0],
            ]
            for given, score in zip([*sample.references, sample.current], expected, strict=True):
                assert given.weight_version == score.weight_version == 7
                assert given.raw_logprobs.tobytes() == np.float32(score.raw_logprobs[first:]).tobytes()
                assert given.logprobs.tobytes() == np.float32(score.logprobs[first:]).tobytes()


def test_the_base_scores_the_samples_of_a_merged_adapter(binary):
    """Its scores are what `score` says of the samples once the adapter is taken out."""
    tuned = FIXTURES / "peft" / "plain"
    with server(binary, FIXTURES / "llama-tied", "--dtype", "float32", "--keep-base") as client:
        config = (tuned / "adapter_config.json").read_text()
        client.push_lora(read_safetensors(tuned / "adapter_model.safetensors"), config)
        outputs = client.generate(PROMPTS, 2, SAMPLING, return_text=False, returns=Returns(base=True))
        client.push_lora(None)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            for sample in output.samples:
                [score] = client.score([[*prompt, *sample.token_ids]], sampling=SamplingParams(temperature=0.8))
                assert sample.base.raw_logprobs.tobytes() == np.float32(score.raw_logprobs[len(prompt) :]).tobytes()
                assert sample.base.logprobs.tobytes() == np.float32(score.logprobs[len(prompt) :]).tobytes()
                assert sample.base.raw_logprobs.tobytes() != np.float32(sample.raw_logprobs).tobytes()


def log_softmax(logprobs, temperature):
    scaled = logprobs.astype(np.float64) / temperature
    return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))


def distributions(client, sequence, temperature, **options):
    """`[T, vocabulary]`, where each token of the sequence after its first was predicted, in float64."""
    [score] = client.score([sequence], returns=Returns(top=VOCABULARY), **options)
    found = np.zeros((len(sequence) - 1, VOCABULARY))
    np.put_along_axis(found, score.returned.top_ids[1:].astype(np.int64), score.returned.top_logprobs[1:], axis=1)
    return log_softmax(found, temperature)


def assert_divergences(score, policy, reference):
    """The divergences of a score are those of two lists of distributions."""
    for found, (p, q) in ((score.kl, (policy, reference)), (score.reverse_kl, (reference, policy))):
        exact = (np.exp(p) * (p - q)).sum(axis=1)
        # Log-probabilities are rounded to float32.
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_divergences_are_those_of_whole_distributions(binary):
    tuned = FIXTURES / "peft" / "plain"
    flags = ("--dtype", "float32", "--max-adapters", "2", "--keep-base")
    with server(binary, FIXTURES / "llama-tied", *flags) as client:
        config = (tuned / "adapter_config.json").read_text()
        client.push_lora(read_safetensors(tuned / "adapter_model.safetensors"), config, name="tuned")
        returns = Returns(references=["tuned", None], base=True, divergences=True)
        outputs = client.generate(PROMPTS, 2, SAMPLING, return_text=False, returns=returns)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            for sample in output.samples:
                sequence = [*prompt, *sample.token_ids]
                policy = distributions(client, sequence, 0.8)[len(prompt) - 1 :]
                reference = distributions(client, sequence, 0.8, adapter="tuned")[len(prompt) - 1 :]
                assert_divergences(sample.references[0], policy, reference)
                assert min(sample.references[0].kl) > 1e-6
                for itself in (sample.references[1], sample.base):
                    assert not itself.kl.any() and not itself.reverse_kl.any()


def test_a_long_sequence_is_scored_under_all_policies(binary):
    """In several messages, with the values of scores under each policy alone."""
    tuned = FIXTURES / "peft" / "plain"
    sequence = [(11 * i * i + 5) % 500 for i in range(1000)]
    flags = ("--dtype", "float32", "--keep-base")
    with server(binary, FIXTURES / "llama-tied", *flags) as client:
        alone = client.score([sequence])[0]
        base = distributions(client, sequence, 1.0)
        config = (tuned / "adapter_config.json").read_text()
        client.push_lora(read_safetensors(tuned / "adapter_model.safetensors"), config)
        returns = Returns(base=True, references=[None], divergences=True, top=VOCABULARY)
        [score, short] = client.score([sequence, [7]], returns=returns)
        assert np.isnan([score.base.raw_logprobs[0], score.base.kl[0], short.base.raw_logprobs[0]]).all()
        assert score.base.raw_logprobs[1:].tobytes() == np.float32(alone.raw_logprobs[1:]).tobytes()
        assert score.references[0].raw_logprobs[1:].tobytes() == np.float32(score.raw_logprobs[1:]).tobytes()
        policy = distributions(client, sequence, 1.0)
        cut = replace(score.base, kl=score.base.kl[1:], reverse_kl=score.base.reverse_kl[1:])
        assert_divergences(cut, policy, base)
        assert len(short.references) == 1 and len(short.references[0].logprobs) == 1


def test_policies_that_cannot_score_are_rejected(served):
    with pytest.raises(NotFound, match=r'returns.references\[1\]: "nobody" is not resident'):
        served.generate([[1]], returns=Returns(references=[None, "nobody"]), return_text=False)
    with pytest.raises(InvalidArgument, match=r'returns.references\[1\]: "" is there twice'):
        served.generate([[1]], returns=Returns(references=[None, None]), return_text=False)
    with pytest.raises(InvalidArgument, match=r"returns.references: expected a list of names, got 'one'"):
        served.generate([[1]], returns=Returns(references="one"), return_text=False)
    penalty = SamplingParams(presence_penalty=0.5)
    with pytest.raises(InvalidArgument, match=r"returns.current: cannot be combined with repetition_penalty"):
        served.generate([[1]], sampling=penalty, returns=Returns(current=True), return_text=False)
    with pytest.raises(InvalidArgument, match=r"returns.base: the server does not keep the base .* --keep-base"):
        served.generate([[1]], returns=Returns(base=True), return_text=False)
    with pytest.raises(InvalidArgument, match=r"returns.base: the server does not keep the base .* --keep-base"):
        served.score([[1, 2]], returns=Returns(base=True))
    with pytest.raises(InvalidArgument, match=r"returns.divergences: are those from references; name some"):
        served.generate([[1]], returns=Returns(divergences=True), return_text=False)
    with pytest.raises(InvalidArgument, match=r"returns.current: Score is always under the policy that serves"):
        served.score([[1, 2]], returns=Returns(current=True))


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ({"entropy": True}, "returns: expected Returns, such as Returns"),
        (Returns(top_of="cooked"), "returns.top_of: 'cooked' is neither"),
        (Returns(top_dtype="float16"), "returns.top_dtype: 'float16' is neither"),
        (Returns(top=-1), "returns.top"),
        (Returns(top=1025), "returns.top: 1025 is more than 1024"),
        (Returns(top=513), "returns.top: 513 is more than the vocabulary size 512"),
        (Returns(max_support_ids=7), "returns.max_support_ids: means nothing without returns.support"),
    ],
)
def test_wrong_returns_are_rejected(served, returns, message):
    with pytest.raises(InvalidArgument, match=message):
        served.generate([[1]], returns=returns, return_text=False)
    with pytest.raises(InvalidArgument, match=message):
        served.score([[1, 2]], returns=returns)


def test_lists_and_arrays_exclude_each_other(served):
    with pytest.raises(InvalidArgument, match="cannot be combined with top_logprobs"):
        served.score([[1, 2]], returns=Returns(top=3), top_logprobs=3)


def message(**values):
    return _proto.message("Completion")(returned=values)


def test_messages_that_contradict_themselves_are_errors():
    with pytest.raises(Internal, match="3 most likely tokens for 2 tokens"):
        returned(message(top_ids=bytes(12), top_logprobs=bytes(12)), 2)
    with pytest.raises(Internal, match="1 ids for supports of 5 tokens"):
        returned(message(support_sizes=[2, 3, 9], support_ids=bytes(4), max_support_ids=8), 3)
    assert returned(_proto.message("Completion")(), 2) is None


def test_parts_are_joined():
    parts = [
        message(support_sizes=[2, 9], support_ids=b"\1\0\0\0\2\0\0\0", max_support_ids=8, entropies=[1.0, 2.0]),
        message(support_sizes=[1], support_ids=b"\7\0\0\0", max_support_ids=8, entropies=[3.0]),
    ]
    joined = returned_of_parts(parts, [2, 1])
    assert [ids.tolist() for ids in joined.support_ids] == [[1, 2], [], [7]]
    assert joined.entropies.tolist() == [1, 2, 3] and joined.top_ids is None
