"""Domain, calibration and error table of a trained network.

The entries by operator, element types, scaling and device, with their training rows, are what ``cdmpp support`` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.model.domain.calibration import fit_factor, read_quantiles
from cdmpp.model.domain.evidence import contexts_of
from cdmpp.model.domain.peers import Peers, as_peers, carried_shift, corrects, rule_of, weights
from cdmpp.model.domain.score import Domain
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.figures import stack_devices
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.nn.rows import RowInputs, distinct_rows
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS, framework_name, implementation_of
from cdmpp.train.baselines import Baseline
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows
from cdmpp.train.evaluation.metrics import RANKING, measure, rank

if TYPE_CHECKING:
    from cdmpp.train.boosters import RowPredictor

Array = np.ndarray[Any, np.dtype[Any]]

#: Names of the parts of :attr:`Dataset.types`.
TYPE_FIELDS = ("operator", "dtype", "weight_dtype", "scaling")


def errors_by_types(dataset: Dataset, rows: MeasuredRows, log_predicted: Array) -> list[dict[str, Any]]:
    """Errors of predictions (log seconds) of ``rows`` for each operator, types and device: :data:`TYPE_FIELDS`,
    ``device``, ``n``, ``mape``, ``median_ape``."""
    if dataset.type_of is None or not len(rows):
        return []
    error = np.abs(np.expm1(log_predicted - rows.log_latency))
    entries = []
    for labels, members in _groups(dataset, rows):
        part = error[members]
        figures = {"n": len(part), "mape": float(part.mean()), "median_ape": float(np.median(part))}
        entries.append({**labels, **figures})
    return entries


def with_training_rows(entries: Sequence[dict[str, Any]], dataset: Dataset, rows: MeasuredRows) -> list[dict[str, Any]]:
    """Entries of :func:`errors_by_types` with the number of training rows, ``rows``; sorted."""
    keys = (*TYPE_FIELDS, "device")
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    if dataset.type_of is not None and len(rows):
        for labels, members in _groups(dataset, rows):
            merged[tuple(labels[k] for k in keys)] = {**labels, "rows": len(members)}
    for entry in entries:
        key = tuple(entry[k] for k in keys)
        merged[key] = {**merged.get(key, {k: entry[k] for k in keys} | {"rows": 0}), **entry}
    return [merged[key] for key in sorted(merged, key=lambda key: tuple(part or "" for part in key))]


def _groups(dataset: Dataset, rows: MeasuredRows) -> list[tuple[dict[str, Any], Array]]:
    assert dataset.type_of is not None
    codes = np.stack([dataset.type_of[rows.program], rows.device], axis=1)
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse.ravel()))[:-1])
    return [
        ({**dict(zip(TYPE_FIELDS, dataset.types[kind], strict=True)), "device": dataset.devices[device].name}, members)
        for (kind, device), members in zip(distinct.tolist(), parts, strict=True)
    ]


#: Validation rows that intervals are fitted to, at most.
_CALIBRATION_ROWS = 60_000
#: Rows of several frameworks that the factor of queries without one is fitted to, at least.
_MIN_OPEN = 200
#: Figures of a baseline in the error table.
_BASELINE_FIGURES = ("mape", "median_ape", *RANKING)


def fit_domain(dataset: Dataset, index: Array, seed: int) -> Domain:
    """Domain of the training rows: centres of their programs, and all their contexts."""
    rows, names = dataset.rows.take(index), [device.name for device in dataset.devices]
    contexts: set[str] = set()
    for context in contexts_of(rows, dataset.kind, dataset.kinds, names)[0]:
        contexts.update((*context.keys(), context.launch_key(), f"{context.device}&"))
    return Domain.fit(dataset.store.summary[np.unique(rows.program)], frozenset(contexts), seed)


def calibrate(
    network: LatencyNetwork,
    inputs: NetworkInputs,
    dataset: Dataset,
    config: TrainConfig,
    predict: RowPredictor | None = None,
) -> dict[str, float]:
    """Factors on the width of intervals, by domain label and for queries without a framework.

    ``in``: conformal on validation rows; ``near`` and ``out``: multiples of it. ``open``: further factor for queries
    that state no framework, conformal on validation rows of problems that several frameworks measured.
    ``predict``: the network with its boosters, where it has some.
    """
    predicted = predict or partial(predict_rows, network, inputs)
    held = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    index = np.flatnonzero((dataset.rows.part == 1) & ~np.isin(dataset.rows.device, held))
    rng = np.random.default_rng([config.seed, 6])
    rows = dataset.rows.take(np.sort(rng.choice(index, min(len(index), _CALIBRATION_ROWS), replace=False)))
    inside = fit_factor(rows.log_latency, predicted(rows)[1])
    opened, several = inside, index[_measured_by_several(dataset.rows)[index]]
    if len(several) >= _MIN_OPEN:
        chosen = np.sort(rng.choice(several, min(len(several), _CALIBRATION_ROWS), replace=False))
        rows = dataset.rows.take(chosen)
        rows.framework[:] = -1
        opened = fit_factor(rows.log_latency, predicted(rows)[1])
    return {
        "in": round(inside, 4),
        "near": round(inside * config.finish.near_factor, 4),
        "out": round(inside * config.finish.out_factor, 4),
        "open": round(max(opened / inside, 1.0), 4),
    }


def _measured_by_several(rows: MeasuredRows) -> Array:
    """Whether several frameworks measured a row's program on its device with its protocol, (n,) bool."""
    _, problem = distinct_rows([rows.program, rows.device, rows.protocol, rows.backend])
    count = np.zeros(int(problem.max(initial=-1)) + 1, dtype=np.int64)
    for framework in range(len(FRAMEWORKS)):
        count[np.unique(problem[rows.framework == framework])] += 1
    return np.asarray(count[problem] > 1)


