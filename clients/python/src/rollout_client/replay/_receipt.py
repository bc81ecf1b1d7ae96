"""Receipts, to JSON and back without losing a bit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import InvalidArgument
from ..types import FinishReason, SamplingParams

FORMAT = "rollout-receipt/1"
_SEED_LIMIT = 1 << 64


@dataclass(frozen=True)
class SpanReceipt:
    """Tokens `[start, end)` of a sample were made by these weights."""

    weight_version: int
    start: int
    end: int
    weights: str | None
    """Digest of the policy's weights, as `weights_digest` gives it; None if nobody asked, or they were gone when the
    receipt was made."""


@dataclass(frozen=True)
class Receipt:
    """All that made one sample, and the sample."""

    server: Mapping[str, Any]
    """What served: the server's version, model, architecture, parameters, dtype, device, kernel and ranks."""
    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """With the sample's own seed, so that a request with `n=1` and these gives the sample again."""
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
    note: Any = None
    """Whatever the recorder was given: a step, a reward. JSON."""
    line: int = field(default=0, compare=False)
    """Where it stands in its file, from 1 on; 0 if it was not read from one."""

    def to_json(self) -> str:
        """One line, without the line end. Log-probabilities are written so that they are read as the same float32."""
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
            "token_ids": self.token_ids,
            "logprobs": _floats_to_json(self.logprobs),
            "raw_logprobs": _floats_to_json(self.raw_logprobs),
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
    """The receipt of one line.

    Args:
        line: what `Receipt.to_json` has written.
        number: of the line, for `Receipt.line`.

    Raises:
        InvalidArgument: it is not that, or it has been changed since.
    """
    try:
        return _parsed(line, number)
    except RecursionError:
        raise InvalidArgument("no receipt: its JSON is nested too deeply") from None


def _parsed(line: str, number: int) -> Receipt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"no JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgument(f"no receipt: an object with format {FORMAT!r} is expected")
    if content.pop("digest", None) != _digest(content):
        raise InvalidArgument("changed since it was written: its digest is of other content")
    try:
        return _receipt(content, number)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"no receipt: {type(error).__name__}: {error}") from None


def read_receipts(path: str | os.PathLike[str]) -> Iterator[Receipt]:
    """The receipts of a file, in order.

    Raises:
        InvalidArgument: a line is none; the message has the file's name and the line's number.
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
        token_ids=[_of(int, token) for token in content["token_ids"]],
        logprobs=_floats_from_json(content["logprobs"]),
        raw_logprobs=_floats_from_json(content["raw_logprobs"]),
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


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _floats_to_json(values: npt.NDArray[np.float32]) -> list[float | str]:
    """Every float32 is a double, whose decimal digits Python writes without loss. JSON has no infinities and no NaN."""
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
    return {name: _plain(value) for name, value in values.items()}


def _sampling_from_json(content: dict[str, Any]) -> SamplingParams:
    sampling = SamplingParams(**content)
    if not 0 <= _of(int, sampling.seed) < _SEED_LIMIT:
        raise ValueError(f"seed {sampling.seed}")
    return replace(sampling, logit_bias={int(token): bias for token, bias in sampling.logit_bias.items()})


def _plain(value: Any) -> Any:
    """A scalar of numpy as one of Python; all else as it is."""
    item: Callable[[], Any] | None = getattr(value, "item", None)
    return value if item is None else item()
