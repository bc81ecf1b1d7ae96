"""TRL's distillation from a teacher on a server, unmodified, with a rollout-server as the teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runs import EXACT, STEPS, logged, serving_checksums
from tiny import prompts
from transformers import AutoModelForCausalLM
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
from trl.generation import vllm_client
from trl.trainer import distillation_trainer

from rollout_client import ServerProcess
from rollout_client.trl import use_rollout_server
from serving import SMALL_CACHE


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """TRL requires that the package is installed, and uses nothing from it here."""
    for module in (vllm_client, distillation_trainer):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_versions: True)


def settings(teacher, output_dir, **further):
    return ServerDistillationConfig(
        output_dir=str(output_dir),
        teacher_model_server_url=f"http://{teacher.http_address}",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        max_completion_length=12,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **further,
    )


def student(model):
    """The teacher's architecture with other weights."""
    torch.manual_seed(7)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    return loaded


@pytest.mark.parametrize(("beta", "top"), [(0, 100), (0, 1), (0.5, 1), (1, 1)])
def test_the_teacher_is_that_of_transformers(server, model, tmp_path, beta, top):
    teacher = AutoModelForCausalLM.from_pretrained(model)
    trainer = ServerDistillationTrainer(
        student(model), settings(server, tmp_path, beta=beta, loss_top_k=top), prompts()
    )
    ask, differences = trainer.teacher_client.get_sequence_logprobs, []

    def compare(sequences, prompt_lengths, **options):
        answer = ask(sequences, prompt_lengths, **options)
        for i, (sequence, first) in enumerate(zip(sequences, prompt_lengths, strict=True)):
            with torch.no_grad():
                logits = teacher(torch.tensor([sequence])).logits[0, first - 1 : -1]
            expected = torch.log_softmax(logits, -1).numpy()
            for values, ids in (("logprobs", "logprob_token_ids"), ("actual_logprobs", "actual_token_ids")):
                found = np.array(answer[values][i]), np.array(answer[ids][i])
                differences.append(np.abs(found[0] - np.take_along_axis(expected, found[1], 1)).max())
            best = np.sort(expected, 1)[:, ::-1][:, :top]
            differences.append(np.abs(np.array(answer["logprobs"][i]) - best).max())
        return answer

    trainer.teacher_client.get_sequence_logprobs = compare
    trainer.train()
    assert len(differences) == 3 * 8 * STEPS and max(differences) < EXACT, max(differences)
    assert len(logged(trainer, "loss")) == STEPS and min(logged(trainer, "grad_norm")) > 0


def test_the_student_samples_on_a_server_of_its_own(binary, server, model, tmp_path):
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--dtype", "float32"]
    with ServerProcess(binary, model, flags) as sampler:
        further = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": f"http://{sampler.address}"}
        trainer = use_rollout_server(ServerDistillationTrainer)(
            student(model), settings(server, tmp_path, beta=1, **further), prompts()
        )
        before = serving_checksums(trainer.model)
        trainer.train()
        assert sampler.client.status().weight_version == STEPS
        trainer.vllm_generation.sync_weights()
        assert sampler.client.checksum() == serving_checksums(trainer.model) != before
    assert min(logged(trainer, "grad_norm")) > 0
    assert server.client.status().weight_version == 0, "the teacher stays"
