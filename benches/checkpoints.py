"""The models of the benches: the given one, a random one in the shape of Qwen2.5-0.5B, and a random one with experts.

.venv/bin/python benches/checkpoints.py DIRECTORY       # writes the random one whose stem is the directory's name
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TOKENIZER = Path(__file__).resolve().parents[1] / "tests/fixtures/qwen2/tokenizer.json"
RANDOM = "Qwen2.5-0.5B, random"
GIVEN_MODEL, RANDOM_MODEL, EXPERTS_MODEL = "given", "random", "experts"
"""A model as `--models` names it."""
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}


QWEN_1_5B = QWEN | {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "intermediate_size": 8960,
}
QWEN_7B = QWEN_1_5B | {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18_944,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}


# 1.12 B parameters, of which a token uses 0.21 B. Attention has half the sizes of Qwen3-30B-A3B's, the experts are
# those of kernels/benches/operators/experts.rs. The vocabulary is small, so that the head is a sixth of a token's
# products: in the 30B it is a tenth.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 32_768,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class RandomModel:
    """A model of random weights that the benches write on the spot."""

    title: str
    stem: str
    """Name of its files; benches.mk has it too."""
    config: dict


RANDOM_MODELS = {
    RANDOM_MODEL: RandomModel(RANDOM, "qwen2.5-0.5b-random", QWEN),
    EXPERTS_MODEL: RandomModel("Qwen3-MoE of 1 B, random", "qwen3-moe-1b-random", QWEN3_MOE),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=f"a local model, as the server's --model takes it, for `{GIVEN_MODEL}`")
    parser.add_argument(
        "--models",
        default=GIVEN_MODEL,
        help=f"comma-separated: {GIVEN_MODEL} is --model, {RANDOM_MODEL} is {RANDOM} (1 GB in the temporary "
        f"directory), {EXPERTS_MODEL} is {RANDOM_MODELS[EXPERTS_MODEL].title} (2.2 GB)",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mem-util", type=float, default=0.4)


@contextmanager
def named_models(args: argparse.Namespace) -> Iterator[list[tuple[str, Path]]]:
    """The models that were asked for, with their names. Random ones are on disk as long as this context."""
    wanted, known = args.models.split(","), [GIVEN_MODEL, *RANDOM_MODELS]
    if unknown := set(wanted) - set(known):
        sys.exit(f"--models: {sorted(unknown)} are not among {known}")
    if GIVEN_MODEL in wanted and not args.model:
        sys.exit(f"--models {GIVEN_MODEL} needs --model")
    with ExitStack() as stack:
        models = []
        if GIVEN_MODEL in wanted:
            models.append((stem_of(Path(args.model)), Path(args.model)))
        for name in [name for name in RANDOM_MODELS if name in wanted]:
            model = RANDOM_MODELS[name]
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-bench-")))
            models.append((model.title, write_qwen(directory / model.stem, model.config)))
        yield models


def stem_of(model: Path) -> str:
    """The name of a model's files without their ending. A directory's name may have dots in it."""
    return model.name if model.is_dir() else model.stem


def qwen_shapes(config: dict = QWEN) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a random model's parameters: of a Qwen2, a Qwen3 or a Qwen3-MoE."""
    hidden, is_qwen2 = config["hidden_size"], config["model_type"] == "qwen2"
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if is_qwen2:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        if not is_qwen2:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = shapes[f"{prefix}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q)
        experts, inner = config.get("num_experts", 0), config["intermediate_size"]
        if experts:
            shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
            inner = config["moe_intermediate_size"]
        for block in [f"experts.{i}." for i in range(experts)] or [""]:
            shapes[f"{prefix}.mlp.{block}gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.{block}up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.{block}down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    lm_head = {} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], hidden)}
    return {**shapes, "model.norm.weight": (hidden,), **lm_head}


def write_qwen(directory: Path, config: dict = QWEN) -> Path:
    """Writes a checkpoint of random values, the same each time, that the server can load, with the tokenizer of a
    fixture. Matrices of models other than QWEN have values that take a twentieth of the time to make.

    Embeddings of a model with experts are about 1 in size. Layers then change little of a token's row, so that the
    tokens of a step take different experts; otherwise all samples of a prompt take nearly the same.
    """
    make = random_bfloat16 if config is QWEN else quick_bfloat16
    directory.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, shape in qwen_shapes(config).items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in qwen_shapes(config).items():
            if len(shape) == 1:
                values = random_bfloat16(rng, shape, 1.0 if "norm" in name else 0.0)
            elif "num_experts" in config and name == "model.embed_tokens.weight":
                values = quick_bfloat16(rng, shape, exponent=-1)
            else:
                values = make(rng, shape)
            file.write(values[0])
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(TOKENIZER, directory)
    return directory


def quick_bfloat16(
    rng: np.random.Generator, shape: tuple[int, ...], exponent: int = -7
) -> tuple[bytes, str, tuple[int, ...]]:
    """A bfloat16 tensor of random bits, between 2^exponent and four times that, of both signs: by default about as
    large as random_bfloat16's. The exponent is odd.
    """
    bits = rng.integers(0, 1 << 16, int(np.prod(shape)), np.uint16)
    return ((bits & 0x80FF) | np.uint16((127 + exponent) << 7)).tobytes(), "bfloat16", shape


def random_bfloat16(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0
) -> tuple[bytes, str, tuple[int, ...]]:
    """A bfloat16 tensor in the form that the client takes where no library with bfloat16 is installed."""
    values = mean + 0.02 * rng.standard_normal(shape, dtype=np.float32)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes(), "bfloat16", shape


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_qwen(target, {model.stem: model.config for model in RANDOM_MODELS.values()}[target.name])
