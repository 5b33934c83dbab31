"""Report on devices that were left out of training, with and without measurements of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.report.known import baseline_columns, baseline_header, title
from benchmarks.report.markdown import ERROR_COLUMNS, error_cells, folded, number, percent, picture, table
from benchmarks.report.results import GROUPS, Results, not_measured, of_study

#: Sources with a headline figure, and their short names: the mean over families (NeuSight), or over rows.
HEADLINES = {"neusight": "fp32 operators", "aiconfigurator_gemm": "bf16 GEMM"}
#: Stages without measurements of the device: its data sheet alone, or with the peak rates of its own runs.
SPECIFICATION, PEAK_RATES = "data sheet only", "measured peak rates"
KS = (10, 40, 100)
SAMPLER = "kmeans"

_INTERVALS = picture("share of measurements inside the predicted intervals", "interval_coverage.png")

Table = Mapping[str, Any]


def tables_of(devices: Mapping[str, Any], source: str) -> Iterator[tuple[str, Table]]:
    """(group, table) of a source, in the order of :data:`GROUPS`."""
    for group in GROUPS:
        for entry in devices["groups"].get(group, {}).get("tables", ()):
            if entry["source"] == source:
                yield group, entry


def figure_of(source: str, errors: Mapping[str, Any] | None) -> float | None:
    """Headline error of a source: the mean over families for NeuSight, the MAPE over rows for the others."""
    if errors is None:
        return None
    value: float | None = errors["macro"] if source == "neusight" else errors["overall"]["mape"]
    return value


def adapted(entry: Table, k: int, sampler: str = SAMPLER) -> list[Mapping[str, Any]]:
    """Runs that adapt with ``k`` measurements, one per seed."""
    runs = [run for run in entry["adapted"] if run["k"] == k and run["sampler"] == sampler]
    return sorted(runs, key=lambda run: int(run["seed"]))


def adapted_figures(source: str, entry: Table, k: int, sampler: str = SAMPLER) -> list[float]:
    """Headline error after adapting, for each seed."""
    values = (figure_of(source, run["after"]) for run in adapted(entry, k, sampler))
    return [value for value in values if value is not None]


def spread(values: Sequence[float]) -> str:
    """Mean over seeds in per cent, with the standard deviation if there are several."""
    if not values:
        return "-"
    text = f"{100 * mean(values):.1f}"
    return f"{text} ± {100 * stdev(values):.1f} %" if len(values) > 1 else f"{text} %"


def headline(
    devices: Mapping[str, Any], source: str, read: Callable[[Table], float | None]
) -> tuple[float | None, int]:
    """Mean over groups of the mean over a group's devices, and the number of groups with a value."""
    by_group: dict[str, list[float]] = {}
    for group, entry in tables_of(devices, source):
        value = read(entry)
        if value is not None:
            by_group.setdefault(group, []).append(value)
    if not by_group:
        return None, 0
    return mean(mean(values) for values in by_group.values()), len(by_group)


def readers(source: str) -> dict[str, Callable[[Table], float | None]]:
    """Functions that read each headline error from a table, by the name of the stage."""
    return {
        SPECIFICATION: lambda entry: figure_of(source, entry["specification"]),
        PEAK_RATES: lambda entry: figure_of(source, entry["ceilings"]),
        **{f"k = {k}": _after(source, k) for k in KS},
    }


def _after(source: str, k: int, sampler: str = SAMPLER) -> Callable[[Table], float | None]:
    def read(entry: Table) -> float | None:
        values = adapted_figures(source, entry, k, sampler)
        return mean(values) if values else None

    return read


def _baseline(source: str, name: str) -> Callable[[Table], float | None]:
    return lambda entry: figure_of(source, entry["baselines"].get(name))


@of_study("devices")
def zero_shot(results: Results, devices: dict[str, Any]) -> str:
    """One table per source: every device, the baselines, and the mean over groups."""
    blocks = [_incomplete(results)]
    for source in _sources(devices):
        entries = list(tables_of(devices, source))
        names = baseline_columns(entry for _, entry in entries)
        reading = readers(source)
        rows = []
        for _, entry in entries:
            cells = [f"**{percent(reading[SPECIFICATION](entry))}**", percent(reading[PEAK_RATES](entry))]
            cells += [spread(adapted_figures(source, entry, k)) for k in KS]
            cells += [percent(figure_of(source, entry["baselines"].get(name))) for name in names]
            rows.append([entry["device"], f"{entry['rows']:,}", *cells])
        means = [headline(devices, source, read)[0] for read in reading.values()]
        means += [headline(devices, source, _baseline(source, name))[0] for name in names]
        if len({group for group, _ in entries}) > 1:
            rows.append(["**mean over groups**", "", *map(percent, means)])
        what = (
            "mean of the MAPEs of GEMM, convolution and vector operators" if source == "neusight" else "MAPE over rows"
        )
        header = ("device left out", "n", SPECIFICATION, PEAK_RATES, *(f"k = {k}" for k in KS), *baseline_header(names))
        blocks.append(f"**{title(source)}**, {what}:\n\n{table(header, rows)}")
    blocks.append(_every_device(devices))
    return "\n\n".join(filter(None, blocks))


