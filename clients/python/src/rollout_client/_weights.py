"""The blocking client's way to new weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import _convert_weights, _proto
from ._delta import make_delta
from ._http2 import ClientStream
from ._lora import adapter_parts
from ._progress import Progress
from ._push import Outgoing, Plan, choose_shared_memory, push_buffer, push_header, push_inline, push_shared
from ._segment import SegmentPool, SharedBuffer
from ._tensors import ITEM_SIZES, Layout, bytes_of, layout_of
from .errors import FailedPrecondition, InvalidArgument
from .options import PushDeltaOptions, PushDirectoryOptions, PushFullOptions, PushLoraOptions, refuse_unknown
from .types import AdapterInfo, DtypeName, OpenUpdate, ParameterInfo, UpdateResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Arrays or tensors by name. Taken are arrays of numpy (float32, float16, and bfloat16 of ml_dtypes), tensors of torch,
and `(bytes, dtype, shape)`; what does not lie in this machine's memory in one piece is copied, the rest is not."""


class WeightSync:
    """Pushes of new weights: each is a transaction, applied whole between two steps or not at all.

    A push that fails raises and leaves the policy as it was: `DataLoss` for bytes that changed on the way,
    `InvalidArgument` naming a tensor that does not fit, `ResourceExhausted` where it finds no memory, `Aborted` while
    another is under way, if the version is not the expected one, after `cancel_update`, and when nothing of it was sent
    for the server's `--update-idle-seconds`. `DataLoss` also says that the server's checkpoint was changed in place.
    """

    address: str
    _segments: SegmentPool
    _timeout: float | None
    _call: Callable[..., Any]
    _start_update: Callable[[float | None], ClientStream]

    def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> UpdateResult:
        """Makes the base with this adapter merged the policy, or keeps the adapter beside the policy.

        The base is the checkpoint, or what was pushed in full since. Each merge starts from it, with the bits of PEFT's
        `merge_adapter()`, so that a thousand pushes leave no drift.

        Args:
            adapter: a PEFT model, whose active adapter is meant; or tensors by PEFT's names; None or an empty mapping
                is the base itself.
            config: with tensors: a `LoraConfig`, a dict or JSON text.
            options: by keyword, those that `rollout_client.PushLoraOptions` lists and describes.
        """
        refuse_unknown("push_lora", options, PushLoraOptions)
        tensors, adapter_config = adapter_parts(adapter, config)
        header = _convert_weights.update_header("lora", options, adapter_config=adapter_config)
        # Names and shapes are checked against the configuration, all at once.
        plan = Plan(header, _outgoing(tensors.items()), _total(tensors), upfront=True)
        return self._push("adapter", plan, options)

    def push_full(self, named_tensors: NamedTensors, **options: Unpack[PushFullOptions]) -> UpdateResult:
        """Makes these tensors the policy; all parameters must be there.

        Args:
            named_tensors: a state dict, or pairs gathered one by one: each is sent before the next is taken, so that
                an iterator need hold no more than one. Names as in the checkpoint, PEFT's prefixes, `qkv_proj` and
                `gate_up_proj` are understood.
            options: by keyword, those that `rollout_client.PushFullOptions` lists and describes.
        """
        refuse_unknown("push_full", options, PushFullOptions)
        header, total_bytes = _convert_weights.update_header("full", options), options.get("total_bytes")
        if isinstance(named_tensors, Mapping):
            pairs: Iterator[tuple[str, Any]] = iter(named_tensors.items())
            total = _total(named_tensors) if total_bytes is None else total_bytes
        else:
            pairs = iter(named_tensors)
            total, pairs = (total_bytes, pairs) if total_bytes is not None else self._estimated(pairs)
        plan = Plan(header, _outgoing(pairs), total, upfront=False)
        return self._push("weights", plan, options, options.get("buffer"))

    def push_delta(
        self,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        base_version: int,
        **options: Unpack[PushDeltaOptions],
    ) -> UpdateResult:
        """Sends what differs between two states, in the precision that serves, compressed.

        Args:
            old: tensors by name, as they were pushed: the server's now.
            new: as they shall be; the same names and shapes. Parameters that do not change may be left out of both.
            base_version: the policy's version that `old` is; the server raises `Aborted` if it has another.
            options: by keyword, those that `rollout_client.PushDeltaOptions` lists and describes.
        """
        refuse_unknown("push_delta", options, PushDeltaOptions)
        header = _convert_weights.update_header("delta", {**options, "expected_version": base_version})
        tensors = [
            Outgoing(delta.name, Layout(delta.dtype, delta.shape), memoryview(delta.payload), delta.changed)
            for delta in make_delta(old, new, self._serving_dtype())
        ]
        plan = Plan(header, tensors, sum(len(tensor.data) for tensor in tensors), upfront=True)
        return self._push("changes", plan, options)

    def push_directory(
        self, path: str | os.PathLike[str], kind: str = "lora", **options: Unpack[PushDirectoryOptions]
    ) -> UpdateResult:
        """Has the server read files below its `--weights-dir`.

        Args:
            path: a directory of the server's host, relative to `--weights-dir` or inside it.
            kind: `"lora"`: `adapter_config.json` and `adapter_model.safetensors`; `"full"`: `*.safetensors`.
            options: by keyword, those that `rollout_client.PushDirectoryOptions` lists and describes.
        """
        refuse_unknown("push_directory", options, PushDirectoryOptions)
        if kind not in ("lora", "full"):
            raise InvalidArgument(f"kind: expected 'lora' or 'full', got {kind!r}")
        header = _convert_weights.update_header(kind, options, directory=os.fspath(path))
        return _convert_weights.update_result(push_header(lambda: self._start_update(options.get("timeout")), header))

    def cancel_update(self, update_id: int | None = None) -> OpenUpdate | None:
        """Ends the push that is under way, whoever sends it: there `Aborted` is raised, and it never happened.

        Args:
            update_id: only the push of this number (`status().update.id`).

        Returns:
            What was ended; None if nothing was under way, or not that one.
        """
        response = self._call(_proto.CANCEL_UPDATE, _convert_weights.cancel_update_request(update_id))
        return _convert_weights.cancelled_update(response)

    def parameters(self) -> list[ParameterInfo]:
        """Every parameter that the server holds, in the model's order: what `push_full` must bring."""
        return _convert_weights.parameter_infos(self._call(_proto.LIST_PARAMETERS, _proto.LIST_PARAMETERS.request()))

    def checksum(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """SHA-256 of parameters as they serve now, in hexadecimal by name; `checksum_of` gives the trainer's.

        Args:
            names: of the parameters; None is all.
        """
        return _convert_weights.checksums(self._call(_proto.CHECKSUM, _convert_weights.checksum_request(names)))

    def adapters(self) -> list[AdapterInfo]:
        """The resident adapters."""
        return _convert_weights.adapter_infos(self._call(_proto.LIST_ADAPTERS, _proto.LIST_ADAPTERS.request()))

    def remove_adapter(self, name: str, expected_generation: int | None = None) -> int:
        """Takes a resident adapter out, waits for the requests that use it, and returns its generation.

        Args:
            name: of the adapter; new requests cannot use it at once.
            expected_generation: raise `Aborted` unless the name has this generation.
        """
        request = _convert_weights.remove_adapter_request(name, expected_generation)
        return self._call(_proto.REMOVE_ADAPTER, request).generation

    def _push(
        self, what: str, plan: Plan, options: PushDeltaOptions, buffer: SharedBuffer | None = None
    ) -> UpdateResult:
        """Sends a plan, of whatever kind, with the options that all pushes of tensors have."""
        transport, timeout = options.get("transport", "auto"), options.get("timeout")
        shared = choose_shared_memory(transport, self.address, plan.total)
        progress, start = Progress(what, plan.total, options.get("progress")), lambda: self._start_update(timeout)
        if buffer is not None and transport != "inline":
            response = push_buffer(start, plan, buffer, progress, fall_back=transport == "auto")
        elif shared:
            response = push_shared(start, plan, self._segments, progress, fall_back=transport == "auto")
        else:
            response = push_inline(start, plan, progress)
        progress.finish()
        return _convert_weights.update_result(response)

    def _estimated(self, pairs: Iterator[tuple[str, Any]]) -> tuple[int, Iterator[tuple[str, Any]]]:
        """Most bytes of the whole model in the first tensor's type, and the pairs again."""
        first = next(pairs, None)
        if first is None:
            return 0, pairs
        item_size = ITEM_SIZES[layout_of(*first).dtype]
        elements = {
            parameter.name: Layout(parameter.dtype, parameter.shape).elements for parameter in self.parameters()
        }
        # A state dict has the head of a tied model too, as a second name of the embedding.
        head = elements.get("model.embed_tokens.weight", 0) if "lm_head.weight" not in elements else 0
        return (sum(elements.values()) + head) * item_size, _rejoined(first, pairs)

    def _serving_dtype(self) -> DtypeName:
        parameters = self.parameters()
        if not parameters:
            raise FailedPrecondition("the server has no parameters")
        return parameters[0].dtype


def _rejoined(first: tuple[str, Any], rest: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """As `itertools.chain`, which would keep the first until the end."""
    yield first
    del first
    yield from rest


def _total(tensors: Mapping[str, Any]) -> int:
    return sum(layout_of(name, tensor).size for name, tensor in tensors.items())


def _outgoing(pairs: Iterable[tuple[str, Any]]) -> Iterator[Outgoing]:
    for name, tensor in pairs:
        yield _one(name, tensor)
        del tensor  # before the next is gathered, so that never two are held


def _one(name: str, tensor: Any) -> Outgoing:
    given = bytes_of(name, tensor)
    return Outgoing(name, given.layout, given.data)
