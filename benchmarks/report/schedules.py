"""Reports on scheduled programs: splits, held-out configurations and sealed networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

from benchmarks.report.markdown import folded, number, percent, table
from benchmarks.report.results import Results, of_study
from benchmarks.report.unseen import spread

#: Split of the programs -> what is unseen in it.
SPLITS = {"task": "tasks", "network": "networks", "sealed": "sealed networks"}
_RANKS = ("task_kendall_tau", "top1_score", "top5_score")
_RANK_HEADERS = ("tau within a task", "top-1", "top-5")

#: GPUs with a hundred tasks or more of Ansor's logs.
GPUS = ("v100-pcie-16gb", "k80", "mi50")
GPU_METRICS = dict.fromkeys(("mape", "median_ape", "within_20"), percent)
GPU_METRICS |= dict.fromkeys(("task_kendall_tau", "top1_score"), number)


@of_study("schedules_gpu")
def gpu(results: Results, result: dict[str, Any]) -> str:
    """Ansor's schedules on GPUs; figures of :data:`GPUS` side by side."""
    parts = {"unseen tasks": result["unseen_tasks"], "the reference alone": result["reference"]}
    parts |= {f"without columns: {group}": figures for group, figures in result["without"].items()}
    for count in next(iter(result["left_out"].values())):
        parts[f"device left out, {count} measurements"] = {d: of[count] for d, of in result["left_out"].items()}
    rows = [
        [what, *(" / ".join(text(figures[d][key]) for d in GPUS) for key, text in GPU_METRICS.items())]
        for what, figures in parts.items()
    ]
    header = (" / ".join(GPUS), "mean error", "median", "within 20 %", "tau within a task", "top-1")
    return f"`{result['command']}`, {result['programs']:,} programs.\n\n{table(header, rows)}"


@of_study("schedules_study")
def study(results: Results, result: dict[str, Any]) -> str:
    """Choices of training, and devices that are left out by method; means and standard deviations over seeds.

    After mean and median error: share inside the 80 % interval, and of KMeans' draws those better than random.
    """

    of = {key: text for key, text in GPU_METRICS.items() if key != "within_20"}

    def cells(runs: list[Any], group: str) -> list[str]:
        """Figures of a group of rows, errors with their spread; a group that was not trained on has none."""
        if group not in runs[0]:
            return ["-"] * len(of)
        columns = [(text, [run[group][key] for run in runs]) for key, text in of.items()]
        return [spread(values) if text is percent else number(mean(values)) for text, values in columns]

    def measured(run: Any, key: str) -> list[float]:
        """Mean and median error; what the interval covers, and draws of a sampler that are better than random."""
        figures = run["measured"][key]
        optional = ("covered",) if key.endswith("random") else ("covered", "better_than_random")
        return [figures["mape"], figures["median_ape"], *(figures[m] for m in optional if m in figures)]

    everything = [run for by_seed in result["variants"].values() for run in by_seed.values()]
    counts = list(dict.fromkeys(key for run in everything for key in run.get("measured", ())))
    choices, left_out = [], []
    for name, by_seed in sorted(result["variants"].items()):
        runs, (kind, _, device) = list(by_seed.values()), name.partition(":")[0].partition("without ")
        if not kind:
            errors = [[measured(run, key) for run in runs if key in run["measured"]] for key in counts]
            pairs = [" / ".join(percent(mean(e)) for e in zip(*pair, strict=True)) or "-" for pair in errors]
            left_out.append([device, name.partition(": ")[2], *cells(runs, "held_out"), *pairs])
        else:
            rows = f"{mean(run['train_rows'] for run in runs):,.0f}"
            choices.append([name, rows, *cells(runs, "gpu"), *cells(runs, "cpu")])
    names = ("mean error", "median", "tau", "top-1")
    parts = [f"`{result['command']}`, {result['steps']:,} steps."]
    header = ("variant", "training rows", *(f"{kind}: {name}" for kind in ("GPU", "CPU") for name in names))
    parts += [table(header, choices)] if choices else []
    columns = [
        f"{key.replace(' ', ' by ')}: mean / median / inside"
        + (" / wins" if " " in key and "random" not in key else "")
        for key in counts
    ]
    header = ("left out", "variant", *names, *columns) if left_out else ()
    return "\n\n".join([*parts, *([table(header, left_out, left=2)] if left_out else [])])


@of_study("schedules_device")
def new_device(results: Results, result: dict[str, Any]) -> str:
    """Devices that a model was not trained on, by group of programs, before and after measurements.

    Mean and median error, share inside the interval, wins against random choice; tau and top-1 where tasks are ranked.
    """
    parts = [f"`{result['command']}`, model `{result['model']}`."]
    for device, groups in result["devices"].items():
        groups = {group: figures for group, figures in groups.items() if "0" in figures}
        first, *_ = groups.values()
        rows = []
        for key in first:
            metrics = ["mape", "median_ape", "covered"] + ["better_than_random"] * (" " in key and "random" not in key)
            metrics += ["task_kendall_tau", "top1_score"]
            kinds = dict.fromkeys(metrics[-2:], number)
            cells = [
                " / ".join(kinds.get(m, percent)(of[key][m]) for m in metrics if of[key].get(m) is not None)
                for of in groups.values()
            ]
            rows.append([key.replace(" ", " by "), *cells])
        header = ("measurements", *(f"{group} ({figures['0']['n']:,.0f})" for group, figures in groups.items()))
        parts.append(f"{device}:\n\n{table(header, rows)}")
    return "\n\n".join(parts)


