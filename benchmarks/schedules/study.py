"""Questions about the network of scheduled programs (``python -m benchmarks.schedules study --public-data DIR``).

Each variant changes one choice of ``configs/scheduled.toml`` and trains one network with the same steps. Errors are of
unseen tasks, programs on GPUs and on CPUs apart; of devices that are left out, of all their programs, before and after
measurements. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy.stats import boxcox
from torch import Tensor, nn

from benchmarks.report.results import STUDIES, Results, rounded, write_result
from benchmarks.report.schedules import study as report
from benchmarks.schedules.methods import figures
from benchmarks.unseen_devices.study import network_of
from cdmpp.errors import CdmppError
from cdmpp.features.launch_schema import GPU_WIDTH
from cdmpp.features.schedule import LAUNCH_FROM
from cdmpp.features.schema import WIDTH
from cdmpp.model.adapter import FeatureMaker, centre_and_spread
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.calibration import DEFAULT_INTERVAL, read_quantiles
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.network import LatencyNetwork, PaddedRows
from cdmpp.model.nn.rows import QueryBatch
from cdmpp.train.adaptation.adapt import MeasuredQueries, fit_process
from cdmpp.train.adaptation.records import Survey
from cdmpp.train.adaptation.select import choose_rows
from cdmpp.train.baselines import TreeBaseline
from cdmpp.train.config import TrainConfig, load_config
from cdmpp.train.dataset import Dataset, MeasuredRows, make_dataset
from cdmpp.train.fit import train, training_rows
from cdmpp.train.job import LabelledRows, TrainingJob
from cdmpp.train.run import load_training_table
from cdmpp.train.step import Objective

Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[Array], Array]
DATA = {"schedules": ("ansor", "metaschedule"), "schedules_per_task": 72, "test_share": 0.2, "validation_share": 0.05}
#: Without virtual devices.
PLAIN = {"hide_device": 0.1, "virtual_hidden": 0.0, "virtual_known": 0.0}
#: Columns of a leaf: where its launch meets the device, and the launch itself.
LAUNCH_INPUTS = slice(NetworkConfig(schedule=True).stored_width, None)
LAUNCH_COLUMNS = slice(WIDTH + LAUNCH_FROM, WIDTH + LAUNCH_FROM + GPU_WIDTH)
#: Rows of a device that measured programs are chosen from, numbers of measurements, and draws of each sampler. Variance
#: reduction draws only the candidates.
SAMPLE, MEASURED = 3000, (20, 40, 100)
DRAWS = {"kmeans": 10, "variance": 1, "random": 10}
METRICS = ("n", "mape", "median_ape", "task_kendall_tau", "top1_score")


class SumOfLeaves(LatencyNetwork):
    """DeepSets: leaves meet in a sum and a mean only."""

    def _layer(self, tokens: Tensor, name: str, parts: Sequence[PaddedRows]) -> Tensor:
        wide = self._apply_layer(f"{name}.feed.0", self._apply_layer(f"{name}.norm_feed", tokens))
        return tokens + self._apply_layer(f"{name}.feed.2", nn.functional.gelu(wide))

    def _pool(self, part: PaddedRows, tokens: Tensor, score: Tensor) -> Tensor:
        real = torch.ones(part.shape, dtype=torch.bool) if part.mask is None else part.mask
        total = (tokens.view(*part.shape, -1) * real[:, :, None]).sum(dim=1)
        return torch.cat((total, total / real.sum(dim=1, keepdim=True)), dim=-1)


def blind(hidden: slice, reads_device: bool = True) -> type[LatencyNetwork]:
    """Network whose leaves do not read some columns, or nothing of the device."""

    class Blind(LatencyNetwork):
        def _first_tokens(self, parts: Sequence[PaddedRows], inputs: Tensor, logs: Tensor, multiple: int) -> Tensor:
            self.leaf_scale[hidden] = 0
            return super()._first_tokens(parts, inputs * reads_device, logs * reads_device, multiple)

    return Blind


class WithoutLeafTimes(LatencyNetwork):
    """The time of a CPU program is no sum over leaves."""

    def leaf_seconds(self, leaves: Tensor, tokens: Tensor, mask: Tensor | None, inputs: Tensor, logs: Tensor) -> Tensor:
        return tokens.new_zeros(len(leaves), 2)


class WithoutReference(NetworkInputs):
    """Inputs with a reference of one second."""

    def encode(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Array]:
        latent, queries, reference = super().encode(*args, **options)
        return latent, queries, np.zeros_like(reference)


class BoxCox(Objective):
    """Absolute error of the Box-Cox transform of the latency, scaled to the spread of its logarithm."""

    def __init__(self, job: TrainingJob, inputs: NetworkInputs) -> None:
        super().__init__(job, WithoutReference(job.store, job.device_matrix))
        self.label_of = box_cox(job.rows.log_latency[job.index])[0]

    def __call__(self, network: LatencyNetwork, rows: LabelledRows, *args: Any, **options: Any) -> Tensor:
        labelled = replace(rows, log_latency=self.label_of(rows.log_latency))
        with patch("cdmpp.train.step.relative_error_loss", partial(nn.functional.smooth_l1_loss, beta=0.05)):
            return super().__call__(network, labelled, *args, **options)


def box_cox(log_latency: Array) -> tuple[Transform, Transform]:
    """Box-Cox transform of log latencies with the power of the largest likelihood, and its inverse."""
    plain, power = boxcox(np.exp(log_latency))
    mean, scale = plain.mean(), log_latency.std() / plain.std()
    return (
        lambda logs: (boxcox(np.exp(logs), power) - mean) * scale,
        lambda labels: np.log(np.maximum(1 + power * (labels / scale + mean), 1e-12)) / power,
    )


class Booster(TreeBaseline):
    """XGBoost on sums over leaves and the launch of the main kernel."""

    def features(self, rows: MeasuredRows) -> Array:
        """Columns of rows."""
        return np.concatenate([super().features(rows), self.inputs.kernels(rows)], axis=1)


@dataclass(frozen=True)
class Variant:
    """What differs from the network of ``configs/scheduled.toml``.

    ``held_out`` starts the names of the devices that are left out, ``keep`` is a mask of the training rows and
    ``positions`` computes positions of leaves from those of the store.
    """

    optimiser: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the network
    domain: Mapping[str, Any] = field(default_factory=dict)
    held_out: str = ""
    network: type[LatencyNetwork] | None = LatencyNetwork  # none: XGBoost on sums over leaves
    objective: type[Objective] = Objective
    inputs: type[NetworkInputs] = NetworkInputs
    keep: Callable[[Dataset], Array] = lambda dataset: np.ones(len(dataset.rows), dtype=bool)
    positions: Transform = np.asarray


def launched(dataset: Dataset) -> Array:
    """Rows of GPU programs, (rows,) bool."""
    return np.asarray(dataset.store.launched[dataset.rows.program])


def quarter(key: Array) -> Array:
    """Rows of a random quarter of the keys, (rows,) bool."""
    return np.asarray(np.random.default_rng(0).random(key.max() + 1)[key] < 0.25)


VARIANTS = {
    "base": Variant(),
    "leaves: sum": Variant(network=SumOfLeaves),
    "leaves: booster": Variant(network=None),
    "leaves: no hidden layer": Variant(sizes={"leaf_hidden": 0}),
    "positions: none": Variant(positions=np.zeros_like),
    "positions: row order": Variant(positions=lambda p: np.zeros_like(p) + np.arange(p.shape[1], dtype=p.dtype)),
    "columns: no launch inputs": Variant(network=blind(LAUNCH_INPUTS)),
    "columns: device in the head": Variant(network=blind(LAUNCH_INPUTS, reads_device=False)),
    "columns: no launch columns": Variant(network=blind(LAUNCH_COLUMNS)),
    "label: no sum of leaf times": Variant(network=WithoutLeafTimes),
    "label: Box-Cox": Variant(network=WithoutLeafTimes, objective=BoxCox, inputs=WithoutReference),
    "data: GPU programs": Variant(keep=launched),
    "data: CPU programs": Variant(keep=lambda dataset: ~launched(dataset)),
    "data: a quarter of the tasks": Variant(keep=lambda data: quarter(data.task[data.rows.program])),
    "data: a quarter of the schedules": Variant(keep=lambda data: quarter(data.rows.program)),
}
ADAPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "virtual devices": {"optimiser": {"hide_device": 0.3, "virtual_hidden": 0.7, "virtual_known": 0.3}},
    **{
        f"{loss.upper()} {weight:g}": {"domain": {"loss": loss, "weight": weight, "rows": 128}}
        for loss, weight in (("cmd", 0.1), ("cmd", 1.0), ("mmd", 0.1), ("coral", 0.1))
    },
}
for device, (what, options) in itertools.product(("v100-pcie-16gb", "k80", "mi50", "intel-xeon-amx"), ADAPTED.items()):
    VARIANTS[f"without {device}: {what}"] = Variant(held_out=device, **options)


def run(everything: Dataset, config: TrainConfig, name: str, runs: Path) -> dict[str, Any]:
    """Figures of a variant by group of rows."""
    variant, names = VARIANTS[name], [d.name for d in everything.devices]
    held = tuple(n for n in names if variant.held_out and n.startswith(variant.held_out))
    store, rows = copy.copy(everything.store), everything.rows
    store.buckets = {s: replace(b, positions=variant.positions(b.positions)) for s, b in store.buckets.items()}
    part = np.where((rows.part == 0) & ~variant.keep(everything), -1, rows.part)
    devices = tuple(d.nominal() if d.name in held else d for d in everything.devices)
    dataset = replace(everything, store=store, devices=devices, rows=replace(rows, part=part))
    update: dict[str, Any] = {"optimiser": replace(config.optimiser, **variant.optimiser)}
    update["network"] = replace(config.network, **variant.sizes)
    update["data"] = config.data.model_copy(update={"holdout_devices": held})
    if variant.domain:
        update["domain"] = replace(config.domain, **variant.domain, target_devices=held)
    config = config.model_copy(update=update)
    index, inputs = training_rows(dataset, config)[0], variant.inputs(store, dataset.device_matrix)
    folder = runs / f"{name.replace(':', '').replace(' ', '-')}-{config.seed}"
    if variant.network is None:
        trees = Booster(dataset, inputs, config).fit(index)
    else:
        with patch("cdmpp.train.loop.LatencyNetwork", variant.network):
            run_folder = folder.with_name(f"{folder.name}.run")
            network = train(dataset, config, run_folder, make_objective=variant.objective)[0]
    inverse = box_cox(rows.log_latency[index])[1] if variant.objective is BoxCox else np.asarray
    unknown = np.isin(rows.device, [names.index(n) for n in held])
    test, gpu = (rows.part == 2) & ~unknown, launched(dataset)
    result: dict[str, Any] = {"train_rows": len(index)}
    trained = {"gpu": test & gpu & gpu[index].any(), "cpu": test & ~gpu & ~gpu[index].all()}
    for group, mask in (trained | {"held_out": unknown}).items():
        chosen = rows.take(np.flatnonzero(mask))
        if len(chosen) and variant.network is None:
            result[group] = figures_of(dataset, chosen, trees.predict_log(chosen))
        elif len(chosen):
            predicted = predict_rows(network, inputs, chosen, known=group != "held_out")[0]
            result[group] = figures_of(dataset, chosen, inverse(predicted))
    if held:
        result["measured"] = measured(dataset, network_of(config, dataset, folder), np.flatnonzero(unknown))
    return result


def measured(dataset: Dataset, artifact: Artifact, rows: Array) -> dict[str, dict[str, float]]:
    """Figures of devices that are left out, by number of measurements, chosen and used as by ``cdmpp adapt``.

    ``covered`` is the share of programs inside their 80 % interval, ``better_than_random`` the share of draws in which
    a sampler has a smaller mean error than random.
    """
    runs_of: dict[str, list[dict[str, float]]] = {}
    place = np.random.default_rng(0).permutation(dataset.task.max() + 1)[dataset.task]
    for code in np.unique(dataset.rows.device[rows]):
        sample = dataset.rows.take(rows[dataset.rows.device[rows] == code])
        sample = sample.take(np.argsort(place[sample.program], kind="stable")[:SAMPLE])  # of few tasks, all programs
        for (_, key), runs in by_choice(
            dataset, artifact, sample, {"": np.ones(len(sample), dtype=bool)}, DRAWS
        ).items():
            runs_of.setdefault(key, []).extend(runs)
    return {key: mean_figures(runs) for key, runs in runs_of.items()}


def by_choice(
    dataset: Dataset, artifact: Artifact, sample: MeasuredRows, groups: Mapping[str, Array], draws: Mapping[str, int]
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Figures of each draw by group of rows of one device and by choice: "0", or number and sampler.

    Programs of the first group are measured. The sampler "tvm" takes all schedules of one task after the other, as
    TVM's search does, whose rounds are of 64 trials of one task and whose cost model ranks at random up to trial 100.
    """
    runs_of: dict[tuple[str, str], list[dict[str, float]]] = {}
    pipeline = InferencePipeline(artifact)
    batch = QueryBatch(dataset.store, dataset.kinds, dataset.kind, dataset.devices, sample)
    base, maker, number = pipeline.predict_base(batch), FeatureMaker(artifact.weights), np.arange(len(sample))
    assert base.peers is not None and base.view is not None
    features, pool = maker.features(batch, base.peers, base.view), np.flatnonzero(next(iter(groups.values())))
    columns = base.point, base.levels, base.factor, base.coverage, base.point
    known = Survey(number, number, *columns, features, maker.names, 0)
    queries = MeasuredQueries(sample.log_latency, base.point, base.levels, features)

    def add(key: str, left: Array, point: Array, levels: Array, width: Array) -> None:
        for group, mask in groups.items():
            if not len(index := left[mask[left]]):
                continue
            rows = sample.take(index)
            run = figures_of(dataset, rows, point[index]) | {"covered": covered(rows, levels[index], width[index])}
            runs_of.setdefault((group, key), []).append(run)

    add("0", number, base.point, base.levels, base.factor)
    for k, draw in itertools.product(MEASURED, range(max(draws.values()))):
        for sampler in (name for name, count in draws.items() if draw < count):
            if sampler == "tvm":
                place = np.random.default_rng(draw).permutation(dataset.task.max() + 1)[dataset.task[sample.program]]
                chosen = pool[np.argsort(place[pool], kind="stable")[:k]]
            else:
                chosen = pool[choose_rows(known, pool, k, sampler, draw)]
            fitted = fit_process(queries.take(chosen))
            point, levels, width = base.point, base.levels, base.factor
            if fitted.weight:
                error = fitted.process.mean_and_variance(features)
                point, levels = centre_and_spread(fitted.process, point, levels, *error, fitted.weight)
                width = np.full(len(sample), fitted.width)
            add(f"{k} {sampler}", np.delete(number, chosen), point, levels, width)
    for (group, key), runs in runs_of.items():
        random = runs_of.get((group, f"{key.partition(' ')[0]} random"), ())
        for run, other in zip(runs, random, strict=False):
            run["better_than_random"] = float(run["mape"] < other["mape"])
    return runs_of


