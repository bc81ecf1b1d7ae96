"""The models of the benches: the given one, and a random one in the shape of Qwen2.5-0.5B.

.venv/bin/python benches/checkpoints.py DIRECTORY       # writes the random one
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
from pathlib import Path

import numpy as np

TOKENIZER = Path(__file__).resolve().parents[1] / "tests/fixtures/qwen2/tokenizer.json"
RANDOM = "Qwen2.5-0.5B, random"
GIVEN_MODEL, RANDOM_MODEL = "given", "random"
"""A model as `--models` names it."""
# Name of the random model's files; the Makefile has it too.
RANDOM_STEM = "qwen2.5-0.5b-random"
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


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a local model, as the server's --model takes it")
    parser.add_argument(
        "--models",
        default=GIVEN_MODEL,
        help=f"comma-separated: {GIVEN_MODEL} is --model, {RANDOM_MODEL} is {RANDOM} (1 GB in the temporary directory)",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mem-util", type=float, default=0.4)


@contextmanager
def named_models(args: argparse.Namespace) -> Iterator[list[tuple[str, Path]]]:
    """The models that were asked for, with their names. The random one is on disk as long as this context."""
    model, wanted = Path(args.model), args.models.split(",")
    if unknown := set(wanted) - {GIVEN_MODEL, RANDOM_MODEL}:
        sys.exit(f"--models: {sorted(unknown)} are not among {GIVEN_MODEL} and {RANDOM_MODEL}")
    with ExitStack() as stack:
        models = []
        if GIVEN_MODEL in wanted:
            models.append((stem_of(model), model))
        if RANDOM_MODEL in wanted:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-bench-")))
            models.append((RANDOM, write_qwen(directory / RANDOM_STEM)))
        yield models


def stem_of(model: Path) -> str:
    """The name of a model's files without their ending. A directory's name may have dots in it."""
    return model.name if model.is_dir() else model.stem


def qwen_shapes(config: dict = QWEN) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the random model's parameters."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    head = {} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], hidden)}
    return {**shapes, "model.norm.weight": (hidden,), **head}


def write_qwen(directory: Path, config: dict = QWEN) -> Path:
    """Writes a checkpoint of random values, the same each time, that the server can load, with the tokenizer of a
    fixture. Matrices of models larger than QWEN have values that take a twentieth of the time to make.
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
            matrix = len(shape) == 2
            values = make(rng, shape) if matrix else random_bfloat16(rng, shape, 1.0 if "norm" in name else 0.0)
            file.write(values[0])
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(TOKENIZER, directory)
    return directory


def quick_bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[bytes, str, tuple[int, ...]]:
    """A bfloat16 tensor of random bits, between 2^-7 and 2^-5, of both signs: about as large as random_bfloat16's."""
    bits = rng.integers(0, 1 << 16, int(np.prod(shape)), np.uint16)
    return ((bits & 0x80FF) | 0x3C00).tobytes(), "bfloat16", shape


def random_bfloat16(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0
) -> tuple[bytes, str, tuple[int, ...]]:
    """A bfloat16 tensor in the form that the client takes where no library with bfloat16 is installed."""
    values = mean + 0.02 * rng.standard_normal(shape, dtype=np.float32)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes(), "bfloat16", shape


if __name__ == "__main__":
    write_qwen(Path(sys.argv[1]))
