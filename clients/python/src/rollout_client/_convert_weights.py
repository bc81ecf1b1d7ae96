"""Converts between dataclasses and messages, as `_convert`: pushes, adapters, sleep and wake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import _proto
from ._fields import extend, known, number, set_field
from .errors import InvalidArgument
from .status import OpenUpdate
from .types import AdapterInfo, Asleep, Lifecycle, ParameterInfo, SleepResult, UpdateResult, WakeResult

LIFECYCLES = {
    1: Lifecycle.RUNNING,
    2: Lifecycle.SHUTTING_DOWN,
    3: Lifecycle.PAUSED,
    4: Lifecycle.ASLEEP,
    5: Lifecycle.WEIGHTS_MISSING,
}
DTYPES = {1: "float32", 2: "bfloat16", 3: "float16"}
MEMORY_TAGS = {1: "weights", 2: "kv_cache"}
RUNNING_POLICIES = {1: "keep", 2: "recompute", 3: "wait", 4: "abort"}
DRAIN_MODES = {1: "wait", 2: "abort", 3: "keep"}
SLEEP_LEVELS = {1: 1, 2: 2}
UPDATE_KINDS = {1: "lora", 2: "full", 3: "delta"}
FULL = 2


def sleep_request(level: int, mode: str) -> Any:
    """A `SleepRequest`."""
    return _proto.SLEEP.request(level=number(SLEEP_LEVELS, level, "level"), mode=number(DRAIN_MODES, mode, "mode"))


def wake_request(tags: Iterable[str] | None, reload: bool) -> Any:
    """A `WakeRequest`; None means all tags."""
    if isinstance(tags, str):
        raise InvalidArgument("tags: expected a list of tags, got a single string; put it in a list")
    numbers = [number(MEMORY_TAGS, tag, f"tags[{i}]") for i, tag in enumerate(tags or ())]
    if tags is not None and not numbers:
        raise InvalidArgument("tags: empty; name the parts to wake, or pass None for all")
    return _proto.WAKE.request(tags=numbers, reload=reload)


def pause_request(mode: str) -> Any:
    """A `PauseRequest`."""
    return _proto.PAUSE.request(mode=number(DRAIN_MODES, mode, "mode"))


def checksum_request(names: Iterable[str] | None) -> Any:
    """A `ChecksumRequest`; None means all parameters."""
    if isinstance(names, str):
        raise InvalidArgument("names: expected a list of names, got a single string; put it in a list")
    request = _proto.CHECKSUM.request()
    extend(request.names, names or (), "names")
    return request


def cancel_update_request(update_id: int | None) -> Any:
    """A `CancelUpdateRequest`."""
    request = _proto.CANCEL_UPDATE.request()
    if update_id is not None:
        set_field(request, "id", update_id, "update_id")
    return request


def cancelled_update(response: Any) -> OpenUpdate | None:
    """The push that a `CancelUpdateResponse` has ended, if any."""
    return open_update(response.update) if response.HasField("update") else None


def open_update(message: Any) -> OpenUpdate:
    """An open push."""
    return OpenUpdate(
        id=message.id,
        peer=message.peer,
        kind=known(UPDATE_KINDS, message.kind),
        adapter=message.adapter or None,
        new_version=message.new_version if message.HasField("new_version") else None,
        open_seconds=message.open_seconds,
        idle_seconds=message.idle_seconds,
        committed=message.committed,
    )


def remove_adapter_request(name: str, expected_generation: int | None) -> Any:
    """A `RemoveAdapterRequest`."""
    request = _proto.REMOVE_ADAPTER.request()
    set_field(request, "name", name, "name")
    if expected_generation is not None:
        set_field(request, "expected_generation", expected_generation, "expected_generation")
    return request


def update_header(
    kind: str, options: Mapping[str, Any], *, adapter_config: str = "", directory: str | None = None
) -> Any:
    """A `Header` without tensors.

    Args:
        kind: as `UPDATE_KINDS` names it.
        options: of a push of this kind; those of the transport are ignored.
        adapter_config: JSON text.
        directory: on the server, which reads the tensors from it.
    """
    header = _proto.UpdateHeader(
        kind=number(UPDATE_KINDS, kind, "kind"),
        running=number(RUNNING_POLICIES, options.get("running", "keep"), "running"),
        in_place=options.get("in_place", False),
        keep_missing=options.get("keep_missing", False),
        force_version=options.get("force_version", False),
        evict_adapter=options.get("evict", False),
        adapter_config=adapter_config,
    )
    for option in ("version", "expected_version", "expected_generation"):
        value = options.get(option)
        if value is not None:
            set_field(header, "new_version" if option == "version" else option, value, option)
    name = options.get("name")
    if name is not None:
        if not name:
            raise InvalidArgument("name: empty; name the adapter, or pass None to merge it")
        set_field(header, "adapter", name, "name")
    if directory is not None:
        header.source.directory.path = directory
    return header


def tensor_entry(
    name: str, dtype: str, shape: tuple[int, ...], digest: bytes, *, changed: int = 0, payload_bytes: int = 0
) -> Any:
    """A `Tensor`."""
    return _proto.Tensor(
        name=name,
        dtype=number(DTYPES, dtype, name),
        shape=shape,
        digest=digest,
        changed=changed,
        payload_bytes=payload_bytes,
    )


def sleep_result(response: Any) -> SleepResult:
    """The result in a `SleepResponse`."""
    return SleepResult(
        released={known(MEMORY_TAGS, entry.tag): entry.bytes for entry in response.released},
        resident_bytes=response.resident_bytes,
        seconds=response.seconds,
    )


def wake_result(response: Any) -> WakeResult:
    """The result in a `WakeResponse`."""
    return WakeResult(lifecycle=known(LIFECYCLES, response.lifecycle), seconds=response.seconds)


def update_result(response: Any) -> UpdateResult:
    """The result in a `UpdateResponse`."""
    return UpdateResult(
        weight_version=response.weight_version,
        digest=response.digest.hex(),
        parameters=response.parameters,
        bytes=response.bytes,
        pause_ms=response.pause_milliseconds,
        staging_ms=response.staging_milliseconds,
        pending=response.pending,
        adapter_generation=response.adapter_generation if response.HasField("adapter_generation") else None,
    )


def parameter_infos(response: Any) -> list[ParameterInfo]:
    """The parameters of a `ListParametersResponse`, in the model's order."""
    return [ParameterInfo(p.name, tuple(p.shape), known(DTYPES, p.dtype)) for p in response.parameters]


def checksums(response: Any) -> dict[str, str]:
    """The checksums of a `ChecksumResponse`, in hexadecimal."""
    return {parameter.name: parameter.sha256.hex() for parameter in response.parameters}


def adapter_infos(response: Any) -> list[AdapterInfo]:
    """The adapters of a `ListAdaptersResponse`."""
    fields = AdapterInfo.__dataclass_fields__
    return [AdapterInfo(**{name: getattr(adapter, name) for name in fields}) for adapter in response.adapters]


def asleep(message: Any) -> Asleep:
    """The state of a server that sleeps."""
    return Asleep(
        level=known(SLEEP_LEVELS, message.level),
        resident=[known(MEMORY_TAGS, tag) for tag in message.resident],
        pending_update=message.pending_update,
    )
