"""Models as arrays: read, written, changed and merged with plain numpy, as a second opinion on the server."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct

import ml_dtypes
import numpy as np

from rollout_client import checksum_of
from serving import FIXTURES

DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "I32": np.int32, "U8": np.uint8}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN_V1_LINEAR = ["c_attn", "c_proj", "w1", "w2"]


def read_safetensors(path):
    """Arrays by name."""
    data = path.read_bytes()
    (header_len,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + header_len]), data[8 + header_len :]
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write_safetensors(path, tensors):
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": [end, end := end + array.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(array.tobytes())


def read_model(directory, dtype=None):
    """The parameters of a checkpoint, rounded to `dtype`."""
    state = {}
    for path in sorted(directory.glob("model*.safetensors")):
        state |= read_safetensors(path)
    return state if dtype is None else {name: array.astype(dtype) for name, array in state.items()}


def write_model(directory, like, state):
    """A checkpoint of these parameters with everything else of the one at `like`."""
    shutil.copytree(like, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_safetensors(directory / "model.safetensors", state)
    return directory


def write_large_model(directory, like, rng):
    """As `write_model`, of the same weights but an embedding of 8 MiB; returns the weights."""
    state = read_model(like)
    name, vocab = "model.embed_tokens.weight", 1 << 15
    columns, dtype = state[name].shape[1], state[name].dtype
    state[name] = rng.standard_normal((vocab, columns), np.float32).astype(dtype)
    config = write_model(directory, like, state) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": vocab}))
    return state


def checksums(state, dtype):
    return {name: checksum_of(array, dtype) for name, array in state.items()}


def perturbed(rng, state, scale=0.02):
    """Other values of the same kind for all parameters."""

    def other(array):
        return array.astype(np.float32) + scale * rng.standard_normal(array.shape, dtype=np.float32)

    return {name: other(array).astype(array.dtype) for name, array in state.items()}


def partly(rng, old, new, share):
    """`old` with this share of the elements of `new`."""
    return {name: np.where(rng.random(a.shape) < share, new[name], a) for name, a in old.items()}


def random_adapter(rng, state, *, rank=4, scale=0.2, layers=None):
    """Tensors and configuration of an adapter on the linear layers, of all layers of the model or some."""
    tensors = {}
    for name, array in state.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEAR and array.ndim == 2 and (layers is None or layer_of(name) in layers):
            rows, columns = array.shape
            tensors |= random_factors(rng, module, (rank, columns), (rows, rank), scale)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(rng.integers(1, 4 * rank)),
        "use_rslora": bool(rng.integers(2)),
        "target_modules": LINEAR,
    }
    return tensors, config


def write_adapter(path, tensors, config):
    path.mkdir(parents=True)
    write_safetensors(path / "adapter_model.safetensors", tensors)
    (path / "adapter_config.json").write_text(json.dumps(config))


def random_factors(rng, module, a, b, scale):
    """The two tensors of a module's adapter, of the shapes `a` and `b`."""
    names = (f"base_model.model.{module}.lora_{factor}.weight" for factor in "AB")
    return {
        name: scale * rng.standard_normal(shape, dtype=np.float32) for name, shape in zip(names, (a, b), strict=True)
    }


def random_expert_adapter(rng, state, *, rank=4, scale=0.2):
    """As `random_adapter`, on the experts of all layers, as PEFT makes it of `target_parameters`."""
    tensors, targets = {}, {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
    for name, array in fused_experts(state).items():
        experts, _, tensor = name.rpartition(".")
        if experts.endswith(".experts"):
            count, rows, columns = array.shape
            module = f"{experts.removesuffix('experts')}{targets[tensor]}"
            tensors |= random_factors(rng, module, (count * rank, columns), (rows, rank * count), scale)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(rng.integers(1, 4 * rank)),
        "target_modules": [],
        "target_parameters": [f"mlp.experts.{tensor}" for tensor in targets],
    }
    return tensors, config


