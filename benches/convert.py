#!/usr/bin/env python3
"""Converts a GGUF file to a Hugging Face checkpoint in bfloat16, for peers that read no GGUF. Run by the peers' own
Python.

    .peers/vllm/bin/python benches/convert.py .models/….gguf .peers/models/…

The checkpoint has no tokenizer, because the benches give token ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    # Read in float32, in which the values are de-quantised, and rounded to bfloat16 once, at the end.
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    # transformers does not tie the head when it reads GGUF, and would save a head of its own.
    config.tie_word_embeddings = "output.weight" not in {tensor.name for tensor in GGUFReader(source).tensors}
    # A model from a GGUF file counts as quantised and cannot be saved, so its values go into a fresh model.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    fresh = type(read)(config)
    fresh.load_state_dict(read.state_dict())
    fresh.tie_weights()
    fresh.to(torch.bfloat16).save_pretrained(target)


if __name__ == "__main__":
    main()
