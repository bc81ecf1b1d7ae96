"""Converts the further values of tokens between `returns` and the messages of `rollout.v1`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._fields import extend, set_field
from .errors import Internal, InvalidArgument
from .returns import PolicyScore, Returned, Returns

_DISTRIBUTIONS = {"raw": 1, "processed": 2}
_DTYPES = {"float32": False, "bfloat16": True}


def distribution(name: Any, path: str) -> int:
    """The `Distribution` with this name."""
    if name not in _DISTRIBUTIONS:
        raise InvalidArgument(f"{path}: {name!r} is neither 'raw' nor 'processed'")
    return _DISTRIBUTIONS[name]


def set_returns(field: Any, given: Any) -> None:
    """Sets the field `returns` of a request; raises `InvalidArgument` with the path of a wrong value."""
    if not isinstance(given, Returns):
        raise InvalidArgument(f"returns: expected Returns, such as Returns(entropy=True), got {type(given).__name__}")
    for name in ("entropy", "support", "top"):
        set_field(field, name, getattr(given, name), f"returns.{name}")
    if given.max_support_ids is not None:
        set_field(field, "max_support_ids", given.max_support_ids, "returns.max_support_ids")
    field.top_of = distribution(given.top_of, "returns.top_of")
    if given.top_dtype not in _DTYPES:
        raise InvalidArgument(f"returns.top_dtype: {given.top_dtype!r} is neither 'float32' nor 'bfloat16'")
    field.top_as_bfloat16 = _DTYPES[given.top_dtype]
    if isinstance(given.references, str):
        raise InvalidArgument(f"returns.references: expected a list of names, got {given.references!r}")
    extend(field.references, [name or "" for name in given.references], "returns.references")
    set_field(field, "current", given.current, "returns.current")
    set_field(field, "base", given.base, "returns.base")
    set_field(field, "divergences", given.divergences, "returns.divergences")


def policy_score(message: Any) -> PolicyScore:
    """The values of a `PolicyScore`."""
    return policy_score_of_parts([message])


def policy_score_of_parts(parts: Sequence[Any]) -> PolicyScore:
    """The values of consecutive messages of one `PolicyScore`, joined."""
    return PolicyScore(
        weight_version=parts[0].weight_version,
        raw_logprobs=np.concatenate([np.array(part.raw_logprobs, np.float32) for part in parts]),
        logprobs=np.concatenate([np.array(part.logprobs, np.float32) for part in parts]),
        kl=_numbers(parts, "kl", np.float32),
        reverse_kl=_numbers(parts, "reverse_kl", np.float32),
    )


def returned(message: Any, tokens: int) -> Returned | None:
    """The field `returned` of a message of so many tokens; None if it is not set."""
    return returned_of_parts([message], [tokens])


def returned_of_parts(messages: Sequence[Any], tokens: Sequence[int]) -> Returned | None:
    """The fields `returned` of consecutive messages, of so many tokens each, joined; None if they are not set."""
    if not messages or not messages[0].HasField("returned"):
        return None
    parts = [message.returned for message in messages]
    sizes = _numbers(parts, "support_sizes", np.uint32)
    top_ids = _joined(parts, lambda part: np.frombuffer(part.top_ids, "<u4"))
    total = sum(tokens)
    if total and top_ids is not None and len(top_ids) % total:
        raise Internal(f"the server sent {len(top_ids)} most likely tokens for {total} tokens")
    logprobs = _joined(parts, _logprobs)
    width = 0 if top_ids is None else len(top_ids) // max(total, 1)
    return Returned(
        raw_entropies=_numbers(parts, "raw_entropies", np.float32),
        entropies=_numbers(parts, "entropies", np.float32),
        support_sizes=sizes,
        support_log_masses=_numbers(parts, "support_log_masses", np.float32),
        support_ids=None if sizes is None else _supports(parts),
        top_ids=None if top_ids is None else top_ids.reshape(total, width),
        top_logprobs=None if logprobs is None else logprobs.reshape(total, width),
    )


def _numbers(parts: Sequence[Any], name: str, dtype: type) -> npt.NDArray[Any] | None:
    return _joined(parts, lambda part: np.array(getattr(part, name), dtype))


def _joined(parts: Sequence[Any], array: Callable[[Any], npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """The arrays of all parts; None if they are empty."""
    joined = np.concatenate([array(part) for part in parts])
    return joined if len(joined) else None


def _logprobs(part: Any) -> npt.NDArray[np.float32]:
    """Log-probabilities in float32; those in bfloat16 are the upper halves of such."""
    if len(part.top_logprobs) == len(part.top_ids):
        return np.frombuffer(part.top_logprobs, "<f4").astype(np.float32)
    halves = np.frombuffer(part.top_logprobs, "<u2").astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32)


def _supports(parts: Sequence[Any]) -> tuple[npt.NDArray[np.uint32], ...]:
    """The ids of each token's support."""
    supports: list[npt.NDArray[np.uint32]] = []
    for part in parts:
        sizes = np.array(part.support_sizes, np.int64)
        listed = np.where(sizes <= part.max_support_ids, sizes, 0)
        ids = np.frombuffer(part.support_ids, "<u4").astype(np.uint32)
        if len(ids) != listed.sum():
            raise Internal(f"the server sent {len(ids)} ids for supports of {listed.sum()} tokens")
        supports.extend(np.split(ids, np.cumsum(listed))[:-1])
    return tuple(supports)
