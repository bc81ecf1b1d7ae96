#!/usr/bin/env python3
"""A GGUF file as a Hugging Face checkpoint in bfloat16, for peers that read no GGUF; run by the peers' own Python.

    .peers/vllm/bin/python benches/convert.py .models/….gguf .peers/models/…

Without a tokenizer: the benches give token ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    config = read.config
    # transformers does not say so, and would save a head of its own.
    config.tie_word_embeddings = "output.weight" not in {tensor.name for tensor in GGUFReader(source).tensors}
    config.dtype = torch.bfloat16
    # What comes from a GGUF file counts as quantised and is not saved: its values go into a fresh model.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(target)


if __name__ == "__main__":
    main()
