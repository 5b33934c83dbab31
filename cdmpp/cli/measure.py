"""``cdmpp measure``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cdmpp.cli.collect import print_summary, progress_bars, resumable
from cdmpp.cli.options import option, with_fields
from cdmpp.cli.output import JsonOption, print_json
from cdmpp.cli.progress import steps


@dataclass(frozen=True)
class MeasureOptions:
    """Options of jobs, of selections and of results."""

    out: Path | None = option(
        None,
        "Folder to fill; of a selection also a .parquet file, by default records.parquet in it.",
        metavar="DIR|FILE",
    )
    on: str | None = option(
        None, "Of a selection: where PyTorch runs it.", metavar="cpu|cuda[:N]", show_default="by the device's kind"
    )
    threads: int | None = option(None, "Threads. Default: as built.", min=1)
    device: str | None = option(None, "The device. Default: as built.", metavar="NAME|FILE")
    import_job: Path | None = option(
        None,
        "Write the records of result files (part-NNN.npz) that run.py of this job made.",
        "--import",
        metavar="JOB",
    )
    drop_impossible: bool = option(
        False, "With --import: times faster than the device's peak become failed records.", "--drop-impossible"
    )
    json: JsonOption = False


@with_fields(MeasureOptions)
def measure(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="JOB|TODO|RESULT...",
            help="Folder that `cdmpp collect --build-only` or `cdmpp select` wrote; with --import result files.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Time the programs of a job, or of a selection, on this machine.

    A job (`cdmpp collect --build-only`) needs TVM's runtime, no compiler. Without pyarrow the result stays in
    DIR/collect.sqlite; the same command on a machine with pyarrow writes the data set. A selection
    (`cdmpp select`) is timed as PyTorch's library kernels, or with `--backend tvm` built and timed as TVM's, for
    `cdmpp adapt --records`. An interrupted run resumes with the same command.

    `cdmpp measure --import JOB DIR/*.npz --out DIR` turns the results of a borrowed GPU
    (`cdmpp collect --build-only --standalone`) into a data set.
    """
    given = MeasureOptions(**options)
    from cdmpp.data.measure.todo import is_scheduled_todo, is_todo

    if not inputs:
        raise typer.BadParameter("name a job, a selection or result files", param_hint="JOB|TODO|RESULT...")
    if given.import_job is not None:
        return _import(given.import_job, inputs, given)
    if given.drop_impossible:
        raise typer.BadParameter("it is for results: add --import JOB", param_hint="--drop-impossible")
    if len(inputs) > 1:
        raise typer.BadParameter(f"one job or selection at a time, not {len(inputs)}", param_hint="JOB|TODO|RESULT...")
    job = inputs[0]
    if is_todo(job):
        return _measure_todo(job, given)
    if is_scheduled_todo(job):
        if given.on is not None or given.threads is not None:
            raise typer.BadParameter("the selection's device has them", param_hint="--on, --threads")
        return _measure_scheduled(job, given.out or job, given.device, given.json)
    if given.out is None:
        raise typer.BadParameter("say where to: --out DIR", param_hint="--out")
    if given.on is not None:
        raise typer.BadParameter("a job file names the machine it runs on", param_hint="--on")
    _measure_job(job, given.out, given.threads, given.device, given.json)


def _import(job: Path, files: list[Path], given: MeasureOptions) -> None:
    from cdmpp.data.measure.kit.import_results import import_results

    if given.out is None:
        raise typer.BadParameter("say where to: --out DIR", param_hint="--out")
    if given.on is not None or given.threads is not None or given.device is not None:
        raise typer.BadParameter("nothing is run: omit them", param_hint="--on, --threads, --device")
    print_summary(import_results(job, files, given.out, drop_impossible=given.drop_impossible), given.json)


def _measure_todo(folder: Path, given: MeasureOptions) -> None:
    from cdmpp.data.measure.library import LibraryTimer, find_timing_device
    from cdmpp.data.measure.todo import measure_programs, read_todo, records_path

    todo = read_todo(folder)
    where = given.on or ("cuda" if todo.device.kind == "gpu" else "cpu")
    timing_device = find_timing_device(where, given.device or todo.device, given.threads)
    name = timing_device.device.name
    timer = LibraryTimer(timing_device, todo.protocol)
    path = records_path(given.out, folder)
    with resumable(path), timer.ready(), steps("programs", len(todo.programs)) as step:
        how: dict[str, Any] = {"device": name, "protocol": todo.protocol, "step": step}
        done = measure_programs(todo.programs, lambda spec: timer.record(spec, "selected"), path, **how)
    if given.json:
        print_json(
            {
                "path": str(path),
                "device": name,
                "protocol": todo.protocol,
                "records": done.records,
                "new": done.new,
                "failed": [{"program": text, "reason": why} for text, why in done.failed.items()],
            }
        )
    else:
        for text, why in done.failed.items():
            print(f"failed: {text}: {why}")
        print(f"{done.records} records of {name} ({todo.protocol}), {done.new} of them new: {path}")
    if not done.records:
        print("error: no program could be measured", file=sys.stderr)
        raise typer.Exit(1)


def _measure_scheduled(folder: Path, out: Path, device: str | None, json: bool) -> None:
    from cdmpp.data.folder import DEVICE
    from cdmpp.data.measure.collect import collect
    from cdmpp.data.measure.scheduled_todo import device_configurations
    from cdmpp.data.measure.settings import CollectSettings

    settings = CollectSettings(repeat_share=0)  # adaptation needs no second measurements
    with resumable(out), progress_bars() as progress:
        collect([str(folder)], device_configurations(device or str(folder / DEVICE)), out, settings, progress=progress)
    print_summary(out, json)


def _measure_job(job: Path, out: Path, threads: int | None, device: str | None, json: bool) -> None:
    from cdmpp.data.measure.archive import finish, measure_job
    from cdmpp.errors import MissingDependencyError

    with resumable(out), progress_bars() as progress:
        measure_job(job, out, device=device, threads=threads, progress=progress)
    try:
        finish(job, out)
    except MissingDependencyError as error:
        print(
            f"measured; {out} holds the figures. To write records.parquet ({error.message}): copy {job} and {out} to a "
            "machine with the extra 'train' (in a checkout: pip install '.[train]') and run the same command there",
            file=sys.stderr,
        )
        if json:
            print_json({"path": str(out), "dataset": False})
        return
    print_summary(out, json)
