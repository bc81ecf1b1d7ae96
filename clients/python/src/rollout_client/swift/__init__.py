"""ms-swift's trainers with rollout-server: `python -m rollout_client.swift rlhf …` instead of `swift rlhf …`.

The arguments are ms-swift's own: `--use_vllm true --vllm_mode server --vllm_server_host HOST --vllm_server_port PORT`,
with the server's gRPC port. vLLM does not need to be installed. A script that creates its own trainer calls `install()`
before it imports anything of ms-swift.
"""

from __future__ import annotations

from ._client import RolloutVLLMClient

__all__ = ["RolloutVLLMClient", "install"]


def install() -> None:
    """Replaces ms-swift's own client with `RolloutVLLMClient` in this process.

    Raises:
        ImportError: ms-swift is not installed, or its trainers lack a method that those of 4.6 have.
    """
    from ._trainer import patch  # noqa: PLC0415 needs ms-swift and torch, unlike the client
    from ._vllm_stub import install_stub  # noqa: PLC0415

    install_stub()
    patch()
