"""One run of the demo's task with DORA or TRL, for `peers.py`: times of the steps, and their samples.

All runs start from the same model, have the same number of steps with the same batch size and learning rate
schedule, and save models at the same steps.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from finished_run import audited_summary, metrics_of, train_command
from peers_watch import ResourceMonitor

import dora
from dora.config import load
from dora.config.schema import Config
from dora.engine.backends.vllm import IN_PROCESS

SERVER_PLUGINS = Path(dora.__file__).parent / "engine" / "backends" / "server_plugins"
EXAMPLE = Path(__file__).parent.parent / "examples" / "gcd.toml"
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
SERVER = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else it compiles C++ for a part of the sampler
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, over ten times the need
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for the calls that load weights
}
SERVER_OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "256"),
    *("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "32768"),
    *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "peers_vllm.FileWeights"),
    *("--disable-log-stats", "--disable-uvicorn-access-log", "--host", "127.0.0.1"),
    *IN_PROCESS,  # as for DORA's own servers
)
START_S, STEP_S = 300.0, 30.0  # time limits of a start and, on average, of a step


class NotMeasured(Exception):
    """A system could not be measured; the message is the reason."""


@dataclass(frozen=True)
class Task:
    """The number of steps of all systems, and how often a model is saved."""

    num_steps: int
    save_every: int
    seed: int

    @property
    def changes(self) -> list[str]:
        """Overrides of the demo's configuration."""
        return [
            f"run.steps={self.num_steps}",
            f"run.seed={self.seed}",
            f"trainer.warmup_steps={self.num_steps // 10}",
            f"trainer.save_freq={self.save_every}",
            "trainer.keep_last=1000",
            "eval.num_prompts=0",
        ]

    @property
    def config(self) -> Config:
        return load.read_config(EXAMPLE, self.changes)


@dataclass(frozen=True)
class Run:
    """Measurements of one run; times are of time.time()."""

    began: float
    ends: list[float]
    rewards: list[float]
    generated_tokens: float  # per answer, mean over the steps
    trained_tokens: float  # likewise, of trained answers
    staleness: tuple[float, float]  # mean and max
    num_discarded: int
    models: dict[int, Path]  # by number of steps
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Peers:
    """The Python environments of the other systems."""

    trl: Path | None
    vllm: Path | None
    server: list[str] = field(default_factory=list)  # URL and process id of a running vLLM server

    @staticmethod
    def add_options(parser: ArgumentParser) -> None:
        """Add the options that name the interpreters."""
        here = Path(sys.executable) if find_spec("trl") else None
        help_of_trl = "an interpreter that can import trl; by default this one, if it has the extra `bench`"
        parser.add_argument("--trl-python", type=Path, metavar="PYTHON", default=here, help=help_of_trl)
        parser.add_argument(
            "--vllm-python", type=Path, metavar="PYTHON", help="an interpreter that can import vllm"
        )

    def python(self, name: str) -> Path:
        found: Path | None = getattr(self, name)
        if found is None:
            raise NotMeasured(f"--{name}-python is not given")
        if not found.exists():
            raise NotMeasured(f"--{name}-python {found} does not exist")
        return found


def run_dora(task: Task, out: Path, max_staleness: int, changes: Sequence[str] = ()) -> Run:
    """`dora train` with the demo's settings and these overrides."""
    out.mkdir(parents=True)
    overrides = (*task.changes, f"orchestrator.max_staleness={max_staleness}", *changes)
    command = train_command(EXAMPLE, out / "run", overrides)
    with _started(command, out / "stderr.txt", {}) as process, ResourceMonitor([process.pid]) as monitor:
        _wait(process, out / "stderr.txt", START_S + STEP_S * task.num_steps)
    return _dora_run(out / "run", monitor, task.config.sampling.group_size)


