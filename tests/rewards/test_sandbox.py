"""A program reaches nothing outside its sandbox, is killed in time, and leaves nothing to the next run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.rewards.test_code import ADD, NEEDS_LINUX

from dora.errors import RewardError
from dora.rewards.sandbox.runner import Sandbox, SandboxLimits

SOURCE = str(Path(__file__).parents[2] / "src")
TIME, SHORT = SandboxLimits(5.0), SandboxLimits(0.3)
pytestmark = NEEDS_LINUX


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


def fork_servers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "dora.rewards.sandbox" in str(each.cmdline())]


@pytest.fixture(autouse=True)
def no_process_is_left(sandbox: Sandbox) -> Iterator[None]:
    """After every test the next program works, and only fork servers are left."""
    yield
    result = sandbox.run(ADD, b"20 3", TIME)
    assert (result.output, result.is_success) == (b"23\n", True)
    assert not any(server.children(recursive=True) for server in fork_servers())


@pytest.fixture
def targets() -> Iterator[dict[str, Any]]:
    """Names and values of what an unrestricted program could reach."""
    with ExitStack() as open_, tempfile.TemporaryDirectory(prefix="dora-") as name:
        folder = Path(name)
        secret = folder / "secret"
        secret.write_text("swordfish")
        tcp, udp, unix = (
            open_.enter_context(socket.socket(*kind))
            for kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_INET, socket.SOCK_DGRAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
            )
        )
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(folder / "unix"))
        tcp.listen()
        unix.listen()
        yield {
            "TCP": tcp.getsockname(),
            "UDP": udp.getsockname(),
            "UNIX": unix.getsockname(),
            "SECRET": str(secret),
            "NEW": str(folder / "new"),
            "PARENT": os.getpid(),
        }


# Each program succeeds only if the restriction it tests is missing.
ESCAPES = {
    "tcp": "import socket\nsocket.create_connection(TCP, 1)",
    "udp": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', UDP)",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX).connect(UNIX)",
    "socket pair": "import socket\nsocket.socketpair()",
    "secret": "assert open(SECRET).read() == 'swordfish'",
    "passwords": "open('/etc/passwd')",
    "folders": "import os\nos.listdir('/')",
    "environment": "open(f'/proc/{PARENT}/environ', 'rb')",
    "memory": "open(f'/proc/{PARENT}/maps')",
    "open files": "import os\nos.listdir(f'/proc/{PARENT}/fd')",
    "own memory": "open('/proc/self/mem', 'rb')",
    "write": "open(NEW, 'w')",
    "append": "open(SECRET, 'a')",
    "truncate": "import os\nos.open(SECRET, os.O_RDONLY | os.O_TRUNC)",
    "folder": "import os\nos.mkdir(NEW)",
    "symlink": "import os\nos.symlink(SECRET, NEW)\nopen(NEW)",
    "hard link": "import os\nos.link(SECRET, NEW)",
    "rename": "import os\nos.rename(SECRET, NEW)",
    "remove": "import os\nos.remove(SECRET)",
    "rights": "import os\nos.chmod(SECRET, 0o777)",
    "times": "import os\nos.utime(SECRET)",
    "memory file": "import os\nos.memfd_create('x')",
    "fork": "import os\nif os.fork() == 0: os._exit(0)\nos.wait()",
    "daemon": "import os\nif os.fork() == 0:\n  os.setsid()\n  os.fork()\n  os._exit(0)\nos.wait()",
    "spawn": "import os\nos.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
    "shell": "import os\nassert os.system('true') == 0",
    "exec": "import os\nos.execv('/bin/true', ['true'])",
    "thread": "import threading\nt = threading.Thread(target=len, args=('',))\nt.start()\nt.join()",
    "signal": "import os\nos.kill(PARENT, 0)",
    "signal to the parent": "import os\nos.kill(os.getppid(), 0)",
    "signal by a pipe": "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, PARENT)",
    "trace": "import ctypes\nassert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0",
    "limits": "import resource as r\nr.setrlimit(r.RLIMIT_AS, r.getrlimit(r.RLIMIT_AS))",
    "folder of work": "import os\nos.chdir('/')",
}


TRY = """
try:
    exec({program!r})
