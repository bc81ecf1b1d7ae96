"""Short runs of TRL's trainers on a CPU, and what is read of them."""

from __future__ import annotations

from trl import GRPOConfig

from rollout_client import checksum_of
from rollout_client._served_names import served_parameters

# Of float32 on both sides: what is beyond it is a wrong policy, not rounding.
EXACT = 1e-4
STEPS = 3
IMAGE_RATE = 1e-3
"""With larger steps the policy may learn to write placeholders, which the server leaves out of the distribution."""


def config(kind=GRPOConfig, server=None, output_dir=None, **settings):
    """The settings of a run that takes seconds; with a server, those of one with vLLM's server mode."""
    if server is not None:
        url = f"http://{server.address}"
        settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url} | settings
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 5e-2,
        "bf16": False,
    } | settings
    return kind(
        output_dir=str(output_dir),
        logging_steps=1,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_on_policy(trainer, steps=STEPS):
    """Every sample was of the policy that trained on it, and the policy moved."""
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == steps and max(differences) < EXACT, differences
    assert min(logged(trainer, "grad_norm")) > 0


def serving_checksums(model):
    """What the server says of itself when it serves this model, adapters merged."""
    if hasattr(model, "merge_adapter"):
        model.merge_adapter()
        model = model.base_model.model
    return {
        served_name: checksum_of(part, "float32")
        for name, tensor in model.named_parameters()
        if "lora_" not in name
        for served_name, part in served_parameters(name.replace(".base_layer", ""), tensor)
    }
