"""The server's parameters of a vision-language model, whose names in a trainer's memory are others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Prefixes of the trainer's names and the server's prefixes for them. The first four are transformers' prefixes for
# Qwen2.5-VL and InternVL3; InternVL's own code uses the others.
_LAYOUTS = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_model.", "vision_tower."),
    ("mlp1.0.", "multi_modal_projector.layer_norm."),
    ("mlp1.1.", "multi_modal_projector.linear_1."),
    ("mlp1.3.", "multi_modal_projector.linear_2."),
)
# Segments of a tower parameter's name in InternVL's own code, and the server's segments for them.
_OWN_TOWER = {
    "class_embedding": "cls_token",
    "position_embedding": "position_embeddings",
    "patch_embedding": "patch_embeddings.projection",
    "layers": "layer",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn": "attention",
    "proj": "projection_layer",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
_TOWERS = ("visual.", "vision_tower.")
_TOWER_QKV = ".qkv."
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def served_parameters(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The server's parameters, by name, that a trainer's tensor has.

    The server has the queries, keys and values of a tower's `qkv` as three parameters.

    Args:
        name: the tensor's name without prefixes of wrappers.
        tensor: an array, a tensor or `(bytes, dtype, shape)`.
    """
    name = _served_name(name)
    if not name.startswith(_TOWERS) or _TOWER_QKV not in name:
        yield name, tensor
        return
    for projection, part in zip(_PROJECTIONS, _thirds(tensor), strict=True):
        yield name.replace(_TOWER_QKV, f".{projection}."), part


def _served_name(name: str) -> str:
    for in_memory, own in _LAYOUTS:
        if name.startswith(in_memory):
            rest = name.removeprefix(in_memory)
            if in_memory == "vision_model.":
                rest = ".".join(_OWN_TOWER.get(segment, segment) for segment in rest.split("."))
            return own + rest
    return name


def _thirds(tensor: Any) -> list[Any]:
    if isinstance(tensor, tuple):
        data, dtype, (rows, *columns) = tensor
        size = len(data) // 3
        return [(data[i * size : (i + 1) * size], dtype, (rows // 3, *columns)) for i in range(3)]
    size = len(tensor) // 3
    return [tensor[i * size : (i + 1) * size] for i in range(3)]