def mean_figures(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Mean of each figure over draws; None where a draw has too few tasks for it."""
    values = {m: [run[m] for run in runs] for m in runs[0]}
    return {m: None if None in column else float(np.mean(column)) for m, column in values.items()}


def covered(rows: MeasuredRows, levels: Array, factor: Array) -> float:
    """Share of measured latencies inside the interval from the 10 % to the 90 % quantile."""
    low, high = read_quantiles(levels, factor, DEFAULT_INTERVAL).T
    return float(((rows.log_latency >= low) & (rows.log_latency <= high)).mean())


def figures_of(dataset: Dataset, rows: MeasuredRows, log_predicted: Array) -> dict[str, Any]:
    """:data:`METRICS` of rows."""
    all_figures = figures(dataset, rows, log_predicted)
    return {key: all_figures[key] for key in METRICS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the variants that the result file lacks and print the tables."""
    study = STUDIES["schedules_study"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules study", description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables; default $CDMPP_PUBLIC_DATA")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000, help="of training; other steps need another --out")
    parser.add_argument("--only", default="", help="starts of names of variants, separated by commas")
    parser.add_argument("--runs", type=Path, default=Path("runs/schedules_study"), help="for checkpoints")
    parser.add_argument("--out", type=Path, default=study.path)
    options = parser.parse_args(arguments)
    config = load_config("configs/scheduled.toml")
    optimiser = replace(config.optimiser, steps=options.steps, threads=1, **PLAIN)
    update = {"optimiser": optimiser, "network": replace(config.network, members=1)}
    config = config.model_copy(update=update | {"data": config.data.model_copy(update=DATA)})
    result: dict[str, Any] = {"command": study.command, "steps": options.steps, "variants": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    chosen = [name for name in VARIANTS if name.startswith(tuple(options.only.split(",")))]
    wanted = [(name, seed) for name in chosen for seed in range(options.seeds)]
    wanted = [(name, seed) for name, seed in wanted if str(seed) not in result["variants"].get(name, {})]
    try:
        table = load_training_table(config, options.public_data, ())
        dataset = make_dataset(table, config.data, schedule=True, every_part=True)
    except CdmppError as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    for name, seed in wanted:
        figures_of_run = rounded(run(dataset, config.model_copy(update={"seed": seed}), name, options.runs))
        result["variants"].setdefault(name, {})[str(seed)] = figures_of_run
        write_result(options.out, result)
    print(report(Results({"schedules_study": result})))
