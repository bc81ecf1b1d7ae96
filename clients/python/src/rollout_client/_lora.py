"""The tensors and configuration of PEFT adapters in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from ._model import has_fsdp_units, is_model, plain_names, unwrapped
from .errors import InvalidArgument


def adapter_parts(adapter: Any, config: Any) -> tuple[Mapping[str, Any], str]:
    """The tensors of an adapter by PEFT's names, and the text of its `adapter_config.json`.

    Args:
        adapter: a PEFT model with an active adapter, which may be wrapped; a mapping from names to tensors; or None for
            no adapter.
        config: with a mapping: JSON text, a dict, or a `LoraConfig`.

    Raises:
        InvalidArgument: the arguments have other types, or do not belong together.
    """
    if is_model(adapter):
        if config is not None:
            raise InvalidArgument("config: a PEFT model brings its own; pass None")
        return _of_peft_model(unwrapped(adapter))
    if adapter is None:
        adapter = {}
    if not isinstance(adapter, Mapping):
        raise InvalidArgument(f"adapter: expected a PEFT model or a mapping, got {type(adapter).__name__}")
    if adapter and config is None:
        raise InvalidArgument("config: needed with the tensors of an adapter; pass the LoraConfig or its JSON")
    return plain_names(adapter), "" if config is None else config_json(config)


def config_json(config: Any) -> str:
    """The JSON text of a `LoraConfig` or a dict; a string is returned unchanged."""
    if isinstance(config, str):
        return config
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise InvalidArgument(f"config: expected JSON, a dict or a LoraConfig, got {type(config).__name__}")
    try:
        return json.dumps(dict(config), default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"config: {error}") from None


def _plain(value: Any) -> Any:
    """Values of a `LoraConfig` that JSON lacks: sets, enums and nested configurations."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "to_dict"):
        return value.to_dict()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _of_peft_model(model: Any) -> tuple[Mapping[str, Any], str]:
    if not hasattr(model, "peft_config"):
        raise InvalidArgument(f"adapter: {type(model).__name__} is not a PEFT model; push_full pushes whole models")
    name = model.active_adapter
    if not isinstance(name, str) or name not in model.peft_config:
        raise InvalidArgument(f"adapter: expected one active adapter, the model has {name!r}")
    try:
        from peft import get_peft_model_state_dict  # noqa: PLC0415 installed wherever such a model exists
    except ImportError:
        raise InvalidArgument(
            "adapter: PEFT cannot be imported here; pass a mapping of its tensors and the config"
        ) from None
    # Inside FSDP's `summon_full_params` parameters are whole, but `state_dict` cannot be called.
    given = {"state_dict": dict(model.named_parameters())} if has_fsdp_units(model) else {}
    # The server has the base's embeddings, which are not trained.
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False, **given)
    return plain_names(tensors), config_json(model.peft_config[name])
