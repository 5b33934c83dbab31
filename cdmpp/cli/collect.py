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

from cdmpp.cli.options import option, with_fields
from cdmpp.cli.output import JsonOption, print_json
from cdmpp.cli.progress import Show, progress_display
from cdmpp.cli.reading import parse_sizes

if TYPE_CHECKING:
    from cdmpp.data.measure.kit.parts import Limits
    from cdmpp.data.measure.settings import Chooser, CollectSettings, ProgressListener
    from cdmpp.data.measure.targets import Configuration


#: Lines about what could not be collected; the card has them all.
_SHOWN = 10


@dataclass(frozen=True)
class CollectOptions:
    """Options of the command; some are for part files or models only."""

    network: list[str] | None = option(
        None, "A network of the zoo; repeatable. --network help lists them.", metavar="NAME[:K=V,...][@float16]"
    )
    out: Path | None = option(None, "Folder to fill.", metavar="DIR")
    target: list[str] | None = option(
        None,
        "native, x86-64-v2|v3|v4, a TVM target tag, its JSON, or cuda:DEVICE; repeatable: the same programs on each.",
        metavar="TARGET[@THREADS]",
        show_default="native",
    )
    schedules: int = option(64, "Random schedules of each task.", min=0)
    irregular: int = option(0, "Also schedules with random loops and annotations: so many of each task (CPU).", min=0)
    seed: int = option(0, "Seed of the schedules.", min=0)
    good: int = option(0, "Also the predicted fastest of a pool of schedules: so many of each task.", min=0)
    active: int = option(0, "Also schedules of the pool on which the models disagree: so many of each task.", min=0)
    pool: int = option(32, "Further schedules drawn for --good and --active.", min=1)
    model: list[Path] | None = option(None, "Models for --good and --active; repeatable.", metavar="DIR")
    tune: int = option(0, "Also search: so many measured trials a task (first target).", min=0)
    device: str | None = option(None, "The device, where this machine is not it.", metavar="NAME|FILE")
    tracker: str | None = option(None, "Measure through TVM's RPC tracker.", metavar="HOST:PORT")
    key: str | None = option(None, "Key of the boards at the tracker.", metavar="KEY")
    dim: list[str] | None = option(
        None, "Size of a dynamic dimension of ONNX models; repeatable.", metavar="NAME=VALUE"
    )
    build_only: bool = option(False, "Write an archive for `cdmpp measure` and run nothing.", "--build-only")
    standalone: bool = option(
        False, "With --build-only and cuda:DEVICE: part files that run without TVM (run.py).", "--standalone"
    )
    tasks: int | None = option(None, "With --standalone: at most so many tasks, of each network in turn.", min=1)
    ansor: Path | None = option(
        None, "With --standalone: also the tasks and the fastest schedules of Ansor's search logs.", metavar="FILE"
    )
    minutes: float | None = option(None, "With --standalone: minutes of a call there.", min=0.5, show_default="9")
    part_mib: float | None = option(None, "With --standalone: largest part file in MiB.", min=0.1, show_default="15")
    result_mib: float | None = option(None, "With --standalone: largest result in MiB.", min=0.1, show_default="16")
    flush_cache: bool = option(False, "Empty the CPU's caches before every run.", "--flush-cache")
    time_limit_s: float = option(30.0, "Limit of all runs of one program.", min=0.1)
    memory_gib: float = option(8.0, "Address space of a worker.", min=1)
    repeat_gap_s: float = option(180.0, "Time between the two measurements of the noise floor.", min=0)
    json: JsonOption = False