except (OSError, RuntimeError, AssertionError):
    print("blocked")
    exit(1)
"""


@pytest.mark.parametrize("program", ESCAPES.values(), ids=ESCAPES)
def test_a_program_cannot_escape(sandbox: Sandbox, targets: dict[str, Any], program: str) -> None:
    names = "".join(f"{name} = {value!r}\n" for name, value in targets.items())
    text = names + TRY.format(program=program)
    result = sandbox.run(text, b"", TIME)
    assert (result.output, result.is_success) == (b"blocked\n", False)
    outside = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert outside.returncode == 0, f"fails even without a sandbox: {outside.stdout}{outside.stderr}"


def test_system_calls_that_are_not_listed_do_not_exist(sandbox: Sandbox) -> None:
    """io_uring, pidfd_open, clone3, pidfd_getfd, process_madvise and Landlock have one number everywhere."""
    program = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for number in (425, 434, 435, 438, 440, 444):\n"
        "    print(libc.syscall(number, 0, 0, 0), ctypes.get_errno() == errno.ENOSYS)\n"
    )
    assert sandbox.run(program, b"", TIME).output == b"-1 True\n" * 6


EXHAUSTING = {
    "memory": "hoard = [bytearray(1 << 24) for _ in range(10**6)]",
    "one block": "bytearray(1 << 45)",
    "processes": "import os\nwhile True: os.fork()",
    "time": "while True: pass",
    "sleep": "import time\ntime.sleep(100)",
    "output": "while True: print('x' * 1000)",
    "ignored signal": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    "closed files": "import os\nos.closerange(0, 64)\nwhile True: pass",
    "recursion": "f = lambda: f()\nf()",
    "nesting": "eval('(' * 10**5)",
    "disk": "n = 0\nwhile True:\n  n += 1\n  open(f'/tmp/{n}', 'w').write('x' * 10**6)",
}


@pytest.mark.parametrize("program", EXHAUSTING.values(), ids=EXHAUSTING)
def test_a_program_that_exhausts_a_resource_is_killed(sandbox: Sandbox, program: str) -> None:
    result = sandbox.run(program, b"", SHORT)
    assert not result.is_success
    assert len(result.output) <= SHORT.output_bytes


def test_a_sandbox_has_no_environment_arguments_or_open_files(sandbox: Sandbox) -> None:
    program = (
        "import os, sys\n"
        "print(dict(os.environ), sys.argv, os.getcwd(), [p for p in sys.path if 'dora' in p])\n"
        "for fd in range(3, 64):\n"
        "    try: print(fd, os.fstat(fd))\n"
        "    except OSError: pass\n"
    )
    assert sandbox.run(program, b"", TIME).output == b"{} ['program'] / []\n"


def test_a_program_has_the_standard_library(sandbox: Sandbox) -> None:
    program = (
        "import csv, dataclasses, datetime, decimal, enum, fractions, hashlib, random, statistics, zlib\n"
        "print(hashlib.sha256(b'').hexdigest()[:4], random.random() < 1, datetime.date(2000, 1, 1))\n"
        "print(decimal.Decimal('0.1') * 3, datetime.datetime.now().tzinfo, statistics.mean([1, 2]))\n"
    )
    assert sandbox.run(program, b"", TIME).output == b"e3b0 True 2000-01-01\n0.3 None 1.5\n"


# What programs of contests print with.
FAST_OUTPUT = """
import io, os, sys

class FastOutput(io.IOBase):
    def __init__(self):
        self.parts = []
        self.write = self.parts.append

    def flush(self):
        os.write(1, "".join(self.parts).encode())
        self.parts.clear()

