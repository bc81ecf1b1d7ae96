"""Pushes in ms-swift's form: buckets of tensors, then a call that ends them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from .._served_names import served_parameters
from .._session import Push
from .._tensors import ITEM_SIZES, checksum_of
from ..client import RolloutClient
from ..errors import FailedPrecondition
from ..types import DtypeName

_Item = TypeVar("_Item")
_T = TypeVar("_T")

PUSH_BASE = "ROLLOUT_PUSH_BASE"


def pushes_base() -> bool:
    """Whether the base of an adapter is pushed, instead of being compared with the server's."""
    return os.environ.get(PUSH_BASE, "") not in ("", "0", "false")


def unflattened(
    metadatas: Sequence[Any], flattened: Any
) -> Iterator[tuple[str, tuple[memoryview, str, tuple[int, ...]]]]:
    """The tensors of one of ms-swift's buckets: names, and bytes with dtype and shape.

    Args:
        metadatas: for each tensor `name`, `dtype` (as torch writes it), `shape`, and its bytes `[start_idx, end_idx)`.
        flattened: the bytes of all tensors, as a tensor of uint8.
    """
    if hasattr(flattened, "detach"):
        flattened = flattened.detach().cpu().contiguous().numpy()
    data = memoryview(flattened).cast("B")
    for entry in metadatas:
        dtype = str(entry.dtype).removeprefix("torch.")
        yield entry.name, (data[entry.start_idx : entry.end_idx], dtype, tuple(entry.shape))


def parameter_name(name: str) -> str:
    """The checkpoint's name for a parameter of a model with adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def adapter_tensors(named_tensors: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """Drops the base weights of adapted embeddings, which PEFT adds and the server has."""
    return {name: tensor for name, tensor in named_tensors if not name.endswith(".base_layer.weight")}


class FullPush:
    """A full push to all servers; each tensor is sent to all of them before the next is taken."""

    def __init__(self, clients: Sequence[RolloutClient], *, in_place: bool) -> None:
        """Begins the push. `in_place`: overwrite the old policy on a sleeping server that cannot hold both."""
        self._pushes: list[Push] = []
        try:
            for client in clients:
                self._pushes.append(client.begin_push("full", in_place=in_place))
        except BaseException:
            self.rollback()
            raise

    def write(self, name: str, tensor: Any) -> None:
        """Sends one tensor."""
        for push in self._pushes:
            push.write(name, tensor)

    def commit(self) -> None:
        """Commits on all servers; if one rejects the push, others may already have applied it."""
        try:
            in_all(lambda push: push.commit(), self._pushes)
        except BaseException:
            self.rollback()
            raise

    def rollback(self) -> None:
        """Rolls back the pushes that are not committed."""
        for push in self._pushes:
            with suppress(FailedPrecondition):
                push.rollback()


def in_all(use: Callable[[_Item], _T], items: Sequence[_Item]) -> list[_T]:
    """The results for all items, in threads if there are several; all calls end before an error is raised."""
    if len(items) == 1:
        return [use(items[0])]
    with ThreadPoolExecutor(len(items), thread_name_prefix="rollout-swift") as threads:
        return [result.result() for result in [threads.submit(use, item) for item in items]]


class BaseCheck:
    """Compares the base of an adapter with the servers' by SHA-256 of the serving parameters, instead of pushing it."""

    def __init__(self, clients: Sequence[RolloutClient]) -> None:
        """Removes adapters of earlier runs, and gets the checksums of each server."""
        self._served: list[tuple[str, DtypeName, dict[str, str]]] = []
        for client in clients:
            client.push_lora(None)
            self._served.append((client.address, client.parameters()[0].dtype, client.checksum()))
        self._differing: dict[str, list[str]] = {}
        self._unknown: list[str] = []
        self._compared = 0

    def write(self, name: str, tensor: Any) -> None:
        """Compares one tensor. Skips those of quantised layers, which no server could serve unchanged."""
        own = tensor[1] if isinstance(tensor, tuple) else str(tensor.dtype).removeprefix("torch.")
        if own in ITEM_SIZES:
            for served_name, part in served_parameters(name, tensor):
                self._compare(served_name, part, own)

    def _compare(self, name: str, tensor: Any, own: str) -> None:
        if not any(name in served for _, _, served in self._served):
            self._unknown.append(name)
            return
        self._compared += 1
        checksums = {dtype: checksum_of(tensor, dtype) for dtype in {dtype for _, dtype, _ in self._served}}
        for address, dtype, served in self._served:
            if served.get(name) != checksums[dtype]:
                self._differing.setdefault(address, []).append(f"{name} ({own} here, {dtype} there)")

    def commit(self) -> None:
        """Checks that all compared tensors were equal.

        Raises:
            FailedPrecondition: some differ, or none could be compared.
        """
        if self._unknown and not self._compared:
            raise FailedPrecondition(
                f"the servers know none of the trainer's {len(self._unknown)} parameters by name, first "
                f"{self._unknown[0]}: start them with the --model that is trained"
            )
        for address, names in self._differing.items():
            raise FailedPrecondition(
                f"{address}: the server's base differs from the trainer's: {len(names)} parameters differ, first "
                f"{names[0]}. Start the server with the --model that is trained and the trainer's --dtype or a coarser "
                f"one, or set {PUSH_BASE}=1 to push the trainer's base"
            )

    def rollback(self) -> None:
        """Does nothing: nothing was sent."""
