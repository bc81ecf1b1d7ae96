"""The blocking client's way to new weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _convert_weights, _proto
from ._delta import DeltaTensor, delta_of, make_delta
from ._http2 import ClientStream
from ._lent import Lender, Lent, NotLentError, is_on_device
from ._lora import adapter_parts, config_json
from ._model import Model, is_model, model_parameters, plain_name
from ._progress import Progress
from ._push import (
    Gathered,
    Inline,
    Outgoing,
    Sender,
    Shared,
    StartCall,
    choose_shared_memory,
    push_buffer,
    push_header,
    send_all,
)
from ._segment import PADDING, SegmentPool, SharedBuffer
from ._session import NamedTensors, Push
from ._tensors import ITEM_SIZES, Layout, bytes_of, layout_of
from .errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from .options import (
    BeginPushOptions,
    PushDeltaOptions,
    PushDirectoryOptions,
    PushFullOptions,
    PushKind,
    PushLoraOptions,
    check_begin_push,
    refuse_unknown,
)
from .types import AdapterInfo, DtypeName, OpenUpdate, ParameterInfo, UpdateResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)
# By the kind of a header: what progress is of.
_WHAT = {1: "adapter", 2: "weights", 3: "changes"}
BUFFER_BYTES = 1 << 20
"""Beside the parameters, for buffers that a state dict has and the model does not need."""


class WeightSync:
    """Pushes of new weights: each is a transaction, applied whole between two steps or not at all.

    A push that fails raises and leaves the policy as it was: `DataLoss` for bytes that changed on the way,
    `InvalidArgument` naming a tensor that does not fit, `ResourceExhausted` where it finds no memory, `Aborted` while
    another is under way, if the version is not the expected one, after `cancel_update`, and when nothing of it was sent
    for the server's `--update-idle-seconds`. `DataLoss` also says that the server's checkpoint was changed in place.
    """

    address: str
    _may_lend = True
    _segments: SegmentPool
    _timeout: float | None
    _call: Callable[..., Any]
    _start_update: Callable[[float | None], ClientStream]

    def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> UpdateResult:
        """Makes the base with this adapter merged the policy, or keeps the adapter beside the policy.

        The base is the checkpoint, or what was pushed in full since. Each merge starts from it, with the bits of PEFT's
        `merge_adapter()`, so that a thousand pushes leave no drift.

        Args:
            adapter: a PEFT model, whose active adapter is meant, and which may be wrapped as for `push_full`; or
                tensors by PEFT's names; None or an empty mapping is the base itself.
            config: with tensors: a `LoraConfig`, a dict or JSON text.
            options: by keyword, those that `rollout_client.PushLoraOptions` lists and describes.
        """
        refuse_unknown("push_lora", options, PushLoraOptions)
        tensors, adapter_config = adapter_parts(adapter, config)
        header = _convert_weights.update_header("lora", options, adapter_config=adapter_config)
        lent = self._push_lent(header, tensors, options)
        if lent is not None:
            return lent
        # Names and shapes are checked against the configuration, all at once.
        return self._push(header, _outgoing(tensors.items()), _exactly(_total(tensors)), options)

    def push_full(self, named_tensors: NamedTensors | Model, **options: Unpack[PushFullOptions]) -> UpdateResult:
        """Makes these tensors the policy; all parameters must be there.

        Args:
            named_tensors: a model (DDP, torch.compile and the like around it are looked through, one that is sharded
                over several ranks is refused), a state dict, or pairs gathered one by one: each is sent before the next
                is taken, so that an iterator need hold no more than one. Names as in the checkpoint, PEFT's prefixes,
                `qkv_proj` and `gate_up_proj` are understood.
            options: by keyword, those that `rollout_client.PushFullOptions` lists and describes.
        """
        refuse_unknown("push_full", options, PushFullOptions)
        header, total_bytes = _convert_weights.update_header("full", options), options.get("total_bytes")
        buffer = options.get("buffer")
        if is_model(named_tensors):
            named_tensors = model_parameters(named_tensors)
        lent = self._push_lent(header, named_tensors, options) if buffer is None else None
        if lent is not None:
            return lent
        is_mapping = isinstance(named_tensors, Mapping)
        pairs: Iterator[tuple[str, Any]] = iter(named_tensors.items() if is_mapping else named_tensors)
        if buffer is not None and options.get("transport", "auto") in ("auto", "shared_memory"):
            return self._push_buffer(header, _outgoing(pairs), buffer, options)
        if total_bytes is not None:
            sizes = _exactly(total_bytes)
        elif is_mapping:
            sizes = _exactly(_total(named_tensors))
        else:
            sizes, pairs = self._estimated(pairs)
        return self._push(header, _outgoing(pairs), sizes, options)

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
        tensors = list(map(_payload, make_delta(old, new, self._serving_dtype())))
        return self._push(header, tensors, _exactly(sum(len(tensor.data) for tensor in tensors)), options)

    def begin_push(self, kind: PushKind = "full", config: Any = None, **options: Unpack[BeginPushOptions]) -> Push:
        """Begins a push whose tensors are handed over by `Push.write`, for trainers that bring them bit by bit.

        A full push is open at the server from here on: no other can come, and one of which nothing is written for the
        server's `--update-idle-seconds` ends with `Aborted`. Adapters and deltas are sent at the commit.

        Args:
            kind: `"full"` for every parameter, `"lora"` for an adapter, `"delta"` for changes of some parameters.
            config: with `"lora"`: a `LoraConfig`, a dict or JSON text; None, with no tensors, is the base itself.
            options: by keyword, those that `rollout_client.BeginPushOptions` lists and describes.
        """
        check_begin_push(kind, config, options)
        if kind == "full":
            return self._begin_full(options)
        if kind == "lora":
            adapter_config = "" if config is None else config_json(config)
            header = _convert_weights.update_header("lora", options, adapter_config=adapter_config)
            if options.get("transport") == "device_memory":
                return self._begin_lent(header, options)
            return self._begin_gathered(header, _adapter_tensor(config), options)
        header = _convert_weights.update_header("delta", {**options, "expected_version": options["base_version"]})
        return self._begin_gathered(header, _changed_tensor(self._serving_dtype()), options)

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
        self,
        header: Any,
        tensors: Iterable[Outgoing],
        sizes: _Sizes,
        options: PushFullOptions | PushLoraOptions | PushDeltaOptions,
    ) -> UpdateResult:
        """Sends tensors that are there, or come from an iterator."""
        progress = _progress(header, sizes.total, options)
        response = send_all(self._sender(header, sizes, progress, options), tensors)
        progress.finish()
        return _convert_weights.update_result(response)

    def _push_lent(
        self, header: Any, tensors: NamedTensors, options: PushFullOptions | PushLoraOptions
    ) -> UpdateResult | None:
        """Has the server read tensors in device memory; None if they are to be sent in another way."""
        transport, is_mapping = options.get("transport", "auto"), isinstance(tensors, Mapping)
        if transport == "auto":
            # What an iterator gathers is not to be held as a whole.
            if not self._may_lend or not is_mapping or not tensors or not all(map(is_on_device, tensors.values())):
                return None
        elif transport != "device_memory":
            return None
        own, pairs = type(header)(), tensors.items() if is_mapping else tensors
        own.CopyFrom(header)
        lender = self._lender()
        progress = _progress(header, _total(tensors) if is_mapping else 0, options)
        try:
            sender = Lent(lambda: self._start_update(options.get("timeout")), own, progress)
            response = send_all(sender, (lender.lend(name, tensor) for name, tensor in pairs))
        except (NotFound, NotLentError) as error:
            if transport != "auto":
                raise
            # A server that cannot open this process's memory never can, and counts each such push as one that failed.
            self._may_lend = not isinstance(error, NotFound)
            _log.info("the tensors of this push are sent, as the server cannot read them where they lie: %s", error)
            return None
        progress.finish()
        return _convert_weights.update_result(response)

    def _lender(self) -> Lender:
        return Lender(self._call(_proto.GET_INFO, _proto.GET_INFO.request()).device_uuids)

    def _push_buffer(
        self, header: Any, tensors: Iterable[Outgoing], buffer: SharedBuffer, options: PushFullOptions
    ) -> UpdateResult:
        """Sends tensors that lie in a buffer that the server can read."""
        kept, start = list(tensors), lambda: self._start_update(options.get("timeout"))
        progress = _progress(header, sum(len(tensor.data) for tensor in kept), options)
        fall_back = options.get("transport", "auto") == "auto"
        response = push_buffer(start, header, kept, buffer, progress, fall_back=fall_back)
        progress.finish()
        return _convert_weights.update_result(response)

    def _begin_full(self, options: BeginPushOptions) -> Push:
        header, total_bytes = _convert_weights.update_header("full", options), options.get("total_bytes")
        if options.get("transport") == "device_memory":
            return self._begin_lent(header, options)
        sizes = self._model_sizes(None) if total_bytes is None else _exactly(total_bytes)
        progress = _progress(header, sizes.total, options)
        return Push(self._sender(header, sizes, progress, options), _tensor, progress)

    def _begin_gathered(
        self, header: Any, outgoing: Callable[[str, Any, Any], Outgoing | None], options: BeginPushOptions
    ) -> Push:
        progress = _progress(header, 0, options)

        def begin(total: int) -> Sender:
            progress.expect(total)
            return self._sender(header, _exactly(total), progress, options)

        return Push(Gathered(begin), outgoing, progress)

    def _begin_lent(self, header: Any, options: BeginPushOptions) -> Push:
        lender, progress = self._lender(), _progress(header, 0, options)
        sender = Lent(lambda: self._start_update(options.get("timeout")), header, progress)
        return Push(sender, lambda name, tensor, old: lender.lend(plain_name(name), tensor, old), progress)

    def _sender(self, header: Any, sizes: _Sizes, progress: Progress, options: Any) -> Sender:
        """What sends the tensors of this header, begun."""
        transport, timeout = options.get("transport", "auto"), options.get("timeout")
        upfront = header.kind != _convert_weights.FULL
        start: StartCall = lambda: self._start_update(timeout)  # noqa: E731
        if not choose_shared_memory(transport, self.address, sizes.total):
            return Inline(start, header, sizes.limit, progress, upfront=upfront)
        try:
            lease = self._segments.lease(sizes.total + PADDING, sizes.limit + PADDING)
        except ResourceExhausted:
            if transport != "auto":
                raise
            return Inline(start, header, sizes.limit, progress, upfront=upfront)
        return Shared(start, header, sizes.limit, progress, upfront=upfront, lease=lease, fall_back=transport == "auto")

    def _estimated(self, pairs: Iterator[tuple[str, Any]]) -> tuple[_Sizes, Iterator[tuple[str, Any]]]:
        """The sizes of a model whose tensors have the first one's type, and the pairs again."""
        first = next(pairs, None)
        if first is None:
            return _exactly(0), pairs
        return self._model_sizes(layout_of(*first).dtype), _rejoined(first, pairs)

    def _model_sizes(self, dtype: DtypeName | None) -> _Sizes:
        """The sizes of the whole model, all of it in this type, or in that in which it serves."""
        parameters = self.parameters()
        elements = {parameter.name: Layout(parameter.dtype, parameter.shape).elements for parameter in parameters}
        # A state dict has the head of a tied model too, as a second name of the embedding.
        head = elements.get("model.embed_tokens.weight", 0) if "lm_head.weight" not in elements else 0
        count = sum(elements.values()) + head
        if dtype is None:
            dtype = _dtype_of(parameters)
        return _Sizes(count * ITEM_SIZES[dtype], count * ITEM_SIZES["float32"] + BUFFER_BYTES)

    def _serving_dtype(self) -> DtypeName:
        return _dtype_of(self.parameters())


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a push."""

    total: int
    """Of all its tensors, as far as that is known."""
    limit: int
    """That may come at most."""


def _exactly(total: int) -> _Sizes:
    return _Sizes(total, total)


def _dtype_of(parameters: list[ParameterInfo]) -> DtypeName:
    if not parameters:
        raise FailedPrecondition("the server has no parameters")
    return parameters[0].dtype


def _progress(header: Any, total: int, options: Any) -> Progress:
    return Progress(_WHAT[header.kind], total, options.get("progress"))


def _rejoined(first: tuple[str, Any], rest: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """As `itertools.chain`, which would keep the first until the end."""
    yield first
    del first
    yield from rest


def _total(tensors: Mapping[str, Any]) -> int:
    return sum(layout_of(name, tensor).size for name, tensor in tensors.items())


def _outgoing(pairs: Iterable[tuple[str, Any]]) -> Iterator[Outgoing]:
    for name, tensor in pairs:
        yield _tensor(name, tensor)
        del tensor  # before the next is gathered, so that never two are held


def _tensor(name: str, tensor: Any, old: Any = None) -> Outgoing:
    """A whole tensor."""
    if old is not None:
        raise InvalidArgument(f"{name}: only a delta has an old tensor")
    given = bytes_of(name, tensor)
    return Outgoing(name, given.layout, given.data)


def _adapter_tensor(config: Any) -> Callable[[str, Any, Any], Outgoing]:
    """What makes a tensor of an adapter with this configuration."""

    def outgoing(name: str, tensor: Any, old: Any) -> Outgoing:
        if config is None:
            raise InvalidArgument("config: needed with the tensors of an adapter; pass the LoraConfig or its JSON")
        return _tensor(plain_name(name), tensor, old)

    return outgoing


def _changed_tensor(dtype: DtypeName) -> Callable[[str, Any, Any], Outgoing | None]:
    """What makes the changes of a tensor, in the type in which the server serves."""

    def outgoing(name: str, tensor: Any, old: Any) -> Outgoing | None:
        if old is None:
            raise InvalidArgument(f"{name}: a delta needs the old tensor too: write(name, tensor, old)")
        delta = delta_of(name, old, tensor, dtype)
        return None if delta is None else _payload(delta)

    return outgoing


def _payload(delta: DeltaTensor) -> Outgoing:
    return Outgoing(delta.name, Layout(delta.dtype, delta.shape), memoryview(delta.payload), delta.changed)