@of_study("schedules_search")
def search(results: Results, result: dict[str, Any]) -> str:
    """Offline searches by group of pools; a method that learns has none in pools of one round."""
    rows = [
        [name, f"{group['pools']}", method, number(m["trials"], 1), number(m["median_trials"], 1)]
        + [percent(m[key]) for key in m if key.startswith("speed_")]
        for name, group in result["groups"].items()
        for method, m in group["methods"].items()
    ]
    after = [key.replace("speed_", "best of ") for key in result["groups"]["all logs"]["methods"]["random order"]][2:]
    header = ("pools", "number", "order", "mean trials to 95 %", "median", *after)
    about = f"`{result['command']}`, model `{result['model']}`, {result['seeds']} seeds."
    if results.model_id not in ("", result["model"]):
        about += f" The shipped model is another one, `{results.model_id}`: run the command again."
    return f"{about}\n\n{table(header, rows)}"


@of_study("schedules")
def schedules(results: Results, result: dict[str, Any]) -> str:
    """Every method on every split."""
    rows = [
        [
            SPLITS.get(split, split),
            method,
            f"{m['n']:,}",
            f"**{percent(m['mape'])}**",
            percent(m["median_ape"]),
            percent(m["within_20"]),
            *(number(m.get(key)) for key in _RANKS),
            str(m.get("ranked_groups", "-")),
        ]
        for split, methods in result["splits"].items()
        for method, m in methods.items()
    ]
    header = ("what is unseen", "method", "n", "MAPE", "median", "within 20 %", *_RANK_HEADERS, "ranked tasks")
    held = ", ".join(result.get("held_out_networks", ())) or "none"
    parts = [
        f"`{result['command']}`. Networks left out: {held}.",
        *(
            f"Sealed networks ({', '.join(read['networks'])}): evaluated once for {label}, on {read['date']}, with "
            f"model {read['model']} (weights) of commit {read['commit']}."
            for label, read in result.get("sealed_reads", {}).items()
        ),
        table(header, rows, left=2),
        *_adapted(result),
        *_costs(result),
        *_devices(result),
    ]
    return "\n\n".join(parts)


@of_study("schedules")
def original(results: Results, result: dict[str, Any]) -> str:
    """The original's network, its training, and the other methods on the same rows."""
    rows = [
        [
            SPLITS[split],
            method,
            *(f"{training[key]:,.0f}" if "original" in method else "-" for key in ("train_seconds", "samples")),
            f"**{percent(m['mape'])}**",
            percent(m["median_ape"]),
            *(number(m.get(key)) for key in _RANKS[:2]),
        ]
        for split, training in result.get("original_training", {}).items()
        for method, m in result["splits"][split].items()
    ]
    header = ("what is unseen", "method", "training (s)", "samples", "MAPE", "median", *_RANK_HEADERS[:2])
    return table(header, rows, left=2)


def _adapted(result: Mapping[str, Any]) -> Iterator[str]:
    """Held-out configurations before and after measurements."""
    adapted, twins = result.get("adapted", {}), result.get("near_twins", {})
    if not adapted:
        return
    count = next(iter(adapted.values()))["measurements"]
    rows = [
        [
            split,
            ", ".join(twins.get(split, ())) or "none",
            configuration,
            method,
            *(f"{percent(m['mape'])}" for m in (entry["before"], entry["after"])),
            *(number(entry["after"].get(key)) for key in _RANKS),
        ]
        for split, part in adapted.items()
        for configuration, methods in part["configurations"].items()
        for method, entry in methods.items()
    ]
    header = (
        *("left out", "near twins in training", "configuration", "method", "MAPE, not measured"),
        f"MAPE, {count} measured",
        *_RANK_HEADERS,
    )
    yield (
        f"The next table shows configurations without training rows, before and after {count} programs of them were "
        "measured. All programs were measured on other configurations. Near twins are configurations of the same CPU. "
        "`cdmpp adapt` uses the measurements for the network; the same residual process corrects each baseline. The "
        "order is that after the measurements."
    )
    yield table(header, rows, left=4)


def _costs(result: Mapping[str, Any]) -> Iterator[str]:
    """CPU time of a prediction relative to the network."""
    costs: dict[str, list[float]] = {}
    for methods in result.get("inference_cost", {}).values():
        for method, ratio in methods.items():
            costs.setdefault(method, []).append(ratio)
    if costs:
        shown = "; ".join(f"{method} {number(mean(ratios), 2)}" for method, ratios in costs.items())
        yield f"CPU time of a prediction from encoded programs, relative to the network: {shown}."


def _devices(result: Mapping[str, Any]) -> Iterator[str]:
    """Error of each method on each configuration."""
    names = sorted(
        {name for methods in result["splits"].values() for m in methods.values() for name in m.get("devices", ())}
    )
    if not names:
        return
    rows = [
        [SPLITS[split], method, *(percent(m.get("devices", {}).get(name, {}).get("mape")) for name in names)]
        for split, methods in result["splits"].items()
        if split in SPLITS
        for method, m in methods.items()
    ]
    yield folded("MAPE on each configuration", table(("what is unseen", "method", *names), rows, left=2))
