"""Goals: the target of each figure, the best result of the preceding study, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.report.known import part_of
from benchmarks.report.markdown import number, percent, table
from benchmarks.report.results import GROUPS, Results, not_measured
from benchmarks.report.unseen import HEADLINES, PEAK_RATES, SPECIFICATION, headline, readers


@dataclass(frozen=True)
class Goal:
    """A target for one figure."""

    #: Quantity, and how it is measured.
    name: str
    protocol: str
    #: Best result of the preceding study, as it reports it.
    before: str
    target: float
    #: None: not measured.
    ours: float | None
    #: Whether a higher value is better.
    higher: bool = False
    #: Formats the figure.
    show: Callable[[float | None], str] = percent
    #: Remark after our figure, such as the groups that it averages.
    note: str = ""

    @property
    def reached(self) -> str:
        """``yes``, ``no``, or ``-`` if it was not measured."""
        if self.ours is None:
            return "-"
        return "yes" if (self.ours >= self.target if self.higher else self.ours <= self.target) else "no"

    def cells(self) -> list[str]:
        """Cells of its table row."""
        sign = "≥" if self.higher else "≤"
        ours = "-" if self.ours is None else f"**{self.show(self.ours)}**{self.note}"
        return [self.name, self.protocol, self.before, f"{sign} {self.show(self.target)}", ours, self.reached]


#: Source -> best result of the preceding study and target, for each stage of :func:`readers`.
_UNSEEN = {
    "neusight": {
        SPECIFICATION: ("22 %", 0.16),
        PEAK_RATES: ("17.3 %", 0.13),
        "k = 10": ("13.9 %", 0.11),
        "k = 40": ("12.2 %", 0.085),
        "k = 100": ("11.3 %", 0.07),
    },
    "aiconfigurator_gemm": {
        SPECIFICATION: ("19 %", 0.13),
        "k = 10": ("13.3 %", 0.10),
        "k = 40": ("11.9 %", 0.075),
        "k = 100": ("10.4 %", 0.06),
    },
}


def _unseen(results: Results) -> Iterator[Goal]:
    devices = results.get("devices")
    for source, stages in _UNSEEN.items():
        reading = readers(source)
        for stage, (before, target) in stages.items():
            value, groups = (None, 0) if devices is None else headline(devices, source, reading[stage])
            note = "" if groups in (0, len(GROUPS)) else f" ({groups} of {len(GROUPS)} groups)"
            yield Goal(f"{HEADLINES[source]}, device left out", stage, before, target, value, note=note)


def _shapes(results: Results) -> Iterator[Goal]:
    shapes, errors = results.get("shapes"), results.get("model")

    def family(name: str) -> float | None:
        part = shapes and part_of(shapes, "neusight", family=name, filtered=True)
        return part["mape"] if part else None

    old = f" ({shapes['model_id']})" if shapes and results.stale() else ""
    what, filtered = "held-out shapes", "rows that pass NeuSight's own filter"
    yield Goal(f"fp32 GEMM, {what}", filtered, "7.0 %", 0.05, family("gemm"), note=old)
    yield Goal(f"fp32 convolutions, {what}", filtered, "17.3 %", 0.12, family("conv"), note=old)
    yield Goal(f"fp32 vector operators, {what}", filtered, "1.5 %", 0.015, family("vector"), note=old)
    yield Goal(f"bf16 GEMM, {what}", "all rows", "5.2 %", 0.04, held_out_error(results, "aiconfigurator_gemm"))
    yield Goal(f"bf16 attention, {what}", "all rows", "-", 0.05, held_out_error(results, "aiconfigurator_attention"))
    yield Goal(f"fp16 LLM layers, {what}", "all rows", "3.9 %", 0.03, held_out_error(results, "vidur"))
    mio = held_out_error(results, "miopen")
    devices = [mape for (name, _), mape in device_errors(errors).items() if name == "miopen"] if errors else []
    note = f" ({100 * min(devices):.1f}-{percent(max(devices))} by device)" if devices else ""
    yield Goal(f"convolutions on AMD GPUs, {what}", "all rows; 12-20 % by device", "14-37 %", 0.20, mio, note=note)


def device_errors(errors: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """MAPE of each source and device of an error table."""
    sums: dict[tuple[str, str], list[float]] = {}
    for group in errors["groups"]:
        total = sums.setdefault((group["source"], group["device"]), [0, 0.0])
        total[0] += group["n"]
        total[1] += group["n"] * group["mape"]
    return {key: total / n for key, (n, total) in sums.items()}


def held_out_error(results: Results, source: str) -> float | None:
    """MAPE on a source's held-out sizes.

    The study of shapes predicts as users do. Without it, or if it is of another model, the error table of the training
    run is used.
    """
    shapes, errors = results.get("shapes"), results.get("model")
    entry = part_of(shapes, source) if shapes and not results.stale() else None
    entry = entry or (errors or {"by_source": {}})["by_source"].get(source)
    return entry["mape"] if entry else None


#: Source -> name, error of a booster on 30,000 rows, target.
_ADDED = {
    "aiconfigurator_gemm_quantised": ("quantised GEMM", "9.5 %", 0.06),
    "aiconfigurator_moe": ("expert layers", "13.6 %", 0.10),
    "aiconfigurator_mla": ("latent attention", "8.2 %", 0.07),
    "tensile_gemm": ("GEMM of rocBLAS and hipBLASLt", "6.9 %", 0.06),
    "aiter_gemm": ("GEMM of aiter", "3.0 %", 0.03),
    "frontier": ("LLM layers of Frontier", "3.7 %", 0.035),
}


def _added(results: Results) -> Iterator[Goal]:
    """Goals of the tables of quantised products, experts, latent attention, AMD libraries and collectives."""
    for source, (name, before, target) in _ADDED.items():
        yield Goal(f"{name}, held-out shapes", "all rows", before, target, held_out_error(results, source))
    collectives = results.get("collectives") or {}
    test, left, adapted = (collectives.get(name) for name in ("test_error", "left_out_error", "adapted_error"))
    yield Goal("collectives, held-out sizes", "all rows", "6.2 %", 0.055, test)
    yield Goal("collectives, device left out", "all rows, one device at a time", "-", 0.25, left)
    yield Goal("collectives, device left out", "8 measurements of each link", "-", 0.10, adapted)


def _trust(results: Results) -> Iterator[Goal]:
    devices, shapes = results.get("devices"), results.get("shapes")
    wholes = [p for p in (shapes or {"parts": []})["parts"] if not (p["device"] or p["family"] or p["filtered"])]
    known = mean(part["coverage"] for part in wholes) if wholes else None
    yield Goal("inside the 80 % interval, held-out shapes", "mean over sources; 75-85 %", "-", 0.75, known, higher=True)
    covered: list[float] = []
    areas: list[float] = []
    for group in (devices or {"groups": {}})["groups"].values():
        covered += [t["specification"]["overall"]["coverage"] for t in group["tables"]]
        area = group.get("domain", {}).get("auc_pooled")
        areas += [] if area is None else [area]
    yield Goal(
        "inside the 80 % interval, devices left out",
        "data sheet only, mean over devices and sources",
        "-",
        0.70,
        mean(covered) if covered else None,
        higher=True,
        note=f" (lowest {percent(min(covered))})" if covered else "",
    )
    yield Goal(
        "domain score: AUC for errors above 30 %",
        "rows of left-out and known devices, mean over groups",
        "-",
        0.75,
        mean(areas) if areas else None,
        higher=True,
        show=lambda v: number(v, 2),
        note=f" (lowest {min(areas):.2f})" if areas else "",
    )


#: Split of the TVM programs -> what is unseen, and the goals of MAPE, tau and top-1 score.
_PROGRAMS = {
    "network": ("networks", 0.12, 0.85, 0.95),
    "sealed": ("sealed networks", 0.18, 0.75, 0.93),
    "task": ("tasks", 0.16, 0.80, 0.95),
}


def _programs(results: Results) -> Iterator[Goal]:
    schedules = results.get("schedules")
    splits = schedules["splits"] if schedules else {}
    for split, (unseen, error, tau, top) in _PROGRAMS.items():
        ours = splits.get(split, {}).get("cdmpp", {})
        what = f"TVM programs of unseen {unseen}" if split != "sealed" else f"TVM programs of {unseen}"
        yield Goal(f"{what}: MAPE", "all rows", "-", error, ours.get("mape"))
        for key, name, target in (
            ("task_kendall_tau", "Kendall tau within a task", tau),
            ("top1_score", "top-1 score", top),
        ):
            yield Goal(f"{what}: {name}", "mean over tasks", "-", target, ours.get(key), True, number)
    for split, baseline, shown in (
        ("network", "XGBoost, PerStoreFeature", "XGBoost"),
        ("network", "original", "the original"),
        ("task", "original", "the original"),
    ):
        methods = splits.get(split, {})
        ours, theirs = methods.get("cdmpp"), next((m for name, m in methods.items() if name.startswith(baseline)), None)
        less = 1 - ours["mape"] / theirs["mape"] if ours and theirs else None
        what = f"TVM programs of unseen {split}s: error reduction over {shown}"
        yield Goal(what, f"{shown} on PerStoreFeature, same rows", "-", 0.30, less, True)


def goals(results: Results) -> str:
    """Table of all goals."""
    rows = [goal.cells() for part in (_unseen, _shapes, _added, _trust, _programs) for goal in part(results)]
    header = ("figure", "protocol", "preceding study", "goal", "cdmpp", "reached")
    left = [not_measured(name) for name in results.missing()]
    return "\n\n".join(filter(None, [table(header, rows, left=2), "  \n".join(left)]))


def headlines(results: Results) -> str:
    """CDMPP's published headline errors and ours on TVM programs, each with its protocol."""
    schedules, choices = results.get("schedules") or {}, results.get("schedules_study") or {}
    by_source = (results.get("model") or {"by_source": {}})["by_source"]
    known_gpus, known_cpus = (percent(by_source.get(name, {}).get("mape")) for name in ("ansor", "cdmpp_collect"))
    networks = schedules.get("splits", {}).get("network", {}).get("cdmpp", {}).get("mape")
    gpus: dict[str, list[float]] = {}
    for name, by_seed in choices.get("variants", {}).items():
        if name.startswith("without ") and name.endswith(": plain"):
            device = name.removeprefix("without ").removesuffix(": plain")
            gpus[device] = [run["measured"]["40 variance"]["mape"] for run in by_seed.values()]
    cpus = {
        cpu: [methods["cdmpp"]["after"]["mape"] for methods in part["configurations"].values()]
        for cpu, part in schedules.get("adapted", {}).items()
        if not schedules["near_twins"][cpu]
    }

    def errors(of: dict[str, list[float]]) -> str:
        return " / ".join(percent(mean(values)) for values in of.values()) or "-"

    lines = [
        [
            *("cross-model", "14.03 %", "TenSet; one network left out, model of the same device"),
            *(percent(networks), "own measurements on CPUs; networks left out"),
        ],
        [
            *[""] * 3,
            f"{known_gpus} / {known_cpus}",
            "GPUs (Ansor's schedules) / CPUs (own measurements); tasks left out",
        ],
        [
            *("cross-device", "10.85 %", "TenSet; trained on other devices, fine-tuned on tasks of the target"),
            *(errors(gpus), f"device left out, k = 40 by variance: {', '.join(gpus) or 'not measured'}"),
        ],
        [*[""] * 3, errors(cpus), f"CPU left out, k = 40: {', '.join(cpus) or 'not measured'}"],
    ]
    return table(("", "CDMPP (published)", "its protocol", "cdmpp", "our protocol"), lines, left=5)
