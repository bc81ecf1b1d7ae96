"""Images of prompts: the pixels that the trainer's processor makes, sent exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument

_RGB = 3
_LARGEST = np.float32(255)
# Processors that divide by 255 before they normalise are off by a unit of float32.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Pixels:
    """8-bit RGB pixels that have their final size; the server normalises them as the trainer's processor does."""

    width: int
    height: int
    rgb: bytes
    """Three bytes a pixel, row by row."""
    tiles: int = 1
    """Tiles of this width and height that the image has one below the other (InternVL3)."""

    @property
    def hash(self) -> str:
        """The `PromptImage.hash` with which the server reports these pixels."""
        digest = hashlib.sha256()
        for size in (self.tiles, self.width, self.height):
            digest.update(size.to_bytes(4, "little"))
        digest.update(self.rgb)
        return digest.hexdigest()

    @staticmethod
    def of(image: Any, path: str = "image") -> Pixels:
        """The pixels of an array `[height, width, 3]` of uint8, such as a PIL image that has its final size, or those
        of tiles, `[tiles, height, width, 3]`.

        Raises:
            InvalidArgument: the array has another shape or type; the message starts with `path`.
        """
        if isinstance(image, Pixels):
            return image
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim not in (3, 4) or array.shape[-1] != _RGB:
            raise InvalidArgument(
                f"{path}: expected 8-bit RGB [height, width, 3], got {array.dtype} of shape {list(array.shape)}; "
                "processed_pixels takes images of other forms"
            )
        *tiles, height, width, _ = array.shape
        return Pixels(width, height, np.ascontiguousarray(array).tobytes(), *tiles)


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt, as the model saw it."""

    hash: str
    """SHA-256 of its tiles, size and pixels, in hexadecimal."""
    width: int
    height: int
    first_token: int
    """Index of its first token in the prompt."""
    tokens: int
    tiles: int
    """Tiles of this width and height, one below the other; 1 for a model without tiles."""


@dataclass(frozen=True)
class ImageInfo:
    """How a model takes images in prompts."""

    most_per_prompt: int
    most_tokens: int
    """Most tokens of an image."""
    token_side: int
    """Pixels of the side of a token: width and height of an image are multiples of it."""
    placeholder: int
    """The token that stands for one token of an image."""
    forbidden_token_ids: list[int]
    """Tokens that no sample has: placeholders of images and videos."""
    tile_side: int
    """Pixels of the side of a tile, if the model takes tiles; 0 if images have any width and height."""


ImageInput = Pixels | npt.NDArray[np.uint8] | bytes | str | Any
"""An image with its final size: `Pixels`, or an array of uint8, `[height, width, 3]`, such as a PIL image, or tiles,
`[tiles, height, width, 3]`. Bytes are a PNG or JPEG file, which the server decodes and resizes. A string is the hash of
an image that was sent to this server before, `PromptImage.hash`; `NotFound` is raised if the server no longer holds
it."""


def processed_pixels(images: Sequence[Any], processor: Any, **options: Any) -> list[Pixels]:
    """The pixels that a processor of transformers makes of images, before it normalises them.

    These are the pixels that a trainer scores with, exactly: they are computed back from the processor's `pixel_values`
    and checked by normalising them again.

    Args:
        images: images of any form that the processor takes.
        processor: the processor of a Qwen2.5-VL or InternVL3 model, or its image processor.
        options: options with which the trainer calls its image processor, such as `size`.

    Raises:
        InvalidArgument: `pixel_values` are not normalised 8-bit pixels, or not of a layout that is known here.
    """
    processor = getattr(processor, "image_processor", processor)
    if hasattr(processor, "crop_to_patches"):
        # Tiles are off in an image processor, and on in the processor that trainers call.
        options = {"crop_to_patches": True, **options}
        each = [processor(images=[image], return_tensors="np", **options) for image in images]
        mean, std = processor.image_mean, processor.image_std
        return [pixels_of_tiles(out["pixel_values"], mean, std) for out in each]
    out = processor(images=list(images), return_tensors="np", **options)
    if "image_grid_thw" not in out:
        raise InvalidArgument("processor: gives neither image_grid_thw nor tiles; use one of Qwen2.5-VL or InternVL3")
    values, first, pixels = np.asarray(out["pixel_values"], np.float32), 0, []
    for frames, rows, columns in np.asarray(out["image_grid_thw"]).tolist():
        count = frames * rows * columns
        pixels.append(_unpatched(values[first : first + count], rows, columns, processor))
        first += count
    return pixels


def pixels_of_tiles(tiles: Any, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """The pixels of an image whose tiles a processor has normalised.

    Args:
        tiles: `[tiles, 3, height, width]` in float32.
        mean, std: of each channel, of values from 0 to 1.

    Raises:
        InvalidArgument: the tiles are not 8-bit pixels that were normalised in this way.
    """
    return Pixels.of(_denormalised(np.asarray(tiles, np.float32).transpose(0, 2, 3, 1), mean, std))


def _unpatched(patches: npt.NDArray[np.float32], rows: int, columns: int, processor: Any) -> Pixels:
    """The pixels of patches `[rows * columns, 3 * frames * side * side]`, which are in blocks of merged ones."""
    side, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    shape = (rows // merge, columns // merge, merge, merge, _RGB, frames, side, side)
    if patches.size != np.prod(shape):
        raise InvalidArgument(f"processor: {patches.shape} patches for {rows} x {columns}; a video is not supported")
    blocks = patches.reshape(shape)
    if not all(np.array_equal(blocks[..., 0, :, :], blocks[..., frame, :, :]) for frame in range(1, frames)):
        raise InvalidArgument("processor: the frames of an image differ; a video is not supported")
    values = blocks[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, _RGB)
    return Pixels.of(_denormalised(values, processor.image_mean, processor.image_std))


def _denormalised(
    values: npt.NDArray[np.float32], mean: Sequence[float], std: Sequence[float]
) -> npt.NDArray[np.uint8]:
    """The 8-bit pixels `[..., 3]` that a processor has normalised."""
    shift, scale = (np.asarray(x, np.float32) * _LARGEST for x in (mean, std))
    rgb = np.rint(values * scale + shift)
    again = (rgb.astype(np.float32) - shift) / scale
    if rgb.min() < 0 or rgb.max() > _LARGEST or np.abs(again - values).max() > _TOLERANCE:
        raise InvalidArgument(
            "processor: pixel_values are not 8-bit pixels normalised by image_mean and image_std; "
            "use a processor that rescales by 1/255 and normalises"
        )
    return rgb.astype(np.uint8)
