"""Converts images of prompts between `images` and the messages of `rollout.v1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _proto
from ._fields import of_each
from .errors import InvalidArgument
from .images import ImageInfo, Pixels, PromptImage


def set_images(fields: Sequence[Any], given: Sequence[Any]) -> None:
    """Sets the images of each prompt or sequence; raises `InvalidArgument`, starting with the path of a wrong one."""
    for i, (field, images) in enumerate(zip(fields, of_each(given, len(fields), "images"), strict=True)):
        for j, image in enumerate(images or ()):
            if isinstance(image, (bytes, bytearray)):
                field.add().encoded = bytes(image)
                continue
            if isinstance(image, str):
                field.add().hash = _digest(image, f"images[{i}][{j}]")
                continue
            pixels = Pixels.of(image, f"images[{i}][{j}]")
            field.add().pixels.MergeFrom(_proto.Pixels(**vars(pixels)))


def _digest(hash_: str, path: str) -> bytes:
    try:
        return bytes.fromhex(hash_)
    except ValueError:
        raise InvalidArgument(f"{path}: {hash_!r} is not a hash in hexadecimal, as `PromptImage.hash` is") from None


def image_info(info: Any) -> ImageInfo:
    """The part of a `GetInfoResponse` about images."""
    names = ("most_per_prompt", "most_tokens", "token_side", "placeholder", "tile_side")
    numbers = {name: getattr(info, name) for name in names}
    return ImageInfo(**numbers, forbidden_token_ids=list(info.forbidden_token_ids))


def prompt_image(image: Any) -> PromptImage:
    """An image of a reply."""
    return PromptImage(image.hash.hex(), image.width, image.height, image.first_token, image.tokens, image.tiles)