@with_fields(CollectOptions)
def collect(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="ONNX model, torch.export program (.pt2), Relax module (.json), or a folder of "
            "`cdmpp select --backend tvm`.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Turn networks into measured tensor programs.

    Lowers the networks, draws schedules, builds and times them in worker processes, and writes
    DIR/records.parquet, repeats.parquet and a card. An interrupted run resumes with the same command.
    """
    given = CollectOptions(**options)
    from cdmpp.data.measure.archive import WORK
    from cdmpp.data.measure.kit.parts import HOME, Limits
    from cdmpp.data.measure.settings import CollectSettings
    from cdmpp.data.measure.store import Store
    from cdmpp.data.measure.targets import configurations
    from cdmpp.data.measure.timing import TimingSettings
    from cdmpp.data.measure.todo import is_scheduled_todo
    from cdmpp.errors import InvalidProgramError

    wanted = [*(given.network or ()), *(sources or ())]
    if given.network == ["help"]:
        from cdmpp.programs.zoo import network_names

        print("\n".join(network_names()))
        return
    if not wanted and given.standalone:
        from cdmpp.data.measure.kit.content import NETWORKS

        wanted = list(NETWORKS)
    if not wanted:
        raise InvalidProgramError(
            "no network is named", hint="--network NAME or a file; --network help lists the names"
        )
    out = given.out
    if out is None:
        raise typer.BadParameter("say where to: --out DIR", param_hint="--out")
    if given.tracker is not None and given.build_only:
        raise typer.BadParameter("--build-only runs nothing: give the tracker later", param_hint="--tracker")
    if (given.tracker is None) != (given.key is None):
        raise typer.BadParameter("--tracker and --key go together", param_hint="--tracker")
    if given.standalone and not given.build_only:
        raise typer.BadParameter("part files are for another machine: add --build-only", param_hint="--standalone")
    kit = {"part_mib": given.part_mib, "result_mib": given.result_mib, "minutes": given.minutes}
    if not given.standalone and any(value is not None for value in (*kit.values(), given.tasks, given.ansor)):
        raise typer.BadParameter(
            "they describe part files: add --standalone",
            param_hint="--part-mib, --result-mib, --minutes, --tasks, --ansor",
        )
    limits = {"time_limit_s": given.time_limit_s, "memory_gib": given.memory_gib, "repeat_gap_s": given.repeat_gap_s}
    timing = TimingSettings(flush_cache=given.flush_cache)
    settings = CollectSettings(
        schedules=given.schedules, irregular=given.irregular, seed=given.seed, tune=given.tune, timing=timing, **limits
    )
    remote = given.tracker is not None or given.build_only
    known: dict[str, Any] = {}
    if out.exists() and not given.build_only:
        with Store(out) as store:  # a folder that is somebody's is refused before anything runs
            known = store.devices()
    chosen = configurations(tuple(given.target or ("native",)), device=given.device, remote=remote, known=known)
    if remote and given.device is None and chosen[0].kind == "llvm":
        print(
            f"note: the target is assumed to be this machine, {chosen[0].name}; name another with --device",
            file=sys.stderr,
        )
    sizes = parse_sizes(given.dim or [])
    if given.irregular and chosen[0].kind != "llvm":
        raise typer.BadParameter("irregular schedules are of programs of a CPU", param_hint="--irregular")
    if (given.good or given.active) and given.build_only:
        raise typer.BadParameter("an archive has random schedules only", param_hint="--good, --active")
    selected = any(is_scheduled_todo(Path(source)) for source in wanted)
    if selected and (len(wanted) > 1 or given.standalone or given.good or given.active or given.tune):
        raise typer.BadParameter(
            "a selection has its programs: name it alone, without --standalone, --good, --active and --tune",
            param_hint="FILE",
        )
    if given.model and not (given.good or given.active):
        raise typer.BadParameter("a model chooses nothing without --good or --active", param_hint="--model")
    job = _Job(given, wanted, chosen, out, settings, sizes)
    if given.standalone:
        parts = Limits(**{name: value for name, value in kit.items() if value is not None})
        _standalone(job, parts)
    elif given.build_only:
        _build_only(job)
    else:
        _measure(job)
    exit_if_skipped(out / HOME if given.standalone else out / WORK if given.build_only else out, wanted, sizes)


@dataclass(frozen=True)
class _Job:
    """Networks to collect, how and where to."""

    given: CollectOptions
    wanted: list[str]
    chosen: tuple[Configuration, ...]
    out: Path
    settings: CollectSettings
    sizes: dict[str, int]

    @property
    def command(self) -> str:
        """This command line."""
        return "cdmpp " + shlex.join(sys.argv[1:])


def _measure(job: _Job) -> None:
    from cdmpp.data.measure.collect import collect
    from cdmpp.data.measure.store import Store
    from cdmpp.data.measure.timers import LocalTimers

    out, given = job.out, job.given
    chooser = _chooser(job.chosen[0], given) if given.good or given.active else None
    with resumable(out), progress_bars() as progress:
        timers: Any = LocalTimers
        if given.tracker is not None and given.key is not None:
            from cdmpp.data.measure.board import parse_tracker
            from cdmpp.data.measure.remote import RemoteTimers

            timers = partial(RemoteTimers, parse_tracker(given.tracker, given.key))
        how: dict[str, Any] = {"timers": timers, "progress": progress, "chooser": chooser}
        collect(job.wanted, job.chosen, out, job.settings, dims=job.sizes, command=job.command, **how)
    with Store(out) as store:
        left_out = store.left_out()
    for name, what, why in left_out[:_SHOWN]:
        print(f"not collected: {name}: {what}: {why}", file=sys.stderr)
    if len(left_out) > _SHOWN:
        print(f"not collected: {len(left_out) - _SHOWN} more, listed in {out}/README.md", file=sys.stderr)
    print_summary(out, job.given.json)


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


def _chooser(configuration: Configuration, given: CollectOptions) -> Chooser:
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

    predictors = [LatencyPredictor.load(path) for path in given.model or []]
    names = [predictor.model_id for predictor in predictors]
    counts = {"pool": given.pool, "good": given.good, "active": given.active}
    return EnsembleChooser([member(p) for p in predictors], names=names, **counts)


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
    if job.given.json:
        print_json({"path": str(job.out), "programs": len(manifest.programs)})
        return
    failed = sum(bool(program.failure) for program in manifest.programs)
    print(
        f"wrote {job.out}: {len(manifest.programs):,} programs"
        + (f", {failed:,} of which could not be built" if failed else "")
        + f"; run them with: cdmpp measure {job.out} --out DIR"
    )


def _standalone(job: _Job, limits: Limits) -> None:
    from cdmpp.data.measure.kit.export_programs import export_programs

    if len(job.chosen) > 1:
        raise typer.BadParameter("part files are for one device: name one --target", param_hint="--target")
    out = job.out
    with progress_bars() as progress:
        how: dict[str, Any] = {"limits": limits, "tasks": job.given.tasks or 0, "ansor": job.given.ansor}
        exported = export_programs(
            job.wanted, job.chosen[0], out, job.settings, dims=job.sizes, command=job.command, progress=progress, **how
        )
    programs = sum(len(part["items"]) for part in exported["parts"] if part["kind"] == "programs")
    size = sum(part["bytes"] for part in exported["parts"])
    failed = len(exported["programs"]["failures"])
    if job.given.json:
        print_json(
            {"path": str(out), "parts": len(exported["parts"]), "programs": programs, "failed": failed, "bytes": size}
        )
        return
    print(
        f"wrote {out}: {len(exported['parts'])} parts, {programs:,} programs, {size / 2**20:.1f} MiB"
        + (f"; {failed:,} programs could not be built" if failed else "")
        + f"; try it here: cd {out} && python run.py part-*.zip --dry-run --out dry"
    )


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
