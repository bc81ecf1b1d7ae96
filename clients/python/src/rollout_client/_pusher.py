"""Sends pushes of the blocking client: chooses the transport, estimates sizes, reports progress."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from . import _convert_weights, _proto
from ._channel import call_timeout
from ._connection import Connection
from ._cuda_ipc import CudaIpcSender, IpcExporter, IpcUnavailableError, is_on_device
from ._delta import DeltaTensor, delta_of, make_delta
from ._http2 import ClientStream
from ._lora import adapter_parts, config_json
from ._model import Model, is_model, model_parameters, plain_name
from ._progress import Progress
from ._segment import PADDING, SegmentPool, SharedBuffer
from ._senders import (
    BufferedSender,
    InlineSender,
    OutgoingTensor,
    Sender,
    SharedMemorySender,
    StartCall,
    choose_shared_memory,
    push_buffer,
    push_header,
    send_all,
)
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
    check_push_directory,
    refuse_unknown,
)
from .types import DtypeName, ParameterInfo, UpdateResult

_log = logging.getLogger(__name__)
# The noun in the progress line, by the header's update kind.
_PROGRESS_NOUNS = {1: "adapter", 2: "weights", 3: "changes"}
BUFFER_BYTES = 1 << 20
"""Allowed in addition to the parameters, for buffers of a state dict that the model does not need."""

_T = TypeVar("_T")


class Pusher:
    """Sends pushes. Blocks, and reads tensors in the thread that calls it."""

    may_use_ipc = True
    """Whether device memory may be tried when the transport is `"auto"`."""

    def __init__(self, connection: Connection, segments: SegmentPool) -> None:
        """Sends nothing yet."""
        self.address = connection.address
        self._connection, self._segments = connection, segments
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[ClientStream] = weakref.WeakSet()
        self._cancelled = False

    def run(self, push: Callable[[Pusher], _T]) -> _T:
        """Calls `push` with this object, as `AsyncPusher.run` does in a thread."""
        return push(self)

    def push_lora(self, adapter: Any, config: Any, options: PushLoraOptions) -> UpdateResult:
        """As `WeightSync.push_lora`."""
        refuse_unknown("push_lora", options, PushLoraOptions)
        tensors, adapter_config = adapter_parts(adapter, config)
        header = _convert_weights.update_header("lora", options, adapter_config=adapter_config)
        result = self._push_ipc(header, tensors, options)
        if result is not None:
            return result
        # The server checks names and shapes against the configuration before it reads any tensor.
        return self._push(header, _outgoing(tensors.items()), _exactly(_total(tensors)), options)

    def push_full(self, named_tensors: NamedTensors | Model, options: PushFullOptions) -> UpdateResult:
        """As `WeightSync.push_full`."""
        refuse_unknown("push_full", options, PushFullOptions)
        header, total_bytes = _convert_weights.update_header("full", options), options.get("total_bytes")
        buffer = options.get("buffer")
        if is_model(named_tensors):
            named_tensors = model_parameters(named_tensors)
        result = self._push_ipc(header, named_tensors, options) if buffer is None else None
        if result is not None:
            return result
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
        # A dict has all tensors at once; what any other mapping or iterator gives may lie in memory that it uses again.
        unchanged = isinstance(named_tensors, dict)
        return self._push(header, _outgoing(pairs), sizes, options, unchanged=unchanged)

    def push_delta(
        self, old: Mapping[str, Any], new: Mapping[str, Any], base_version: int, options: PushDeltaOptions
    ) -> UpdateResult:
        """As `WeightSync.push_delta`."""
        refuse_unknown("push_delta", options, PushDeltaOptions)
        header = _convert_weights.update_header("delta", {**options, "expected_version": base_version})
        tensors = list(map(_payload, make_delta(old, new, self._serving_dtype())))
        return self._push(header, tensors, _exactly(sum(len(tensor.data) for tensor in tensors)), options)

    def push_directory(self, path: str | os.PathLike[str], kind: str, options: PushDirectoryOptions) -> UpdateResult:
        """As `WeightSync.push_directory`."""
        refuse_unknown("push_directory", options, PushDirectoryOptions)
        check_push_directory(kind, options)
        header = _convert_weights.update_header(kind, options, directory=os.fspath(path))
        return _convert_weights.update_result(push_header(lambda: self.start(options.get("timeout")), header))

    def begin_push(self, kind: PushKind, config: Any, options: BeginPushOptions) -> Push:
        """As `WeightSync.begin_push`."""
        check_begin_push(kind, config, options)
        if kind == "full":
            return self._begin_full(options)
        if kind == "lora":
            adapter_config = "" if config is None else config_json(config)
            header = _convert_weights.update_header("lora", options, adapter_config=adapter_config)
            if options.get("transport") == "device_memory":
                return self._begin_ipc(header, options)
            return self._begin_buffered(header, _adapter_tensor(config), options)
        header = _convert_weights.update_header("delta", {**options, "expected_version": options["base_version"]})
        return self._begin_buffered(header, _changed_tensor(self._serving_dtype()), options)

    def start(self, timeout: float | None) -> ClientStream:
        """Starts the call of a push, which may take `timeout` seconds; None is the client's timeout."""
        connection = self._connection
        limit = call_timeout(timeout, connection.timeout)
        stream = ClientStream(connection.address, _proto.UPDATE.path, connection.metadata, limit, connection.tls)
        with self._lock:
            self._streams.add(stream)
            cancelled = self._cancelled
        if cancelled:
            stream.cancel()
        return stream

    def parameters(self) -> list[ParameterInfo]:
        """As `WeightSync.parameters`."""
        return _convert_weights.parameter_infos(self._connection.call(_proto.LIST_PARAMETERS))

    def cancel(self) -> None:
        """Ends the pushes that are open, and any that is started later. For any thread."""
        with self._lock:
            self._cancelled = True
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def _push(
        self,
        header: Any,
        tensors: Iterable[OutgoingTensor],
        sizes: _Sizes,
        options: PushFullOptions | PushLoraOptions | PushDeltaOptions,
        *,
        unchanged: bool = False,
    ) -> UpdateResult:
        """Sends tensors inline or through shared memory, each before the next is taken, unless they stay unchanged."""
        progress = _progress(header, sizes.total, options)
        response = send_all(self._sender(header, sizes, progress, options, unchanged=unchanged), tensors)
        progress.finish()
        return _convert_weights.update_result(response)

    def _push_ipc(
        self, header: Any, tensors: NamedTensors, options: PushFullOptions | PushLoraOptions
    ) -> UpdateResult | None:
        """Has the server read the tensors from device memory; None if another transport must send them."""
        transport, is_mapping = options.get("transport", "auto"), isinstance(tensors, Mapping)
        if transport == "auto":
            # All tensors must stay alive until the commit, which an iterator is meant to avoid.
            if not self.may_use_ipc or not is_mapping or not tensors or not all(map(is_on_device, tensors.values())):
                return None
        elif transport != "device_memory":
            return None
        ipc_header, pairs = type(header)(), tensors.items() if is_mapping else tensors
        ipc_header.CopyFrom(header)
        exporter = self._exporter()
        progress = _progress(header, _total(tensors) if is_mapping else 0, options)
        try:
            sender = CudaIpcSender(lambda: self.start(options.get("timeout")), ipc_header, progress)
            response = send_all(sender, (exporter.export(name, tensor) for name, tensor in pairs))
        except (NotFound, IpcUnavailableError) as error:
            if transport != "auto":
                raise
            # A server that cannot open this process's memory never can, and counts every attempt as a failed push.
            self.may_use_ipc = not isinstance(error, NotFound)
            _log.info("device memory cannot be shared with the server, so this push sends the tensors: %s", error)
            return None
        progress.finish()
        return _convert_weights.update_result(response)

    def _device_uuids(self) -> Sequence[str]:
        return self._connection.call(_proto.GET_INFO).device_uuids

    def _exporter(self) -> IpcExporter:
        return IpcExporter(self._device_uuids())

    def _push_buffer(
        self, header: Any, tensors: Iterable[OutgoingTensor], buffer: SharedBuffer, options: PushFullOptions
    ) -> UpdateResult:
        """Sends tensors that are already in a buffer that the server can read."""
        kept, start = list(tensors), lambda: self.start(options.get("timeout"))
        progress = _progress(header, sum(len(tensor.data) for tensor in kept), options)
        fall_back = options.get("transport", "auto") == "auto"
        response = push_buffer(start, header, kept, buffer, progress, fall_back=fall_back)
        progress.finish()
        return _convert_weights.update_result(response)

    def _begin_full(self, options: BeginPushOptions) -> Push:
        header, total_bytes = _convert_weights.update_header("full", options), options.get("total_bytes")
        if options.get("transport") == "device_memory":
            return self._begin_ipc(header, options)
        sizes = self._model_sizes(None) if total_bytes is None else _exactly(total_bytes)
        progress = _progress(header, sizes.total, options)
        return self._open(self._sender(header, sizes, progress, options), _tensor, progress)

    def _begin_buffered(
        self, header: Any, outgoing: Callable[[str, Any, Any], OutgoingTensor | None], options: BeginPushOptions
    ) -> Push:
        progress = _progress(header, 0, options)

        def begin(total: int) -> Sender:
            progress.expect(total)
            return self._sender(header, _exactly(total), progress, options)

        return self._open(BufferedSender(begin), outgoing, progress)

    def _begin_ipc(self, header: Any, options: BeginPushOptions) -> Push:
        exporter, progress = self._exporter(), _progress(header, 0, options)
        sender = CudaIpcSender(lambda: self.start(options.get("timeout")), header, progress)
        return self._open(sender, lambda name, tensor, old: exporter.export(plain_name(name), tensor, old), progress)

    def _open(self, sender: Sender, outgoing: Callable[..., OutgoingTensor | None], progress: Progress) -> Push:
        return Push(sender, outgoing, progress)

    def _sender(
        self, header: Any, sizes: _Sizes, progress: Progress, options: Any, *, unchanged: bool = False
    ) -> Sender:
        """A sender of the tensors of this header, inline or through shared memory."""
        transport, timeout = options.get("transport", "auto"), options.get("timeout")
        upfront = header.kind != _convert_weights.FULL
        start: StartCall = lambda: self.start(timeout)  # noqa: E731
        inline = partial(InlineSender, start, header, sizes.limit, progress, upfront=upfront, unchanged=unchanged)
        if not choose_shared_memory(transport, self.address, sizes.total):
            return inline()
        try:
            lease = self._segments.lease(sizes.total + PADDING, sizes.limit + PADDING)
        except ResourceExhausted:
            if transport != "auto":
                raise
            return inline()
        fall_back = transport == "auto"
        return SharedMemorySender(
            start, header, sizes.limit, progress, upfront=upfront, lease=lease, fall_back=fall_back
        )

    def _estimated(self, pairs: Iterator[tuple[str, Any]]) -> tuple[_Sizes, Iterator[tuple[str, Any]]]:
        """The sizes of a model whose tensors all have the first one's dtype, and the pairs again."""
        first = next(pairs, None)
        if first is None:
            return _exactly(0), pairs
        return self._model_sizes(layout_of(*first).dtype), _rejoined(first, pairs)

    def _model_sizes(self, dtype: DtypeName | None) -> _Sizes:
        """The sizes of the whole model in this dtype, or in the one that it serves in."""
        parameters = self.parameters()
        elements = {parameter.name: Layout(parameter.dtype, parameter.shape).elements for parameter in parameters}
        # The state dict of a model with tied embeddings has the head too, as a second name of the embedding.
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
    """Of all tensors; an estimate where they come one by one."""
    limit: int
    """The most that may be sent."""


