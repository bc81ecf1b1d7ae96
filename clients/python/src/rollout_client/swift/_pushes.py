"""Pushes as ms-swift makes them: buckets of tensors, then a word that they were all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from .._session import Push
from .._tensors import ITEM_SIZES, checksum_of
from ..client import RolloutClient
from ..errors import FailedPrecondition
from ..types import DtypeName

_Item = TypeVar("_Item")
_T = TypeVar("_T")

PUSH_BASE = "ROLLOUT_PUSH_BASE"


def pushes_base() -> bool:
    """Whether the base below an adapter is pushed, instead of being compared with the server's."""
    return os.environ.get(PUSH_BASE, "") not in ("", "0", "false")


def unflattened(
    metadatas: Sequence[Any], flattened: Any
) -> Iterator[tuple[str, tuple[memoryview, str, tuple[int, ...]]]]:
    """The tensors of a bucket of ms-swift: names, and bytes with type and shape.

    Args:
        metadatas: of each tensor: `name`, `dtype` (as torch writes it), `shape`, and its bytes `[start_idx, end_idx)`.
        flattened: the bytes of all of them, a tensor of uint8.
    """
    if hasattr(flattened, "detach"):
        flattened = flattened.detach().cpu().contiguous().numpy()
    data = memoryview(flattened).cast("B")
    for entry in metadatas:
        dtype = str(entry.dtype).removeprefix("torch.")
        yield entry.name, (data[entry.start_idx : entry.end_idx], dtype, tuple(entry.shape))


def parameter_name(name: str) -> str:
    """The checkpoint's name of a parameter as a model with adapters names it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def adapter_tensors(named_tensors: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """Without the weights of embeddings that adapters lie on, which PEFT adds and the server has."""
    return {name: tensor for name, tensor in named_tensors if not name.endswith(".base_layer.weight")}


class FullPush:
    """A push of all parameters to all servers at once; each tensor is sent to all before the next is taken."""

    def __init__(self, clients: Sequence[RolloutClient], *, in_place: bool) -> None:
        """Begins it. `in_place`: over the policy that is there, on a server that sleeps and cannot hold both."""
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
        """Makes what was written the policy; where one server refuses it, others may have it already."""
        try:
            in_all(lambda push: push.commit(), self._pushes)
        except BaseException:
            self.rollback()
            raise

    def rollback(self) -> None:
        """Drops what is not committed."""
        for push in self._pushes:
            with suppress(FailedPrecondition):
                push.rollback()


def in_all(use: Callable[[_Item], _T], items: Sequence[_Item]) -> list[_T]:
    """The results for all items, in threads if there are several; every one ends before an error is raised."""
    if len(items) == 1:
        return [use(items[0])]
    with ThreadPoolExecutor(len(items), thread_name_prefix="rollout-swift") as threads:
        return [result.result() for result in [threads.submit(use, item) for item in items]]


class BaseCheck:
    """Compares the base below an adapter with the servers' instead of pushing it, by SHA-256 of what would serve."""

    def __init__(self, clients: Sequence[RolloutClient]) -> None:
        """Takes adapters of earlier trainings out, and asks each server what it has."""
        self._served: list[tuple[str, DtypeName, dict[str, str]]] = []
        for client in clients:
            client.push_lora(None)
            self._served.append((client.address, client.parameters()[0].dtype, client.checksum()))
        self._differing: dict[str, list[str]] = {}
        self._unknown: list[str] = []
        self._compared = 0

    def write(self, name: str, tensor: Any) -> None:
        """Compares one tensor. Those that no server could serve as they are, of quantised layers, are left out."""
        own = tensor[1] if isinstance(tensor, tuple) else str(tensor.dtype).removeprefix("torch.")
        if own not in ITEM_SIZES:
            return
        if not any(name in served for _, _, served in self._served):
            self._unknown.append(name)
            return
        self._compared += 1
        checksums = {dtype: checksum_of(tensor, dtype) for dtype in {dtype for _, dtype, _ in self._served}}
        for address, dtype, served in self._served:
            if served.get(name) != checksums[dtype]:
                self._differing.setdefault(address, []).append(f"{name} ({own} here, {dtype} there)")

    def commit(self) -> None:
        """Says whether they are the same.

        Raises:
            FailedPrecondition: they are not, or nothing could be compared.
        """
        if self._unknown and not self._compared:
            raise FailedPrecondition(
                f"the servers know none of the trainer's {len(self._unknown)} parameters by name, first "
                f"{self._unknown[0]}: start them with the --model that is trained"
            )
        for address, names in self._differing.items():
            raise FailedPrecondition(
                f"{address}: the base there is not the trainer's: {len(names)} parameters differ, first {names[0]}. "
                "Start the server with the --model that is trained, and with --dtype as the trainer's or coarser; or "
                f"set {PUSH_BASE}=1 to push the trainer's base"
            )

    def rollback(self) -> None:
        """There is nothing to drop."""
