"""Structured output against a real server of a tiny model: texts match, distributions are of the allowed tokens."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections import Counter

import jsonschema
import numpy as np
import pytest

from rollout_client import (
    DeadlineExceeded,
    FinishReason,
    InvalidArgument,
    ResourceExhausted,
    RolloutClient,
    SamplingParams,
)
from serving import FIXTURES, assert_idle, bits, server

# Documents have no space between their parts, which a random model would go on with for ever.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SAMPLING = SamplingParams(max_tokens=120, top_k=100)


@pytest.fixture
def dice():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def with_structure(structure, sampling=SAMPLING, **changes):
    return dataclasses.replace(sampling, structured_outputs=structure, **changes)


def random_schema(dice, depth=2):
    leaves = [
        lambda: {"type": "integer", "minimum": dice.randint(-50, 0), "maximum": dice.randint(1, 5000)},
        lambda: {"type": "number", "minimum": 0, "maximum": dice.randint(1, 9)},
        lambda: {"type": "integer", "multipleOf": dice.choice([2, 5, 12]), "minimum": 0, "maximum": 99},
        lambda: {"type": "string", "minLength": dice.randint(0, 2), "maxLength": dice.randint(2, 8)},
        lambda: {"type": "string", "pattern": f"^{random_regex(dice, 1)}$"},
        lambda: {"enum": dice.sample(["a", "bb", 3, 4.5, True, None, "été"], dice.randint(1, 4))},
        lambda: {"const": dice.choice(["x", 7, None, {"k": [1]}])},
        lambda: {"type": dice.choice([["boolean", "null"], "boolean", "null"])},
    ]
    if depth == 0 or dice.random() < 0.3:
        return dice.choice(leaves)()
    kind = dice.randrange(4)
    if kind == 0:
        least = dice.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(dice, depth - 1),
            "minItems": least,
            "maxItems": least + dice.randint(0, 2),
        }
    if kind == 1:
        return {"anyOf": [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
    names = dice.sample(["name", "b", "c d", 'q"', "é"], dice.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(dice, depth - 1) for name in names},
        "required": dice.sample(names, dice.randint(0, len(names))),
        "additionalProperties": False,
    }


def random_regex(dice, depth=3):
    def atom():
        kind = dice.randrange(6 if depth > 0 else 4)
        if kind == 0:
            return re.escape(dice.choice(["a", "be", "0", "x-y", "é"]))
        if kind == 1:
            return dice.choice(["[a-f]", "[0-9]", "[A-Z_]", "[xyz]"])
        if kind == 2:
            return dice.choice(["[a-z]{2,4}", "[0-9]{1,3}", "b?", "(?:ab)*c"])
        if kind == 3:
            return dice.choice(["-", ":", "q"])
        inner = [random_regex(dice, depth - 1) for _ in range(dice.randint(1, 3))]
        return f"(?:{'|'.join(inner)})" + (dice.choice(["", "?", "{1,2}"]) if kind == 4 else "")

    return "".join(atom() for _ in range(dice.randint(1, 3)))


def matches(structure, text):
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    document = json.loads(text)
    jsonschema.validate(document, structure["json"], cls=jsonschema.Draft202012Validator)
    return True


def test_500_random_schemas_and_regexes(client, dice):
    structures = [{"regex": random_regex(dice)} for _ in range(250)]
    structures += [{"json": {**random_schema(dice), **COMPACT}} for _ in range(250)]
    ended = Counter()
    for structure in structures:
        sampling = with_structure(structure, seed=dice.randrange(2**32), temperature=dice.choice([0.7, 1.0, 2.0]))
        (output,) = client.generate([[5, 6, dice.randrange(500)]], n=2, sampling=sampling)
        for sample in output.samples:
            ended[sample.finish_reason] += 1
            if sample.finish_reason is not FinishReason.LENGTH:
                assert matches(structure, sample.text), (structure, sample.text)
    assert set(ended) <= {FinishReason.EOS, FinishReason.LENGTH}, ended
    assert ended[FinishReason.LENGTH] < 100, ended


def test_a_cut_text_is_the_beginning_of_one_that_matches(client):
    structure = {"json": {"type": "array", "items": {"enum": [12, "ab"]}, "minItems": 4, "maxItems": 4, **COMPACT}}
    whole = with_structure(structure, seed=5)
    (sample,) = client.generate([[5, 6]], sampling=whole)[0].samples
    for most in range(1, len(sample.token_ids)):
        (cut,) = client.generate([[5, 6]], sampling=dataclasses.replace(whole, max_tokens=most))[0].samples
        assert cut.finish_reason is FinishReason.LENGTH
        assert cut.token_ids == sample.token_ids[:most] and sample.text.startswith(cut.text)


def distribution(client, prompt, sampling):
    """The processed distribution of the first token: every token's log-probability where it has one."""
    (sample,) = client.generate(
        [prompt], sampling=dataclasses.replace(sampling, max_tokens=1), top_logprobs=100, top_logprobs_of="processed"
    )[0].samples
    return sample.top_logprobs[0]


