"""Run a command until it exits or standard input closes, then end its whole process group.

The command gets a folder for temporary files, which is removed: inference servers leave sockets there.

    python run_until_eof.py COMMAND ...

The parent starts this script in a new session and holds the other end of its standard input. If the parent
exits, even by SIGKILL, the command ends too. The script needs the standard library only.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

POLL_INTERVAL_S = 0.2
GRACE_S = 5.0  # between SIGTERM and SIGKILL


def main() -> None:
    """Does not return: this process is in the group that it kills."""
    folder = tempfile.mkdtemp(prefix="dora")
    kept = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")  # by default in TMPDIR, too
    environment = {"TORCHINDUCTOR_CACHE_DIR": kept, **os.environ, "TMPDIR": folder}
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, env=environment)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after the child has started, which must not inherit it
    while child.poll() is None:
        if select.select([0], [], [], POLL_INTERVAL_S)[0] and not os.read(0, 4096):
            os.killpg(0, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            break
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
