"""``cdmpp collect``."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.output import JsonOption, print_json
from cdmpp.cli.progress import Show, progress_display
from cdmpp.cli.reading import parse_sizes

if TYPE_CHECKING:
    from cdmpp.data.measure.kit.parts import Limits
    from cdmpp.data.measure.settings import Chooser, CollectSettings, ProgressListener
    from cdmpp.data.measure.targets import Configuration


#: Lines about what could not be collected; the card has them all.
_SHOWN = 10


def collect(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="ONNX model, torch.export program (.pt2), Relax module (.json), or a folder of "
            "`cdmpp select --backend tvm`.",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:K=V,...][@float16]", help="A network of the zoo; repeatable. --network help lists them."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to fill.")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TARGET[@THREADS]",
            help="native, x86-64-v2|v3|v4, a TVM target tag, its JSON, or cuda:DEVICE; repeatable: "
            "the same programs on each.",
            show_default="native",
        ),
    ] = None,
    schedules: Annotated[int, typer.Option(min=0, help="Random schedules of each task.")] = 64,
    irregular: Annotated[
        int, typer.Option(min=0, help="Also schedules with random loops and annotations: so many of each task (CPU).")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the schedules.")] = 0,
    good: Annotated[
        int, typer.Option(min=0, help="Also the predicted fastest of a pool of schedules: so many of each task.")
    ] = 0,
    active: Annotated[
        int, typer.Option(min=0, help="Also schedules of the pool on which the models disagree: so many of each task.")
    ] = 0,
    pool: Annotated[int, typer.Option(min=1, help="Further schedules drawn for --good and --active.")] = 32,
    model: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Models for --good and --active; repeatable.")
    ] = None,
    tune: Annotated[int, typer.Option(min=0, help="Also search: so many measured trials a task (first target).")] = 0,
    device: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="The device, where this machine is not it.")
    ] = None,
    tracker: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Measure through TVM's RPC tracker.")] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Key of the boards at the tracker.")] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Size of a dynamic dimension of ONNX models; repeatable."),
    ] = None,
    build_only: Annotated[
        bool, typer.Option("--build-only", help="Write an archive for `cdmpp measure` and run nothing.")
    ] = False,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone", help="With --build-only and cuda:DEVICE: part files that run without TVM (run.py)."
        ),
    ] = False,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="With --standalone: at most so many tasks, of each network in turn.")
    ] = None,
    ansor: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --standalone: also the tasks and the fastest schedules of Ansor's search logs."
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.5, help="With --standalone: minutes of a call there.", show_default="9")
    ] = None,
    part_mib: Annotated[
        float | None, typer.Option(min=0.1, help="With --standalone: largest part file in MiB.", show_default="15")
    ] = None,
    result_mib: Annotated[
        float | None, typer.Option(min=0.1, help="With --standalone: largest result in MiB.", show_default="16")
    ] = None,
    flush_cache: Annotated[
        bool, typer.Option("--flush-cache", help="Empty the CPU's caches before every run.")
    ] = False,
    time_limit_s: Annotated[float, typer.Option(min=0.1, help="Limit of all runs of one program.")] = 30.0,
    memory_gib: Annotated[float, typer.Option(min=1, help="Address space of a worker.")] = 8.0,
    repeat_gap_s: Annotated[
        float, typer.Option(min=0, help="Time between the two measurements of the noise floor.")
    ] = 180.0,
    json: JsonOption = False,
) -> None:
    """Turn networks into measured tensor programs.

    Lowers the networks, draws schedules, builds and times them in worker processes, and writes
    DIR/records.parquet, repeats.parquet and a card. An interrupted run resumes with the same command.
    """
    from cdmpp.data.measure.archive import WORK
    from cdmpp.data.measure.kit.parts import HOME, Limits
    from cdmpp.data.measure.settings import CollectSettings
    from cdmpp.data.measure.store import Store
    from cdmpp.data.measure.targets import configurations
    from cdmpp.data.measure.timing import TimingSettings
    from cdmpp.data.measure.todo import is_scheduled_todo
    from cdmpp.errors import InvalidProgramError

    wanted = [*(network or ()), *(sources or ())]
    if network == ["help"]:
        _print_networks()
        return
    if not wanted and standalone:
        from cdmpp.data.measure.kit.content import NETWORKS

        wanted = list(NETWORKS)
    if not wanted:
        raise InvalidProgramError(
            "no network is named", hint="--network NAME or a file; --network help lists the names"
        )
    if out is None:
        raise typer.BadParameter("say where to: --out DIR", param_hint="--out")
    if tracker is not None and build_only:
        raise typer.BadParameter("--build-only runs nothing: give the tracker later", param_hint="--tracker")
    if (tracker is None) != (key is None):
        raise typer.BadParameter("--tracker and --key go together", param_hint="--tracker")
    if standalone and not build_only:
        raise typer.BadParameter("part files are for another machine: add --build-only", param_hint="--standalone")
    kit = {"part_mib": part_mib, "result_mib": result_mib, "minutes": minutes}
    if not standalone and any(value is not None for value in (*kit.values(), tasks, ansor)):
        raise typer.BadParameter(
            "they describe part files: add --standalone",
            param_hint="--part-mib, --result-mib, --minutes, --tasks, --ansor",
        )
    limits = {"time_limit_s": time_limit_s, "memory_gib": memory_gib, "repeat_gap_s": repeat_gap_s}
    timing = TimingSettings(flush_cache=flush_cache)
    settings = CollectSettings(schedules=schedules, irregular=irregular, seed=seed, tune=tune, timing=timing, **limits)
    remote = tracker is not None or build_only
    known: dict[str, Any] = {}
    if out.exists() and not build_only:
        with Store(out) as store:  # a folder that is somebody's is refused before anything runs
            known = store.devices()
    chosen = configurations(tuple(target or ("native",)), device=device, remote=remote, known=known)
    if remote and device is None and chosen[0].kind == "llvm":
        print(
            f"note: the target is assumed to be this machine, {chosen[0].name}; name another with --device",
            file=sys.stderr,
        )
    sizes = parse_sizes(dim or [])
    if irregular and chosen[0].kind != "llvm":
        raise typer.BadParameter("irregular schedules are of programs of a CPU", param_hint="--irregular")
    if (good or active) and build_only:
        raise typer.BadParameter("an archive has random schedules only", param_hint="--good, --active")
    selected = any(is_scheduled_todo(Path(source)) for source in wanted)
    if selected and (len(wanted) > 1 or standalone or good or active or tune):
        raise typer.BadParameter(
            "a selection has its programs: name it alone, without --standalone, --good, --active and --tune",
            param_hint="FILE",
        )
    if model and not (good or active):
        raise typer.BadParameter("a model chooses nothing without --good or --active", param_hint="--model")
    chooser = _chooser(chosen[0], good, active, pool, model or []) if good or active else None
    job = _Job(wanted, chosen, out, settings, sizes, json)
    if standalone:
        parts = Limits(**{name: value for name, value in kit.items() if value is not None})
        _standalone(job, parts, tasks or 0, ansor)
    elif build_only:
        _build_only(job)
    else:
        _measure(job, tracker, key, chooser)
    exit_if_skipped(out / HOME if standalone else out / WORK if build_only else out, wanted, sizes)


@dataclass(frozen=True)
class _Job:
    """Networks to collect, where from and where to."""

    wanted: list[str]
    chosen: tuple[Configuration, ...]
    out: Path
    settings: CollectSettings
    sizes: dict[str, int]
    json: bool

    @property
    def command(self) -> str:
        """This command line."""
        return "cdmpp " + shlex.join(sys.argv[1:])


def _measure(job: _Job, tracker: str | None, key: str | None, chooser: Chooser | None) -> None:
    from cdmpp.data.measure.collect import collect
    from cdmpp.data.measure.store import Store
    from cdmpp.data.measure.timers import LocalTimers

    out = job.out
    with resumable(out), progress_bars() as progress:
        timers: Any = LocalTimers
        if tracker is not None and key is not None:
            from cdmpp.data.measure.board import parse_tracker
            from cdmpp.data.measure.remote import RemoteTimers

            timers = partial(RemoteTimers, parse_tracker(tracker, key))
        how: dict[str, Any] = {"timers": timers, "progress": progress, "chooser": chooser}
        collect(job.wanted, job.chosen, out, job.settings, dims=job.sizes, command=job.command, **how)
    with Store(out) as store:
        left_out = store.left_out()
    for name, what, why in left_out[:_SHOWN]:
        print(f"not collected: {name}: {what}: {why}", file=sys.stderr)
    if len(left_out) > _SHOWN:
        print(f"not collected: {len(left_out) - _SHOWN} more, listed in {out}/README.md", file=sys.stderr)
    print_summary(out, job.json)


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Exit with 130 after Ctrl-C, and a message that the same command resumes."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with {out}", file=sys.stderr)
        raise typer.Exit(130) from None


def exit_if_skipped(folder: Path, wanted: list[str], sizes: dict[str, int]) -> None:
    """Name the networks that could not be lowered; the exit code is 1 where there are any."""
    from cdmpp.data.measure.store import Store
    from cdmpp.programs.frontends.tasks import network_name

    with Store(folder) as store:
        skipped = store.skipped()
    names = [name for source in wanted if (name := network_name(source, sizes)) in skipped]
    if names:
        print(f"skipped: {len(names)} of {len(wanted)} networks: {', '.join(names)}", file=sys.stderr)
        raise typer.Exit(1)


def _chooser(configuration: Configuration, good: int, active: int, pool: int, models: list[Path]) -> Chooser:
    """Choice by an ensemble of models for the first configuration's device."""
    import numpy as np

    from cdmpp.data.measure.choosing import EnsembleChooser, Member
    from cdmpp.features.encode import TIR
    from cdmpp.predict.bulk import FeaturePart, FeatureQueries
    from cdmpp.predict.predictor import LatencyPredictor

    def member(predictor: LatencyPredictor) -> Member:
        def log_s(encoded: Any) -> Any:
            parts = [FeaturePart(e, TIR, configuration.device, "tvm", "kernel") for e in encoded]
            return np.log(predictor.predict_features(FeatureQueries.of(parts)).latency_s)

        return log_s

    predictors = [LatencyPredictor.load(path) for path in models]
    names = [predictor.model_id for predictor in predictors]
    return EnsembleChooser([member(p) for p in predictors], pool=pool, good=good, active=active, names=names)


