"""Commands that read the files of a finished or running run; none of them changes the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def audit(
    run: RunFolder,
    deep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Also recompute the log-probs and rewards of N samples, from stored weights.",
        ),
    ] = None,
) -> None:
    """Check the guarantees C1-C3 and the digests of a run's files, and replay it; exit code 1 on a violation.

    See docs/audit.md.
    """
    from dora.audit import audit
    from dora.errors import DamagedRunError
    from dora.journal import replay

    code = audit.main(run)
    try:
        code = max(code, replay.main(run))
    except DamagedRunError:  # the audit has reported it
        raise typer.Exit(1) from None
    if deep is not None:
        from dora.audit import logprob_recheck, reward_recheck

        code = max(code, logprob_recheck.main(run, deep), reward_recheck.main(run, deep))
    raise typer.Exit(code)


def replay(run: RunFolder) -> None:
    """Replay the recorded events of a run and compare the actions; exit code 1 if they differ."""
    from dora.journal import replay

    raise typer.Exit(replay.main(run))


def why(
    run: RunFolder,
    request: Annotated[
        str,
        typer.Argument(metavar="REQUEST", help="epoch/row/sibling, or epoch/row for all siblings."),
    ],
) -> None:
    """Print what happened to one request, from its admission to its training, and its text once finished."""
    from dora.journal import why
    from dora.report.samples import print_response

    why.main(run, request)
    print_response(run, request)


def samples(
    run: RunFolder,
    request: Annotated[
        str | None,
        typer.Argument(metavar="[REQUEST]", help="epoch/row/sibling, or epoch/row for all siblings."),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of groups.", show_default="4, or all with --jsonl"),
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print one JSON object for each response.")] = False,
) -> None:
    """Print prompts and responses of the last groups, or of one group or request, as text."""
    from dora.report.samples import print_samples

    if request is not None and last is not None:
        raise typer.BadParameter(f"--last {last} and {request} exclude each other")
    print_samples(run, request, last or (None if jsonl else 4), as_jsonl=jsonl)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="report.html in the first RUN")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of responses shown in full, for each run.")
    ] = 400,
) -> None:
    """Write a self-contained HTML report of runs: see docs/monitoring.md."""
    from dora.report.page import write_report

    path = write_report(runs, out, samples)
    typer.echo(f"{path}  {path.stat().st_size / 1e6:.1f} MB, opens in any browser, needs no network")


def trace(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; compressed if it ends in .gz.", show_default="RUN/trace.json"),
    ] = None,
) -> None:
    """Write a trace of a run for Perfetto: see docs/monitoring.md."""
    from dora.trace.chrome_trace import main

    typer.echo(main(run, out))


def dash(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port to listen on, on the loopback interface only; 0: a free port."
        ),
    ] = 3672,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the auth token in the page's address; without it each start creates a new token."
        ),
    ] = None,
) -> None:
    """Serve the report as a live page until Ctrl-C: see docs/monitoring.md."""
    from dora.dashboard.server import main

    main(runs, port, token_file)


def status(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as one line of JSON.")] = False,
) -> None:
    """Print a run's progress, its processes and what it waits for; exit code 1 if it is not healthy."""
    from dora.metrics import status

    raise typer.Exit(status.main(run, as_json))


def metrics(
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="Text to search in names and meanings.")] = "",
) -> None:
    """Print the unit and meaning of every metric, or of the metrics that contain WORD."""
    from dora.metrics import catalog

    typer.echo(catalog.format_listing(word))
