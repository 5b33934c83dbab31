"""Cost models in one and the same search of MetaSchedule, compared by the programs that they find.

``python -m benchmarks.tuning [--tasks 1] [--seeds 1] [--trials 32]``: for each seed, task and method (random
scores, TVM's XGBModel, cdmpp frozen, cdmpp corrected online) one search with so many measured trials, 16 per round,
through the project's builder and runner. The defaults take about two minutes. ``--full`` is the published table: 6
tasks, 3 seeds, 128 trials, 4 methods, several hours. Measurements and finished searches are kept in ``--work``: the
same command resumes after a kill, and no program is measured twice. ``--render`` only writes docs/tuning.md and its
figure from the result file of the full table.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

from benchmarks.report.results import write_result
from cdmpp.measure.sampling import prepare_sampler

OUT = Path("benchmarks/results/tuning.json")
#: Tasks, seeds, trials and methods of the published table.
FULL = ("6", 3, 128, "4")
#: Some milliseconds a program: ten repeats of four milliseconds, of which the least counts. Other work on the
#: machine lengthens some repeats, hardly ever all of them.
REPEATS_S, SPREAD = 0.04, 0.5
#: What no program worth having takes: some schedules unroll until the compiler is busy for minutes.
BUILD_LIMIT_S, TIME_LIMIT_S = 12.0, 12.0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing, and give the result."""
    # Everything that imports TVM, after prepare_sampler has kept its CUDA intrinsics out.
    from benchmarks.tuning.results import METHODS, summarise
    from benchmarks.tuning.search import GENERATIONS, POPULATION, ROUND, run_search
    from benchmarks.tuning.tasks import TASKS, check_unseen, make_task
    from cdmpp.integrations.measuring import Workbench
    from cdmpp.measure.settings import CollectSettings
    from cdmpp.measure.targets import configurations
    from cdmpp.measure.timing import TimingSettings
    from cdmpp.predictor import LatencyPredictor

    names = chosen(options.tasks, list(TASKS))
    methods = chosen(options.methods, list(METHODS))
    tasks = [make_task(name) for name in names]
    check_unseen(tasks, options.data)
    configuration = configurations((options.target,))[0]
    predictor = LatencyPredictor.load(options.model)
    timing = TimingSettings(total_s=REPEATS_S, max_spread=SPREAD)
    work = Path(options.work)
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)
    end = time.monotonic() + 60 * options.minutes
    settings = CollectSettings(timing=timing, build_limit_s=BUILD_LIMIT_S, time_limit_s=TIME_LIMIT_S)
    with Workbench(work / "trials", configuration, settings, statistic="least") as bench:
        searches = []
        for seed in range(options.seeds):
            for task in tasks:
                for method in methods:
                    file = work / f"{task.name}-{method}-{seed}-{options.trials}.json".replace(" ", "-")
                    if not file.is_file() and time.monotonic() < end:
                        found = run_search(task, method, seed, options.trials, bench, predictor)
                        aside = file.with_suffix(".part")
                        aside.write_text(json.dumps(found), encoding="utf-8")
                        aside.replace(file)
                        print(f"{task.name}, {method}, seed {seed}: {found['wall_s']:.0f} s", flush=True)
                    if file.is_file():
                        searches.append(json.loads(file.read_text(encoding="utf-8")))
    about = {
        "command": f"python -m benchmarks.tuning --tasks {len(tasks)} --seeds {options.seeds} "
        f"--trials {options.trials}",
        "model_id": predictor.model_id,
        "device": configuration.name,
        "target": configuration.target_text,
        "trials_per_round": ROUND,
        "population": POPULATION,
        "generations": GENERATIONS,
        "asked": len(tasks) * options.seeds * len(methods),
        "programs": None,
    }
    programs = {h for s in searches for r in s["rounds"] for h, _, _ in r["trials"]}
    return about | {"programs": len(programs)} | summarise(searches, options.trials)


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
    parser.add_argument("--full", action="store_true", help="the published table")
    parser.add_argument("--methods", default="4", help="number of methods, or their names: a,b")
    parser.add_argument("--target", default="x86-64-v3@1", help="as cdmpp collect's")
    parser.add_argument("--model", help="folder; by default the shipped one")
    parser.add_argument("--data", default="data/cdmpp-measured", help="no task of these records is searched")
    parser.add_argument("--work", default="runs/tuning")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="minutes after which no search is started")
    parser.add_argument("--out", type=Path, help=f"default: {OUT} with --full, otherwise in --work")
    parser.add_argument("--render", action="store_true", help="only write docs/tuning.md from the result")
    options = parser.parse_args()
    if options.full:
        options.tasks, options.seeds, options.trials, options.methods = FULL
    out = options.out or (OUT if options.full or options.render else Path(options.work) / "result.json")
    if not options.render:
        prepare_sampler("llvm")
        write_result(out, run(options))
    from benchmarks.tuning.document import overview, render

    result = json.loads(out.read_text(encoding="utf-8"))
    print(overview(result))
    if out == OUT:
        render(result, Path("docs"))


if __name__ == "__main__":
    main()
