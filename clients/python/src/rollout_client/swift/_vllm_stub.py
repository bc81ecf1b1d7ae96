"""A stand-in for the package vllm: ms-swift imports names from it, but never calls them in server mode.

Both ms-swift (for importance sampling at least 0.10.2) and the TRL below it (at most 0.12.0) accept its version.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VERSION = "0.12.0"

# Modules, with the names that are imported from them.
_NAMES: dict[str, tuple[str, ...]] = {
    "vllm": ("LLM", "RequestOutput", "SamplingParams"),
    "vllm.distributed": (),
    "vllm.distributed.device_communicators": (),
    "vllm.distributed.device_communicators.pynccl": ("PyNcclCommunicator",),
    "vllm.distributed.utils": ("StatelessProcessGroup",),
    "vllm.lora": (),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.sampling_params": ("GuidedDecodingParams", "StructuredOutputsParams"),
}


class _Placeholder:
    """A class of vLLM that can be subclassed and used in annotations, but not instantiated."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: vLLM is not installed, and rollout_client.swift replaces it only with "
            "--use_vllm true --vllm_mode server"
        )

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int, **_options: Any) -> None:
        """Has the arguments of `StatelessProcessGroup.create`, which ms-swift inspects."""
        raise RuntimeError(f"rollout-server has no process group (requested: {host}:{port}, {rank}/{world_size})")


def install_stub() -> bool:
    """Makes `import vllm` work if vLLM is not installed; returns whether it did."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return False
    for name, members in _NAMES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        for member in members:
            setattr(module, member, type(member, (_Placeholder,), {"__module__": name}))
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["vllm"].__version__ = VERSION  # type: ignore[attr-defined]
    return True
