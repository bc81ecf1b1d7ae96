#!/usr/bin/env python3
"""Converts a random checkpoint of the benches in bfloat16 to a GGUF file for llama.cpp. Run by the peers' own Python.

    .peers/vllm/bin/python benches/to_gguf.py CHECKPOINT FILE

The texts of its tokens are numbers, because the benches give and take token ids.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from safetensors import safe_open

ARCHITECTURES = {"qwen2": MODEL_ARCH.QWEN2, "qwen3_moe": MODEL_ARCH.QWEN3MOE}
EXPERT = re.compile(r"(.*\.experts)\.0\.(\w+\.weight)")


def named_tensors(checkpoint: Path, experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors; a projection of a layer's experts is one tensor of three dimensions, as llama.cpp has it."""
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 a safetensors file cannot be iterated
            if first := EXPERT.fullmatch(name):
                block, projection = first.groups()
                yield (
                    f"{block}.{projection}",
                    torch.stack([tensors.get_tensor(f"{block}.{i}.{projection}") for i in range(experts)]),
                )
            elif ".experts." not in name:
                yield name, tensors.get_tensor(name)


def main() -> None:
    source, target = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((source / "config.json").read_text())
    layers, vocab, experts = config["num_hidden_layers"], config["vocab_size"], config.get("num_experts", 0)
    writer = GGUFWriter(target, config["model_type"].replace("_", ""))
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([str(i) for i in range(vocab)])
    writer.add_token_types([TokenType.NORMAL] * vocab)
    writer.add_token_merges(["0 1"])
    writer.add_eos_token_id(config["eos_token_id"])
    names = get_tensor_name_map(ARCHITECTURES[config["model_type"]], layers)
    for name, tensor in named_tensors(source, experts):
        other = names.get_name(name, (".weight", ".bias"))
        # llama.cpp's own conversion has norms, biases and routers in float32.
        if tensor.dim() == 1 or name.endswith(".mlp.gate.weight"):
            writer.add_tensor(other, tensor.float().numpy())
        else:
            writer.add_tensor(other, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