def print_summary(out: Path, json: bool) -> None:
    """Contents of a folder of measurements."""
    from cdmpp.data.summary import info

    summary = info(out)
    if json:
        print_json(summary)
    else:
        floor = summary["noise_floor"]
        print(
            f"wrote {out}: {summary['records']:,} records of {summary['programs']:,} programs, "
            f"{summary['failed']:,} failed, {summary['flagged']:,} flagged"
            + (f", noise floor {floor:.1%}" if floor is not None else "")
        )


def _build_only(job: _Job) -> None:
    from cdmpp.data.measure.archive import write_job

    with progress_bars() as progress:
        manifest = write_job(job.wanted, job.chosen, job.out, job.settings, progress=progress, dims=job.sizes)
    if job.json:
        print_json({"path": str(job.out), "programs": len(manifest.programs)})
        return
    failed = sum(bool(program.failure) for program in manifest.programs)
    print(
        f"wrote {job.out}: {len(manifest.programs):,} programs"
        + (f", {failed:,} of which could not be built" if failed else "")
        + f"; run them with: cdmpp measure {job.out} --out DIR"
    )


def _standalone(job: _Job, limits: Limits, tasks: int, ansor: Path | None) -> None:
    from cdmpp.data.measure.kit.export_programs import export_programs

    if len(job.chosen) > 1:
        raise typer.BadParameter("part files are for one device: name one --target", param_hint="--target")
    out = job.out
    with progress_bars() as progress:
        how: dict[str, Any] = {"limits": limits, "tasks": tasks, "ansor": ansor, "progress": progress}
        exported = export_programs(
            job.wanted, job.chosen[0], out, job.settings, dims=job.sizes, command=job.command, **how
        )
    programs = sum(len(part["items"]) for part in exported["parts"] if part["kind"] == "programs")
    size = sum(part["bytes"] for part in exported["parts"])
    failed = len(exported["programs"]["failures"])
    if job.json:
        print_json(
            {"path": str(out), "parts": len(exported["parts"]), "programs": programs, "failed": failed, "bytes": size}
        )
        return
    print(
        f"wrote {out}: {len(exported['parts'])} parts, {programs:,} programs, {size / 2**20:.1f} MiB"
        + (f"; {failed:,} programs could not be built" if failed else "")
        + f"; try it here: cd {out} && python run.py part-*.zip --dry-run --out dry"
    )


