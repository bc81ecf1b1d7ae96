"""The models of `images.py`, written with random weights, and what transformers needs to run their towers.

Tokenizers, preprocessors, random weights and pictures are those of the fixtures.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import QWEN, TOKENIZER
from safetensors.torch import load_file, save_file
from towers import INTERN_VIT_300M, QWEN_3B, QWEN_3B_QUARTER, SMALL, TOKEN_SIDE, tiled_flops, windowed_flops

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/fixtures"))

import make_internvl_fixtures as tiled
import make_vision_fixtures as windowed

GRID = (32, 40)
"""Rows and columns of the tokens of a picture of 1,120 x 896 pixels."""
TILES = 5
TOKENS = 1280
"""Tokens of a picture of either model."""
LAST_LAYER = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
"""What InternVL's configuration says of its features."""
TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
}
"""A decoder that takes next to no time."""


@dataclass(frozen=True)
class Tower:
    """One of the towers that transformers has too."""

    title: str
    model: str
    flops: int
    """Of a picture of `TOKENS` tokens."""
    picture: Callable[[torch.Generator], torch.Tensor]
    """Random pixels, of which each picture has others."""
    placeholder: int
    logprobs: Callable[..., torch.Tensor]
    """Those of a model of transformers, of tokens with pictures."""
    inputs: Callable[[torch.Tensor], dict[str, Any]]
    """The arguments of transformers' `get_image_features` for a picture."""


TOWERS = [
    Tower(
        "Qwen2.5-VL-3B's",
        "qwen-3b-tower",
        windowed_flops(QWEN_3B, TINY["hidden_size"], *GRID),
        partial(windowed.picture, GRID),
        windowed.IMAGE,
        windowed.logprobs,
        lambda rgb: dict(zip(("pixel_values", "image_grid_thw"), windowed.pixel_values(rgb), strict=True)),
    ),
    Tower(
        "InternVL3's, with projector",
        "intern-vit",
        tiled_flops(INTERN_VIT_300M, TINY["hidden_size"], TILES),
        partial(tiled.picture, TILES, INTERN_VIT_300M["image_size"][0]),
        tiled.CONTEXT,
        tiled.logprobs,
        lambda rgb: {"pixel_values": tiled.pixel_values(rgb)} | LAST_LAYER,
    ),
]


def save_random(model_class: Any, config: Any, randomize: Callable[[Any, int], None], directory: Path) -> None:
    """Writes a model of this configuration in bfloat16, the same each time, without transformers' initial weights."""
    with torch.device("meta"):
        model = model_class(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    randomize(model, 0)
    model.save_pretrained(directory)


def write_qwen_vl(directory: Path, decoder: dict, tower: dict) -> None:
    """Writes a Qwen2.5-VL whose decoder has untied embeddings unless it says otherwise."""
    width = decoder["hidden_size"] // decoder["num_attention_heads"] // 2
    # In the proportions of the real models.
    sections = [width - 2 * (3 * width // 8), 3 * width // 8, 3 * width // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = transformers.Qwen2_5_VLConfig(
        text_config=windowed.TEXT | decoder | {"rope_parameters": rope},
        vision_config=windowed.TOWER | tower | {"out_hidden_size": decoder["hidden_size"]},
        image_token_id=windowed.IMAGE,
        video_token_id=windowed.VIDEO,
        vision_start_token_id=windowed.VISION_START,
        vision_end_token_id=windowed.VISION_END,
        tie_word_embeddings=decoder.get("tie_word_embeddings", False),
    )
    save_random(transformers.Qwen2_5_VLForConditionalGeneration, config, windowed.randomize, directory)
    pixels = {"min_pixels": 4 * TOKEN_SIDE**2, "max_pixels": 1280 * TOKEN_SIDE**2}
    transformers.Qwen2VLImageProcessor(**pixels).save_pretrained(directory)
    windowed.write_tokenizer(directory)


def write_intern_vl(directory: Path, decoder: dict, tower: dict) -> None:
    """Writes an InternVL3 whose decoder is a Qwen2 with untied embeddings."""
    side = tower["image_size"][0]
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = transformers.InternVLConfig(
        text_config=tiled.TEXT | decoder | {"model_type": "qwen2", "rope_parameters": rope},
        vision_config=tower,
        image_token_id=tiled.CONTEXT,
        image_seq_length=(side // TOKEN_SIDE) ** 2,
        tie_word_embeddings=False,
    )
    save_random(transformers.InternVLForConditionalGeneration, config, tiled.randomize, directory)
    tiled.write_preprocessor(directory, side, is_own=False)
    tiled.write_tokenizer(directory, is_own=False)


def write_decoder(directory: Path, model: Path) -> None:
    """Writes the decoder of a Qwen2.5-VL of the shape of `QWEN` as a Qwen2, with the same weights."""
    directory.mkdir()
    weights = {name: x for name, x in load_file(model / "model.safetensors").items() if not is_of_tower(name)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    ends = json.loads((model / "config.json").read_text())["text_config"]
    config = QWEN | {name: token for name, token in ends.items() if name.endswith("_token_id")}
    (directory / "config.json").write_text(json.dumps(config))
    for name in (TOKENIZER.name, "tokenizer_config.json"):
        shutil.copy(model / name, directory)


def is_of_tower(name: str) -> bool:
    """Whether a parameter of a Qwen2.5-VL is one of its vision tower."""
    return "visual." in name


SIZES = {name: QWEN[name] for name in [*TINY, "vocab_size", "tie_word_embeddings"]}
WRITERS: dict[str, Callable[[Path], None]] = {
    "qwen-3b-tower": partial(write_qwen_vl, decoder=TINY, tower=QWEN_3B),
    "intern-vit": partial(write_intern_vl, decoder=TINY, tower=INTERN_VIT_300M),
    "small-tower": partial(write_qwen_vl, decoder=TINY, tower=SMALL),
    "vision-language": partial(write_qwen_vl, decoder=SIZES, tower=QWEN_3B_QUARTER),
}
"""How the models are written, by name."""


class Models:
    """The models in a directory, each written when it is first needed."""

    def __init__(self, directory: Path) -> None:
        """Writes nothing yet."""
        self.directory = directory

    def __getitem__(self, name: str) -> Path:
        """The directory of a model of `WRITERS`."""
        return self.made(name, WRITERS[name])

    @property
    def decoder(self) -> Path:
        """The decoder of "vision-language", alone."""
        return self.made("decoder", partial(write_decoder, model=self["vision-language"]))

    def made(self, name: str, write: Callable[[Path], None]) -> Path:
        """The directory of this name, written by `write` if it is not there."""
        directory = self.directory / name
        if not directory.exists():
            print(f"writing {name} …", file=sys.stderr)
            write(directory)
        return directory
