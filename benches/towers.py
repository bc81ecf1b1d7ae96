"""The shapes of the vision towers of `images.py`, and the FLOPs that a picture takes."""

from __future__ import annotations

TOKEN_SIDE, PATCH, UNIT = 28, 14, 4
"""Pixels of the side of a token and of a patch, and patches of a token."""
CHANNELS = 3
QWEN_3B = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
    "temporal_patch_size": 2,
}
"""The tower of Qwen2.5-VL-3B."""
QWEN_3B_QUARTER = QWEN_3B | {"depth": 8, "fullatt_block_indexes": [7]}
SMALL = QWEN_3B | {
    "depth": 4,
    "hidden_size": 512,
    "num_heads": 8,
    "intermediate_size": 1368,
    "fullatt_block_indexes": [3],
}
INTERN_VIT_300M = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": [448, 448],
    "patch_size": [PATCH, PATCH],
    "attention_bias": True,
}
"""The tower of InternVL3 up to 14B."""


def windowed_flops(tower: dict, output_size: int, rows: int, columns: int) -> int:
    """FLOPs of a tower of Qwen2.5-VL for a picture of `rows` x `columns` tokens.

    A multiplication and its addition count as two. The count has the linear layers and the two products of attention,
    in which a patch sees the patches of its window, or all patches in the blocks with full attention.
    """
    hidden, inner, depth = tower["hidden_size"], tower["intermediate_size"], tower["depth"]
    tokens, side, full = rows * columns, tower["window_size"] // TOKEN_SIDE, len(tower["fullatt_block_indexes"])
    heights = [min(side, rows - row) for row in range(0, rows, side)]
    widths = [min(side, columns - column) for column in range(0, columns, side)]
    windows = sum((UNIT * height * width) ** 2 for height in heights for width in widths)
    pairs = full * (UNIT * tokens) ** 2 + (depth - full) * windows
    embedding = CHANNELS * tower["temporal_patch_size"] * PATCH**2 * hidden
    blocks = depth * (4 * hidden**2 + 3 * hidden * inner)
    merger = (UNIT * hidden) ** 2 + UNIT * hidden * output_size
    return 2 * (UNIT * tokens * (embedding + blocks) + tokens * merger + 2 * pairs * hidden)


def tiled_flops(tower: dict, output_size: int, tiles: int) -> int:
    """FLOPs of InternViT and its projector for a picture of `tiles` tiles, counted as `windowed_flops` counts.

    A tile has a class token beside its patches, and each of its rows sees all of them.
    """
    hidden, inner = tower["hidden_size"], tower["intermediate_size"]
    patches = (tower["image_size"][0] // PATCH) ** 2
    embedding = patches * CHANNELS * PATCH**2 * hidden
    block = (patches + 1) * (4 * hidden**2 + 2 * hidden * inner) + 2 * (patches + 1) ** 2 * hidden
    projector = patches // UNIT * (UNIT * hidden * output_size + output_size**2)
    return 2 * tiles * (embedding + tower["num_hidden_layers"] * block + projector)
