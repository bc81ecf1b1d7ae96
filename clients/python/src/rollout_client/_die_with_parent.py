"""Becomes another program that the kernel kills when the thread which started it ends: `python FILE PARENT COMMAND…`.

A process that is killed has no time to end its server, which would keep the device's memory. Only Linux has this.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
