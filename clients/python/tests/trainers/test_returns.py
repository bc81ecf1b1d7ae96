"""What the server returns beside log-probabilities is what a trainer computes from its own logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout_client import Returns, SamplingParams
from serving import FIXTURES, server

PROMPTS = [[(7 * i * i + 3) % 500 for i in range(30)], [5, 6, 7], [9]]
ALL = Returns(entropy=True, support=True, top=300, top_of="processed")


@pytest.fixture(scope="module", params=["qwen2", "llama-tied"])
def policy(request, binary):
    """A served model, and the same in transformers."""
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / request.param, dtype=torch.float32).eval()
    with server(binary, FIXTURES / request.param, "--dtype", "float32") as client:
        yield client, model


@torch.no_grad()
def logits_of(model, prompt, tokens):
    """A trainer's logits at the positions before the tokens, `[T, vocabulary]`."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
        SamplingParams(temperature=1.5, min_p=0.02),
        SamplingParams(allowed_token_ids=list(range(0, 500, 3))),
        SamplingParams(temperature=0.5),
    ],
    ids=["top_p", "top_p and top_k", "min_p", "allowed ids", "temperature"],
)
def test_ratios_over_the_support_are_1_for_equal_weights(policy, sampling):
    client, model = policy
    sampling = SamplingParams(**{**vars(sampling), "max_tokens": 12, "seed": 4, "ignore_eos": True})
    outputs = client.generate(PROMPTS, 4, sampling, return_text=False, returns=ALL)
    for output in outputs:
        for sample in output.samples:
            logits = logits_of(model, output.prompt_token_ids, sample.token_ids)
            returned, tokens = sample.returned, torch.tensor(sample.token_ids)[:, None]
            mask = torch.from_numpy(returned.support_mask(logits.shape[-1]))
            new = torch.log_softmax((logits / sampling.temperature).masked_fill(~mask, -torch.inf), -1)
            entropies = torch.special.entr(new.exp()).sum(-1)
            assert np.allclose(entropies, returned.entropies, atol=1e-4)
            new = new.gather(-1, tokens)[:, 0]
            ratios = torch.exp(new - torch.from_numpy(sample.logprobs))
            assert torch.allclose(ratios, torch.ones_like(ratios), atol=1e-4), ratios
            # The mass alone gives them too.
            whole = torch.log_softmax(logits / sampling.temperature, -1).gather(-1, tokens)[:, 0]
            assert np.allclose(whole - returned.support_log_masses, sample.logprobs, atol=1e-4)
            if sampling.top_p < 1:
                assert torch.exp(whole - torch.from_numpy(sample.logprobs)).min() < 0.95, "a filter kept all tokens"
            raw = torch.log_softmax(logits, -1).exp()
            assert np.allclose(torch.special.entr(raw).sum(-1), returned.raw_entropies, atol=1e-4)


def test_a_teacher_gives_the_distribution_at_the_students_temperature(policy):
    """Scores with many most likely tokens are the teacher's distribution, as distillation needs it."""
    client, model = policy
    sequence, temperature = PROMPTS[0], 0.8
    vocabulary = model.config.vocab_size
    returns = Returns(top=vocabulary, top_of="processed", entropy=True)
    [score] = client.score([sequence], returns=returns, sampling=SamplingParams(temperature=temperature))
    logprobs = torch.log_softmax(logits_of(model, sequence[:1], sequence[1:]) / temperature, -1)
    found = np.empty((len(sequence) - 1, vocabulary), np.float32)
    np.put_along_axis(found, score.returned.top_ids[1:].astype(np.int64), score.returned.top_logprobs[1:], 1)
    assert np.allclose(found, logprobs, atol=1e-4)


@torch.no_grad()
def test_divergences_are_those_of_a_peft_model_and_its_base(binary):
    base = AutoModelForCausalLM.from_pretrained(FIXTURES / "llama-tied", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, FIXTURES / "peft" / "plain").eval()
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12, seed=4, ignore_eos=True)
    with server(binary, FIXTURES / "llama-tied", "--dtype", "float32", "--max-adapters", "1") as client:
        client.push_lora(model, name="policy")
        returns = Returns(references=[None], divergences=True)
        outputs = client.generate(PROMPTS, 4, sampling, return_text=False, adapter="policy", returns=returns)
    for output in outputs:
        for sample in output.samples:
            tokens = output.prompt_token_ids, sample.token_ids
            policy = torch.log_softmax(logits_of(model, *tokens).double() / 0.7, -1)
            with model.disable_adapter():
                reference = torch.log_softmax(logits_of(model, *tokens).double() / 0.7, -1)
            kl = (policy.exp() * (policy - reference)).sum(-1)
            reverse_kl = (reference.exp() * (reference - policy)).sum(-1)
            [score] = sample.references
            assert np.allclose(score.kl, kl, rtol=1e-4, atol=1e-5), score.kl - kl.numpy()
            assert np.allclose(score.reverse_kl, reverse_kl, rtol=1e-4, atol=1e-5)
            assert score.kl.min() > 1e-4, "the adapter changes the distribution"
