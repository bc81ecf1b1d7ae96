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
    # In float32, in which it is de-quantised; rounded to bfloat16 once, at the end.
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    # transformers does not say so, and would save a head of its own.
    config.tie_word_embeddings = "output.weight" not in {tensor.name for tensor in GGUFReader(source).tensors}
    # What comes from a GGUF file counts as quantised and is not saved: its values go into a fresh model.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    fresh = type(read)(config)
    fresh.load_state_dict(read.state_dict())
    fresh.tie_weights()
    fresh.to(torch.bfloat16).save_pretrained(target)


if __name__ == "__main__":
    main()
