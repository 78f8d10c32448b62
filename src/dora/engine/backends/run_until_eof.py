"""Run a command until it exits or standard input closes, then end its whole process group.

    python run_until_eof.py COMMAND ...

The parent starts this script in a new session and holds the other end of its standard input. If the parent
exits, even by SIGKILL, the command ends too. The script needs the standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

POLL_INTERVAL_S = 0.2
GRACE_S = 5.0  # between SIGTERM and SIGKILL


def main() -> None:
    """Does not return: this process is in the group that it kills."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after the child has started, which must not inherit it
    while child.poll() is None:
        if select.select([0], [], [], POLL_INTERVAL_S)[0] and not os.read(0, 4096):
            os.killpg(0, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
