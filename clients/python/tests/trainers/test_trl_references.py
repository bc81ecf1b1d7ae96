"""TRL's KL term with a reference that the server computes: the trainer computes none, and the loss is the same."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import tools
import torch
import trl
from peft import get_peft_model
from runs import EXACT, STEPS, assert_on_policy, config, logged
from tiny import length_reward, lora, make_model, prompts
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, RLOOConfig
from trl.trainer.utils import use_adapter

from rollout_client import Aborted, Lifecycle, RolloutClient
from rollout_client.trl import GRPOTrainer, RLOOTrainer, rollout_func
from rollout_client.trl._references import INITIAL, POLICY, ScoredToken, computes_reference, reference_logprobs

BETA = 0.05
LOGPROBS = "_get_per_token_logps_and_entropies"


@pytest.fixture
def references(monkeypatch):
    """For each batch the reference in the loss, TRL's own, and the tokens with their mask; fails if TRL's is used."""
    found, wanted = [], []
    originals = {kind: getattr(kind, LOGPROBS) for kind in (trl.GRPOTrainer, trl.RLOOTrainer)}

    def forward(trainer, model, *args, **options):
        """TRL's own, which runs the model."""
        original = next(originals[kind] for kind in type(trainer).__mro__ if kind in originals)
        assert wanted or not computes_reference(trainer.accelerator.unwrap_model(model)), "TRL computes the reference"
        return original(trainer, model, *args, **options)

    def served(kind):
        ours = getattr(kind, LOGPROBS)

        def compare(trainer, model, ids, mask, *args, **options):
            result = ours(trainer, model, ids, mask, *args, **options)
            if computes_reference(trainer.accelerator.unwrap_model(model)):
                wanted.append(True)
                found.append((result[0], forward(trainer, model, ids, mask, *args, **options)[0], ids, mask))
                wanted.clear()
            return result

        return compare

    for kind in originals:
        monkeypatch.setattr(kind, LOGPROBS, forward)
    for kind in (GRPOTrainer, RLOOTrainer):
        monkeypatch.setattr(kind, LOGPROBS, served(kind))
    return found


def assert_equal(references, batches, masks=None):
    """The server's are TRL's, for all tokens of the loss."""
    assert len(references) == batches
    for i, (served, own, _, _) in enumerate(references):
        # TRL has 0 for padding, which no token of a random model has.
        mask = own != 0 if masks is None else masks[i].bool()
        assert served.shape == own.shape and mask.sum() > len(served)
        difference = (served - own)[mask].abs().max().item()
        assert difference < EXACT, difference


def moved(model):
    """An adapter over the model that an earlier training has left."""
    torch.manual_seed(5)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return adapted


def turns_reward(completions, **columns):
    return [float(len(completion[-1].get("content") or "")) for completion in completions]


def test_the_kl_term_is_trls_own(server, model, tmp_path, monkeypatch):
    seen, losses = [], []
    compute, compute_loss = getattr(trl.GRPOTrainer, LOGPROBS), trl.GRPOTrainer._compute_loss

    def forward(trainer, given, *args, **options):
        seen.append(computes_reference(trainer.model))
        return compute(trainer, given, *args, **options)

    def spy(trainer, given, inputs):
        """The loss, and the one with TRL's own reference; each logs its KL."""
        loss = compute_loss(trainer, given, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad(), use_adapter(trainer.model, None):
            reference, _, _ = compute(trainer, trainer.model, ids, mask, inputs["completion_ids"].shape[1])
        with torch.no_grad():
            own = compute_loss(trainer, given, {**inputs, "ref_per_token_logps": reference})
        kl = trainer._metrics["train"]["kl"]
        losses.append((loss.item(), own.item(), kl[-2], kl.pop()))
        return loss

    monkeypatch.setattr(trl.GRPOTrainer, LOGPROBS, forward)
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", spy)
    settings = config(GRPOConfig, server, tmp_path, beta=BETA, temperature=0.8)
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora(), server_reference=True)
    trainer.train()
    assert_on_policy(trainer)
    assert trainer.ref_model is None and seen and not any(seen), "the trainer has run its reference"
    assert len(losses) == STEPS
    for loss, own, kl, own_kl in losses:
        assert abs(kl - own_kl) < EXACT and abs(loss - own) < BETA * EXACT, losses
    assert max(kl for _, _, kl, _ in losses) > 10 * EXACT, f"the policy has not left the reference: {losses}"
    assert logged(trainer, "kl") == pytest.approx([kl for _, _, kl, _ in losses])
    # The adapter is resident, and the base below it is the checkpoint's.
    assert [(adapter.name, adapter.rank) for adapter in server.client.adapters()] == [(POLICY, lora().r)]
    assert server.client.status().weight_version == 1


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
def test_a_training_that_continues_an_adapter(server, model, tmp_path, references, sleeps):
    """TRL's reference is then the adapter with which it began."""
    seen = []

    def reward(completions, **columns):
        seen.append(server.client.status().lifecycle)
        return length_reward(completions)

    settings = config(GRPOConfig, server, tmp_path, beta=BETA, vllm_enable_sleep_mode=sleeps)
    trainer = GRPOTrainer(moved(model), reward, settings, prompts(), server_reference=True)
    trainer.train()
    assert_on_policy(trainer)
    assert_equal(references, STEPS)
    assert logged(trainer, "kl")[0] < EXACT < max(logged(trainer, "kl"))
    assert seen == [Lifecycle.ASLEEP if sleeps else Lifecycle.RUNNING] * STEPS
    server.client.wake()
    assert {adapter.name for adapter in server.client.adapters()} == {POLICY, INITIAL}