def pieces():
    """The text of each token that has one in ASCII and is not special."""
    tokenizer = json.loads((FIXTURES / "llama-tied" / "tokenizer.json").read_text())
    texts = {token: piece.replace("\u0120", " ") for piece, token in tokenizer["model"]["vocab"].items()}
    texts |= {added["id"]: "" if added["special"] else added["content"] for added in tokenizer["added_tokens"]}
    return {token: text for token, text in texts.items() if text and text.isascii()}


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_processed_log_probabilities_are_renormalised_over_what_is_allowed(client, dice, temperature):
    choices = ["the rest", "that", "beautiful", "better", "a", "explicit is", " ugly", "complex", "is it", "or", "one"]
    plain = SamplingParams(temperature=temperature, max_tokens=1)
    prompt = [dice.randrange(500) for _ in range(9)]
    found = distribution(client, prompt, with_structure({"choice": choices}, plain))
    allowed = {token for token, text in pieces().items() if any(choice.startswith(text) for choice in choices)}
    assert set(found) == allowed and len(allowed) > 8
    # Each token's raw log-probability, from Score; at another temperature they are only scaled.
    scores = client.score([[*prompt, token] for token in sorted(allowed)])
    raw = np.array([score.raw_logprobs[-1] for score in scores]) / temperature
    expected = raw - raw.max() - math.log(np.exp(raw - raw.max()).sum())
    assert np.allclose([found[token] for token in sorted(allowed)], expected, atol=1e-5)


def test_filters_see_only_what_is_allowed(client):
    plain = SamplingParams(max_tokens=1, top_k=2)
    structure = {"choice": ["a", "b", "c", "d"]}
    everything = distribution(client, [5, 6], with_structure(structure, plain, top_k=0))
    two = distribution(client, [5, 6], with_structure(structure, plain))
    assert list(two) == list(everything)[:2] and abs(sum(map(math.exp, two.values())) - 1) < 1e-5


def test_raw_log_probabilities_are_those_of_the_score(client):
    prompt = [3, 1, 4, 1, 5]
    for structure in ({"regex": "[a-z ]{20,30}"}, {"json_object": True}):
        sampling = with_structure(structure, max_tokens=25, seed=8)
        (sample,) = client.generate([prompt], sampling=sampling)[0].samples
        (score,) = client.score([prompt + sample.token_ids])
        assert np.float32(score.raw_logprobs[len(prompt) :]).tobytes() == sample.raw_logprobs.tobytes()
        assert (sample.logprobs >= sample.raw_logprobs - 1e-5).all()


def test_sampling_is_rejection_sampling(client):
    """Draws with a grammar, beside draws without it of which those that it forbids are thrown away."""
    prompt, pattern = [7, 8, 9], "[abcdefgh]"
    allowed = {token for token, text in pieces().items() if re.fullmatch(pattern, text)}
    sampling = SamplingParams(
        temperature=1.0, max_tokens=1, allowed_token_ids=sorted(allowed | {200, 201, 202}), seed=1
    )

    def first_tokens(sampling):
        groups = client.generate([prompt] * 4, n=1000, sampling=sampling, return_text=False)
        return Counter(sample.token_ids[0] for group in groups for sample in group.samples)

    rejection = Counter({t: c for t, c in first_tokens(sampling).items() if t in allowed})
    found = first_tokens(with_structure({"regex": pattern}, sampling, allowed_token_ids=None, seed=2))
    assert set(found) <= allowed and set(rejection) <= allowed
    total, other = sum(found.values()), sum(rejection.values())
    assert total == 4000 and other > 1000
    # Two samples of one distribution (Press et al., Numerical Recipes 14.3), rare tokens as one cell.
    cells = [(found[t], rejection[t]) for t in allowed if found[t] + rejection[t] >= 20]
    cells.append((total - sum(a for a, _ in cells), other - sum(b for _, b in cells)))
    up, down = math.sqrt(other / total), math.sqrt(total / other)
    chi2 = sum((up * a - down * b) ** 2 / (a + b) for a, b in cells if a + b)
    assert chi2 < len(cells) + 4 * math.sqrt(2 * len(cells)), (chi2, cells)


