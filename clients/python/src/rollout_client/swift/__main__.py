"""`python -m rollout_client.swift rlhf …`: `swift rlhf …` whose rollouts come from rollout-servers."""

from __future__ import annotations

import sys

from . import _worker

USAGE = """usage: python -m rollout_client.swift rlhf [CONFIG.yaml] [arguments of `swift rlhf`]

`swift rlhf` of ms-swift, whose rollouts come from rollout-servers:
  --use_vllm true --vllm_mode server    rollouts of a server
  --vllm_server_host HOST [HOST ...]    its host; several servers share the work
  --vllm_server_port PORT [PORT ...]    its gRPC port, 50051 unless the server was given another

Environment: NPROC_PER_NODE and the other variables of ms-swift. ROLLOUT_TOKEN_FILE, ROLLOUT_TLS_CA, ROLLOUT_TLS_CERT,
ROLLOUT_TLS_KEY: files for servers with tokens and TLS. ROLLOUT_PUSH_BASE=1 pushes the base below an adapter too."""


def main() -> None:
    """Runs ms-swift's `rlhf`: in this process, or, as ms-swift does it, through torchrun with one for each rank."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):  # noqa: PLR2004 the subcommand
        print(USAGE)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    if sys.argv[1] != "rlhf":
        sys.exit(f"rollout_client.swift: only rlhf makes rollouts; run `swift {sys.argv[1]}` for that")
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
