"""The messages and methods of `rollout.v1`, built from the compiled `proto/` at import.

Generated `_pb2` modules would tie the package to one major version of protobuf, and trainers pin their own, so the
descriptors are shipped instead (`rollout.binpb`, made by `make proto`). They live in a pool of their own, so that
another package with files of the same names does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_pool = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    resources.files(__package__).joinpath("rollout.binpb").read_bytes()
).file:
    _pool.Add(_file)


def message(name: str) -> Any:
    """The class of the message `rollout.v1.<name>`."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"rollout.v1.{name}"))


@dataclass(frozen=True)
class Method:
    """One RPC: its path and its two message classes."""

    path: str
    request: Any
    response: Any


def _method(service: str, name: str) -> Method:
    descriptor = _pool.FindServiceByName(f"rollout.v1.{service}").methods_by_name[name]
    return Method(
        f"/rollout.v1.{service}/{name}",
        message_factory.GetMessageClass(descriptor.input_type),
        message_factory.GetMessageClass(descriptor.output_type),
    )


GENERATE = _method("Rollout", "Generate")
SCORE = _method("Rollout", "Score")
ABORT = _method("Rollout", "Abort")
GET_INFO = _method("Control", "GetInfo")
GET_STATUS = _method("Control", "GetStatus")
GET_TIMELINE = _method("Control", "GetTimeline")
RESET_PREFIX_CACHE = _method("Control", "ResetPrefixCache")
SLEEP = _method("Control", "Sleep")
WAKE = _method("Control", "Wake")
PAUSE = _method("Control", "Pause")
RESUME = _method("Control", "Resume")
UPDATE = _method("Weights", "Update")
CANCEL_UPDATE = _method("Weights", "CancelUpdate")
LIST_PARAMETERS = _method("Weights", "ListParameters")
CHECKSUM = _method("Weights", "Checksum")
LIST_ADAPTERS = _method("Weights", "ListAdapters")
REMOVE_ADAPTER = _method("Weights", "RemoveAdapter")

Prompt = message("Prompt")
Pixels = message("Pixels")
SamplingParamsMessage = message("SamplingParams")
UpdateHeader = message("Header")
Manifest = message("Manifest")
Tensor = message("Tensor")
Commit = message("Commit")
