"""TRL's loop of tools on a rollout-server: a turn continues from token ids, with the turns before it in the cache."""

from __future__ import annotations

import pytest
import tools
from runs import config, logged
from tiny import make_model, prompts
from trl import GRPOConfig

from rollout_client import Lifecycle, RolloutClient
from rollout_client.trl import GRPOTrainer

TURNS = 3


@pytest.fixture
def turns(monkeypatch):
    """Prompts and outputs of each call of `generate`."""
    seen = []
    generate = RolloutClient.generate

    def spy(client, given, n, sampling, **options):
        outputs = generate(client, given, n, sampling, **options)
        seen.append((given, outputs))
        return outputs

    monkeypatch.setattr(RolloutClient, "generate", spy)
    return seen


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_rollout_of_several_turns(server, tmp_path, turns, sleeps):
    sums = []

    def reward(completions, **columns):
        sums.extend([m["content"] for m in completion if m["role"] == "tool"] for completion in completions)
        assert server.client.status().lifecycle is (Lifecycle.ASLEEP if sleeps else Lifecycle.RUNNING)
        return [float(len(completion[-1].get("content") or "")) for completion in completions]

    settings = config(
        GRPOConfig,
        server,
        tmp_path,
        max_steps=1,
        max_completion_length=300,
        max_tool_calling_iterations=TURNS - 1,
        vllm_structured_outputs_regex=tools.CALL,
        vllm_enable_sleep_mode=sleeps,
    )
    # The same weights as the server's model, and a template that shows tools.
    model = str(make_model(tmp_path / "model", tools.CHAT_TEMPLATE))
    trainer = GRPOTrainer(model, reward, settings, prompts(), tools=[tools.add])
    trainer.train()
    assert logged(trainer, "tools/call_frequency") == [TURNS - 1]
    assert logged(trainer, "tools/failure_frequency") == [0]
    assert len(turns) == TURNS
    assert all(len(calls) == TURNS - 1 and all(2 <= int(found) <= 18 for found in calls) for calls in sums), sums
    before = None
    for given, outputs in turns:
        samples = [sample for output in outputs for sample in output.samples]
        if before is not None:
            for prompt, said, sample in zip(given, before, samples, strict=True):
                assert prompt[: len(said)] == said, "the tokens of the turns before, as they were sampled"
                # All whole blocks but the last token, which was sampled and not yet computed.
                assert sample.cached_tokens >= (len(said) - 1) // 16 * 16 > 0
        repeated = [prompt for prompt, output in zip(given, outputs, strict=True) for _ in output.samples]
        before = [prompt + sample.token_ids for prompt, sample in zip(repeated, samples, strict=True)]
