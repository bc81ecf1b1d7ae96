"""verl's trainer on the CPU, by verl's own registries of platforms and engines: FSDP and VeOmni over gloo.

verl imports this module in each of its processes (`VERL_USE_EXTERNAL_MODULES=cpu_platform`, `VERL_PLATFORM=cpu`).
"""

from __future__ import annotations

import contextlib
import functools
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


class _OtherExperts:
    """VeOmni's manager of replays: verl's, for routers that all choose experts next to those that they would.

    So a run agrees with the server only if verl replaces every choice that matters by what the server returned.
    """

    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def on_router_forward(self, module: torch.nn.Module, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._replay.on_router_forward(module, scores, (experts + 1) % scores.shape[1])


def _register_engines() -> None:
    import veomni.arguments

    # In float32, for which verl has no setting: verl takes this class from here.
    veomni.arguments.MixedPrecisionConfig = functools.partial(
        veomni.arguments.MixedPrecisionConfig, param_dtype="float32"
    )
    from veomni.utils.moe_router_replay import set_active_replay
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.veomni.transformer_impl import VeOmniEngineWithLMHead

    class VeOmniEngine(VeOmniEngineWithLMHead):
        _autocast_dtype = torch.float32

        def initialize(self) -> None:
            super().initialize()
            if self._router_replay is not None:
                set_active_replay(_OtherExperts(self._router_replay))

    for engine, backends in (FSDPEngineWithLMHead, ["fsdp", "fsdp2"]), (VeOmniEngine, ["veomni"]):
        EngineRegistry.register(model_type="language_model", backend=backends, device="cpu")(engine)


def _take_the_cpu_once() -> None:
    """verl asks for `cpu:gloo` and the device's backend, which torch takes for two of one device."""
    start = torch.distributed.init_process_group

    def start_once(backend=None, *arguments, **options):
        return start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **options)

    torch.distributed.init_process_group = start_once


_take_the_cpu_once()
_register_engines()
