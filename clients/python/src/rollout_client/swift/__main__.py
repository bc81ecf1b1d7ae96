"""`python -m rollout_client.swift rlhf …`: `swift rlhf …` with rollouts from rollout-server."""

from __future__ import annotations

import sys

from . import _worker

USAGE = """usage: python -m rollout_client.swift rlhf [CONFIG.yaml] [arguments of `swift rlhf`]

Runs ms-swift's `swift rlhf` with rollouts from rollout-server:
  --use_vllm true --vllm_mode server    sample from a server
  --vllm_server_host HOST [HOST ...]    the server's host; prompts are spread over several servers
  --vllm_server_port PORT [PORT ...]    the server's gRPC port, 50051 by default

Environment: NPROC_PER_NODE and the other variables of ms-swift. ROLLOUT_TOKEN_FILE, ROLLOUT_TLS_CA, ROLLOUT_TLS_CERT,
ROLLOUT_TLS_KEY: files for servers with tokens and TLS. ROLLOUT_PUSH_BASE=1: push the base of an adapter too."""


def main() -> None:
    """Runs ms-swift's `rlhf` in this process or, like ms-swift, through torchrun with one process for each rank."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):  # noqa: PLR2004 the subcommand
        print(USAGE)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    if sys.argv[1] != "rlhf":
        sys.exit(f"rollout_client.swift: only the subcommand rlhf uses rollouts; run `swift {sys.argv[1]}` instead")
    try:
        from swift.cli.main import cli_main, parse_yaml_args, use_torchrun  # noqa: PLC0415 takes seconds
    except ImportError as error:
        sys.exit(f"rollout_client.swift: {error}; install ms-swift with pip install 'rollout-client[swift]'")
    if use_torchrun():
        cli_main({"rlhf": _worker.__name__})
        return
    del sys.argv[1]
    arguments = sys.argv[1:]
    parse_yaml_args(arguments)
    sys.argv[1:] = arguments
    _worker.run()


if __name__ == "__main__":
    main()