def _sources(devices: Mapping[str, Any]) -> list[str]:
    present = {entry["source"] for group in devices["groups"].values() for entry in group["tables"]}
    return [*(s for s in HEADLINES if s in present), *sorted(present - set(HEADLINES))]


def _incomplete(results: Results) -> str:
    absent = results.absent_groups()
    return f"Groups that were not left out yet: {', '.join(absent)}. {not_measured('devices')}" if absent else ""


def _every_device(devices: Mapping[str, Any]) -> str:
    """All metrics of every device and family."""
    rows = []
    for source in _sources(devices):
        for _, entry in tables_of(devices, source):
            stages = {SPECIFICATION: entry["specification"], PEAK_RATES: entry["ceilings"]}
            runs = adapted(entry, 40)
            stages["k = 40, seed 0"] = runs[0]["after"] if runs else None
            for stage, errors in stages.items():
                if errors is None:
                    continue
                named = {"all": errors["overall"]}
                named |= errors["families"] if len(errors["families"]) > 1 else {}
                rows += [
                    [title(source), entry["device"], stage, family, *error_cells(m)]
                    for family, m in named.items()
                    if m["n"]
                ]
    header = ("source", "device left out", "known about it", "family", *ERROR_COLUMNS)
    return folded("Every device, stage and family", table(header, rows, left=4))


@of_study("devices")
def samplers(results: Results, devices: dict[str, Any]) -> str:
    """Error by sampler and number of measurements: every device, and the mean over groups."""
    blocks = []
    for source in _sources(devices):
        entries = list(tables_of(devices, source))
        names = sorted({run["sampler"] for _, entry in entries for run in entry["adapted"]})
        if len(names) < 2:
            continue
        columns = [(name, k) for name in names for k in KS]
        rows = [
            [entry["device"], *(spread(adapted_figures(source, entry, k, name)) for name, k in columns)]
            for _, entry in entries
        ]
        means = [headline(devices, source, _after(source, k, name)) for name, k in columns]
        # Means over different groups cannot be compared.
        groups = len({group for group, _ in entries})
        cells = (percent(value) if count == groups else "-" for value, count in means)
        rows.append(["**mean over groups**", *cells])
        header = ("device left out", *(f"{name}, k = {k}" for name, k in columns))
        blocks.append(f"**{title(source)}**:\n\n{table(header, rows)}")
    blocks.append(picture("error against the number of measurements", "error_by_k.png"))
    return "\n\n".join(blocks)


def trust(results: Results) -> str:
    """Coverage of the intervals on unseen devices, and how well the domain score ranks errors."""
    devices, shapes = results.get("devices"), results.get("shapes")
    blocks = []
    if shapes is None:
        blocks.append(not_measured("shapes"))
    else:
        rows = [[name, *error_cells(m)] for name, m in shapes["domain"]["labels"].items()]
        auc = number(shapes["domain"]["auc"], 2)
        blocks.append(
            "Held-out shapes of known devices by the predicted domain. The domain score separates errors above 30 % "
            f"from smaller ones with an AUC of {auc}.\n\n" + table(("domain", *ERROR_COLUMNS), rows)
        )
    if devices is None:
        return "\n\n".join([*blocks, not_measured("devices"), *([] if shapes is None else [_INTERVALS])])
    rows = []
    for group in GROUPS:
        entry = devices["groups"].get(group, {})
        # A study that was interrupted has tables, but no domain.
        if "domain" in entry:
            domain = entry["domain"]
            shares = [t["specification"]["overall"]["coverage"] for t in entry["tables"]]
            after = [run["after"]["overall"]["coverage"] for t in entry["tables"] for run in adapted(t, 40)]
            rows.append(
                [
                    ", ".join(entry["held_out"]),
                    _range(shares),
                    _range(after),
                    number(domain["auc_pooled"], 2),
                    number(domain["auc_held_out"], 2),
                    percent(domain["off_held_out"]),
                    percent(domain["off_known"]),
                ]
            )
    header = (
        *("devices left out", "inside the 80 % interval, by source", "the same after k = 40"),
        *("AUC, with rows of known devices", "AUC, rows of left-out devices alone"),
        *("errors above 30 %: left-out devices", "errors above 30 %: known devices"),
    )
    return "\n\n".join([*blocks, table(header, rows), _INTERVALS])


def _range(values: Sequence[float]) -> str:
    """Smallest and largest value as text, in per cent."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return percent(low, 0) if low == high else f"{100 * low:.0f}-{percent(high, 0)}"


@of_study("devices")
def summary(results: Results, devices: dict[str, Any]) -> str:
    """Table of left-out devices by source: means over groups, and the range over devices."""
    rows = []
    for source in _sources(devices):
        cells = []
        for read in readers(source).values():
            average = headline(devices, source, read)[0]
            values = [v for _, entry in tables_of(devices, source) if (v := read(entry)) is not None]
            cells.append("-" if average is None else f"**{percent(average)}** ({_range(values)})")
        rows.append([title(source), *cells])
    header = ("source", *readers("").keys())
    return table(header, rows)
