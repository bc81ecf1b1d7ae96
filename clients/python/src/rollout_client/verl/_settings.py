"""How a replica's server is started or found: read from verl's configuration, checked before anything starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from . import NAME

BINARY = "rollout-server"
BINARY_VARIABLE = "ROLLOUT_SERVER_BINARY"
START_SECONDS = 600.0
"""For a start: a checkpoint of some 100 GB from a disk of 200 MB/s."""

OPTIONS = f"actor_rollout_ref.rollout.engine_kwargs.{NAME}"
"""Where the options that are not verl's own stand."""

LOGPROBS = {"processed_logprobs": "logprobs", "raw_logprobs": "raw_logprobs"}
"""verl's `logprobs_mode` and the field of a sample."""

# verl's settings that change what is sampled, or how, and that this server cannot follow, with what they may be.
_FIXED: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "expert_parallel_size": (1, None),
    "quantization": (None,),
    "enable_rollout_routing_replay": (False,),
    "logprobs_mode": tuple(LOGPROBS),
    "dtype": ("auto", "bfloat16", "float32"),
}
_RESERVED = {"port": "is chosen here", "http_port": "is chosen here", "model": "is actor_rollout_ref.model.path"}


@dataclass(frozen=True)
class Settings:
    """What the actor of a replica needs to know."""

    replica_rank: int
    model: str
    """As `--model` takes it; on the host of the actor it may still have to be copied there."""
    flags: dict[str, Any]
    """Flags of the command line by their names."""
    address: str | None
    """`host:port` of a server that runs already, instead of starting one."""
    binary: str | None
    token_file: str | None
    tls: Any
    start_seconds: float
    adapter: bool
    """Whether pushes are LoRA adapters, so that a sleep must keep what they change: the checkpoint."""
    free_cache_engine: bool
    max_model_len: int | None
    prompt_length: int
    response_length: int
    sampling_defaults: dict[str, Any]
    """verl's parameters of sampling where a request has none."""
    logprobs_field: str
    seed: int | None
    """With `full_determinism`, what the samples' seeds are made from."""
    save_path: str | None
    """Where profiles go; None if none are wanted."""


def read_settings(config: Any, model_config: Any, replica_rank: int, replicas_per_node: int) -> Settings:
    """The settings of one replica.

    Args:
        config: verl's `RolloutConfig`.
        model_config: verl's `HFModelConfig`, or the `DictConfig` of one.
        replica_rank: number of the replica.
        replicas_per_node: how many share a machine, and so its memory and its cores.

    Raises:
        InvalidArgument: a setting asks for what this server cannot do; the message names it.
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
        seed=config.seed if config.full_determinism else None,
        save_path=profiler.save_path if profiler is not None and profiler.enable else None,
    )


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """`{"mem_util": 0.3, "profile": True}` as `["--mem-util", "0.3", "--profile"]`; None and False leave a flag out."""
    line = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        line += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return line


def find_binary(given: str | None) -> Path:
    """The server's executable: `given`, or the one that the environment names, or the first in `PATH`.

    Raises:
        InvalidArgument: there is none.
    """
    variable = os.environ.get(BINARY_VARIABLE)
    for where, path in ((f"{OPTIONS}.binary", given), (BINARY_VARIABLE, variable)):
        if path and not os.access(path, os.X_OK):
            raise InvalidArgument(f"{where}: no executable at {path} on this machine")
        if path:
            return Path(path)
    found = shutil.which(BINARY)
    if found is None:
        raise InvalidArgument(
            f"no {BINARY} in PATH on this machine: build it (`make server`) and say +{OPTIONS}.binary=PATH or "
            f"{BINARY_VARIABLE}=PATH, or name servers that run in +{OPTIONS}.addresses (the + is for Hydra, which else "
            "refuses names that are new to it)"
        )
    return Path(found)


def _options(config: Any) -> dict[str, Any]:
    options = (config.engine_kwargs or {}).get(NAME) or {}
    if not isinstance(options, Mapping):
        raise InvalidArgument(f"{OPTIONS}: expected names with values, got {options!r}")
    return {str(name): value for name, value in options.items() if value is not None}


def _flags(config: Any, replicas_per_node: int) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "tp": config.tensor_model_parallel_size,
        # As with one accelerator for each replica, all of a machine's take this fraction of it together.
        "mem_util": round(config.gpu_memory_utilization / replicas_per_node, 6),
        "dtype": config.dtype,
        "log": "warn",  # a line for each request is too much where each sample is one
        "max_model_len": config.max_model_len,
    }
    if replicas_per_node > 1:
        flags["threads"] = max(1, (os.cpu_count() or 1) // replicas_per_node)
    return flags


def _address(addresses: Any, options: Mapping[str, Any], replica_rank: int) -> str | None:
    if addresses is None:
        return None
    if options:
        raise InvalidArgument(f"{OPTIONS}.{next(iter(options))}: not with addresses, whose servers run already")
    if isinstance(addresses, str):
        addresses = [addresses]
    if replica_rank >= len(addresses):
        raise InvalidArgument(
            f"{OPTIONS}.addresses: {len(addresses)} for replicas 0 to {replica_rank} at least: verl makes one replica "
            "for each tensor_model_parallel_size ranks of the trainer, and each needs a server of its own"
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
