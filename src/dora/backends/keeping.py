"""Run a command until standard input closes, or it ends; then its whole process group ends.

    python keeping.py COMMAND ...

Who starts this in a session of its own and holds the other end of its standard input takes the command
with it, however it dies. It needs the standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

LOOK_S = 0.2
GRACE_S = 5.0  # to end by itself, before it is killed


def main() -> None:
    """Does not return: this process is of the group that ends."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # not inherited by what was started before
    while child.poll() is None:
        if select.select([0], [], [], LOOK_S)[0] and not os.read(0, 4096):
            os.killpg(0, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
