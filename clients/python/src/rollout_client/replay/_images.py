"""The images of recorded prompts, kept as PNG files that are named by their digests."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import InvalidArgument
from ..images import ImageInput, Pixels, PromptImage
from ..types import PromptOutput

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = 3
# Bytes of a chunk before its data (their length, its kind) and after them (a checksum).
_CHUNK_BEGIN, _CHUNK_END = 8, 4
_FAST = 1  # zlib's level: a higher one takes several times as long, and gains little on rows without a filter


class ImageDirectory:
    """A directory of PNG files, one for each digest. Threads and processes may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Does not touch the directory."""
        self._path = Path(path)

    def keep(self, outputs: Sequence[PromptOutput], images: Sequence[Sequence[ImageInput] | None]) -> None:
        """Writes the images of the outputs of one call, `images` of which are given.

        Raises:
            InvalidArgument: an image is missing, is a file, or is not the one that the model saw.
        """
        given = exact_images(images)
        self._path.mkdir(parents=True, exist_ok=True)
        for output in outputs:
            index = output.prompt_index
            pixels = given[index] if index < len(given) else []
            if len(pixels) < len(output.images):
                raise InvalidArgument(
                    f"images[{index}]: {len(pixels)} images, but the prompt has {len(output.images)}; pass the call's "
                    "images, which this recorder keeps"
                )
            for j, image in enumerate(output.images):
                if pixels[j].hash != image.hash:
                    raise InvalidArgument(
                        f"images[{index}][{j}]: its digest is {pixels[j].hash}, but the model saw {image.hash}; pass "
                        "the call's images"
                    )
                self._write(image, pixels[j])

    def read(self, image: PromptImage) -> Pixels:
        """The pixels of an image.

        Raises:
            InvalidArgument: its file is missing, or has other pixels.
        """
        path = self._file(image)
        try:
            file = path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"images: {path}: {error.strerror}; expected the image {image.hash}") from None
        pixels = _decoded(file, image)
        if pixels is None or pixels.hash != image.hash:
            raise InvalidArgument(
                f"images: {path} was changed after it was written: its pixels are not those of the image {image.hash}; "
                "restore the file"
            )
        return pixels

    def _file(self, image: PromptImage) -> Path:
        return self._path / f"{image.hash}.png"

    def _write(self, image: PromptImage, pixels: Pixels) -> None:
        path = self._file(image)
        if path.exists():
            return
        # A process that is killed, or another writer of the same image, leaves no part of a file under its name.
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        part.write_bytes(_encoded(pixels))
        part.replace(path)


def exact_images(images: Sequence[Sequence[ImageInput] | None]) -> list[list[Pixels]]:
    """The pixels of the images of each prompt.

    Raises:
        InvalidArgument: an image is a file, whose pixels only the server knows, or has a wrong shape or type.
    """
    return [
        [_exact(image, f"images[{i}][{j}]") for j, image in enumerate(of_prompt or ())]
        for i, of_prompt in enumerate(images)
    ]


def _exact(image: ImageInput, path: str) -> Pixels:
    if isinstance(image, (bytes, bytearray)):
        raise InvalidArgument(
            f"{path}: a file, whose pixels only the server knows; send pixels (processed_pixels makes them), or leave "
            "the recorder's images= out"
        )
    return Pixels.of(image, path)


def _encoded(pixels: Pixels) -> bytes:
    """A PNG file of 8-bit RGB whose rows have no filter, so that reading it needs no library of images.

    Tiles are one below the other.
    """
    height = pixels.tiles * pixels.height
    rows = np.zeros((height, 1 + pixels.width * _CHANNELS), np.uint8)
    rows[:, 1:] = np.frombuffer(pixels.rgb, np.uint8).reshape(height, -1)
    data = _chunk(b"IDAT", zlib.compress(rows.tobytes(), _FAST))
    return _head(pixels.width, height) + data + _chunk(b"IEND", b"")


def _decoded(file: bytes, image: PromptImage) -> Pixels | None:
    """The pixels of a file of `_encoded` that has the image's size; None if it is not such a file."""
    height = image.tiles * image.height
    head, end = _head(image.width, height), _chunk(b"IEND", b"")
    compressed = file[len(head) + _CHUNK_BEGIN : -len(end) - _CHUNK_END]
    if file != head + _chunk(b"IDAT", compressed) + end:
        return None
    size = height * (1 + image.width * _CHANNELS)
    try:
        rows = zlib.decompressobj().decompress(compressed, size + 1)
    except zlib.error:
        return None
    if len(rows) != size:
        return None
    array = np.frombuffer(rows, np.uint8).reshape(height, -1)
    return None if array[:, 0].any() else Pixels(image.width, image.height, array[:, 1:].tobytes(), image.tiles)


def _head(width: int, height: int) -> bytes:
    """The signature, and a header that says 8-bit RGB."""
    sizes = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return _SIGNATURE + _chunk(b"IHDR", sizes + bytes((8, 2, 0, 0, 0)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