def test_rloo(server, model, tmp_path, references):
    settings = config(RLOOConfig, server, tmp_path, beta=BETA)
    trainer = RLOOTrainer(model, length_reward, settings, prompts(), peft_config=lora(), server_reference=True)
    trainer.train()
    assert_equal(references, STEPS)
    assert trainer.ref_model is None and max(map(abs, logged(trainer, "kl"))) > EXACT


def test_another_adapter_as_the_reference(server, model, tmp_path, references):
    other = moved(model)
    server.client.push_lora(other, name="other")
    settings = config(GRPOConfig, server, tmp_path, beta=BETA, max_steps=1)
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora(), server_reference="other")
    trainer.train()
    [(served, base, ids, mask)] = references
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = other(ids, attention_mask=mask, position_ids=positions).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0][:, -served.shape[1] :]
    sampled = mask[:, -served.shape[1] :].bool()
    assert (served - logprobs)[sampled].abs().max() < EXACT
    assert (served - base)[sampled].abs().max() > 100 * EXACT


def test_turns_with_a_tool(server, tmp_path, references, monkeypatch):
    """Tokens of the tool are not sampled, and have no reference; those of all turns have."""
    masks = []
    score = trl.GRPOTrainer._generate_and_score_completions

    def spy(trainer, inputs):
        output = score(trainer, inputs)
        masks.append(output["tool_mask"] * output["completion_mask"])
        assert torch.isfinite(output["ref_per_token_logps"]).all()
        return output

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", spy)
    settings = config(
        GRPOConfig,
        server,
        tmp_path,
        beta=BETA,
        max_steps=1,
        max_completion_length=300,
        max_tool_calling_iterations=2,
        vllm_structured_outputs_regex=tools.CALL,
    )
    model = str(make_model(tmp_path / "model", tools.CHAT_TEMPLATE))
    trainer = GRPOTrainer(
        model, turns_reward, settings, prompts(), tools=[tools.add], peft_config=lora(), server_reference=True
    )
    trainer.train()
    assert logged(trainer, "tools/call_frequency") == [2]
    assert (masks[0] == 0).any(1).all(), "every completion has a tool's tokens"
    assert_equal(references, 1, masks)


@pytest.mark.parametrize("own", [False, True], ids=["ours", "one's own"])
def test_rollout_func(server, model, tmp_path, references, own):
    ours = rollout_func(server.address)

    def without_references(given, trainer):
        answer = ours(given, trainer)
        return {**answer, "completion_ids": [[int(token) for token in ids] for ids in answer["completion_ids"]]}

    settings = config(GRPOConfig, server, tmp_path, beta=BETA, max_steps=2)
    trainer = GRPOTrainer(
        model,
        length_reward,
        settings,
        prompts(),
        peft_config=lora(),
        rollout_func=without_references if own else ours,
        server_reference=True,
    )
    if own:
        with pytest.raises(ValueError, match="completion 0 has no log-probabilities under the reference"):
            trainer.train()
    else:
        trainer.train()
        assert_on_policy(trainer, 2)
        assert_equal(references, 2)


