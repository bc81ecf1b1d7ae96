"""ms-swift's trainers on rollout-servers: `python -m rollout_client.swift rlhf …` instead of `swift rlhf …`.

The arguments are ms-swift's own: `--use_vllm true --vllm_mode server --vllm_server_host HOST --vllm_server_port PORT`,
where the port is the server's gRPC port. vLLM need not be installed. A script that makes its trainer by itself calls
`install()` before it imports anything of ms-swift.
"""

from __future__ import annotations

from ._client import RolloutVLLMClient

__all__ = ["RolloutVLLMClient", "install"]


def install() -> None:
    """Puts `RolloutVLLMClient` in the place of ms-swift's own client, in this process.

    Raises:
        ImportError: ms-swift is not installed, or is one whose trainers have other parts than those of 4.6.
    """
    from ._trainer import patch  # noqa: PLC0415 needs ms-swift and torch, which the client alone does not
    from ._vllm_stub import install_stub  # noqa: PLC0415

    install_stub()
    patch()
