"""The server's parameters of models that have others in a trainer's memory: images or experts, Phi-3, Qwen v1."""

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
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.ln_f.", "model.norm."),
    ("transformer.h.", "model.layers."),
)
# Modules of a layer of Qwen v1, and the server's names for them. `c_attn` stays, and is divided.
_QWEN_V1 = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.c_attn",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.up_proj",
    "mlp.w2": "mlp.gate_proj",
    "mlp.c_proj": "mlp.down_proj",
}
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
# Fused modules, and the projections in them, one below the other. Only towers have the first.
_FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# The tensors of all experts of a layer, and the projections of an expert in them, one below the other.
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def served_parameters(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The server's parameters, by name, that a trainer's tensor has.

    The server has the projections of a fused module, and those of each expert, as parameters of their own.

    Args:
        name: the tensor's name without prefixes of wrappers.
        tensor: an array, a tensor or `(bytes, dtype, shape)`.
    """
    name = _served_name(name)
    experts, _, tensor_name = name.rpartition(".")
    if experts.endswith(".experts") and tensor_name in _EXPERTS:
        yield from _of_experts(experts, _EXPERTS[tensor_name], tensor)
        return
    *block, module, kind = name.rsplit(".", 2) if name.count(".") > 1 else (name, "", "")
    projections = _FUSED.get(module, ())
    if not projections or (module == "qkv") != name.startswith(_TOWERS):
        yield name, tensor
        return
    rows = _rows(module, [int(size) for size in (tensor[2] if isinstance(tensor, tuple) else tensor.shape)])
    for projection, part in zip(projections, _divided(tensor, rows), strict=True):
        yield ".".join([*block, projection, kind]), part


def _of_experts(experts: str, projections: tuple[str, ...], tensor: Any) -> Iterator[tuple[str, Any]]:
    """The weights of each expert in a tensor `[experts, rows, columns]`."""
    count, rows, columns = (int(size) for size in (tensor[2] if isinstance(tensor, tuple) else tensor.shape))
    names = [f"{experts}.{index}.{projection}.weight" for index in range(count) for projection in projections]
    if isinstance(tensor, tuple):
        flat = (*tensor[:2], (count * rows, columns))
    else:
        flat = tensor.reshape(count * rows, columns)
    return zip(names, _divided(flat, [count * rows // len(names)] * len(names)), strict=True)


def _rows(module: str, shape: list[int]) -> list[int]:
    """The rows of each projection in a fused tensor.

    The heads of Phi-3's queries divide its hidden size, so that its `qkv_proj` has as many rows of queries as columns.
    """
    if module == "qkv_proj":
        keys = (shape[0] - shape[1]) // 2
        return [shape[1], keys, keys]
    count = len(_FUSED[module])
    return [shape[0] // count] * count


def _served_name(name: str) -> str:
    for in_memory, own in _LAYOUTS:
        if name.startswith(in_memory):
            rest = name.removeprefix(in_memory)
            if in_memory == "vision_model.":
                rest = ".".join(_OWN_TOWER.get(segment, segment) for segment in rest.split("."))
            if in_memory == "transformer.h.":
                layer, _, tensor = rest.partition(".")
                module, _, kind = tensor.rpartition(".")
                rest = f"{layer}.{_QWEN_V1.get(module, module)}.{kind}"
            return own + rest
    return name


def _divided(tensor: Any, rows: list[int]) -> Iterator[Any]:
    """The parts of a tensor with so many rows each, one below the other."""
    first = 0
    for count in rows:
        if isinstance(tensor, tuple):
            data, dtype, (all_rows, *columns) = tensor
            size = len(data) // all_rows
            yield data[first * size : (first + count) * size], dtype, (count, *columns)
        else:
            yield tensor[first : first + count]
        first += count
