"""What runs in each process of a training: ms-swift's own `rlhf` script, after `install()`.

ms-swift's command line starts this file as a script, alone or through torchrun.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def run() -> None:
    """Installs our client and runs ms-swift's script."""
    from rollout_client.swift import install  # noqa: PLC0415 as a script, this module has no package

    install()
    runpy.run_module("swift.cli.rlhf", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Of a script, the first entry is its own directory, whose modules are those of the package.
    if sys.path and Path(sys.path[0]) == Path(__file__).parent:
        del sys.path[0]
    run()
