"""The rules of `make bench`, on engines whose runs take a given time."""

import argparse
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from rollout_client import SamplingParams
from serving import server

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benches"))

import chart
import checkpoints
import end_to_end
import expert_push
import section
import towers
import weight_sync
from engines import OURS, PLAIN, Ours, PeerFailedError
from workloads import SHAPES, WORKLOADS, Limits, Shape, Workload, floor_seconds

LIMITS = Limits(
    threads=2,
    instructions="avx512f",
    f32_fma_gflops=400.0,
    bf16_dot_gflops=800.0,
    bf16_tile_gflops=None,
    read_gb_per_s=40.0,
)


class FakePeer:
    group = -1

    def __init__(self, name, seconds_per_token, fails_at=None):
        self.name, self.seconds_per_token, self.fails_at, self.runs = name, seconds_per_token, fails_at, 0

    def run(self, workload, prompts):
        assert len(prompts) == workload.prompts
        if self.runs == self.fails_at:
            raise PeerFailedError(f"{self.name} has ended")
        self.runs += 1
        return self.seconds_per_token * workload.all_tokens


class FakeOurs(FakePeer, Ours):
    pass


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setattr(end_to_end, "other_cpu_seconds", lambda _: 0.0)
    return [FakeOurs(OURS, 0.001), FakeOurs(PLAIN, 0.002)]


def measure(engines, name, runs=3, peer_seconds=0.0):
    absent = {}
    results = end_to_end.measure(engines, absent, name, vocab_size=1000, runs=runs, peer_seconds=peer_seconds)
    return {r["engine"]: r for r in results}, absent


def report(results, absent):
    limits, memory = asdict(LIMITS), {"peak_resident_bytes": None, "ceiling_bytes": 2**30}
    model = {"model": "SmolLM2", "dtype": "bfloat16", "kernel": "avx512_bf16", "parameters": 134_515_008, "runs": 3}
    model |= {"versions": {OURS: "1"}, "start_seconds": {OURS: 0.5}, "absent": absent, "memory": memory}
    measured = {"date": "2026-01-01", "machine": "m", "commit": "c", "command": "x", "peer_minutes": 1.0}
    measured |= {"limits": limits, "models": [model | {"results": list(results.values())}]}
    end_to_end.keep(argparse.Namespace(json=None), measured)
    return measured


def test_a_peer_gets_as_many_runs_as_fit_into_its_time(engines):
    tokens = WORKLOADS["W2"].all_tokens
    rivals = [FakePeer("quick", 1 / tokens), FakePeer("slow", 20 / tokens), FakePeer("slowest", 70 / tokens)]
    results, absent = measure([*engines, *rivals], "W2", peer_seconds=60.0)
    assert {name: r["runs"] for name, r in results.items()} == {OURS: 3, PLAIN: 3, "quick": 3, "slow": 3, "slowest": 0}
    results, _ = measure([*engines, *rivals], "W2", peer_seconds=59.0)
    assert results["slow"]["runs"] == 2
    assert results["slowest"]["expected_seconds"] == pytest.approx(70)
    assert rivals[2].runs == 2, "its warm-ups"
    assert not absent


def test_one_stream_alone_is_measured_without_speculation(engines):
    assert PLAIN in measure(engines, "W2")[0]
    assert PLAIN not in measure(engines, "W3")[0]
    assert {engine.name for engine in engines} == {OURS, PLAIN}


def test_a_peer_that_fails_leaves_the_others(engines):
    engines += [FakePeer("fragile", 0.01, fails_at=2), FakePeer("steady", 0.01)]
    results, absent = measure(engines, "W2")
    assert list(results) == [OURS, PLAIN, "steady"]
    assert absent == {"fragile": "fragile has ended"}
    assert "fragile is absent: fragile has ended" in section.markdown(report(results, absent))


def test_table_and_picture_say_what_was_left_out(engines):
    engines += [FakePeer("vllm", 0.004), FakePeer("mistral.rs", 1.0)]
    results, absent = measure(engines, "W2", peer_seconds=60.0)
    measured = report(results, absent)
    lines = section.markdown(measured).splitlines()
    assert any("| mistral.rs | left out: a run takes about 4.3 min |" in line for line in lines)
    assert any(line.startswith(f"| … {PLAIN} | {OURS} |") and "2.00 × vllm" in line for line in lines)
    assert any("| vllm |" in line and f"4.0 × ({PLAIN} 2.0 ×)" in line for line in lines)
    texts = [element.text for element in ET.fromstring(chart.chart(measured)).iter() if element.text]
    assert "left out: about 4.3 min" in texts
    assert texts.count(PLAIN) == 1


def parameters_of(shapes, *parts):
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if not parts or any(p in name for p in parts))


@pytest.mark.parametrize("model", checkpoints.RANDOM_MODELS.values(), ids=lambda model: model.stem)
def test_the_floor_of_a_random_model_is_computed_from_its_sizes(model):
    config, shapes = model.config, checkpoints.qwen_shapes(model.config)
    shape, embedding = SHAPES[parameters_of(shapes)], parameters_of(shapes, "embed_tokens")
    looked_up = embedding if "lm_head.weight" in shapes else 0
    assert shape.parameters == parameters_of(shapes) - looked_up
    assert shape.embedding_parameters == embedding
    keys = [rows for name, (rows, *_) in shapes.items() if name.endswith("k_proj.weight")]
    assert shape.kv_elements_per_token == 2 * sum(keys)
    assert shape.expert_parameters == parameters_of(shapes, ".experts.")
    assert shape.taken_share == config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)