sys.stdout = FastOutput()
print(9)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint(9)",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint(9)",
        "import sys\nsys.stdout.reconfigure(encoding='utf-8')\nprint(9)",
        "import sys\nprint(9)\nsys.stdout.close()",
        "import sys\nprint(9)\nsys.stdout = sys.stderr",
        "import sys\nsys.stdout = open(1, 'w')\nprint(9)",
        "file = open(1, 'w')\nfile.write('9\\n')",
        FAST_OUTPUT,
        "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\nprint(int(input()) ** 2)",
    ],
)
def test_standard_streams_are_those_of_an_interpreter(sandbox: Sandbox, program: str) -> None:
    result = sandbox.run(program, b"3\n", TIME)
    expected = subprocess.run([sys.executable, "-c", program], input=b"3\n", capture_output=True)
    assert (result.output, result.is_success) == (expected.stdout, expected.returncode == 0) == (b"9\n", True)


def test_each_run_starts_fresh(sandbox: Sandbox) -> None:
    assert sandbox.run("import builtins, json\nbuiltins.print = json.loads = None", b"", TIME).is_success
    assert sandbox.run("import json\nprint(json.loads('[1]'))", b"", TIME).output == b"[1]\n"


def script(text: str) -> subprocess.Popen[str]:
    """A Python process that can import the sandbox."""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def test_a_killed_fork_server_is_replaced() -> None:
    before = fork_servers()
    sandbox = Sandbox()
    (server,) = set(fork_servers()) - set(before)
    server.kill()
    with pytest.raises(RewardError, match="the fork server of the sandbox is lost"):
        sandbox.run(ADD, b"1 2", TIME)
    assert sandbox.run(ADD, b"1 2", TIME).output == b"3\n"


def test_a_sandbox_is_killed_with_its_parent() -> None:
    loop = "Sandbox().run('print(1, flush=True)\\nwhile True: pass', b'', SandboxLimits(60.0))"
    with script(
        f"from dora.rewards.sandbox.runner import Sandbox, SandboxLimits\nprint('begun', flush=True)\n{loop}"
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        process = psutil.Process(parent.pid)
        family: list[psutil.Process] = []
        while len(family) < 2:  # fork server and sandbox
            assert parent.poll() is None
            family = process.children(recursive=True)
        parent.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=10)
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


# Like some containers: Landlock's first system call fails in this process and its children.
WITHOUT_LANDLOCK = """
import ctypes, struct
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, ctypes.addressof(program), 0, 0) == 0
from dora.errors import RewardError
from dora.rewards.sandbox.runner import Sandbox, SandboxLimits
try:
    Sandbox()
except RewardError as error:
    print(error)
print(Sandbox(is_restricted=False).run("print(7)", b"", SandboxLimits(5.0)).output)
"""


def test_programs_that_cannot_be_confined_run_only_on_request() -> None:
    with script(WITHOUT_LANDLOCK) as process:
        output = process.communicate()[0]
    assert output.startswith(
        "programs cannot be confined on this machine (Landlock: Operation not permitted): "
    )
    assert "set confined = false" in output
    assert output.endswith("\nb'7\\n'\n")


# Below one folder files can be read and not truncated; elsewhere neither.
RESTRICTED = """
import os, sys
from dora.rewards.sandbox.fork_server import Restrictions
readable, other = sys.stdin.readline().split()
restrictions = Restrictions([readable])
if os.getuid() == 0 and {as_user}:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
restrictions.apply()
for path, flags in [(readable, os.O_RDONLY), (readable, os.O_RDONLY | os.O_TRUNC), (other, os.O_RDONLY)]:
    try:
        print(os.read(os.open(path + "/file", flags), 9))
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.parametrize("as_user", [False, True], ids=["as it is", "as a user"])
def test_root_is_restricted_like_other_users(as_user: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="dora-") as name:
        folders = [Path(name) / place for place in ("readable", "other")]
        for folder in (Path(name), *folders):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        for folder in folders:
            (folder / "file").write_text("content")
        done = subprocess.run(
            [sys.executable, "-c", RESTRICTED.format(as_user=as_user)],
            input=" ".join(map(str, folders)) + "\n",
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        assert (folders[0] / "file").read_text() == "content"
    refused = "Permission denied"
    assert (done.stdout.splitlines(), done.stderr) == (["b'content'", refused, refused], "")