def test_what_ends_a_sample(client):
    def ends(structure, **changes):
        (sample,) = client.generate([[5, 6]], sampling=with_structure(structure, seed=3, **changes))[0].samples
        return sample.text, sample.finish_reason, sample.token_ids[-1]

    choice = {"choice": ["abcde"]}
    assert ends(choice)[:2] == ("abcde", FinishReason.EOS)
    assert ends(choice, ignore_eos=True)[:2] == ("abcde", FinishReason.GRAMMAR)
    assert ends(choice, min_tokens=50)[:2] == ("abcde", FinishReason.GRAMMAR)
    assert ends(choice, ignore_eos=True, stop_token_ids=[1])[1:] == (FinishReason.STOP_TOKEN, 1)
    assert ends(choice, stop=["c"])[:2] == ("ab", FinishReason.STOP_STRING)
    assert ends(choice, stop=["e"], ignore_eos=True)[:2] == ("abcd", FinishReason.STOP_STRING)
    text, reason, _ = ends({"regex": "a+"}, ignore_eos=True, max_tokens=9)
    assert set(text) == {"a"} and reason is FinishReason.LENGTH
    one = next(token for token, text in pieces().items() if text == "a")
    assert ends({"regex": "ab?"}, allowed_token_ids=[one])[:2] == ("a", FinishReason.GRAMMAR)
    assert ends({"grammar": 'start: "a" start "b" | "c"'}, temperature=0)[1] in (FinishReason.EOS, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("structure", "field", "reason"),
    [
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": ""}, "regex", "is empty"),
        ({"json": "{"}, "json_schema", "is not JSON"),
        ({"json": {"type": "nonsense"}}, "json_schema", "nonsense"),
        ({"json": False}, "json_schema", "Unsatisfiable"),
        ({"json": {"multipleOf": 999983}}, "json_schema", "multiple"),
        ({"choice": []}, "choice", "0 choices"),
        ({"choice": ["a", ""]}, "choice", "choice 1 is empty"),
        ({"grammar": "start: missing"}, "grammar", "missing"),
        ({"json_object": False}, "json_object", "leave structured_outputs unset"),
        ({"regex": "a" * 200_000}, "regex", "more than 131072"),
    ],
)
def test_what_is_wrong_is_refused(client, structure, field, reason):
    with pytest.raises(InvalidArgument) as error:
        client.generate([[1]], sampling=with_structure(structure))
    assert str(error.value).startswith(f"sampling.structured_outputs.{field}: ") and reason in str(error.value)


def test_tokens_that_the_grammar_cannot_begin_with_are_refused(client):
    with pytest.raises(InvalidArgument, match="leaves no token to begin with"):
        client.generate([[1]], sampling=with_structure({"choice": ["a"]}, allowed_token_ids=[300]))
    with pytest.raises(InvalidArgument, match="has no meaning in Score"):
        client.score([[1, 2]], sampling=SamplingParams(structured_outputs={"regex": "a"}))


def test_bombs_leave_others_alone(running, client):
    """While a request has a grammar that takes for ever, another's samples go on and have their bits."""
    quiet = with_structure({"regex": "[a-z]{40}"}, max_tokens=60, seed=4)
    expected = [bits(sample) for sample in client.generate([[5, 6]], n=8, sampling=quiet)[0].samples]
    bomb = with_structure({"grammar": 'start: start start | "a"'}, max_tokens=900, ignore_eos=True)
    with RolloutClient(running.address, timeout=120) as other:
        stream = other.generate_stream([[1, 2]], n=2, sampling=bomb, stream_tokens=True)
        next(stream)
        assert [bits(sample) for sample in client.generate([[5, 6]], n=8, sampling=quiet)[0].samples] == expected
        with pytest.raises(ResourceExhausted, match=r"sampling\.structured_outputs.*processor time"):
            list(stream)
    assert_idle(client)


def test_a_client_that_vanishes_while_its_grammar_is_compiled_costs_nothing(running, client, monkeypatch):
    monkeypatch.setattr("rollout_client._channel.ANSWER_SECONDS", 0.0)
    values = [f"value {i}" for i in range(4000)]
    with RolloutClient(running.address, timeout=0.001) as hasty:
        for i in range(20):
            with pytest.raises(DeadlineExceeded):
                hasty.generate([[1]], sampling=with_structure({"json": {"enum": [*values, i]}}))
    assert_idle(client)
    assert client.generate([[1]], sampling=with_structure({"choice": ["a"]}))[0].samples[0].text == "a"


def test_suspended_requests_go_on_as_they_were(binary):
    """A reader that lags holds its request back; a sleep in between keeps it. The samples' bits stay."""
    sampling = with_structure({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 90}}, max_tokens=400)
    sampling = dataclasses.replace(sampling, seed=6, temperature=0.7)
    with server(binary, FIXTURES / "llama-tied") as client:
        expected = [bits(sample) for sample in client.generate([[5, 6]], n=4, sampling=sampling)[0].samples]
        stream = client.generate_stream([[5, 6]], n=4, sampling=sampling, stream_tokens=True)
        events = [next(stream)]
        client.sleep(mode="keep")
        client.wake()
        events += list(stream)
        samples = sorted((e for e in events if hasattr(e, "seed")), key=lambda sample: sample.sample_index)
        assert [bits(sample) for sample in samples] == expected
