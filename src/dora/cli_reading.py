"""The commands that read what a run left behind, or leaves just now; `dora.cli` has them among its own.

None of them takes part in a run, and none writes into its folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def audit(
    run: RunFolder,
    deep: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Compute log-probs of N samples again, from stored versions."),
    ] = None,
) -> None:
    """Check the three guarantees from a run's files alone; exit 1 on a violation."""
    from dora.observe import audit

    code = audit.main(run)
    if deep is not None:
        from dora.runtime import deep_audit

        code = max(code, deep_audit.main(run, deep))
    raise typer.Exit(code)


def replay(run: RunFolder) -> None:
    """Feed a run's recorded facts to a fresh orchestrator and compare its orders; exit 1 on a difference."""
    from dora.observe import replay

    raise typer.Exit(replay.main(run))


def why(
    run: RunFolder,
    request: Annotated[
        str,
        typer.Argument(metavar="REQUEST", help="epoch/row/sibling, or epoch/row for all siblings."),
    ],
) -> None:
    """Print the life of one request: admitted, placed, moved, finished, scored, trained."""
    from dora.observe import why

    raise typer.Exit(why.main(run, request))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="report.html in the first RUN")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most answers of each run that are shown in full.")
    ] = 400,
) -> None:
    """Write what happened in runs as one HTML page that needs nothing else: see docs/looking.md."""
    from dora.observe.report import page

    raise typer.Exit(page.main(runs, out, samples))


def trace(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="File to write; .gz compresses.", show_default="RUN/trace.json")
    ] = None,
) -> None:
    """Draw what ran where and when, for Perfetto: see docs/looking.md."""
    from dora.observe.trace.run import main

    typer.echo(main(run, out))


def dash(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at, on this machine only; 0: a free one.")
    ] = 3672,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with a token for the address, which then is the same each time."),
    ] = None,
) -> None:
    """Serve the report of runs that go as a page that follows them, until Ctrl-C: see docs/looking.md."""
    from dora.observe.dash.server import main

    main(runs, port, token_file)


def status(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as one line of JSON.")] = False,
) -> None:
    """Print where a run stands, which processes are alive, who waits for whom; exit 1 if all is not well."""
    from dora.observe import status

    raise typer.Exit(status.main(run, as_json))


def metrics(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="A name, or a part of one or of its meaning.")
    ] = "",
) -> None:
    """Print what the names in metrics.jsonl and summary.json mean, with units; all, or those with a word."""
    from dora.observe import metrics

    typer.echo(metrics.listing(word))
