"""Models of the real PEFT, pushed: bits of its own `merge_adapter()`."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollout_client import checksum_of
from rollout_client._served_names import served_parameters
from serving import FIXTURES, server

ATTENTION = ["q_proj", "v_proj"]
OWN_LAYOUT = "internvl3-chat"
# Fixtures of models whose class transformers lacks.
OWN_MODULES = (OWN_LAYOUT, "qwen_v1")
MLP = ["gate_proj", "up_proj", "down_proj"]
# name: (base, dtype of the adapter, LoraConfig)
CASES = {
    "default targets": ("llama-tied", torch.float32, {"r": 4}),
    "all linear": ("qwen2", torch.float32, {"r": 8, "target_modules": "all-linear"}),
    "rslora and patterns": (
        "qwen2",
        torch.float32,
        {
            "r": 4,
            "use_rslora": True,
            "target_modules": ATTENTION + MLP,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 6},
            "alpha_pattern": {"v_proj": 32},
        },
    ),
    "DoRA": ("llama-tied", torch.float32, {"r": 4, "use_dora": True, "target_modules": ATTENTION + MLP}),
    "bfloat16": ("qwen2", torch.bfloat16, {"r": 4, "target_modules": ATTENTION}),
    "modules to save": (
        "llama",
        torch.float32,
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "embeddings": ("llama", torch.float32, {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "biases": ("qwen2", torch.float32, {"r": 4, "target_modules": ATTENTION, "bias": "lora_only"}),
    "Phi-3, all linear": ("phi3", torch.float32, {"r": 4, "target_modules": "all-linear"}),
    "Phi-3, fused projections in bfloat16": (
        "phi3",
        torch.bfloat16,
        {
            "r": 4,
            "target_modules": ["qkv_proj", "gate_up_proj"],
            "rank_pattern": {"qkv_proj": 2},
            "alpha_pattern": {"gate_up_proj": 3},
        },
    ),
    "Phi-3, DoRA": ("phi3", torch.float32, {"r": 4, "use_dora": True, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "Qwen v1, default targets of its recipes": (
        "qwen_v1",
        torch.float32,
        {"r": 4, "target_modules": ["c_attn", "attn.c_proj", "w1", "w2"], "modules_to_save": ["wte", "lm_head"]},
    ),
    "Qwen v1, patterns in bfloat16": (
        "qwen_v1",
        torch.bfloat16,
        {
            "r": 4,
            "target_modules": ["c_attn", "c_proj", "w1"],
            "rank_pattern": {"attn.c_proj": 2},
            "alpha_pattern": {"c_attn": 3},
        },
    ),
    "Qwen v1, DoRA": ("qwen_v1", torch.float32, {"r": 4, "use_dora": True, "target_modules": ["c_attn", "mlp.c_proj"]}),
    "Qwen v1, fused projections saved": (
        "qwen_v1",
        torch.float32,
        {"r": 4, "target_modules": ["w2"], "modules_to_save": ["c_attn"]},
    ),
    "Qwen v1, biases": ("qwen_v1", torch.float32, {"r": 4, "target_modules": ["c_attn"], "bias": "lora_only"}),
    "SmolLM3, all linear": ("smollm3", torch.float32, {"r": 4, "target_modules": "all-linear"}),
    "GLM-4.5, experts and attention": (
        "glm4_moe",
        torch.float32,
        {
            "r": 4,
            "target_modules": [*ATTENTION, "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"experts.gate_up_proj": 5},
        },
    ),
    "GLM-4.5, all linear": ("glm4_moe", torch.float32, {"r": 2, "target_modules": "all-linear"}),
    "all linear, tower and decoder": ("qwen2_5_vl", torch.float32, {"r": 4, "target_modules": "all-linear"}),
    "tower alone": ("qwen2_5_vl", torch.bfloat16, {"r": 2, "target_modules": ["qkv", "merger.mlp.0"]}),
    "InternVL3, all linear": ("internvl3", torch.float32, {"r": 4, "target_modules": "all-linear"}),
    "InternVL3, q and v of tower and decoder": ("internvl3", torch.bfloat16, {"r": 2, "target_modules": ATTENTION}),
    "InternVL3, tower and projector alone": (
        "internvl3",
        torch.float32,
        {"r": 4, "target_modules": r".*(vision_tower.*(k_proj|projection_layer|fc1)|projector\.linear_[12])"},
    ),
    "InternVL3's own layout, q, k and v in one": (
        OWN_LAYOUT,
        torch.float32,
        {"r": 4, "target_modules": ["attn.qkv", "attn.proj", "fc2", "mlp1.1", "mlp1.3", *ATTENTION]},
    ),
}


# AutoModelForCausalLM does not know these models' class.
VISION = {
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "internvl3": transformers.InternVLForConditionalGeneration,
}


def own_modules(directory, dtype):
    """A module of the names of a checkpoint whose class transformers lacks; it cannot compute."""
    model = torch.nn.Module()
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        *path, last, kind = name.split(".")
        parent = model
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        if kind == "weight" and tensor.ndim == 2:
            linear = torch.nn.Linear(*reversed(tensor.shape), bias=f"{name.removesuffix(kind)}bias" in tensors)
            setattr(parent, last, linear)
        elif not hasattr(parent, last):
            parent.add_module(last, torch.nn.Module())
        if not hasattr(getattr(parent, last), kind):
            getattr(parent, last).register_parameter(kind, torch.nn.Parameter(torch.empty_like(tensor)))
    model.load_state_dict(tensors)
    return model.to(dtype)


def loaded(base, dtype):
    """A fixture as its trainers load it."""
    if base in OWN_MODULES:
        return own_modules(FIXTURES / base, dtype)
    return VISION.get(base, transformers.AutoModelForCausalLM).from_pretrained(FIXTURES / base, dtype=dtype)


def adapted(base, adapter_dtype, config, dtype, seed):
    """A model with adapters of random values; PEFT's own start is the base itself."""
    task = None if base in OWN_MODULES else "CAUSAL_LM"
    model = peft.get_peft_model(loaded(base, dtype), peft.LoraConfig(lora_alpha=12, task_type=task, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            around = parameter.float() if "lora_A" not in name and "lora_B" not in name else 0.0
            parameter.copy_(around + 0.1 * noise)
            if "lora_" in name and "magnitude" not in name:
                parameter.data = parameter.data.to(adapter_dtype)
    return model


def merged_state(model):
    """What `merge_adapter()` makes of the model, by the checkpoint's names."""
    model.merge_adapter()
    state = {}
    for key, value in model.base_model.model.state_dict().items():
        if "lora_" not in key and ".original_module." not in key:
            state[key.replace(".base_layer", "").replace(".modules_to_save.default", "")] = value
    return state


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_a_pushed_model_serves_what_peft_merges(binary, name, dtype):
    base, adapter_dtype, config = CASES[name]
    torch.set_num_threads(1)
    model = adapted(base, adapter_dtype, config, getattr(torch, dtype), seed=len(name))
    with server(binary, FIXTURES / base, "--dtype", dtype) as client:
        before = client.checksum()
        result = client.push_lora(model)
        found, state = client.checksum(), merged_state(model)
        served = dict(part for name, tensor in state.items() for part in served_parameters(name, tensor))
        assert found == {each.name: checksum_of(served[each.name], each.dtype) for each in client.parameters()}
        changed = sum(found[parameter] != before[parameter] for parameter in before)
        assert 0 < changed <= result.parameters
        client.push_full(state)
        assert client.checksum() == found
        client.push_lora(None)
        assert client.checksum() == found, "a full push is the base of what follows"
