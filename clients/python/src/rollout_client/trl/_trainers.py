"""TRL's trainers with `RolloutGeneration` instead of vLLM."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trl
import trl.generation.vllm_generation as trl_generation

from ..client import RolloutClient
from ._generation import RolloutGeneration

Trainer = TypeVar("Trainer", bound=type)

_NAME = "VLLMGeneration"
_SWAPPED = threading.Lock()
"""Held while a trainer is created, because the replaced name belongs to TRL's modules."""


def use_rollout_server(trainer: Trainer) -> Trainer:
    """Returns a subclass of a trainer that generates with rollout-server instead of vLLM.

    Args:
        trainer: a class of TRL that has `use_vllm` (GRPO, RLOO, and others that generate through `VLLMGeneration`),
            or a subclass of one.

    Returns:
        The class. Its constructor also takes `client=RolloutClient(...)`, for a server with tokens or TLS.
    """

    class OnRolloutServer(trainer):
        def __init__(self, *args: Any, client: RolloutClient | None = None, **options: Any) -> None:
            with _generation_of(trainer, functools.partial(RolloutGeneration, client=client)):
                super().__init__(*args, **options)
            if not isinstance(getattr(self, "vllm_generation", None), RolloutGeneration):
                raise ValueError(
                    f"{trainer.__name__} on rollout-server: set use_vllm=True, vllm_mode='server' and "
                    f"vllm_server_base_url in its {type(self.args).__name__}"
                )

        def _generate(self, *args: Any, **options: Any) -> Any:
            with self.vllm_generation.rollout():
                return super()._generate(*args, **options)

    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(OnRolloutServer, name, getattr(trainer, name))
    return OnRolloutServer


@contextmanager
def _generation_of(trainer: type, make: Callable[..., RolloutGeneration]) -> Iterator[None]:
    """Replaces `VLLMGeneration` in the modules of a trainer and its bases."""
    modules = {sys.modules[base.__module__] for base in trainer.__mro__ if base.__module__ in sys.modules}
    modules = {module for module in modules if hasattr(module, _NAME)} | {trl_generation}
    with _SWAPPED:
        kept = {module: getattr(module, _NAME) for module in modules}
        try:
            for module in modules:
                setattr(module, _NAME, make)
            yield
        finally:
            for module, original in kept.items():
                setattr(module, _NAME, original)


GRPOTrainer = use_rollout_server(trl.GRPOTrainer)
RLOOTrainer = use_rollout_server(trl.RLOOTrainer)
