"""The command line: every command is a thin call into the part that does the work.

Exit codes: 0 ok, 1 a failed run or a failed check, 2 bad input, 130 stopped by Ctrl-C.
What is heavy to import is imported inside its command, so that help answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dora import cli_reading
from dora.cli_reading import RunFolder
from dora.cli_simulate import plan, simulate
from dora.errors import InputError, RunError

if TYPE_CHECKING:
    from rich.console import Console

    from dora.config import Config as Settings
    from dora.runtime.calls import Door

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(simulate, name="simulate")
engines = typer.Typer(help="See, add and remove the engines of a run that goes.", no_args_is_help=True)
app.add_typer(engines, name="engines")

Timeout = Annotated[float, typer.Option(min=0.0, help="How long to wait for the answer (s).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
]


Config = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file that describes the run.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder the run writes to; it must not hold a run yet.", show_default="runs/NAME-TIME"),
]
Steps = Annotated[int | None, typer.Option(help="Training steps; short for --set run.steps=N.")]
Seed = Annotated[int | None, typer.Option(help="Seed; short for --set run.seed=N.")]
Resumed = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped or killed.")
]


@app.command()
def train(
    config: Config = None,
    out: Out = None,
    steps: Steps = None,
    seed: Seed = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    resume: Resumed = None,
) -> None:
    """Train a policy."""
    if resume and dry_run:
        raise typer.BadParameter("--dry-run checks a CONFIG file, not a run")
    _begin(config, out, _changes(overrides, steps, seed), resume, is_dry=dry_run)


@app.command()
def serve(
    config: Config = None,
    out: Out = None,
    steps: Steps = None,
    seed: Seed = None,
    overrides: Overrides = None,
    resume: Resumed = None,
) -> None:
    """Train a policy, and answer over HTTP meanwhile: see docs/service.md."""
    _begin(config, out, _changes(overrides, steps, seed), resume, is_served=True)


@app.command()
def environments(
    name: Annotated[str, typer.Argument(metavar="ENVIRONMENT", help='"file.py:Class" or "module:Class".')],
    host: Annotated[str, typer.Option(help="Address to listen at, of a private network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")] = 0,
    token_file: Annotated[
        Path, typer.Option(help="File with the token that runs must show; made if it is not there.")
    ] = Path("environments.token"),
) -> None:
    """Play environments for runs elsewhere, until Ctrl-C: see docs/environments.md."""
    import asyncio

    from dora.envs.base import load_environment
    from dora.envs.remote import serve_forever
    from dora.tokens import new_token, read_token, write_private

    make = load_environment(name)
    if not token_file.exists():
        write_private(token_file, new_token())
    token = read_token(token_file, "--token-file")

    def announce(port: int) -> None:
        typer.echo(f'{name} is played here: env.hosts = ["{host}:{port}"]')
        typer.echo(f'for who shows its token: env.token_file = "{token_file.resolve()}", or a copy')

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_forever(make, token, host, port, announce))


def _changes(overrides: list[str] | None, steps: int | None, seed: int | None) -> list[str]:
    short = {"run.steps": steps, "run.seed": seed}
    return [*(overrides or []), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def _begin(
    config: Path | None,
    out: Path | None,
    changes: list[str],
    resume: Path | None,
    is_dry: bool = False,
    is_served: bool = False,
) -> None:
    """Check what was given, and run. Always ends by typer.Exit or an error, but for a dry run."""
    from dora import settings
    from dora.runtime.process import warm_up

    if (resume is None) == (config is None) or (resume and out):
        raise typer.BadParameter("give a CONFIG file, or --resume RUN with no more than --set")
    resolved = None if config is None else settings.read(config, changes)
    for sentence in settings.forgotten(config, changes, resolved) if config and resolved else ():
        typer.echo(sentence)
    if not is_dry:
        warm_up()  # while this process does its own imports
    from dora.runtime import run

    if resume is not None:
        from dora.runtime.resuming import resumed_config

        door = _door(resumed_config(resume, changes), resume) if is_served else None
        raise typer.Exit(_train(resume, lambda console: run.resume(resume, changes, console, door=door)))
    assert config is not None
    assert resolved is not None
    folder = out or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if is_dry:
        from dora.runtime.dry_run import check

        typer.echo(check(resolved, folder))
        return
    door = _door(resolved, folder) if is_served else None
    raise typer.Exit(_train(folder, lambda console: run.train(resolved, folder, console, door=door)))


def _door(config: Settings, run: Path) -> Door:
    """The service of a run. Raises InputError where what it needs is not installed."""
    try:
        from dora.service.server import WebDoor
    except ImportError as error:
        raise InputError(f"dora serve needs {error.name}; run pip install 'dora-rl[serve]'") from error
    return WebDoor(config.service, run)


def _train(out: Path, live: Callable[[Console], dict[str, Any]]) -> int:
    """Run, audit what the run left behind, and print the table. 130 after Ctrl-C, as shells have it."""
    from rich.console import Console

    from dora.observe import audit, summary

    console = Console()
    try:
        stopped = live(console)["stopped"]
    except InputError:
        raise  # the folder may hold somebody else's run
    except Exception:
        with contextlib.suppress(InputError, OSError):  # a full disk may have kept us from writing anything
            summary.add_verdicts(out, audit.check(out))
        raise
    verdict = audit.check(out)
    summary.add_verdicts(out, verdict)
    console.print(summary.table(out))
    closing = summary.closing(out, stopped, _program())
    console.print(closing, markup=False, highlight=False, soft_wrap=True)
    kept = not verdict.findings
    return 130 if stopped else 0 if kept else 1


def _program() -> str:
    """What to type for this program: its path, where a shell would not find it by its name."""
    own = sys.argv[0]
    return own if Path(own).name == "dora" and shutil.which("dora") is None else "dora"


@app.command("config")
def show_config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file to resolve.")] = None,
    overrides: Overrides = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Print every key with meaning, unit and default.")
    ] = False,
) -> None:
    """Print a configuration with all defaults filled in, or every key there is."""
    from dora import settings

    if defaults == (config is not None):
        raise typer.BadParameter("give either a CONFIG file or --defaults")
    if config is None:
        typer.echo(settings.defaults_toml(), nl=False)
        return
    typer.echo(settings.read(config, overrides or []).to_toml(), nl=False)


for read in (
    cli_reading.audit,
    cli_reading.replay,
    cli_reading.why,
    cli_reading.report,
    cli_reading.trace,
    cli_reading.dash,
    cli_reading.status,
    cli_reading.metrics,
    plan,
):
    app.command()(read)


@engines.command("list")
def list_engines(run: RunFolder, timeout: Timeout = 30.0) -> None:
    """Print a running run's engines."""
    raise typer.Exit(_ask(run, "list", None, timeout))