def _print_networks() -> None:
    from cdmpp.programs.zoo import network_names

    for name in network_names():
        print(name)


@contextmanager
def progress_bars() -> Iterator[ProgressListener]:
    """Bars with rate, time left and failures on a terminal; a line now and then elsewhere."""
    with progress_display(lines=True, transient=False) as show:
        yield _Phases(show)


class _Phases:
    """Counts the pieces of a collection's phases, with their rate and failures."""

    def __init__(self, show: Show) -> None:
        self._show = show

    def phase(self, name: str, done: int, total: int) -> None:
        """See :class:`cdmpp.data.measure.settings.ProgressListener`."""
        self.name, self.done, self.total, self.failed = name, done, total, 0
        self.started, self.first = time.monotonic(), done
        self.show()

    def step(self, ok: bool) -> None:
        """See :class:`cdmpp.data.measure.settings.ProgressListener`."""
        self.done += 1
        self.failed += not ok
        self.show()

    def show(self) -> None:
        """Show the counts."""
        elapsed = time.monotonic() - self.started
        rate = f"{(self.done - self.first) / elapsed:.1f}/s" if elapsed > 1 else ""
        failed = f"{self.failed} failed" if self.failed else ""
        self._show(self.name, self.done, self.total, ", ".join(filter(None, (rate, failed))))