def _exactly(total: int) -> _Sizes:
    return _Sizes(total, total)


def _dtype_of(parameters: list[ParameterInfo]) -> DtypeName:
    if not parameters:
        raise FailedPrecondition("the server has no parameters")
    return parameters[0].dtype


def _progress(header: Any, total: int, options: Any) -> Progress:
    return Progress(_PROGRESS_NOUNS[header.kind], total, options.get("progress"))


def _rejoined(first: tuple[str, Any], rest: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """As `itertools.chain`, which would keep the first pair alive until the end."""
    yield first
    del first
    yield from rest


def _total(tensors: Mapping[str, Any]) -> int:
    return sum(layout_of(name, tensor).size for name, tensor in tensors.items())


def _outgoing(pairs: Iterable[tuple[str, Any]]) -> Iterator[OutgoingTensor]:
    for name, tensor in pairs:
        yield _tensor(name, tensor)
        del tensor  # before the next one is gathered, so that two are never alive at once


def _tensor(name: str, tensor: Any, old: Any = None) -> OutgoingTensor:
    """A whole tensor."""
    if old is not None:
        raise InvalidArgument(f"{name}: only a delta has an old tensor")
    given = bytes_of(name, tensor)
    return OutgoingTensor(name, given.layout, given.data)


def _adapter_tensor(config: Any) -> Callable[[str, Any, Any], OutgoingTensor]:
    """Returns the conversion of an adapter's tensors; `config` is the adapter's configuration."""

    def outgoing(name: str, tensor: Any, old: Any) -> OutgoingTensor:
        if config is None:
            raise InvalidArgument("config: needed with the tensors of an adapter; pass the LoraConfig or its JSON")
        return _tensor(plain_name(name), tensor, old)

    return outgoing


def _changed_tensor(dtype: DtypeName) -> Callable[[str, Any, Any], OutgoingTensor | None]:
    """Returns the conversion of a pair of tensors to their difference in `dtype`, the one that the server serves in."""

    def outgoing(name: str, tensor: Any, old: Any) -> OutgoingTensor | None:
        if old is None:
            raise InvalidArgument(f"{name}: a delta needs the old tensor too: write(name, tensor, old)")
        delta = delta_of(name, old, tensor, dtype)
        return None if delta is None else _payload(delta)

    return outgoing


def _payload(delta: DeltaTensor) -> OutgoingTensor:
    return OutgoingTensor(delta.name, Layout(delta.dtype, delta.shape), memoryview(delta.payload), delta.changed)
