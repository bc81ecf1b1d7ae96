"""Patches ms-swift: its client, and the few methods of its trainers with facts that the client needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ._client import RolloutVLLMClient
from ._encoder import TemplateEncoder
from ._pushes import pushes_base

# Initialisations of an adapter that change the base, so that pushing only the adapter is not enough.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora-ga", "lora_ga", "mica")


def patch() -> None:
    """Patches ms-swift's modules in this process.

    Raises:
        ImportError: ms-swift is not installed, or lacks a patched method.
    """
    import swift.rlhf_trainers  # noqa: PLC0415 takes seconds and needs torch
    import swift.rlhf_trainers.vllm_client  # noqa: PLC0415
    from swift.arguments.rlhf_args import RLHFArguments  # noqa: PLC0415
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin  # noqa: PLC0415

    wrappers: list[tuple[type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
        (RLHFArguments, "__post_init__", _arguments),
        (RolloutTrainerMixin, "_prepare_vllm", _prepare),
        (RolloutTrainerMixin, "_move_adapter_to_vllm", _move_adapter),
        (RolloutTrainerMixin, "_fast_infer", _rollouts),
    ]
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in wrappers if not hasattr(owner, name)]
    if missing:
        raise ImportError(
            f"rollout_client.swift supports ms-swift 4.6; the installed version lacks {', '.join(missing)}"
        )
    for owner, name, wrapper in wrappers:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(wrapper(original)))
    swift.rlhf_trainers.VLLMClient = RolloutVLLMClient
    swift.rlhf_trainers.vllm_client.VLLMClient = RolloutVLLMClient


def _arguments(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Reads the arguments for rollouts before ms-swift resets some of them in server mode."""

    def post_init(self: Any) -> None:
        sleep_level = getattr(self, "sleep_level", 0)
        if self.use_vllm and self.vllm_mode == "colocate":
            raise ValueError("vllm_mode: colocate runs vLLM in the trainer; rollout_client.swift needs server")
        if sleep_level and self.async_generate:
            raise ValueError("sleep_level: with async_generate a rollout is always in flight; leave one of them out")
        original(self)
        _State.sleep_level = sleep_level
        client = self.vllm_client
        if isinstance(client, RolloutVLLMClient):
            init_weights = str(getattr(self, "init_weights", "true")).lower()
            client.takes_adapters = self.tuner_type == "lora" and not init_weights.startswith(_CHANGES_BASE)

    return post_init


class _State:
    """Arguments that all ranks share."""

    sleep_level = 0


def _prepare(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Makes the client encode prompts with the trainer's own template."""

    def prepare(self: Any) -> None:
        client = self.vllm_client
        if isinstance(client, RolloutVLLMClient):
            client.encoder = TemplateEncoder(self.template)
        original(self)

    return prepare


def _move_adapter(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Skips the merge and unmerge with which ms-swift collects an adapter: in bfloat16 they make the base drift."""

    def move(self: Any) -> None:
        with _unmerged(self.model):
            original(self)

    return move


@contextmanager
def _unmerged(model: Any) -> Iterator[None]:
    """Disables the model's `merge_adapter` and `unmerge_adapter` inside the block."""
    names = ("merge_adapter", "unmerge_adapter")
    for name in names:
        model.__dict__[name] = lambda *_arguments, **_options: None
    try:
        yield
    finally:
        for name in names:
            del model.__dict__[name]


def _rollouts(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Puts the servers to sleep after all turns of a step's rollouts, while the trainer trains."""

    def fast_infer(self: Any, samples: Any) -> Any:
        outputs = original(self, samples)
        if _State.sleep_level and self.vllm_mode == "server":
            client = self.vllm_client
            if isinstance(client, RolloutVLLMClient):
                client.sleep(_State.sleep_level)
            if _State.sleep_level > 1:
                # The policy is discarded: the next rollouts, even of the same step, begin with the same push.
                self._last_loaded_step = -1
                self.base_sync_done = self.base_sync_done and not pushes_base()
        return outputs

    return fast_infer
