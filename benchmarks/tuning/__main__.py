"""Cost models in one and the same search of MetaSchedule, compared by the programs that they find.

``python -m benchmarks.tuning [--tasks 1] [--seeds 1] [--trials 32]``: for each seed, task and method one search with
so many measured trials, through the project's builder and runner. The methods are random scores, TVM's XGBModel, and
cdmpp frozen, corrected online ("fine-tuned"), and corrected with optimistic scores ("exploring"; not among the four
of the default). The defaults take about two minutes.

``--full`` is the published table: 6 tasks, 3 seeds, 128 trials, 4 methods, more than an hour. ``--defaults`` has the
settings of TVM's own search (population 512, 4 generations), on two tasks with XGBModel and the fine-tuned cost model.
``--trials-per-round 8`` lets all methods learn after every 8 trials.

Measurements and finished searches are kept in ``--work``: the same command goes on after a kill, and no program is
measured twice. A search with another model or on another device is searched again. ``--render`` only writes
docs/tuning.md and its figure from the result files of the two published tables.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report.results import write_result
from cdmpp.data.measure.sampling import prepare_sampler

OUT, OUT_DEFAULTS = Path("benchmarks/results/tuning.json"), Path("benchmarks/results/tuning_defaults.json")
#: Tasks, seeds, trials and methods of the published tables.
FULL, DEFAULTS = ("6", 3, 128, "4"), ("matmul,conv2d", 1, 128, "xgboost,fine-tuned")
#: Measured trials of a round.
ROUND = 16
#: Some milliseconds a program: ten repeats of four milliseconds, of which the least counts. Other work on the
#: machine lengthens some repeats, hardly ever all of them.
REPEATS_S, SPREAD = 0.04, 0.5
#: What no program worth having takes: some schedules unroll until the compiler is busy for minutes.
BUILD_LIMIT_S, TIME_LIMIT_S = 12.0, 12.0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing, and give the result."""
    # Everything that imports TVM, after prepare_sampler has kept its CUDA intrinsics out.
    from benchmarks.tuning.finished import FinishedSearches
    from benchmarks.tuning.results import METHODS, summarise
    from benchmarks.tuning.search import TVM_DEFAULTS, SearchSettings, run_search
    from benchmarks.tuning.tasks import TASKS, check_unseen, make_task
    from cdmpp.data.measure.settings import CollectSettings
    from cdmpp.data.measure.targets import configurations
    from cdmpp.data.measure.timing import TimingSettings
    from cdmpp.integrations.measuring import Workbench
    from cdmpp.predict.predictor import LatencyPredictor

    names = chosen(options.tasks, list(TASKS))
    methods = chosen(options.methods, list(METHODS))
    tasks = [make_task(name) for name in names]
    check_unseen(tasks, options.data)
    configuration = configurations((options.target,))[0]
    device = configuration.device
    predictor = LatencyPredictor.load(options.model)
    chosen_settings = TVM_DEFAULTS if options.defaults else SearchSettings()
    settings = replace(chosen_settings, round=options.trials_per_round)
    timing = TimingSettings(total_s=REPEATS_S, max_spread=SPREAD)
    work = Path(options.work)
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)
    end = time.monotonic() + 60 * options.minutes
    limits = CollectSettings(timing=timing, build_limit_s=BUILD_LIMIT_S, time_limit_s=TIME_LIMIT_S)
    wanted = [(task, method, seed) for seed in range(options.seeds) for task in tasks for method in methods]
    searches = []
    with Workbench(work / "trials", configuration, limits, statistic="least") as bench:
        finished = FinishedSearches(work, device.name, predictor.model_id, f"{options.trials}-{settings.label}")
        for number, (task, method, seed) in enumerate(wanted, 1):
            search = finished.find(task.name, method, seed)
            if search is None and time.monotonic() < end:
                found = run_search(task, method, seed, options.trials, bench, predictor, settings)
                search = finished.add(found)
                about = f"{task.name}, {method}, seed {seed}: {found['wall_s']:.0f} s"
                print(f"{number} of {len(wanted)}: {about}", flush=True)
            if search is not None:
                searches.append(search)
    programs = {h for s in searches for r in s["rounds"] for h, _, _ in r["trials"]}
    return {
        "command": command(options, len(tasks)),
        "model_id": predictor.model_id,
        "device": device.name,
        "processor": f"{device.vendor} {device.arch}",
        "target": configuration.target_text,
        "trials_per_round": settings.round,
        "population": settings.population,
        "generations": settings.generations,
        "asked": len(wanted),
        "programs": len(programs),
    } | summarise(searches, options.trials)


def command(options: argparse.Namespace, tasks: int) -> str:
    """The command that gives this result."""
    if options.defaults:
        return "python -m benchmarks.tuning --defaults"
    rounds = f" --trials-per-round {options.trials_per_round}" if options.trials_per_round != ROUND else ""
    methods = f" --methods {options.methods}" if options.methods != FULL[3] else ""
    settings = f"--tasks {tasks} --seeds {options.seeds} --trials {options.trials}"
    return f"python -m benchmarks.tuning {settings}{rounds}{methods}"


def chosen(text: str, known: list[str]) -> list[str]:
    """A number of the known names, or some of them."""
    if text.isdecimal():
        return known[: int(text)]
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{', '.join(unknown)}: none of {', '.join(known)}")
    return names


def main() -> None:
    """Run, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="1", help="number of tasks, or their names: a,b")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trials", type=int, default=32, help="measured programs of a search")
    parser.add_argument("--trials-per-round", type=int, default=ROUND, help="measured trials between two updates")
    published = parser.add_mutually_exclusive_group()
    published.add_argument("--full", action="store_true", help="the published table")
    published.add_argument("--defaults", action="store_true", help="the table with the settings of TVM's search")
    parser.add_argument("--methods", default="4", help="number of methods, or their names: a,b")
    parser.add_argument("--target", default="x86-64-v3@1", help="as cdmpp collect's")
    parser.add_argument("--model", help="folder; by default the shipped one")
    parser.add_argument("--data", default="data/cdmpp-measured", help="no task of these records is searched")
    parser.add_argument("--work", default="runs/tuning")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="minutes after which no search is started")
    parser.add_argument("--out", type=Path, help=f"default: {OUT} with --full, otherwise in --work")
    parser.add_argument("--render", action="store_true", help="only write docs/tuning.md from the result")
    options = parser.parse_args()
    if options.full or options.defaults:
        options.tasks, options.seeds, options.trials, options.methods = FULL if options.full else DEFAULTS
    own = OUT_DEFAULTS if options.defaults else OUT if options.full or options.render else None
    out = options.out or own or Path(options.work) / "result.json"
    if not options.render:
        prepare_sampler("llvm")
        write_result(out, run(options))
    from benchmarks.tuning.document import overview, render

    print(overview(read(out)))
    if out in (OUT, OUT_DEFAULTS):
        render(read(OUT), read(OUT_DEFAULTS) if OUT_DEFAULTS.is_file() else None, Path("docs"))


def read(path: Path) -> dict[str, Any]:
    """Read a result file."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    main()
