"""The experts that tokens take in a mixture-of-experts model: returned, given back, and in the form of trainers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument

_AXES = 3


@dataclass(frozen=True)
class Routing:
    """The experts of consecutive tokens. Replies have it, and requests take it as it came."""

    first_token: int
    """Index of the first of the tokens in the sequence of prompt and completion."""
    experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    """`[tokens, layers, top_k]`, that with the largest weight first. The layers are `RoutingInfo.layers`: those with
    experts. uint8 for a model with up to 256 experts in a layer, else uint16."""

    @property
    def hash(self) -> str:
        """SHA-256 of the index of the first token, the shape, and the experts, in hexadecimal."""
        digest = hashlib.sha256()
        for size in (self.first_token, *self.experts.shape):
            digest.update(size.to_bytes(4, "little"))
        digest.update(self.experts.astype(self.experts.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def routed_experts(self, layers: Sequence[int], num_hidden_layers: int) -> npt.NDArray[Any]:
        """The experts in the form of vLLM's `routed_experts`, which trainers take: a row for every layer.

        Args:
            layers: `RoutingInfo.layers`.
            num_hidden_layers: of the model, with the layers that have no experts.

        Returns:
            `[tokens, num_hidden_layers, top_k]`, in the type of `experts`, with zeros in layers without experts.

        Raises:
            InvalidArgument: the layers are not those of `experts`, or not of such a model.
        """
        tokens, count, top_k = self.experts.shape
        if len(layers) != count:
            raise InvalidArgument(f"layers: {len(layers)} for experts of {count} layers; give RoutingInfo.layers")
        if max(layers, default=0) >= num_hidden_layers:
            raise InvalidArgument(
                f"num_hidden_layers: {num_hidden_layers}, but layer {max(layers)} has experts; give the model's"
            )
        all_layers = np.zeros((tokens, num_hidden_layers, top_k), self.experts.dtype)
        all_layers[:, list(layers)] = self.experts
        return all_layers


@dataclass(frozen=True)
class RoutingInfo:
    """The experts of a model."""

    layers: list[int]
    """Indices of the layers with experts."""
    top_k: int
    """Experts that a token takes in each of them."""
    experts: int
    """Experts of each of them."""
    returned: bool
    """Whether requests may ask for the experts that tokens took (`--return-routing`)."""


def join_routing(*parts: Routing) -> Routing:
    """The routing of tokens whose parts follow one another, such as those of a prompt and its completion.

    Parts without tokens are left out.

    Raises:
        InvalidArgument: there are no parts, one does not begin where the part before ends, or their shapes differ.
    """
    if not parts:
        raise InvalidArgument("parts: none; give at least one Routing")
    parts = tuple(part for part in parts if len(part.experts)) or parts[:1]
    end = parts[0].first_token
    for i, part in enumerate(parts):
        if part.first_token != end:
            raise InvalidArgument(f"parts[{i}].first_token: {part.first_token}, but the part before ends at {end}")
        if part.experts.shape[1:] != parts[0].experts.shape[1:]:
            raise InvalidArgument(
                f"parts[{i}].experts: [layers, top_k] are {list(part.experts.shape[1:])}, but "
                f"{list(parts[0].experts.shape[1:])} in the first part"
            )
        end += len(part.experts)
    return Routing(parts[0].first_token, np.concatenate([part.experts for part in parts]))


def check_routing(given: Any, path: str) -> Routing:
    """Returns a `Routing` that can be sent; raises `InvalidArgument`, starting with `path`, for anything else."""
    if not isinstance(given, Routing):
        raise InvalidArgument(f"{path}: expected a Routing, such as Sample.routing, got {type(given).__name__}")
    experts = np.asarray(given.experts)
    if experts.dtype not in (np.uint8, np.uint16) or experts.ndim != _AXES:
        raise InvalidArgument(
            f"{path}.experts: expected [tokens, layers, top_k] of uint8, or of uint16 for a model with more than 256 "
            f"experts in a layer, got {experts.dtype} of shape {list(experts.shape)}"
        )
    return Routing(given.first_token, experts)