def test_the_floor_of_experts_is_that_of_a_hand_count():
    # A token takes 1 of 4 experts with 200 parameters each; two tokens take 1.75 different experts on average.
    shape = Shape(1000, 100, 3, expert_parameters=800, taken_share=1 / 4)
    assert shape.used_parameters == 400
    assert [shape.read_parameters(tokens) for tokens in (1, 2)] == [400, pytest.approx(550)]
    assert shape.read_parameters(1000) == pytest.approx(1000)

    def floor(gflops, gb_per_s):
        limits = Limits(2, "none", gflops, None, None, gb_per_s)
        return floor_seconds(Workload(2, 1, 10, 3, 1.0), shape, "float32", limits)

    # 2 prompts of 10 tokens, whose last ones go through the head; then 2 steps of 2 tokens.
    prefill = 2 * (300 * 20 + 100 * 2)
    kv = 4 * 3 * ((20 + 2) + (20 + 4))
    assert floor(1e-9, 1e9) == pytest.approx(prefill + 2 * (2 * 400 * 2))
    assert floor(1e9, 1e-9) == pytest.approx(2 * (4 * 550) + kv)


def test_tokens_take_as_many_experts_of_a_random_model_as_its_floor_counts(binary, tmp_path):
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 64, "moe_intermediate_size": 16, "vocab_size": 512}
    config = checkpoints.QWEN3_MOE | sizes
    sampling = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    with server(binary, checkpoints.write_qwen(tmp_path, config), "--return-routing") as client:
        assert {p.name: p.shape for p in client.parameters()} == checkpoints.qwen_shapes(config)
        (group,) = client.generate([[*range(9, 99)]], n=16, sampling=sampling, return_routing=True)
    steps = np.stack([sample.routing.experts for sample in group.samples], axis=2).reshape(4 * 2, 16 * 8)
    shape = Shape(64, 0, 0, expert_parameters=64, taken_share=8 / 64)
    assert np.mean([len(np.unique(experts)) for experts in steps]) == pytest.approx(shape.read_parameters(16), rel=0.1)


def test_pushes_of_experts_are_compared_with_a_dense_model_of_their_bytes():
    experts, dense = (checkpoints.qwen_shapes(config) for config in (expert_push.SMALL, expert_push.WIDE))
    assert sum(".experts." in name for name in experts) == 18_432
    assert 1e9 < expert_push.bytes_of(expert_push.SMALL) < 2e9
    assert parameters_of(experts, ".experts.") == parameters_of(dense, ".mlp.")
    routers = {name for name in experts if name.endswith(".mlp.gate.weight")}
    others = {name: shape for name, shape in experts.items() if ".experts." not in name and name not in routers}
    assert others == {name: shape for name, shape in dense.items() if ".mlp." not in name}


def test_a_ratio_of_pushes_is_that_of_neighbouring_runs():
    values = {expert_push.EXPERTS: [1.0, 6.0, 2.0], expert_push.DENSE: [2.0, 3.0, 4.0]}
    assert expert_push.Line("a", values, "≤ 1").row() == (
        "| a | 2.00 (1.00–6.00) | 3.00 (2.00–4.00) | 0.50 (0.50–2.00) | ≤ 1 |"
    )


def test_an_adapter_has_the_modules_that_were_asked_for():
    names = [f"model.layers.0.{part}_proj.weight" for part in ("self_attn.q", "self_attn.o", "mlp.experts.3.up")]
    parameters = [weight_sync.ParameterInfo(name, (4, 6), "bfloat16") for name in names]
    tensors, config = weight_sync.random_adapter(parameters, expert_push.ATTENTION)
    assert config["target_modules"] == expert_push.ATTENTION
    assert {name.partition("model.layers.0.")[2].rpartition(".lora_")[0] for name in tensors} == {
        "self_attn.q_proj",
        "self_attn.o_proj",
    }


def test_the_flops_of_a_windowed_tower_are_those_of_a_hand_count():
    tower = {"depth": 3, "hidden_size": 8, "intermediate_size": 12, "fullatt_block_indexes": [1]}
    tower |= {"window_size": 112, "temporal_patch_size": 2}
    # 2 x 6 tokens are 48 patches, in windows of 2 x 4 and 2 x 2 tokens: 32 and 16 patches.
    embedding = 48 * (3 * 2 * 14 * 14) * 8
    linear = 48 * 3 * (8 * 24 + 8 * 8 + 8 * 24 + 12 * 8)
    queries_and_keys = (48 * 48 + 2 * (32 * 32 + 16 * 16)) * 8
    merger = 12 * (32 * 32 + 32 * 5)
    by_hand = 2 * (embedding + linear + 2 * queries_and_keys + merger)
    assert towers.windowed_flops(tower, output_size=5, rows=2, columns=6) == by_hand


def test_the_flops_of_tiles_are_those_of_a_hand_count():
    tower = {"num_hidden_layers": 3, "hidden_size": 8, "intermediate_size": 12, "image_size": [56, 56]}
    # A tile has 4 x 4 patches, a class token, and 4 tokens.
    embedding = 16 * (3 * 14 * 14) * 8
    linear = 17 * 3 * (8 * 24 + 8 * 8 + 8 * 12 + 12 * 8)
    queries_and_keys = 3 * 17 * 17 * 8
    projector = 4 * (32 * 5 + 5 * 5)
    by_hand = 2 * 2 * (embedding + linear + 2 * queries_and_keys + projector)
    assert towers.tiled_flops(tower, output_size=5, tiles=2) == by_hand