@engines.command("add")
def add_engine(run: RunFolder, timeout: Timeout = 120.0) -> None:
    """Start one more engine, which joins once it is ready; the run goes on meanwhile."""
    raise typer.Exit(_ask(run, "add", None, timeout))


@engines.command("drain")
def drain_engine(
    run: RunFolder,
    engine: Annotated[int, typer.Argument(metavar="ENGINE", help="Number of the engine.")],
    timeout: Timeout = 600.0,
) -> None:
    """Have an engine leave once its requests have moved or finished; nothing is generated again."""
    raise typer.Exit(_ask(run, "drain", engine, timeout))


def _ask(run: Path, command: Literal["list", "add", "drain"], engine: int | None, timeout_s: float) -> int:
    """Print a running run's answer; 1 if it could not do what was asked."""
    from dora.runtime.control import Ask, ask

    answer = ask(run, Ask(command, engine), timeout_s)
    typer.echo(answer.text)
    return 0 if answer.is_done else 1


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder of the model.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to go on from, or a message.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="PROMPT is a user's message, for the model's chat template.")
    ] = False,
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many answers.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest answer (tokens).")] = 256,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of these, from the fewest so probable together.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Of these, from those so probable, relative to the likeliest.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends an answer; repeatable.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="Token that ends an answer; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal answers.")] = 0,
    kernels: Annotated[
        str, typer.Option(help="How to compute: auto, numba, eager; see `dora doctor`.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of weights and KV: float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as a line of JSON.")] = False,
) -> None:
    """Answer a prompt with a model, without any training."""
    from dora import generate

    drawing = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "max_tokens": max_tokens, "stop_strings": tuple(stop or ()), "stop_ids": tuple(stop_token_id or ()),
    }  # fmt: skip
    computing = generate.Computing(kernels, device, dtype)
    answers = generate.main(
        model, prompt, drawing, computing, seed=seed, num_answers=num, is_chat=chat, as_json=as_json
    )
    typer.echo(answers)


@app.command("init-model")
def init_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the model.")],
    family: Annotated[str, typer.Option(help="qwen3, qwen2, llama or qwen3_moe.")] = "qwen3",
    hidden_size: Annotated[int, typer.Option(min=1)] = 64,
    intermediate_size: Annotated[int, typer.Option(min=1)] = 192,
    num_hidden_layers: Annotated[int, typer.Option(min=1)] = 2,
    num_attention_heads: Annotated[int, typer.Option(min=1)] = 4,
    num_key_value_heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=2)] = 32,
    max_position_embeddings: Annotated[int, typer.Option(min=1, help="Longest context (tokens).")] = 2048,
    num_experts: Annotated[int, typer.Option(min=1, help="Of qwen3_moe, as the next two.")] = 8,
    num_experts_per_tok: Annotated[int, typer.Option(min=1)] = 2,
    moe_intermediate_size: Annotated[int, typer.Option(min=1)] = 64,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE_OR_DIR", help="Copy this tokenizer, with its chat template.")
    ] = None,
    tokenizer_from: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Train a byte-level BPE on the texts of this dataset.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Most tokens of a trained tokenizer.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 0,
) -> None:
    """Make a small random model that `dora train` and transformers can load."""
    from dora import init_model

    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "moe_intermediate_size": moe_intermediate_size,
    }
    typer.echo(init_model.main(folder, family, tokenizer, tokenizer_from, vocab_size, seed, **shape))


@app.command()
def doctor() -> None:
    """Print versions, which kernels engines run and why, threads and GPUs."""
    from dora import doctor

    typer.echo(doctor.report())


@app.command()
def version() -> None:
    """Print the version."""
    from dora import __version__

    typer.echo(__version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script `dora`. Always ends by SystemExit."""
    atexit.register(gc.freeze)  # a last search of all that is imported would take most of a second
    try:
        app(args=None if arguments is None else list(arguments), prog_name="dora")
    except InputError as error:
        print(f"dora: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"dora: {error}", file=sys.stderr)
        sys.exit(1)
