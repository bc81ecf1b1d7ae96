"""Unwraps models of trainers. No library is imported: torch is there if a model is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .errors import InvalidArgument

# Classes that have the model in an attribute. Other wrappers change the model in place (FSDP2, accelerate's mixed
# precision) or wrap modules inside it.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
}
# Parts that wrapped modules add to the names of their parameters.
_SEGMENTS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Model(Protocol):
    """A torch module, or an object that behaves like one."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Its parameters by name."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its parameters and buffers by name."""


def is_model(value: object) -> bool:
    """Whether this is a torch module, or behaves like one."""
    return hasattr(value, "state_dict")


def unwrapped(model: Any) -> Any:
    """The model inside its wrappers.

    Raises:
        InvalidArgument: its parameters are sharded, as under FSDP1 outside of `summon_full_params`.
    """
    if any(unit.training_state.name != "SUMMON_FULL_PARAMS" for unit in _fsdp_units(model)):
        raise InvalidArgument(
            "model: is sharded by FSDP; push inside `with FSDP.summon_full_params(model, writeback=False)`, which "
            "every rank must enter, and on one of them"
        )
    while (attribute := _wrapper(model)) is not None:
        model = getattr(model, attribute)
    return model


def has_fsdp_units(model: Any) -> bool:
    """Whether FSDP1 wraps modules of the model, which makes `state_dict` a collective call."""
    return bool(_fsdp_units(model))


def model_parameters(model: Any) -> dict[str, Any]:
    """The parameters of a model by the checkpoint's names.

    Raises:
        InvalidArgument: as `unwrapped`; or it is a PEFT model, whose parameters are not those of the checkpoint.
    """
    model = unwrapped(model)
    if hasattr(model, "peft_config"):
        raise InvalidArgument(
            "named_tensors: a PEFT model; push its adapter with push_lora, or the state dict of merge_and_unload()"
        )
    return plain_names(dict(model.named_parameters()))


def plain_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors by their names without wrappers."""
    return {plain_name(name): tensor for name, tensor in tensors.items()}


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    segments = [segment for segment in name.split(".") if segment not in _SEGMENTS]
    while segments[:1] == ["module"]:
        del segments[0]
    return ".".join(segments)


def _wrapper(model: Any) -> str | None:
    """The attribute in which a wrapper has the model; None for any other object."""
    names = (_WRAPPERS.get(cls.__name__) for cls in type(model).__mro__)
    return next((name for name in names if name is not None), None)


def _fsdp_units(model: Any) -> list[Any]:
    return [module for module in model.modules() if _is_fsdp(module)] if hasattr(model, "modules") else []


def _is_fsdp(module: Any) -> bool:
    return any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__)
