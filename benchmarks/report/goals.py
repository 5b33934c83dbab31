"""Figures to reach: what was aimed at, the best of the preceding study, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.report.known import part_of
from benchmarks.report.markdown import number, percent, table
from benchmarks.report.results import GROUPS, Results, not_measured
from benchmarks.report.unseen import headline, readers, tables_of


@dataclass(frozen=True)
class Goal:
    """One figure.

    Attributes
    ----------
    name, protocol : str
        What is measured, and how.
    before : str
        The best of the preceding study, as it states it.
    target : float
    ours : float, optional
        None where it was not measured.
    higher : bool
        Whether more is better.
    show : callable
        The figure for people.
    note : str
        Behind our figure: what it is the mean of.
    """

    name: str
    protocol: str
    before: str
    target: float
    ours: float | None
    higher: bool = False
    show: Callable[[float | None], str] = percent
    note: str = ""

    @property
    def reached(self) -> str:
        """Yes, no, or - where nothing was measured."""
        if self.ours is None:
            return "-"
        return "yes" if (self.ours >= self.target if self.higher else self.ours <= self.target) else "no"

    def cells(self) -> list[str]:
        """Its row."""
        sign = "≥" if self.higher else "≤"
        ours = "-" if self.ours is None else f"**{self.show(self.ours)}**{self.note}"
        return [self.name, self.protocol, self.before, f"{sign} {self.show(self.target)}", ours, self.reached]


#: Source -> (name, best of the study and target for each stage of :func:`readers`).
_UNSEEN = {
    "neusight": (
        "NS",
        {
            "specification": ("22 %", 0.16),
            "ceilings": ("17.3 %", 0.13),
            "k = 10": ("13.9 %", 0.11),
            "k = 40": ("12.2 %", 0.085),
            "k = 100": ("11.3 %", 0.07),
        },
    ),
    "aiconfigurator_gemm": (
        "AIC",
        {
            "specification": ("19 %", 0.13),
            "k = 10": ("13.3 %", 0.10),
            "k = 40": ("11.9 %", 0.075),
            "k = 100": ("10.4 %", 0.06),
        },
    ),
}


def _unseen(results: Results) -> Iterator[Goal]:
    devices = results.get("devices")
    for source, (name, stages) in _UNSEEN.items():
        reading = readers(source)
        for stage, (before, target) in stages.items():
            value, groups = (None, 0) if devices is None else headline(devices, source, reading[stage])
            note = "" if groups in (0, len(GROUPS)) else f" ({groups} of {len(GROUPS)} groups)"
            yield Goal(f"{name}, device left out", stage, before, target, value, note=note)


def _shapes(results: Results) -> Iterator[Goal]:
    shapes, errors = results.get("shapes"), results.get("model")

    def family(name: str) -> float | None:
        part = shapes and part_of(shapes, "neusight", family=name, filtered=True)
        return part["mape"] if part else None

    def source(name: str) -> float | None:
        # The study answers as users are answered; the table of the training run stands in for it.
        found = shapes and part_of(shapes, name)
        found = found or (errors or {"by_source": {}})["by_source"].get(name)
        return found["mape"] if found else None

    what = "unseen shapes, known devices"
    yield Goal(f"NS GEMM, {what}", "rows that the authors keep", "7.0 %", 0.05, family("gemm"))
    yield Goal(f"NS conv, {what}", "rows that the authors keep", "17.3 %", 0.12, family("conv"))
    yield Goal(f"NS vector, {what}", "rows that the authors keep", "1.5 %", 0.015, family("vector"))
    yield Goal(f"AIC GEMM, {what}", "all rows", "5.2 %", 0.04, source("aiconfigurator_gemm"))
    yield Goal(f"AIC attention, {what}", "all rows", "-", 0.05, source("aiconfigurator_attention"))
    yield Goal(f"vidur, {what}", "all rows", "3.9 %", 0.03, source("vidur"))
    mio = source("miopen")
    devices = [
        p["mape"]
        for p in (shapes["parts"] if shapes else ())
        if p["source"] == "miopen" and p["device"] and not p["family"]
    ]
    note = f" ({100 * min(devices):.1f}-{percent(max(devices))} by device)" if devices else ""
    yield Goal(f"MIOpen conv, {what}", "all rows; 12-20 % by device", "14-37 %", 0.20, mio, note=note)


def _trust(results: Results) -> Iterator[Goal]:
    devices, shapes = results.get("devices"), results.get("shapes")
    known = None if shapes is None else part_rows(shapes)
    yield Goal("80 % interval covers, unseen shapes", "mean over sources; 75-85 %", "-", 0.75, known, higher=True)
    covered: list[float] = []
    areas: list[float] = []
    for found in (devices or {"groups": {}})["groups"].values():
        covered += [t["specification"]["overall"]["coverage"] for t in found["tables"]]
        area = found.get("domain", {}).get("auc_pooled")
        areas += [] if area is None else [area]
    yield Goal(
        "80 % interval covers, unseen devices",
        "specification only, mean over devices and sources",
        "-",
        0.70,
        mean(covered) if covered else None,
        higher=True,
        note=f" (least {percent(min(covered))})" if covered else "",
    )
    yield Goal(
        "domain score, AUC for off by more than 30 %",
        "left-out beside known rows, mean over groups",
        "-",
        0.75,
        mean(areas) if areas else None,
        higher=True,
        show=lambda v: number(v, 2),
        note=f" (least {min(areas):.2f})" if areas else "",
    )


def part_rows(shapes: dict[str, Any]) -> float:
    """Coverage on unseen shapes, the mean over sources."""
    covered: float = mean(p["coverage"] for p in shapes["parts"] if not (p["device"] or p["family"] or p["filtered"]))
    return covered


def _programs(results: Results) -> Iterator[Goal]:
    found = results.get("schedules")
    methods = found["splits"].get("network", {}) if found else {}
    ours = methods.get("cdmpp", {})
    trees = next((m for name, m in methods.items() if "PerStore" in name), None)
    what = "own programs, unseen networks"
    yield Goal(f"{what}: MAPE", "all rows", "-", 0.12, ours.get("mape"))
    for key, name, target in (("task_kendall_tau", "Kendall tau in a task", 0.85), ("top1_score", "top-1 score", 0.95)):
        yield Goal(f"{what}: {name}", "mean over tasks", "-", target, ours.get(key), True, number)
    less = 1 - ours["mape"] / trees["mape"] if ours and trees else None
    yield Goal(f"{what}: less error than XGBoost", "on PerStoreFeature, same rows", "-", 0.30, less, True)


def _race(results: Results) -> Iterator[Goal]:
    found = results.get("reference")
    ratio = found["samples_per_s_ratio"] if found else None
    yield Goal(
        "samples a second in training",
        "the original's on the same machine",
        "-",
        10.0,
        ratio,
        True,
        lambda v: f"{number(v, 0)} times",
    )
    methods = found["methods"] if found else {}
    theirs = [m["test"]["mape"] for name, m in methods.items() if name.startswith("original")]
    tenth = methods.get("ours, a tenth of the time", {}).get("test", {}).get("mape")
    if theirs:
        yield Goal("error after a tenth of the time", "below the original's after all of it", "-", min(theirs), tenth)


def goals(results: Results) -> str:
    """The table "Figures to reach"."""
    rows = [goal.cells() for part in (_unseen, _shapes, _trust, _programs, _race) for goal in part(results)]
    header = ("figure", "protocol", "best of the study", "to reach", "ours", "reached")
    left = [not_measured(name) for name in results.missing()]
    return "\n\n".join(filter(None, [table(header, rows, left=2), "  \n".join(left)]))


def headlines(results: Results) -> str:
    """CDMPP's published headlines, ours beside them with the protocol named."""
    devices, found = results.get("devices"), results.get("schedules")
    network = found["splits"].get("network", {}).get("cdmpp", {}).get("mape") if found else None

    def of(source: str, stage: str) -> str:
        value = headline(devices, source, readers(source)[stage])[0] if devices else None
        return percent(value)

    names = sorted({t["device"] for s in _UNSEEN for _, t in tables_of(devices, s)}) if devices else []
    lines = [
        [
            "cross-model",
            "14.03 %",
            "TenSet; a network left out, the model of its device",
            percent(network),
            "own measured programs, four networks left out, CPU",
        ],
        [
            "cross-device",
            "10.85 %",
            "TenSet; trained on other devices, then on tasks of the target",
            f"{of('neusight', 'k = 40')} / {of('aiconfigurator_gemm', 'k = 40')}",
            "NS / AIC, whole device groups left out, k = 40",
        ],
        ["", "", "", f"{of('neusight', 'k = 100')} / {of('aiconfigurator_gemm', 'k = 100')}", "the same, k = 100"],
        [
            "",
            "",
            "",
            f"{of('neusight', 'specification')} / {of('aiconfigurator_gemm', 'specification')}",
            "the same, no measurement",
        ],
    ]
    header = ("", "CDMPP", "its protocol", "ours", "our protocol")
    after = f"\n\nDevices left out: {', '.join(names)}." if names else ""
    text = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(line) for line in lines)]
    return "\n".join(f"| {line} |" for line in text) + after
