"""What `dora simulate` and `dora plan` can be told: a job, its answers, a layout, and what is written.

Names are those of the parameters' types in `dora.cli_simulate`; panels are those of the help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JOB, LENGTHS, LAYOUT, OUTPUT = "Job", "Answers", "Layout", "Output"  # panels of the help
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures as JSON.", rich_help_panel=OUTPUT),
]
Model = Annotated[str, typer.Option(help="A preset's name; a wrong one prints all.", rich_help_panel=JOB)]
Batch = Annotated[int, typer.Option(help="Groups of a training step.", rich_help_panel=JOB)]
Group = Annotated[int, typer.Option(help="Answers of a group.", rich_help_panel=JOB)]
Context = Annotated[int, typer.Option(help="Longest context of the model (tokens).", rich_help_panel=JOB)]
Reward = Annotated[float, typer.Option(min=0, help="Seconds to score a group.", rich_help_panel=JOB)]
Skew = Annotated[
    float,
    typer.Option(min=0, help="By which the most wanted rank of experts is wanted more.", rich_help_panel=JOB),
]
Mean = Annotated[
    float | None, typer.Option(help="Mean answer (tokens).", show_default="2300", rich_help_panel=LENGTHS)
]
Limit = Annotated[int, typer.Option(help="Longest answer (tokens).", rich_help_panel=LENGTHS)]
Tail = Annotated[
    float | None,
    typer.Option(
        help="Sigma of a lognormal, or alpha of a Pareto.", show_default="1.2", rich_help_panel=LENGTHS
    ),
]
Family = Annotated[
    str | None,
    typer.Option(help="lognormal or pareto.", show_default="lognormal", rich_help_panel=LENGTHS),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="CSV|RUN", help="Lengths of a CSV's --column, or of a run's answers.", rich_help_panel=LENGTHS
    ),
]
Column = Annotated[
    str | None,
    typer.Option(help="Of the CSV.", show_default="GeneratedTokens", rich_help_panel=LENGTHS),
]
Alike = Annotated[
    float, typer.Option(help="Correlation of a group's answers, 0 to 1.", rich_help_panel=LENGTHS)
]
Drift = Annotated[
    float, typer.Option(help="Growth of answers in each step, 0.01 for 1 %.", rich_help_panel=LENGTHS)
]
Prompt = Annotated[int, typer.Option(help="Tokens of a prompt.", rich_help_panel=LENGTHS)]
Turns = Annotated[int, typer.Option(help="Of an episode, equally long.", rich_help_panel=LENGTHS)]
Delay = Annotated[
    float, typer.Option(help="Seconds of the environment after each turn.", rich_help_panel=LENGTHS)
]
DeviceName = Annotated[
    str, typer.Option("--device", help="H800, H100, H200, A100, 910B or CPU.", rich_help_panel=LAYOUT)
]
Devices = Annotated[
    int, typer.Option(min=1, help="How many, for training and rollout.", rich_help_panel=LAYOUT)
]
Policies = Annotated[str, typer.Option(help="Names, separated by commas.", rich_help_panel=LAYOUT)]
Steps = Annotated[int, typer.Option(min=1, help="Training steps to simulate.", rich_help_panel=OUTPUT)]
Tensor = Annotated[
    int, typer.Option(help="Devices that an engine's attention is split over.", rich_help_panel=LAYOUT)
]
Rows = Annotated[
    int | None, typer.Option(min=1, help="Of an engine.", show_default="by its KV", rich_help_panel=LAYOUT)
]
Bounds = Annotated[
    str, typer.Option("--staleness", "-S", help="Bounds, separated by commas.", rich_help_panel=LAYOUT)
]
Trainer = Annotated[
    int | None, typer.Option(min=1, help="How many train.", show_default="half", rich_help_panel=LAYOUT)
]
Fleet = Annotated[
    str,
    typer.Option(metavar="FLEET", help="Other devices for rollout: H800:16,A100:32.", rich_help_panel=LAYOUT),
]
Expert = Annotated[
    int, typer.Option(help="Ranks of an engine that share its experts.", rich_help_panel=LAYOUT)
]
Slack = Annotated[
    int, typer.Option(min=0, help="Groups kept below the bound by admission.", rich_help_panel=LAYOUT)
]
Elastic = Annotated[
    bool, typer.Option(help="The trainer's devices decode while it waits.", rich_help_panel=LAYOUT)
]
Without = Annotated[str, typer.Option(help="Parts of dora to leave out, by commas.", rich_help_panel=LAYOUT)]
TimelineFile = Annotated[
    Path | None,
    typer.Option(metavar="SVG", help="Draw the last row's engines.", rich_help_panel=OUTPUT),
]
PlotFile = Annotated[
    Path | None, typer.Option(metavar="SVG", help="Draw tokens/s against S.", rich_help_panel=OUTPUT)
]
Check = Annotated[
    list[Path] | None, typer.Option("--check", metavar="RUN", help="Forecast this run, too; repeatable.")
]
Bound = Annotated[int, typer.Option("--staleness", "-S", help="Largest bound.", rich_help_panel=LAYOUT)]
Searched = Annotated[
    int | None,
    typer.Option(
        min=1, help="Ranks that share the experts.", show_default="searched", rich_help_panel=LAYOUT
    ),
]
Played = Annotated[int, typer.Option(min=1, help="Layouts that are played at most.", rich_help_panel=OUTPUT)]
Shown = Annotated[int, typer.Option(min=1, help="Plans that are printed, the best.", rich_help_panel=OUTPUT)]
Known = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="A run to say how far the simulator is off.", rich_help_panel=OUTPUT),
]
