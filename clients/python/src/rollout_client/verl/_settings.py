"""Reads and checks verl's configuration: how a replica's server is started or found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument, NotFound
from ..process import SERVER, find_server
from . import NAME

BINARY_VARIABLE = "ROLLOUT_SERVER_BINARY"
START_SECONDS = 600.0
"""Default limit for a start: enough to read 100 GB from a disk at 200 MB/s."""

OPTIONS = f"actor_rollout_ref.rollout.engine_kwargs.{NAME}"
"""The place of the options that verl itself does not have."""

LOGPROBS = {"processed_logprobs": "logprobs", "raw_logprobs": "raw_logprobs"}
"""verl's `logprobs_mode` and the field of a sample."""

# verl's settings that affect sampling and that this server does not support in full, with their allowed values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "quantization": (None,),
    "logprobs_mode": tuple(LOGPROBS),
    "dtype": ("auto", "bfloat16", "float32"),
}
_RESERVED = {
    "port": "is chosen automatically",
    "http_port": "is chosen automatically",
    "model": "is actor_rollout_ref.model.path",
}


@dataclass(frozen=True)
class Settings:
    """Settings of a replica's actor."""

    replica_rank: int
    model: str
    """The value of `--model`; the actor may have to copy it to its host first."""
    flags: dict[str, Any]
    """Command-line flags by name."""
    address: str | None
    """`host:port` of a running server; None starts one."""
    binary: str | None
    token_file: str | None
    tls: Any
    start_seconds: float
    adapter: bool
    """Whether pushes are LoRA adapters, so that a sleep must keep their base."""
    free_cache_engine: bool
    max_model_len: int | None
    prompt_length: int
    response_length: int
    sampling_defaults: dict[str, Any]
    """verl's sampling parameters for requests without their own."""
    logprobs_field: str
    routing_replay: bool
    """Whether samples have the experts that their tokens took, for a trainer that replays them (R3)."""
    seed: int | None
    """With `full_determinism`, the source of the samples' seeds."""
    save_path: str | None
    """Directory for profiles; None writes none."""


def read_settings(config: Any, model_config: Any, replica_rank: int, replicas_per_node: int) -> Settings:
    """The settings of one replica.

    Args:
        config: verl's `RolloutConfig`.
        model_config: verl's `HFModelConfig`, or the `DictConfig` of one.
        replica_rank: number of the replica.
        replicas_per_node: how many replicas share a machine, its memory and its cores.

    Raises:
        InvalidArgument: the server does not support a setting; the message names it.
    """
    _refuse_unsupported(config)
    options = _options(config)
    for name, why in _RESERVED.items():
        if name in options:
            raise InvalidArgument(f"{OPTIONS}.{name} {why}: leave it out")
    own = {name: options.pop(name, None) for name in ("addresses", "binary", "token_file", "tls", "start_seconds")}
    profiler = config.profiler
    return Settings(
        replica_rank=replica_rank,
        model=str(model_config.get("local_path") or model_config.get("path")),
        flags=_flags(config, replicas_per_node) | options,
        address=_address(own["addresses"], options, replica_rank),
        binary=own["binary"],
        token_file=own["token_file"],
        tls=own["tls"],
        start_seconds=START_SECONDS if own["start_seconds"] is None else float(own["start_seconds"]),
        adapter=_pushes_adapters(model_config),
        free_cache_engine=config.free_cache_engine,
        max_model_len=config.max_model_len,
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        sampling_defaults={"repetition_penalty": config.repetition_penalty, "ignore_eos": config.ignore_eos},
        logprobs_field=LOGPROBS[config.logprobs_mode],
        routing_replay=config.enable_rollout_routing_replay,
        seed=config.seed if config.full_determinism else None,
        save_path=profiler.save_path if profiler is not None and profiler.enable else None,
    )


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """`{"mem_util": 0.3, "profile": True}` as `["--mem-util", "0.3", "--profile"]`; None and False omit a flag."""
    line = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        line += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return line


def find_binary(given: str | None) -> Path:
    """The server's executable: `given`, or the one in the environment variable, or the installed one.

    Raises:
        InvalidArgument: it does not exist or is not executable.
    """
    variable = os.environ.get(BINARY_VARIABLE)
    for where, path in ((f"{OPTIONS}.binary", given), (BINARY_VARIABLE, variable)):
        if path and not os.access(path, os.X_OK):
            raise InvalidArgument(f"{where}: no executable at {path} on this machine")
        if path:
            return Path(path)
    try:
        return Path(find_server())
    except NotFound:
        raise InvalidArgument(
            f"no {SERVER} in PATH on this machine: install it (`pip install {SERVER}`), or build it (`make server`) "
            f"and set +{OPTIONS}.binary=PATH or {BINARY_VARIABLE}=PATH, or list running servers in "
            f"+{OPTIONS}.addresses (without the +, Hydra rejects names that it does not know)"
        ) from None


def _options(config: Any) -> dict[str, Any]:
    options = (config.engine_kwargs or {}).get(NAME) or {}
    if not isinstance(options, Mapping):
        raise InvalidArgument(f"{OPTIONS}: expected names with values, got {options!r}")
    return {str(name): value for name, value in options.items() if value is not None}


def _flags(config: Any, replicas_per_node: int) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "tp": config.tensor_model_parallel_size,
        # All replicas of a machine take this fraction of its memory together, as they would of one accelerator each.
        "mem_util": round(config.gpu_memory_utilization / replicas_per_node, 6),
        "dtype": config.dtype,
        "log": "warn",  # every sample is a request, so one line per request is too much
        "max_model_len": config.max_model_len,
        "limit_mm_per_prompt": f"image={config.limit_images}" if config.limit_images else None,
        "return_routing": config.enable_rollout_routing_replay,
    }
    if replicas_per_node > 1:
        flags["threads"] = max(1, (os.cpu_count() or 1) // replicas_per_node)
    return flags


def _address(addresses: Any, options: Mapping[str, Any], replica_rank: int) -> str | None:
    if addresses is None:
        return None
    if options:
        raise InvalidArgument(
            f"{OPTIONS}.{next(iter(options))}: not allowed with addresses, whose servers are already running"
        )
    if isinstance(addresses, str):
        addresses = [addresses]
    if replica_rank >= len(addresses):
        raise InvalidArgument(
            f"{OPTIONS}.addresses: {len(addresses)} for replicas 0 to {replica_rank} at least: verl creates a replica "
            "for each tensor_model_parallel_size ranks of the trainer, and each needs its own server"
        )
    return str(addresses[replica_rank])


def _pushes_adapters(model_config: Any) -> bool:
    lora = model_config.get("lora") or {}
    rank = max(model_config.get("lora_rank") or 0, lora.get("rank") or 0)
    return rank > 0 and not lora.get("merge", False)


def _refuse_unsupported(config: Any) -> None:
    for name, allowed in _FIXED.items():
        value = getattr(config, name)
        if value not in allowed:
            choice = " or ".join(repr(one) for one in allowed)
            raise InvalidArgument(f"rollout.{name}={value!r}: with rollout.name={NAME} it must be {choice}")
    if config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout:
        raise InvalidArgument(f"rollout.mtp.enable_rollout: must be False with rollout.name={NAME}")
    if (config.qat or {}).get("enable", False):
        raise InvalidArgument(f"rollout.qat.enable: must be False with rollout.name={NAME}")