def _dora_run(out: Path, monitor: ResourceMonitor, group_size: int) -> Run:
    summary, lines = audited_summary(out), metrics_of(out)
    # The last line of the metrics is written at the end of the last step.
    zero = (out / "metrics.jsonl").stat().st_mtime - lines[-1]["t_s"]
    with (out / "journal.jsonl").open(encoding="utf-8") as journal:
        first = next(record for record in map(json.loads, journal) if record.get("kind") == "admit")
    began, ends = zero + first["t_s"], [zero + line["t_s"] for line in lines]
    lengths = [line["response_length/mean"] for line in lines]
    untrained = summary["filtered_groups"] + summary["failed_groups"] + summary["pending_groups"]
    return Run(
        began=began,
        ends=ends,
        rewards=[line["reward/mean"] for line in lines],
        generated_tokens=fmean(lengths),  # every answer is trained
        trained_tokens=fmean(lengths),
        staleness=(summary["staleness_mean"], summary["staleness_max"]),
        num_discarded=untrained * group_size,
        models=_models(out / "checkpoints"),
        cpu_s=monitor.cpu_s(began, ends[-1]),
        peak_bytes=monitor.peak_bytes(began, ends[-1]),
    )


def run_trl(task: Task, out: Path, peers: Peers, kind: str, changes: dict[str, Any]) -> Run:
    """TRL's sync or async trainer; see `peers_child.py`. Raises NotMeasured."""
    config, python = task.config, peers.python("trl")
    given = {
        "model": str(config.model.path),
        "batch": config.trainer.batch_size * config.sampling.group_size,
        "group": config.sampling.group_size,
        "max_tokens": config.sampling.max_response_length,
        "lr": config.trainer.lr,
        "warmup_steps": config.trainer.warmup_steps,
        "steps": task.num_steps,
        "save_every": task.save_every,
        "seed": task.seed,
        **changes,
    }
    pids = []
    if kind != "sync":
        given["url"], pid = peers.server
        pids = [int(pid)]
    out.mkdir(parents=True)
    child = str(Path(__file__).with_name("peers_child.py"))
    command = [str(python), child, kind, str(out), json.dumps(given)]
    source = str(Path(dora.__file__).parent.parent)
    own = QUIET | {"PYTHONPATH": source, "OMP_NUM_THREADS": str(given["threads"])}
    with (
        _started(command, out / "stderr.txt", own) as process,
        ResourceMonitor([process.pid, *pids]) as monitor,
    ):
        _wait(process, out / "stderr.txt", START_S + STEP_S * task.num_steps)
    return _trl_run(out, monitor)


def _trl_run(out: Path, monitor: ResourceMonitor) -> Run:
    head, *lines = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    began, ends = head["began"], [line["t"] for line in lines]
    dropped = ("sample/dropped_stale_total", "batch/dropped_oversize_total")
    generated = [line["completions/mean_length"] for line in lines if "completions/mean_length" in line]
    trained = [line.get("sample/trained_tokens_mean", line.get("completions/mean_length")) for line in lines]
    return Run(
        began=began,
        ends=ends,
        rewards=[line["reward"] for line in lines],
        generated_tokens=fmean(generated),
        trained_tokens=fmean(trained),
        staleness=(
            fmean(line.get("sample/staleness_mean", 0.0) for line in lines),
            max(line.get("sample/staleness_max", 0.0) for line in lines),
        ),
        num_discarded=round(sum(line.get(name, 0.0) for line in lines for name in dropped)),
        models=_models(out),
        cpu_s=monitor.cpu_s(began, ends[-1]),
        peak_bytes=monitor.peak_bytes(began, ends[-1]),
    )


def _models(folder: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*")}


@contextmanager
def vllm_server(peers: Peers, folder: Path, threads: int) -> Iterator[Peers]:
    """A vLLM server of the demo's model that loads weights from files. Raises NotMeasured."""
    python, model = peers.python("vllm"), Task(1, 1, 0).config.model.path
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("peers_vllm.py"), folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    plugins = os.pathsep.join((str(folder), str(SERVER_PLUGINS)))
    own = SERVER | {"PYTHONPATH": plugins, "OMP_NUM_THREADS": str(threads)}
    with _started([*command, *SERVER_OPTIONS, "--port", port], folder / "stderr.txt", own) as process:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotMeasured(f"vLLM's server did not start: {_last_line(folder / 'stderr.txt')}")
            time.sleep(0.5)
        yield Peers(peers.trl, peers.vllm, [url, str(process.pid)])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _started(command: list[str], log: Path, own: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, by default with one thread. On exit it ends with all processes that it has started."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | own
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=out, env=environment, process_group=0
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process, so that a server can end its own processes, then kill its group."""
    process.terminate()
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


def _wait(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"not finished after {limit_s:.0f} s") from None
    if code:
        raise NotMeasured(f"ended with code {code}: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
