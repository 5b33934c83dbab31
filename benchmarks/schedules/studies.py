"""Studies of training on scheduled programs: several variants, three seeds each.

``python -m benchmarks.schedules.studies [STUDY ...] [--on development]``. Studies: domain loss (CMD and CORAL towards
unlabelled programs of the unseen networks), choice of tasks (KMeans or random), choice of schedules (active or random),
feature groups (one left out), ranking loss, and ensemble. A run trains one network of the configuration with one
change on one core, for a few minutes. It is stored as one JSON file in ``--runs`` and never repeated on the same
data; two processes with the same command share the runs.

``--on development`` evaluates validation tasks and validation networks, for choices. ``--on task`` and ``--on network``
evaluate the test parts of these splits, for the final figures of what was chosen. No study reads a sealed network. The
summary is written to ``benchmarks/results/schedule_studies.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.report.markdown import number, percent
from benchmarks.report.results import rounded, write_result
from benchmarks.schedules.parts import Scheduled, Split
from benchmarks.schedules.runs import Run, claimed, stored
from benchmarks.schedules.stacked import file_of, stacked
from benchmarks.schedules.variants import STUDIES, Variant
from cdmpp.errors import CdmppError, DataError
from cdmpp.train.config import TrainConfig, load_config

OUT = Path("benchmarks/results/schedule_studies.json")
ENSEMBLE = "ensemble"
#: Figures of the printed table.
SHOWN = ("mape", "task_kendall_tau", "top1_score", "top5_score")


class Studies:
    """All runs of some studies on one split."""

    def __init__(self, data: Scheduled, split: Split, config: TrainConfig, seeds: list[int], folder: Path) -> None:
        self.data, self.split, self.config, self.seeds, self.folder = data, split, config, seeds, folder
        #: Entry of each run by study, variant and seed.
        self._entries: dict[tuple[str, str, int], dict[str, Any]] = {}

    def evaluate(self, names: list[str]) -> None:
        """Make every run that is not stored; runs that another process is making are waited for at the end."""
        later = [job for job in self._jobs(names) if not self._run(*job, wait=False)]
        for job in later:
            self._run(*job, wait=True)
        if ENSEMBLE in names:
            self._ensemble()

    def _jobs(self, names: list[str]) -> Iterator[tuple[str, str, Variant, int]]:
        for study in names:
            # The ensemble's members are runs of the default.
            variants = {"": Variant()} if study == ENSEMBLE else STUDIES[study]
            for variant, change in variants.items():
                yield from ((study, variant, change, seed) for seed in self.seeds)

    def _run(self, study: str, variant: str, change: Variant, seed: int, *, wait: bool) -> bool:
        """Make or read one run; False where another process is making it."""
        try:
            run = Run(self.data, self.split, self.config, change, seed, self.folder)
        except DataError as error:
            print(f"{study}, {variant}, seed {seed}: left out, {error}", flush=True)
            return True
        with claimed(run.file, wait=wait) as mine:
            if mine and study == ENSEMBLE:
                run.result()
            elif mine:
                self._add(study, variant, seed, {"run": run.key, **run.result()})
        return mine

    def _ensemble(self) -> None:
        runs = [Run(self.data, self.split, self.config, Variant(), seed, self.folder) for seed in self.seeds]
        # Each seed in turn is the first member.
        for i, seed in enumerate(self.seeds):
            turned = runs[i:] + runs[:i]
            file = file_of(turned, self.folder)
            with claimed(file, wait=True):
                found = stored(file, lambda turned=turned: stacked(turned))  # type: ignore[misc]
            for variant, entry in found.items():
                self._add(ENSEMBLE, variant, seed, entry)

    def _add(self, study: str, variant: str, seed: int, entry: dict[str, Any]) -> None:
        self._entries[study, variant, seed] = {"seed": seed, **entry}
        shown = "; ".join(f"{test} {percent(m['mape'])}" for test, m in entry["figures"].items())
        print(f"{study}, {variant}, seed {seed}: {shown}", flush=True)

    @property
    def found(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """Entries by study and variant, in the order of the studies and seeds."""
        result: dict[str, dict[str, list[dict[str, Any]]]] = {}
        studies = [*STUDIES, ENSEMBLE]
        rank = {(s, v): i for s in STUDIES for i, v in enumerate(STUDIES[s])}
        order = sorted(self._entries, key=lambda k: (studies.index(k[0]), rank.get(k[:2], 0)))
        for study, variant, seed in order:
            result.setdefault(study, {}).setdefault(variant, []).append(self._entries[study, variant, seed])
        return result

    def table(self) -> str:
        """Mean and standard deviation over seeds of each variant."""
        lines = []
        for study, variants in self.found.items():
            lines += ["", f"{study} ({self.split.name})", "", f"| variant | seeds | test | {' | '.join(SHOWN)} |"]
            lines.append("| --- | ---: | --- |" + " ---: |" * len(SHOWN))
            for variant, entries in variants.items():
                for test in entries[0]["figures"]:
                    cells = [over_seeds([e["figures"][test][key] for e in entries], key) for key in SHOWN]
                    lines.append(f"| {variant} | {len(entries)} | {test} | {' | '.join(cells)} |")
        return "\n".join(lines)


def over_seeds(values: list[float | None], key: str) -> str:
    """Mean ± standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    show = percent if key == "mape" else number
    return show(mean(known)) + (f" ± {show(stdev(known))}" if len(known) > 1 else "")


