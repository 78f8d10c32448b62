"""The commands `train`, `serve`, `eval`, `env-server` and `engines`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from dora.cli.inspect import RunFolder
from dora.errors import ConfigError, FinishedRunError, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from dora.config.schema import Config
    from dora.runtime.control.requests import Gateway

ConfigFile = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="TOML file of the run.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the new run; it must not hold a run.", show_default="runs/NAME-TIME"),
]
Steps = Annotated[int | None, typer.Option(help="Training steps; short for --set run.steps=N.")]
Seed = Annotated[int | None, typer.Option(help="Seed; short for --set run.seed=N.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the configuration; repeatable."
    ),
]
ContinuedFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="CHECKPOINT",
        help="Start a new run with weights and optimizer of RUN/checkpoints/step-N; short for --set "
        "trainer.continue_from=CHECKPOINT.",
    ),
]
ResumedRun = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Resume a run that was stopped or killed.")
]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume", help="Resume the run if --out has one: the same command starts and continues it."
    ),
]
Timeout = Annotated[float, typer.Option(min=0.0, help="Maximum wait for the run's reply (s).")]


def train(
    config: ConfigFile = None,
    out: Out = None,
    steps: Steps = None,
    seed: Seed = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load and check everything, print the plan, train nothing.")
    ] = False,
    resume: ResumedRun = None,
    auto_resume: AutoResume = False,
    continue_from: ContinuedFrom = None,
) -> None:
    """Train a policy."""
    changes = _changes(overrides, steps, seed, continue_from)
    if not dry_run:
        _run(config, out, changes, resume, auto_resume=auto_resume)
    if resume is not None or config is None or auto_resume:
        raise typer.BadParameter(
            "--dry-run checks a CONFIG file: leave out --resume and --auto-resume. A resume itself checks "
            "configuration, journal, data, initial weights and checkpoints before it changes the run's folder"
        )
    from dora.cli.dry_run import dry_run as describe_run

    typer.echo(describe_run(_read_config(config, changes), out or _new_folder(config)))


def serve(
    config: ConfigFile = None,
    out: Out = None,
    steps: Steps = None,
    seed: Seed = None,
    overrides: Overrides = None,
    resume: ResumedRun = None,
    auto_resume: AutoResume = False,
    continue_from: ContinuedFrom = None,
) -> None:
    """Train a policy and serve the run over HTTP: see docs/service.md."""
    changes = _changes(overrides, steps, seed, continue_from)
    _run(config, out, changes, resume, auto_resume=auto_resume, is_served=True)


def evaluate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of a run.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Model to evaluate, such as RUN/checkpoints/step-N; short for --set model.path=DIR.",
        ),
    ] = None,
    out: Out = None,
    overrides: Overrides = None,
    auto_resume: AutoResume = False,
) -> None:
    """Evaluate a model on the held-out prompts of a run: no training."""
    settings = _read_evaluated(config, model, overrides or [])
    is_served = settings.external_source is not None
    if (begun := _begun(out, auto_resume=auto_resume)) is not None:
        _resume(begun, [], settings, auto_resume=True, is_served=is_served)
    _start(settings, out or _new_folder(config, "-eval"), is_served=is_served)


def _read_evaluated(config: Path, model: Path | None, overrides: list[str]) -> Config:
    """The configuration of an evaluation. Raises InputError; it names --model if the model is missing."""
    from dora.config import load
    from dora.trainer.checkpoint_folders import check_model_folder

    if model is None:
        return load.read_config(config, [*overrides, "run.steps=0"])
    check_model_folder("--model", model)
    try:
        return load.read_config(config, [*overrides, f"model.path={json.dumps(str(model))}", "run.steps=0"])
    except ConfigError as error:
        wrong = str(error).removeprefix(f"model.path = {str(model)!r}")
        raise ConfigError(f"--model {model}{wrong}" if wrong != str(error) else wrong) from error


def _changes(
    overrides: list[str] | None, steps: int | None, seed: int | None, continue_from: Path | None
) -> list[str]:
    checkpoint = None if continue_from is None else json.dumps(str(continue_from))
    short = {"run.steps": steps, "run.seed": seed, "trainer.continue_from": checkpoint}
    return [*(overrides or []), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def _run(
    config: Path | None,
    out: Path | None,
    changes: list[str],
    resume: Path | None,
    *,
    auto_resume: bool,
    is_served: bool = False,
) -> NoReturn:
    """Start or resume a run, and exit with its code."""
    if resume is not None and any(change.startswith("trainer.continue_from=") for change in changes):
        raise typer.BadParameter(
            "--continue-from starts a new run: leave out --resume, and give a CONFIG file"
        )
    if (config is None) == (resume is None) or (resume and out):
        raise typer.BadParameter("give either a CONFIG file, or --resume RUN without --out")
    given = None if config is None else _read_config(config, changes)
    if (begun := resume or _begun(out, auto_resume=auto_resume)) is not None:
        _resume(begun, changes, given, auto_resume=auto_resume, is_served=is_served)
    assert config is not None
    assert given is not None
    _start(given, out or _new_folder(config), is_served=is_served)


def _begun(out: Path | None, *, auto_resume: bool) -> Path | None:
    """The run that --auto-resume continues."""
    if auto_resume and out is None:
        raise typer.BadParameter("--auto-resume needs a CONFIG file and --out RUN")
    return out if auto_resume and out is not None and (out / "config.toml").is_file() else None


def _resume(
    begun: Path, changes: list[str], given: Config | None, *, auto_resume: bool, is_served: bool
) -> NoReturn:
    from dora.runtime.process.worker_process import preload_workers

    preload_workers()  # during the imports of this process
    from dora.metrics.console import print_notice
    from dora.runtime import run
    from dora.runtime.recovery.resume import resumed_config

    gateway = _gateway(resumed_config(begun, changes, given), begun) if is_served else None

    def continue_run(console: Console) -> dict[str, Any]:
        try:
            return run.resume(begun, changes, console, gateway=gateway, given=given)
        except FinishedRunError as finished:
            if not auto_resume:
                raise
            print_notice(console, str(finished).removeprefix("--resume "))
            return {"stopped": "", "was_finished": True}

    raise typer.Exit(_finish(begun, continue_run, "serve" if is_served else "train"))


def _start(config: Config, out: Path, *, is_served: bool) -> NoReturn:
    from dora.runtime.process.worker_process import preload_workers

    preload_workers()  # during the imports of this process
    from dora.runtime import run

    gateway = _gateway(config, out) if is_served else None
    command = "serve" if is_served else "train"
    raise typer.Exit(_finish(out, lambda console: run.train(config, out, console, gateway=gateway), command))


def _read_config(path: Path, changes: list[str]) -> Config:
    from dora.config import load

    config = load.read_config(path, changes)
    for notice in load.dropped_settings(path, changes, config):
        typer.echo(notice)
    return config


def _new_folder(config: Path, suffix: str = "") -> Path:
    return Path("runs") / f"{config.stem}{suffix}-{time.strftime('%Y%m%d-%H%M%S')}"


def _gateway(config: Config, run: Path) -> Gateway:
    """The HTTP service of a run. Raises InputError if a package that it needs is not installed."""
    try:
        from dora.service.server import WebGateway
    except ImportError as error:
        raise InputError(f"dora serve needs {error.name}; run pip install 'dora-rl[serve]'") from error
    return WebGateway(config.service, run)


def _finish(out: Path, execute: Callable[[Console], dict[str, Any]], command: str) -> int:
    """Execute a run, audit its files and print the summary; returns the exit code, 130 after Ctrl-C.

    `command` resumes it.
    """
    from rich.console import Console

    from dora.audit import audit
    from dora.config.load import read_run_config
    from dora.metrics.console import closing_line, print_notice, summary_table

    console = Console()
    try:
        ended = execute(console)
    except InputError:
        raise  # the folder may belong to another run
    except Exception:
        with contextlib.suppress(InputError, OSError):  # for example, no file exists because the disk is full
            audit.write_verdicts(out, audit.check(out))
        raise
    result, is_stopped = audit.check(out), ended["stopped"]
    if not (result.findings and "was_finished" in ended):  # a new seal would hide a change after the end
        audit.write_verdicts(out, result)
    console.print(summary_table(out, only_evaluates=not read_run_config(out).run.steps))
    for finding in result.findings[: audit.MAX_PRINTED]:
        print_notice(console, f"the audit found: {finding}")
    if len(result.findings) > audit.MAX_PRINTED:
        print_notice(console, f"and {len(result.findings) - audit.MAX_PRINTED:,} more: see dora audit {out}")
    closing = closing_line(out, is_stopped, _program(), command)
    print_notice(console, closing)
    return 130 if is_stopped else 1 if result.findings else 0


def _program() -> str:
    """How a shell calls this program: its path, if `dora` is not on the search path."""
    own = sys.argv[0]
    return own if Path(own).name == "dora" and shutil.which("dora") is None else "dora"


def rollout(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that dora serve has started.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="Program that runs one episode.")
    ],
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-n", min=1, max=1000, help="Commands at a time.")
    ] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Maximum time of a command (s).")] = 600.0,
    docker: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Run each command in a Docker container of this image."),
    ] = None,
) -> None:
    """Run the episodes of a served run with any command, until the run ends: see docs/service.md."""
    from dora.service.client import Address
    from dora.service.rollout import Rollout, describe

    rollout = Rollout(command, Address.of_run(run), run, concurrency, timeout, typer.echo, docker)
    typer.echo(describe(rollout.run_all()))


def env_server(
    environment: Annotated[
        str,
        typer.Argument(metavar="ENVIRONMENT", help='Environment class, "file.py:Class" or "module:Class".'),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; it belongs in a private network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free port.")] = 0,
    token_file: Annotated[
        Path, typer.Option(help="File with the auth token of the runs; created if it does not exist.")
    ] = Path("environments.token"),
    options: Annotated[
        str, typer.Option(metavar="JSON", help='Keyword arguments of the class, such as {"size": 4}.')
    ] = "{}",
) -> None:
    """Serve environments to runs on other machines, until Ctrl-C: see docs/environments.md."""
    import asyncio

    from dora.auth_token import new_auth_token, read_auth_token, write_private_file
    from dora.envs.base import load_environment
    from dora.envs.remote import serve_forever

    try:
        arguments = dict(json.loads(options))
    except (TypeError, ValueError) as error:
        raise InputError(f"--options {options}: it must be a JSON object: {error}") from error
    make = load_environment(environment, arguments, "--options")
    if not token_file.exists():
        write_private_file(token_file, new_auth_token())
    token = read_auth_token(token_file, "--token-file")

    def announce(port: int) -> None:
        typer.echo(f'serving {environment}; configure runs with env.hosts = ["{host}:{port}"]')
        typer.echo(f'and a copy of the auth token: env.token_file = "{token_file.resolve()}"')

    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve_forever(make, token, host, port, announce))
    except OSError as error:
        raise InputError(
            f"--host {host} --port {port}: cannot listen there: {os.strerror(error.errno or 0)}; change one "
            "of them; ports below 1024 need the rights of root"
        ) from error


engines = typer.Typer(help="List, add and drain the engines of a run in progress.", no_args_is_help=True)


@engines.command("list")
def list_engines(run: RunFolder, timeout: Timeout = 30.0) -> None:
    """Print the engines."""
    raise typer.Exit(_request(run, "list", None, timeout))


@engines.command("add")
def add_engine(run: RunFolder, timeout: Timeout = 180.0) -> None:
    """Start one more engine; it joins the run when it is ready."""
    raise typer.Exit(_request(run, "add", None, timeout))


@engines.command("drain")
def drain_engine(
    run: RunFolder,
    engine: Annotated[int, typer.Argument(metavar="ENGINE", help="Number of the engine.")],
    timeout: Timeout = 600.0,
) -> None:
    """Remove an engine after its requests have migrated or finished; no token is generated twice."""
    raise typer.Exit(_request(run, "drain", engine, timeout))


def _request(
    run: Path, command: Literal["list", "add", "drain"], engine: int | None, timeout_s: float
) -> int:
    """Send a request to a run and print its reply; 1 if the request failed."""
    from dora.runtime.control.admin import AdminRequest, send_request

    answer = send_request(run, AdminRequest(command, engine), timeout_s)
    typer.echo(answer.text)
    return 0 if answer.is_done else 1
