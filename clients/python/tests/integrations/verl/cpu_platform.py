"""verl's trainer on the CPU, by verl's own registries of platforms and engines: its FSDP engine over gloo.

verl imports this module in each of its processes (`VERL_USE_EXTERNAL_MODULES=cpu_platform`, `VERL_PLATFORM=cpu`).
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

# Of `torch.cuda` what verl calls and `torch.cpu` has not, with its answer: there is no memory of a device.
_ANSWERS: dict[str, Any] = {
    "empty_cache": None,
    "get_device_name": "CPU",
    "ipc_collect": None,
    "manual_seed": None,
    "manual_seed_all": None,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (0, 0),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "reset_peak_memory_stats": None,
}


class _Device(types.ModuleType):
    """`torch.cpu` with `_ANSWERS`."""

    def __getattr__(self, name: str) -> Any:
        if name in _ANSWERS:
            return lambda *_arguments, **_options: _ANSWERS[name]
        return getattr(torch if name in ("get_rng_state", "set_rng_state") else torch.cpu, name)


_DEVICE = _Device("cpu")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU stands for each accelerator that Ray is told of."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def _register_engine() -> None:
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


def _take_the_cpu_once() -> None:
    """verl asks for `cpu:gloo` and the device's backend, which torch takes for two of one device."""
    start = torch.distributed.init_process_group

    def start_once(backend=None, *arguments, **options):
        return start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **options)

    torch.distributed.init_process_group = start_once


_take_the_cpu_once()
_register_engine()