def write(out: Path, split: str, studies: Studies, steps: int) -> None:
    """Put the studies of one split into the summary; others in it stay."""
    old: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    splits = old.get("splits", {})
    mine = {
        study: {variant: [_kept(entry) for entry in entries] for variant, entries in variants.items()}
        for study, variants in studies.found.items()
    }
    about = {
        "networks": list(studies.data.development_networks if split == "development" else studies.data.test_networks),
        "steps": steps,
        "data": studies.data.dataset.fingerprint,
    }
    splits[split] = {**splits.get(split, {}), **about, "studies": {**splits.get(split, {}).get("studies", {}), **mine}}
    write_result(out, {"command": "python -m benchmarks.schedules.studies", "splits": splits})


def _kept(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with the figures of the summary."""
    found = {test: {key: m[key] for key in ("n", *SHOWN, "ranked_groups")} for test, m in entry["figures"].items()}
    kept: dict[str, Any] = rounded({**entry, "figures": found})
    return kept


def main() -> None:
    """Make the runs that are not stored yet, print the tables and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = ", ".join([*STUDIES, ENSEMBLE])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {known}; default: all")
    parser.add_argument("--on", choices=("development", "task", "network"), default="development")
    parser.add_argument("--config", default="configs/cpu.toml")
    parser.add_argument("--data", help="dataset folder or records, in place of the configuration's")
    parser.add_argument("--steps", type=int, help="in place of the configuration's")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", type=Path, default=Path("runs/schedules"))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    names = options.studies or [*STUDIES, ENSEMBLE]
    if unknown := sorted(set(names) - {*STUDIES, ENSEMBLE}):
        raise SystemExit(f"{', '.join(unknown)} is none of the studies {known}")
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise SystemExit(f"--seeds must be numbers like 0,1,2, not {options.seeds!r}") from None
    config = load_config(options.config).of_one_network()
    if options.data:
        config = config.model_copy(update={"data": config.data.model_copy(update={"records": (options.data,)})})
    if options.steps:
        steps = config.optimiser.model_copy(update={"steps": options.steps})
        config = config.model_copy(update={"optimiser": steps})
    try:
        data = Scheduled.load(config)
        studies = Studies(data, data.split(options.on, config), config, seeds, options.runs)
        studies.evaluate(names)
    except CdmppError as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    print(studies.table())
    write(options.out, options.on, studies, config.optimiser.steps)


if __name__ == "__main__":
    main()
