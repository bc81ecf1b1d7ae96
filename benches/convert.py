#!/usr/bin/env python3
"""Converts a GGUF file to a Hugging Face checkpoint in bfloat16, for trainers, and for peers that read no GGUF. Run by
their own Python.

    .venv-trainers/bin/python benches/convert.py --tokenizer .models/….gguf .models/…
    .peers/vllm/bin/python benches/convert.py .models/….gguf .peers/models/…

The peers' checkpoint has no tokenizer, because the benches give token ids.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase


def read_tokenizer(source: Path, reader: GGUFReader) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if reader.fields["tokenizer.ggml.pre"].contents() == "smollm":
        # transformers splits as GPT-2 does, which differs where digits follow several spaces or lines.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the GGUF file")
    parser.add_argument("target", type=Path, help="the checkpoint's directory")
    parser.add_argument("--tokenizer", action="store_true", help="also its tokenizer and chat template")
    args = parser.parse_args()
    source, target = args.source, args.target
    reader = GGUFReader(source)
    if args.tokenizer:
        read_tokenizer(source, reader).save_pretrained(target)
    # Read in float32, in which the values are de-quantised, and rounded to bfloat16 once, at the end.
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    # transformers does not tie the head when it reads GGUF, and would save a head of its own.
    config.tie_word_embeddings = "output.weight" not in {tensor.name for tensor in reader.tensors}
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