def random_router_adapter(rng, state, *, rank=4, scale=0.2):
    """As `random_adapter`, on the routers of all layers."""
    tensors = {}
    for name, array in state.items():
        if name.endswith(".mlp.gate.weight"):
            rows, columns = array.shape
            tensors |= random_factors(rng, name.removesuffix(".weight"), (rank, columns), (rows, rank), scale)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(rng.integers(1, 4 * rank)),
        "target_modules": [],
        "target_parameters": ["mlp.gate.weight"],
    }
    return tensors, config


def fused_experts(state):
    """The parameters as transformers 5 has them in memory: all experts of a layer in two tensors."""
    fused, experts = {}, {}
    for name, array in state.items():
        of_expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        if of_expert is None:
            fused[name] = array
        else:
            prefix, index, projection = of_expert.groups()
            experts.setdefault(prefix, {}).setdefault(int(index), {})[projection] = array
    for prefix, by_index in experts.items():
        each = [by_index[index] for index in range(len(by_index))]
        fused[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate([e["gate_proj"], e["up_proj"]]) for e in each])
        fused[f"{prefix}.down_proj"] = np.stack([e["down_proj"] for e in each])
    return fused


def layer_of(name):
    return int(name.split(".")[2])


def merged(base, tensors, config):
    """What PEFT's `merge_adapter()` makes of those parameters that the adapter changes.

    Its product on the CPU is a chain of fused multiply-adds over the rank. The sum of an exact product and a float32 is
    rounded to float64 and then to float32 here, which could differ from one rounding only where the first one ends on a
    tie: too rare to be seen through the last rounding, to bfloat16.
    """
    scaling = np.float32(config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"]))
    changed = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        module = key.removesuffix(".lora_A.weight")
        name = f"{module.removeprefix('base_model.model.')}.weight"
        b, product = tensors[f"{module}.lora_B.weight"].astype(np.float64), np.zeros(base[name].shape, np.float32)
        for k in range(config["r"]):
            product = (b[:, k : k + 1] * a[k : k + 1].astype(np.float64) + product).astype(np.float32)
        changed[name] = (base[name].astype(np.float32) + product * scaling).astype(base[name].dtype)
    return changed


IN_MEMORY = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."}
OF_VLLM = {"model.": "language_model.model.", "visual.": "visual.", "lm_head.": "language_model.lm_head."}
"""Beginnings of the names of a Qwen2.5-VL, as a trainer has them in memory and as vLLM has them."""
INTERNVL_IN_MEMORY = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
"""Beginnings of the names of an InternVL3 of transformers, as a trainer has them in memory."""


def renamed(prefixes, state):
    """Tensors, or other values by name, under names with other beginnings."""

    def of(name):
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        return prefixes[prefix] + name.removeprefix(prefix)

    return {of(name): value for name, value in state.items()}


VISION_MODELS = {
    "qwen2_5_vl": ("model.", "lm_head.", "visual.merger.mlp.2."),
    "internvl3": ("language_model.model.", "language_model.lm_head.", "multi_modal_projector.linear_2."),
    "internvl3-chat": ("language_model.model.", "language_model.lm_head.", "mlp1.3."),
}
"""Beginnings of the names of a model's decoder, of its head, and of the last layer before the images' embeddings."""


def write_vision_model(directory, name="qwen2_5_vl"):
    """A model of `VISION_MODELS` that, like a trained one, hardly ever draws a placeholder.

    The first component of its hidden states is positive after any token, and makes placeholders unlikely: the server
    draws from the distribution without them, and a trainer that computes on all tokens then finds the same.
    """
    like, (decoder, head, projector) = FIXTURES / name, VISION_MODELS[name]
    config = json.loads((like / "config.json").read_text())
    state = {key: array.copy() for key, array in read_model(like).items()}
    state[f"{decoder}embed_tokens.weight"][:, 0] = 4
    state[f"{projector}bias"][0] += 4
    rows = state[f"{head}weight"]
    rows[:, 0] = 0
    # InternVL's own layout names the token of images in the tokenizer alone.
    for token in (config.get("image_token_id", len(rows) - 1), config.get("video_token_id")):
        if token is not None:
            rows[token] = 0
            rows[token, 0] = -10
    return write_model(directory, like, state)
