#!/usr/bin/env python3
"""Converts a Qwen2 checkpoint in bfloat16 to a GGUF file for llama.cpp. Run by the peers' own Python.

    .peers/vllm/bin/python benches/to_gguf.py CHECKPOINT FILE

The texts of its tokens are numbers, because the benches give and take token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from safetensors import safe_open


def main() -> None:
    source, target = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((source / "config.json").read_text())
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    writer = GGUFWriter(target, "qwen2")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([str(i) for i in range(vocab)])
    writer.add_token_types([TokenType.NORMAL] * vocab)
    writer.add_token_merges(["0 1"])
    writer.add_eos_token_id(config["eos_token_id"])
    names = get_tensor_name_map(MODEL_ARCH.QWEN2, layers)
    with safe_open(source / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 it is no mapping
            tensor, other = tensors.get_tensor(name), names.get_name(name, (".weight", ".bias"))
            if tensor.dim() == 1:
                writer.add_tensor(other, tensor.float().numpy())
            else:
                writer.add_tensor(other, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
