"""Receipts, written as JSON and read back without losing a bit."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import InvalidArgument
from ..images import PromptImage
from ..types import FinishReason, SamplingParams

FORMAT = "rollout-receipt/2"
# Receipts before images, which are read too.
_FORMAT_1 = "rollout-receipt/1"
_SEED_LIMIT = 1 << 64


@dataclass(frozen=True)
class SpanReceipt:
    """The weights that sampled tokens `[start, end)`."""

    weight_version: int
    start: int
    end: int
    weights: str | None
    """Digest of the policy's weights, from `weights_digest`; None if digests are off, or the weights were gone when the
    receipt was written."""


@dataclass(frozen=True)
class Receipt:
    """Everything that determined one sample, and the sample."""

    server: Mapping[str, Any]
    """The server's version, model, architecture, parameters, dtype, device, kernel and ranks."""
    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """With the sample's own seed: a request with these and `n=1` returns the sample again."""
    adapter: str | None
    """Name of the resident adapter."""
    adapter_generation: int | None
    spans: list[SpanReceipt]
    """They cover `[0, T)`."""
    token_ids: list[int]
    """`[T]`."""
    logprobs: npt.NDArray[np.float32]
    """`[T]`."""
    raw_logprobs: npt.NDArray[np.float32]
    """`[T]`."""
    finish_reason: FinishReason
    images: list[PromptImage] = field(default_factory=list)
    """The prompt's images, in order: their digests, sizes and places in `prompt_token_ids`."""
    routing: str | None = None
    """Digest of the experts that the tokens took, `Routing.hash` of prompt and sample together; None unless
    `return_routing` was requested."""
    note: Any = None
    """The recorder's note: any JSON value, such as a step or a reward."""
    line: int = field(default=0, compare=False)
    """Line number in its file, from 1 on; 0 if it was not read from a file."""

    def to_json(self) -> str:
        """One line, without the line end. Log-probabilities read back as the same float32."""
        content = {
            "format": FORMAT,
            "server": dict(self.server),
            "prompt_index": self.prompt_index,
            "sample_index": self.sample_index,
            "adapter": self.adapter,
            "adapter_generation": self.adapter_generation,
            "spans": [vars(span) for span in self.spans],
            "sampling": _sampling_to_json(self.sampling),
            "finish_reason": self.finish_reason.value,
            "prompt_token_ids": self.prompt_token_ids,
            "images": [vars(image) for image in self.images],
            "token_ids": self.token_ids,
            "logprobs": _floats_to_json(self.logprobs),
            "raw_logprobs": _floats_to_json(self.raw_logprobs),
            "routing": self.routing,
            "note": self.note,
        }
        try:
            read = json.loads(json.dumps(content, allow_nan=False))
            return json.dumps(read | {"digest": _digest(read)})
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"note: {error}") from None
        except RecursionError:
            raise InvalidArgument("note: nested too deeply for JSON; flatten it") from None


def parse_receipt(line: str, number: int = 0) -> Receipt:
    """Parses one line.

    Args:
        line: a line that `Receipt.to_json` has written.
        number: the line's number, for `Receipt.line`.

    Raises:
        InvalidArgument: the line is not a receipt, or was changed after it was written.
    """
    try:
        return _parsed(line, number)
    except RecursionError:
        raise InvalidArgument("not a receipt: its JSON is nested too deeply") from None


def _parsed(line: str, number: int) -> Receipt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") not in (FORMAT, _FORMAT_1):
        raise InvalidArgument(f"not a receipt: expected an object with format {FORMAT!r} or {_FORMAT_1!r}")
    if content.pop("digest", None) != _digest(content):
        raise InvalidArgument("changed after it was written: the digest does not match the content")
    try:
        return _receipt(content, number)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"not a receipt: {type(error).__name__}: {error}") from None


def read_receipts(path: str | os.PathLike[str]) -> Iterator[Receipt]:
    """The receipts of a file, in order.

    Raises:
        InvalidArgument: a line is not a receipt; the message has the file's name and the line's number.
    """
    for number, line in _lines(path):
        try:
            yield parse_receipt(line, number)
        except InvalidArgument as error:
            raise InvalidArgument(f"{os.fspath(path)}, line {number}: {error}") from None


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _receipt(content: dict[str, Any], number: int) -> Receipt:
    receipt = Receipt(
        server=_of(dict, content["server"]),
        prompt_index=_of(int, content["prompt_index"]),
        sample_index=_of(int, content["sample_index"]),
        adapter=content["adapter"],
        adapter_generation=content["adapter_generation"],
        spans=[SpanReceipt(**span) for span in content["spans"]],
        sampling=_sampling_from_json(content["sampling"]),
        finish_reason=FinishReason(content["finish_reason"]),
        prompt_token_ids=[_of(int, token) for token in content["prompt_token_ids"]],
        images=[_image(image) for image in ([] if content["format"] == _FORMAT_1 else content["images"])],
        token_ids=[_of(int, token) for token in content["token_ids"]],
        logprobs=_floats_from_json(content["logprobs"]),
        raw_logprobs=_floats_from_json(content["raw_logprobs"]),
        routing=content.get("routing"),
        note=content["note"],
        line=number,
    )
    count = len(receipt.token_ids)
    if len(receipt.logprobs) != count or len(receipt.raw_logprobs) != count:
        raise ValueError(
            f"{count} tokens with {len(receipt.logprobs)} and {len(receipt.raw_logprobs)} log-probabilities"
        )
    ends = [0, *(span.end for span in receipt.spans)]
    if [span.start for span in receipt.spans] != ends[:-1] or ends[-1] != count:
        raise ValueError(f"spans that do not cover the {count} tokens")
    return receipt


def _image(content: dict[str, Any]) -> PromptImage:
    image = PromptImage(**content)
    if re.fullmatch("[0-9a-f]{64}", image.hash) is None:
        raise ValueError(f"image {image.hash!r}")
    for size in (image.width, image.height, image.first_token, image.tokens):
        _of(int, size)
    return image


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _floats_to_json(values: npt.NDArray[np.float32]) -> list[float | str]:
    """Python writes doubles, and so float32, without loss. NaN and infinities, which JSON lacks, become strings."""
    return [value if math.isfinite(value) else str(value) for value in values.tolist()]


def _floats_from_json(values: list[float | str]) -> npt.NDArray[np.float32]:
    return np.array([float(value) for value in values], np.float32)


def _sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    values = {entry.name: getattr(sampling, entry.name) for entry in fields(SamplingParams)}
    values["logit_bias"] = {str(token): float(bias) for token, bias in sampling.logit_bias.items()}
    for name in ("allowed_token_ids", "stop_token_ids"):
        if values[name] is not None:
            values[name] = [int(token) for token in values[name]]
    values["stop"] = list(sampling.stop)
    values["bad_words"] = list(sampling.bad_words)
    return {name: _plain(value) for name, value in values.items()}


def _sampling_from_json(content: dict[str, Any]) -> SamplingParams:
    sampling = SamplingParams(**content)
    if not 0 <= _of(int, sampling.seed) < _SEED_LIMIT:
        raise ValueError(f"seed {sampling.seed}")
    return replace(sampling, logit_bias={int(token): bias for token, bias in sampling.logit_bias.items()})


def _plain(value: Any) -> Any:
    """Converts a numpy scalar to Python's; returns other values unchanged."""
    item: Callable[[], Any] | None = getattr(value, "item", None)
    return value if item is None else item()
