"""The command line: its commands, their panels in the help, and errors as exit codes.

Exit codes: 0 success, 1 a failed run or check, 2 bad input, 130 stopped by Ctrl-C. A command imports heavy
modules when it runs, so that `dora --help` is fast.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dora.cli import inspect, train
from dora.cli.simulate import plan, simulate
from dora.errors import InputError, RunError

RUN, INSPECT, SIMULATE, TOOLS = "Run", "Inspect a run", "Simulate and plan", "Tools"  # panels of the help

TemplateVariables = Annotated[
    str, typer.Option(metavar="JSON", help="Variables of the chat template, as data.chat_template_kwargs.")
]

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from dora import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


app.command(rich_help_panel=RUN)(train.train)
app.command(rich_help_panel=RUN)(train.serve)
app.command("eval", rich_help_panel=RUN)(train.evaluate)
app.command(rich_help_panel=RUN)(train.rollout)
app.command("env-server", rich_help_panel=RUN)(train.env_server)
app.add_typer(train.engines, name="engines", rich_help_panel=RUN)
for command in (
    inspect.status,
    inspect.dash,
    inspect.report,
    inspect.trace,
    inspect.why,
    inspect.samples,
    inspect.metrics,
    inspect.audit,
    inspect.replay,
):
    app.command(rich_help_panel=INSPECT)(command)
app.add_typer(simulate, name="simulate", rich_help_panel=SIMULATE)
app.command(rich_help_panel=SIMULATE)(plan)


@app.command("config", rich_help_panel=TOOLS)
def print_config(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="TOML file of a run.")] = None,
    overrides: train.Overrides = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Print every key with its meaning, unit and default.")
    ] = False,
) -> None:
    """Print a configuration with all defaults, or all keys."""
    from dora.config import load, toml

    if defaults == (config is not None):
        raise typer.BadParameter("give either a CONFIG file or --defaults")
    if config is None:
        typer.echo(toml.defaults_toml(), nl=False)
        return
    typer.echo(toml.to_toml(load.read_config(config, overrides or [])), nl=False)


@app.command(rich_help_panel=TOOLS)
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder of the model.")],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to continue, or a message with --chat.")
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send PROMPT as a user message in the model's chat template.")
    ] = False,
    chat_template_kwargs: TemplateVariables = "{}",
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="Number of responses.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Maximum response length (tokens).")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Nucleus sampling: the smallest set of tokens with cumulative probability >= top_p."
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Sample from tokens with at least this fraction of the most likely token's probability."
        ),
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="String that ends a response; repeatable.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="Token that ends a response; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling; the same seed gives the same responses.")] = 0,
    kernels: Annotated[str, typer.Option(help="CPU kernels: auto, numba or eager.")] = "auto",
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Data type of weights and KV cache: float32 or bfloat16.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per response.")] = False,
) -> None:
    """Generate responses to a prompt with a model."""
    from dora.cli import tools

    sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "max_tokens": max_tokens, "stop_strings": tuple(stop or ()), "stop_ids": tuple(stop_token_id or ()),
    }  # fmt: skip
    engine_options = {"kernels": kernels, "device": device, "dtype": dtype}
    responses = tools.generate(
        model, prompt, sampling, engine_options,
        seed=seed, num_responses=num, is_chat=chat, chat_template_kwargs=chat_template_kwargs,
        as_json=as_json,
    )  # fmt: skip
    typer.echo(responses)


@app.command(rich_help_panel=TOOLS)
def examples(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder.")] = Path("examples"),
) -> None:
    """Copy the examples, with their models and data, into a new folder."""
    from dora.cli import tools

    typer.echo(tools.copy_examples(folder))


@app.command("init-model", rich_help_panel=TOOLS)
def init_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the model.")],
    family: Annotated[str, typer.Option(help="qwen3, qwen2, llama or qwen3_moe.")] = "qwen3",
    hidden_size: Annotated[int, typer.Option(min=1)] = 64,
    intermediate_size: Annotated[int, typer.Option(min=1)] = 192,
    num_hidden_layers: Annotated[int, typer.Option(min=1)] = 2,
    num_attention_heads: Annotated[int, typer.Option(min=1)] = 4,
    num_key_value_heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=2)] = 32,
    max_position_embeddings: Annotated[int, typer.Option(min=1, help="Context length (tokens).")] = 2048,
    num_experts: Annotated[int, typer.Option(min=1, help="Experts per layer; qwen3_moe only.")] = 8,
    num_experts_per_tok: Annotated[int, typer.Option(min=1, help="Experts per token; qwen3_moe only.")] = 2,
    moe_intermediate_size: Annotated[
        int, typer.Option(min=1, help="MLP size of an expert; qwen3_moe only.")
    ] = 64,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE_OR_DIR", help="Copy this tokenizer, with its chat template."),
    ] = None,
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="Train a byte-level BPE tokenizer on the texts of this dataset."),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Maximum vocabulary of a trained tokenizer (tokens).")
    ] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
) -> None:
    """Create a small random model for `dora train` and transformers."""
    from dora.cli import tools

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
    typer.echo(tools.init_model(folder, family, tokenizer, tokenizer_from, vocab_size, seed, **shape))


@app.command(rich_help_panel=TOOLS)
def sft(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help="A .jsonl, .json, .csv or .parquet file, or a folder that datasets reads."
        ),
    ],
    model: Annotated[
        Path, typer.Option(metavar="DIR", help="Hugging Face folder of the model to start from.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the trained model.")],
    prompt_key: Annotated[
        str, typer.Option(metavar="NAME", help="Column with the prompt, text or messages.")
    ] = "prompt",
    response_key: Annotated[
        str, typer.Option(metavar="NAME", help="Column with the response, text.")
    ] = "response",
    chat: Annotated[
        bool, typer.Option("--chat", help="Format prompts with the model's chat template.")
    ] = False,
    chat_template_kwargs: TemplateVariables = "{}",
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over the rows.")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 32,
    held_out: Annotated[
        int, typer.Option(min=0, help="Last rows, whose loss is measured before and after.")
    ] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate, which decays linearly to 0.")] = 1e-4,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises.")] = 10,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the order of the rows.")] = 0,
) -> None:
    """Fine-tune a model on responses, as a warm start for `dora train`."""
    from dora.cli.sft import run_sft

    summary = run_sft(
        data, model, out, typer.echo,
        prompt_key=prompt_key, response_key=response_key, is_chat=chat,
        chat_template_kwargs=chat_template_kwargs, num_epochs=epochs, batch_size=batch_size,
        num_held_out=held_out, lr=lr, warmup_steps=warmup_steps, device=device, seed=seed,
    )  # fmt: skip
    typer.echo(summary)


@app.command(rich_help_panel=TOOLS)
def doctor() -> None:
    """Print versions, devices, and the kernels that engines run."""
    from dora.cli import tools

    typer.echo(tools.doctor())


def _skip_final_collection() -> None:
    """A collection over all imported modules would take most of a second when the process exits.

    With triton, which some models of transformers import, there is one: without it nanobind, in which
    triton is written, prints a page about leaked objects.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script `dora`. Always raises SystemExit."""
    atexit.register(_skip_final_collection)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="dora")
    except InputError as error:
        print(f"dora: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"dora: {error}", file=sys.stderr)
        sys.exit(1)
