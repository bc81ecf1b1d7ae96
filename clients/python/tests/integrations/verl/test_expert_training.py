"""verl's own trainer with a mixture of experts: routing replay (R3) by its VeOmni engine, and adapters of experts."""

from __future__ import annotations

from training import TWO_RANKS, assert_on_policy, questions, write_expert_model

LAYERS, TOP_K, SAMPLES = 4, 2, 16
RETURNED = {
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
    # verl then logs how many experts of sampled tokens it received.
    "actor_rollout_ref.rollout.moe_load_balance_metrics_interval": 1,
}
REPLAYED = {
    **RETURNED,
    **TWO_RANKS,
    "model_engine": "veomni",
    "actor_rollout_ref.actor.veomni.router_replay.mode": "R3",
    # Those that need no GPU.
    "actor_rollout_ref.actor.veomni.attn_implementation": "eager",
    "actor_rollout_ref.actor.veomni.moe_implementation": "eager",
    "actor_rollout_ref.model.use_remove_padding": True,
}
OF_FSDP = [
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.model.override_config",
]


def test_verls_trainer_takes_the_experts_that_the_server_returned(binary, tmp_path):
    """Its own routers choose other experts in this run (cpu_platform.py), which would show in the probabilities."""
    model = {**REPLAYED, "actor_rollout_ref.model.path": write_expert_model(tmp_path / "experts")}
    steps = assert_on_policy(binary, tmp_path, questions(), model, without=OF_FSDP)
    assert_experts_arrive(steps)


def test_verls_trainer_pushes_adapters_of_experts(binary, tmp_path):
    """Of attention, of experts and routers, and of the dense block in layer 1, as PEFT makes them for all-linear."""
    path = write_expert_model(tmp_path / "experts", mlp_only_layers=[1])
    model = {**RETURNED, "actor_rollout_ref.model.path": path, "actor_rollout_ref.model.lora_rank": 4}
    assert_experts_arrive(assert_on_policy(binary, tmp_path, questions(), model))


def assert_experts_arrive(steps):
    """Finds a row of experts in each layer for each sampled token but the last of a sample, which is not run."""
    for step in steps:
        tokens = round(SAMPLES * step["response_length/mean"])
        assert step["rollout/moe/routed_expert_assignments"] == (tokens - SAMPLES) * LAYERS * TOP_K