def error_table(
    network: LatencyNetwork,
    inputs: NetworkInputs,
    dataset: Dataset,
    rows: MeasuredRows,
    calibration: dict[str, float],
    baselines: Mapping[str, Baseline],
    *,
    known: bool = True,
    interval: str = "in",
    peers: Peers | None = None,
    predict: RowPredictor | None = None,
) -> dict[str, Any]:
    """Errors of the model (``predict``: the network with its boosters) and the baselines on the same rows.

    ``interval_factor``: the width factor with which the 10-90 % interval covers 80 % of these rows. ``types``: errors
    by operator, types and device (:func:`cdmpp.train.finish.errors_by_types`). ``overall``, ``by_source``, ``tables``
    (source, device) and ``groups`` (source, device, op); each entry has the metrics of the model, and under
    ``baselines`` the mape and median_ape of each baseline; where programs are schedules of tasks, all with the figures
    of :func:`cdmpp.train.evaluation.metrics.rank`. The entry ``neusight_filtered`` of ``by_source`` has the rows that
    pass NeuSight's own filter; ``aiconfigurator_gemm_without_b60`` excludes the Intel card, whose repeats differ by 23
    %.
    """
    point, levels = (predict or partial(predict_rows, network, inputs))(rows, known=known)
    if peers is not None:
        point, levels = _with_peers(network, inputs, dataset, rows, point, levels, peers)
    bounds = read_quantiles(levels, np.full(len(rows), calibration[interval]), (0.1, 0.9))
    low = np.exp(np.minimum(bounds[:, 0], point))
    high = np.exp(np.maximum(bounds[:, 1], point))
    return tabulate(dataset, rows, point, baselines, low, high) | {
        "interval_factor": round(fit_factor(rows.log_latency, levels), 4)
    }


