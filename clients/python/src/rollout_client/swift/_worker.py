"""Runs ms-swift's own `rlhf` script after `install()`, in each process of a training.

ms-swift's command line starts this file as a script, alone or through torchrun.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def run() -> None:
    """Installs the client and runs ms-swift's script."""
    from rollout_client.swift import install  # noqa: PLC0415 as a script, this module has no package

    install()
    runpy.run_module("swift.cli.rlhf", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # A script's first path entry is its own directory, whose modules would shadow others.
    if sys.path and Path(sys.path[0]) == Path(__file__).parent:
        del sys.path[0]
    run()