@pytest.mark.parametrize("before", ["request", "push"])
def test_another_trainers_policy_is_refused(server, model, tmp_path, monkeypatch, before):
    """Instead of a request, or of the push after a step, that takes it for one's own."""
    generate, other = RolloutClient.generate, moved(model)

    def push():
        with RolloutClient(server.address) as client:
            client.push_lora(other, name=POLICY)

    def interrupted(client, *args, **options):
        push()
        return generate(client, *args, **options)

    def reward(completions, **columns):
        push()
        return length_reward(completions)

    if before == "request":
        monkeypatch.setattr(RolloutClient, "generate", interrupted)
    settings = config(GRPOConfig, server, tmp_path, beta=BETA)
    rewards = reward if before == "push" else length_reward
    trainer = GRPOTrainer(model, rewards, settings, prompts(), peft_config=lora(), server_reference=True)
    with pytest.raises(Aborted, match="another client has pushed" if before == "request" else "generation"):
        trainer.train()


def test_samples_without_their_references_are_refused(server, model, tmp_path, monkeypatch):
    """As those of a request that ended too early."""
    generate = RolloutClient.generate

    def cut(client, *args, **options):
        outputs = generate(client, *args, **options)
        samples = [[dataclasses.replace(sample, references=[]) for sample in output.samples] for output in outputs]
        return [dataclasses.replace(output, samples=of) for output, of in zip(outputs, samples, strict=True)]

    monkeypatch.setattr(RolloutClient, "generate", cut)
    settings = config(GRPOConfig, server, tmp_path, beta=BETA)
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora(), server_reference=True)
    with pytest.raises(Aborted, match="raise the timeout"):
        trainer.train()


def test_what_has_no_reference_on_the_server_is_refused(server, model, tmp_path, monkeypatch):
    def trainer(peft_config=None, **settings):
        settings = config(GRPOConfig, server, tmp_path, **settings)
        return GRPOTrainer(model, length_reward, settings, prompts(), peft_config=peft_config, server_reference=True)

    with pytest.raises(ValueError, match="its beta is 0"):
        trainer(peft_config=lora())
    with pytest.raises(ValueError, match=r"replaces the base.*train a LoRA"):
        trainer(beta=BETA)
    info = RolloutClient.info
    monkeypatch.setattr(RolloutClient, "info", lambda client: dataclasses.replace(info(client), max_adapters=0))
    with pytest.raises(ValueError, match=r"start the server with --max-adapters 1, or leave server_reference out"):
        trainer(beta=BETA, peft_config=lora())


def test_without_it_the_trainer_computes_the_reference(server, model, tmp_path, monkeypatch):
    seen = []
    compute = getattr(trl.GRPOTrainer, LOGPROBS)

    def forward(trainer, given, *args, **options):
        seen.append(computes_reference(trainer.model))
        return compute(trainer, given, *args, **options)

    monkeypatch.setattr(trl.GRPOTrainer, LOGPROBS, forward)
    settings = config(GRPOConfig, server, tmp_path, beta=BETA, max_steps=1)
    GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora()).train()
    assert sum(seen) == 1 and server.client.adapters() == []


def test_references_travel_with_their_tokens():
    token = ScoredToken(7)
    token.reference = -1.5
    [copied, plain] = pickle.loads(pickle.dumps([token, 8]))
    assert (copied, copied.reference, plain) == (7, -1.5, 8)
    tokens = torch.tensor([[7, 8, 0], [7, 0, 0]])
    logprobs = reference_logprobs([[copied, plain], [copied]], tokens)
    assert logprobs[:, 0].tolist() == [-1.5, -1.5] and logprobs[1, 1:].tolist() == [0, 0]
    differences = logprobs[0, 1] - torch.tensor([0.0, -300.0])
    assert torch.isfinite(torch.exp(differences) - differences - 1).all(), "the KL of a tool's token, whatever it is"
    with pytest.raises(ValueError, match="other completions than were sampled last"):
        reference_logprobs([[copied], [copied]], torch.tensor([[7], [9]]))
    with pytest.raises(ValueError, match="other completions than were sampled last"):
        reference_logprobs([[copied]], tokens[:, :1])
