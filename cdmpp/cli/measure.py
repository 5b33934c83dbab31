"""``cdmpp measure``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cdmpp.cli.collect import print_summary, progress_bars
from cdmpp.cli.output import JsonOption, print_json


def measure(
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB", help="Folder that `cdmpp collect --build-only` wrote.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to fill.", show_default=False)],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads, if not as built.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The device, if not as built.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Time the programs of a job on this machine.

    Needs TVM's runtime, no compiler. Without pyarrow the result stays in DIR/collect.sqlite; the same command
    finishes the data set where pyarrow is. Stopped at any moment, the same command goes on.
    """
    from cdmpp.errors import MissingDependencyError
    from cdmpp.measure.archive import finish, measure_job

    try:
        with progress_bars() as progress:
            measure_job(job, out, device=device, threads=threads, progress=progress)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with {out}", file=sys.stderr)
        raise typer.Exit(130) from None
    try:
        finish(job, out)
    except MissingDependencyError as error:
        print(
            f"measured; {out} holds the figures. To write records.parquet ({error.message}): "
            f"copy {job} and {out} to where cdmpp[train] is and give the same command there",
            file=sys.stderr,
        )
        if json:
            print_json({"path": str(out), "dataset": False})
        return
    print_summary(out, json)
