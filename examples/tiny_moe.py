#!/usr/bin/env python3
"""Makes a tiny Qwen3-MoE that answers "Sort these numbers in ascending order: 7 3 9" with the numbers in any order.

    python examples/tiny_moe.py .models/tiny-moe

It is what `make train MODEL=tiny-moe` starts from: the tiny model of examples/tiny_model.py with eight experts in each
layer, of which a token takes two, trained in the same way. The directory is an ordinary Hugging Face checkpoint in
float32.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

import tiny_model


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """Random weights, spread more widely than usual, as those of the tiny model without experts."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def make(directory: Path, steps: int = 200, seed: int = 0) -> None:
    """Writes the checkpoint, the same one for the same seed on the same machine."""
    tiny_model.make(directory, steps, seed, make_model)


if __name__ == "__main__":
    tiny_model.run(make, __doc__, steps=200)