def tabulate(
    dataset: Dataset, rows: MeasuredRows, point: Array, baselines: Mapping[str, Baseline], *bounds: Array
) -> dict[str, Any]:
    """The error table of given predictions, log of seconds; see :func:`error_table`. ``bounds``: lower and upper bound
    of an 80 % interval, in seconds; omitted without an interval."""
    columns = {"model": point} | {name: b.predict_log(rows) for name, b in baselines.items()}
    measured = np.exp(rows.log_latency)
    group = dataset.group(rows)

    def figures_of(values: Array, chosen: Array, *bounds: Array) -> dict[str, Any]:
        figures = measure(np.exp(values[chosen]), measured[chosen], *bounds)
        if (group[chosen] >= 0).any():
            figures |= rank(values[chosen], measured[chosen], group[chosen], rows.program[chosen])
        return figures

    def entry(mask: Array) -> dict[str, Any]:
        chosen = np.flatnonzero(mask)
        figures = figures_of(point, chosen, *(bound[chosen] for bound in bounds))
        figures["baselines"] = {
            name: {k: v for k, v in figures_of(values, chosen).items() if k in _BASELINE_FIGURES}
            for name, values in columns.items()
            if name != "model"
        }
        return figures

    present = np.unique(rows.source)
    by_source = {name: entry(rows.source == i) for i, name in enumerate(dataset.sources) if i in present}
    noisy = np.array([d.name == "arc-pro-b60" for d in dataset.devices])[rows.device]
    for name, label, mask in (
        ("neusight", "neusight_filtered", rows.report),
        ("aiconfigurator_gemm", "aiconfigurator_gemm_without_b60", ~noisy),
        ("aiconfigurator_attention", "aiconfigurator_attention_without_b60", ~noisy),
    ):
        if name in by_source:
            chosen = (rows.source == dataset.sources.index(name)) & mask
            if chosen.any() and not chosen[rows.source == dataset.sources.index(name)].all():
                by_source[label] = entry(chosen)
    names: dict[str, tuple[Array, Sequence[str]]] = {
        "source": (rows.source, dataset.sources),
        "device": (rows.device, [device.name for device in dataset.devices]),
        "op": (rows.op, dataset.ops),
    }

    def entries(*keys: str) -> list[dict[str, Any]]:
        distinct, inverse = np.unique(np.stack([names[k][0] for k in keys], axis=1), axis=0, return_inverse=True)
        return [
            {key: names[key][1][code] for key, code in zip(keys, codes, strict=True)} | entry(inverse.ravel() == i)
            for i, codes in enumerate(distinct.tolist())
        ]

    return {
        "overall": entry(np.ones(len(rows), dtype=bool)),
        "by_source": by_source,
        "tables": entries("source", "device"),
        "groups": entries("source", "device", "op"),
        "types": errors_by_types(dataset, rows, point),
        "sample": _sample(dataset, rows, point),
    }


def _with_peers(
    network: LatencyNetwork,
    inputs: NetworkInputs,
    dataset: Dataset,
    rows: MeasuredRows,
    point: Array,
    levels: Array,
    peers: Peers,
) -> tuple[Array, Array]:
    """Predictions of unseen devices, corrected by peers as in the predictor."""
    point, levels = point.copy(), levels.copy()
    codes = np.stack([rows.device, dataset.kind[rows.program], rows.protocol, rows.backend, rows.framework], axis=1)
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
    embedding = np.arange(1, len(dataset.devices) + 1)
    sheets = RowInputs(dataset.store, stack_devices([device.nominal() for device in dataset.devices]))
    for i, (device, kind, protocol, backend, framework) in enumerate(distinct.tolist()):
        members = np.flatnonzero(inverse.ravel() == i)
        operator, dtype = dataset.kinds[kind]
        spec = dataset.devices[device]
        rule = rule_of(spec, operator)
        meant = implementation_of(operator, framework_name(framework))
        known = peers.of(spec.kind, spec.vendor, operator, dtype, PROTOCOLS[protocol], BACKENDS[backend], meant)
        if not known or not corrects(spec.kind, operator):
            continue
        part, sheet = rows.take(members), sheets if spec.sustained is None else inputs
        on_peers = as_peers(part, [index - 1 for index, _ in known])
        logs = np.concatenate([point[members], predict_rows(network, inputs, on_peers, embedding=embedding)[0]])
        reference = np.concatenate([inputs.reference(part), inputs.reference(on_peers)])
        weight = weights(spec, operator, dtype, tuple(peer for _, peer in known))
        by, _ = carried_shift(logs, reference, sheet, (part, on_peers), weight, rule)
        point[members], levels[members] = point[members] + by, levels[members] + by[:, None]
    return point, levels


def _sample(dataset: Dataset, rows: MeasuredRows, point: Array, per_source: int = 700) -> dict[str, list[Any]]:
    """A seeded sample of rows with measured and predicted latency, for a scatter plot."""
    rng = np.random.default_rng(7)
    chosen = np.concatenate(
        [rng.permutation(np.flatnonzero(rows.source == source))[:per_source] for source in range(len(dataset.sources))]
    )
    return {
        "source": [dataset.sources[i] for i in rows.source[chosen]],
        "measured_s": [float(f"{v:.4g}") for v in np.exp(rows.log_latency[chosen])],
        "predicted_s": [float(f"{v:.4g}") for v in np.exp(point[chosen])],
    }
