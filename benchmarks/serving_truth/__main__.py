"""``python -m benchmarks.serving_truth --public-data DIR``: serving systems against measurements.

Prices every cell of ``e2e_llm_serving.csv.gz`` and ``e2e_pipeweave.csv.gz`` whose model is known (``--configs``: folder
of the models' config.json with ``aliases.csv``) with the shipped profile of its engine, with ``kernels-only``, and with
profiles calibrated to four other rows of its device and engine (five draws), and writes
``benchmarks/results/serving_truth.json`` and docs/serving-accuracy.md.

``--fit`` prints the figures of the shipped profiles: one fit for all rows of an engine, 60 rows of a
(device, model) at most. Rows below the time in which the device reads the weights are counted and left out.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.report.markdown import fill_document, percent, table
from benchmarks.report.results import write_result
from benchmarks.serving_truth import served
from benchmarks.serving_truth.cells import ROOT, Cell, config_of, read_cells
from benchmarks.spreads import FIELDS, Miss, plain, residuals, truth_parser
from benchmarks.spreads import needed as residual_needed
from cdmpp import LatencyPredictor
from cdmpp.data.load import public_data_dir
from cdmpp.devices.registry import lookup
from cdmpp.errors import CdmppError
from cdmpp.llm import Decode, EstimatePlan, Layout, LLMConfig, step_operators
from cdmpp.llm.engines import EngineProfile, load_engine
from cdmpp.llm.engines.profile import KERNELS_ONLY, MeasuredSteps, Place
from cdmpp.llm.layout import Types
from cdmpp.llm.memory import weights_read
from cdmpp.llm.pricing import PricedStep, StepPricing, combined, is_stand_in, place_of, stand_ins
from cdmpp.llm.serving.calibrate import Calibration, MeasuredBuilder, fit_profile, phase_runs
from cdmpp.model.domain.score import LABELS, Label

OUT, DOCUMENT = ROOT / "benchmarks/results/serving_truth.json", ROOT / "docs/serving-accuracy.md"
COMMAND = "python -m benchmarks.serving_truth --public-data DIR"
#: Draws of four rows.
DRAWS, DRAWN = 5, 4
#: Groups of fewer rows are not calibrated.
MIN_GROUP = 12
#: Another engine of the same time, whose host is the prior where a source is left out.
PRIORS = {"vllm": "trtllm", "trtllm": "vllm", "sglang": "vllm", "vllm-2024": "trtllm-2024", "trtllm-2024": "vllm-2024"}
#: Most cells of a (source, device, model) in a fit of all.
SHARE = 60

Array = np.ndarray[Any, np.dtype[np.float64]]
#: Engine, kind of measurement and device.
Source = tuple[str, str, str]


class Remembering:
    """A predictor that asks each query once."""

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor, self.model_id, self.artifact = predictor, predictor.model_id, predictor.artifact
        self._known: dict[Any, Any] = {}

    def predict_queries(self, queries: Sequence[Any], **options: Any) -> list[Any]:
        """Predictions in order."""
        keys = [(q.program.operator.text(), q.device.name, q.protocol, q.framework) for q in queries]
        new = {key: query for key, query in zip(keys, queries, strict=True) if key not in self._known}
        self._known.update(zip(new, self._predictor.predict_queries(list(new.values()), **options), strict=True))
        return [self._known[key] for key in keys]


@dataclass(frozen=True)
class PricedCell:
    """A cell with the steps that make its duration, and how often each counts.

    ``waved``: the same where the clients' requests stay in waves. No source says so; bounds contain both.
    """

    cell: Cell
    steps: list[PricedStep]
    runs: Array
    waved: Array
    place: Place

    def placed(self, engine: EngineProfile) -> tuple[EngineProfile, Label, str]:
        """The profile with the residual of the cell, and the cell's domain by what the profile was fitted to."""
        return engine.at(self.place, *stand_ins(part for step in self.steps for part in step.parts))

    def figures(self, engine: EngineProfile) -> Array:
        """Point, lower and upper bound with an engine's figures in place of those of the pricing."""
        profile, *_ = self.placed(engine)
        steps = np.stack(
            [
                PricedStep(
                    replace(step.pricing, engine=profile),
                    step.predictions,
                    profile.kernel_factor / step.pricing.engine.kernel_factor * step.seconds,
                ).kinds()
                for step in self.steps
            ]
        )
        both = [combined(np.einsum("s,sfk->fk", runs, steps), profile.residual) for runs in (self.runs, self.waved)]
        return np.array([both[0][0], min(both[0][1], both[1][1]), max(both[0][2], both[1][2])])

    @property
    def stand_in_s(self) -> float:
        """Seconds of kernels that stand for others."""
        return sum(
            often * seconds
            for step, often in zip(self.steps, self.runs.tolist(), strict=True)
            for part, seconds in zip(step.parts, step.seconds[0].tolist(), strict=True)
            if is_stand_in(part)
        )

    @property
    def roofline_s(self) -> float:
        """The duration at the device's data sheet."""
        return sum(
            often * sum(part.count * (p.roofline_s or 0.0) for part, p in zip(s.parts, s.predictions, strict=True))
            for s, often in zip(self.steps, self.runs.tolist(), strict=True)
        )


def price(cell: Cell, config: LLMConfig, engine: EngineProfile, predictor: Remembering) -> PricedCell:
    """Price a cell; a CdmppError if that is not possible, or below the time in which the device reads the weights."""
    device, request = lookup(cell.device), cell.request
    layout = Layout(request["tp"], 1, request.get("ep", 1), request.get("dp"))
    types = Types.of(config, request.get("dtype", "bfloat16"), request.get("weights"))
    if cell.step is not None:
        parts = step_operators(config, layout, cell.step, device=device)
        options = {"sequences": -(-cell.batch // layout.dp), "ranks": layout.tp, "replicas": layout.dp}
        step = StepPricing.of(engine, parts, decode=isinstance(cell.step, Decode), **options)
        steps_priced = [step.priced(predictor.predict_queries(step.queries(device)))]
        place = place_of(config, device, layout, types, batch=cell.batch)
        return PricedCell(cell, steps_priced, np.ones(1), np.ones(1), place)
    plan = EstimatePlan(config, device, engine=engine, lengths=cell.lengths, **request)
    steps = {"total_s": request["output"], "ttft_s": 1, "tpot_s": 1}[cell.name]
    if cell.seconds < steps * weights_read(config, layout, types) / device.mem_bandwidth_bytes_per_s:
        raise CdmppError("below the time to read the weights")
    prefill, decode_steps = plan.priced(predictor.predict_queries(plan.queries))
    runs = phase_runs(cell.name, plan, cell.closed_loop, engine)
    return PricedCell(cell, [*prefill, *decode_steps], *runs, plan.place)


def price_all(
    cells: Iterable[Cell], predictor: Remembering, engine: str | None = None
) -> tuple[list[PricedCell], Counter[tuple[str, str, str]]]:
    """All cells with the profile of their engine, or with one; and the reasons of those that have no price."""
    priced, left_out = [], Counter[tuple[str, str, str]]()
    for cell in cells:
        config = config_of(cell.config)
        shipped = load_engine(cell.engine)
        profile = shipped if engine is None else load_engine(engine, shipped.framework)
        try:
            if isinstance(config, CdmppError):
                raise config
            priced.append(price(cell, config, profile, predictor))
        except CdmppError as error:
            left_out[cell.source, cell.engine, _reason(error.message)] += 1
    return priced, left_out


def _reason(message: str) -> str:
    if "is not known" in message:
        return "architecture not known"
    return "does not fit" if " GB on each " in message else message.partition(":")[0]


def fitted(cells: Sequence[PricedCell], start: EngineProfile, *, alone: bool = False) -> Calibration:
    """A fit to cells, which its ``measured`` covers, too; ``alone``: of one source, whose clients may send waves."""
    builder = MeasuredBuilder()
    for number, row in enumerate(cells, 1):
        builder.add(number, row.cell.seconds, row.steps, row.runs, row.waved if alone else row.runs)
    fit = fit_profile(builder.measured(), start)
    return replace(fit, profile=fit.profile.model_copy(update={"measured": covering(cells, start.measured)}))


def covering(cells: Iterable[PricedCell], measured: MeasuredSteps) -> MeasuredSteps:
    """What is measured, with cells."""
    for row in cells:
        measured = measured.widened(*row.place)
    return measured


def errors(cells: Sequence[PricedCell], figures: Array) -> dict[str, float]:
    """Mean and median of |predicted / measured - 1|, and the share inside the interval; ``figures`` is (cells, 3)."""
    measured = np.array([row.cell.seconds for row in cells])
    wrong = figures[:, 0] / measured - 1
    inside = (figures[:, 1] <= measured) & (measured <= figures[:, 2])
    return {
        "mean": float(np.abs(wrong).mean()),
        "median": float(np.median(np.abs(wrong))),
        "bias": float(np.median(wrong)),
        "covered": float(inside.mean()),
    }


def even(cells: Sequence[PricedCell]) -> list[PricedCell]:
    """At most :data:`SHARE` cells of each (source, device, model), drawn.

    Cells are left out that the shipped profile misses by more than a factor of two, or where kernels that stand for
    others take a tenth of the time: no host time explains them.
    """
    groups: dict[tuple[str, str, str], list[PricedCell]] = defaultdict(list)
    for row in cells:
        point = row.figures(load_engine(row.cell.engine))[0]
        if not 0.5 < point / row.cell.seconds < 2 or row.stand_in_s > 0.1 * point:
            continue
        groups[row.cell.source, row.cell.device, row.cell.model].append(row)
    rng = np.random.default_rng(0)
    return [group[i] for _, group in sorted(groups.items()) for i in rng.permutation(len(group))[:SHARE]]


def source_of(row: PricedCell) -> Source:
    """Engine, kind of measurement and device."""
    return row.cell.engine, row.cell.source.partition(",")[0], row.cell.device


def misses(rows: Iterable[PricedCell], profile: EngineProfile) -> list[Miss]:
    """The residuals that cells need."""
    bare = plain(profile)
    return [
        Miss(row.cell.engine, (*source_of(row), row.cell.model), row.placed(bare)[1], needed)
        for row in rows
        for needed in [residual_needed(row.figures(bare), row.cell.seconds)]
    ]


class Sources:
    """Profiles without each source whose engine has others, and the residuals of such profiles.

    The prior of a fit is the host of another engine of the same time (:data:`PRIORS`), which never saw the engine's
    rows. Where a profile's sources cover a cell, the misses of its own fit count as well; a source that it covers says
    nothing of those that it does not.
    """

    def __init__(self, cells: Sequence[PricedCell]) -> None:
        self._rows: dict[Source, list[PricedCell]] = defaultdict(list)
        for row in cells:
            self._rows[source_of(row)].append(row)
        self.profiles: dict[Source, EngineProfile] = {}
        for source in self._rows:
            others = [row for row in cells if row.cell.engine == source[0] and source_of(row) != source]
            if others:
                shipped, other = load_engine(source[0]), load_engine(PRIORS[source[0]]).host
                names = ("step_s", "sequence_s", "ranks_s")
                host = shipped.host.model_copy(update={name: getattr(other, name) for name in names})
                fit = fitted(even(others), shipped.model_copy(update={"kernel_factor": 1.0, "host": host})).profile
                known = covering(others, MeasuredSteps())
                self.profiles[source] = fit.model_copy(update={"measured": known})
        self._within = {source: misses(rows, load_engine(source[0])) for source, rows in self._rows.items()}
        self._between = {source: misses(self._rows[source], profile) for source, profile in self.profiles.items()}

    def residuals(self, profile: EngineProfile, engine: str, without: Source | None = None) -> EngineProfile:
        """A profile with the residuals of all sources, or of all but one that it was fitted without."""
        within = {source: group for source, group in self._within.items() if source != without}
        if without is not None:
            within |= {source: misses(self._rows[source], profile) for source in within if source[0] == engine}
        known = [miss for group in within.values() for miss in group if miss.domain == "in"]
        known += [miss for source, group in self._between.items() if source != without for miss in group]
        return profile.model_copy(update=residuals(known, engine))


def group_result(cells: list[PricedCell], bare: list[PricedCell]) -> dict[str, Any]:
    """Errors of a group of one source, engine and device."""
    shipped = load_engine(cells[0].cell.engine)
    kernels = load_engine(KERNELS_ONLY, shipped.framework)
    roofline = np.array([[row.roofline_s] * 3 for row in bare])
    result: dict[str, Any] = {
        "rows": len(cells),
        "shipped": errors(cells, np.stack([row.figures(shipped) for row in cells])),
        "kernels_only": errors(bare, np.stack([row.figures(kernels) for row in bare])),
        "roofline": errors(bare, roofline),
    }
    if len(cells) < MIN_GROUP:
        return result
    draws = []
    for seed in range(DRAWS):
        chosen = set(np.random.default_rng(seed).permutation(len(cells))[:DRAWN].tolist())
        fit = fitted([cells[i] for i in sorted(chosen)], shipped, alone=True)
        others = [row for i, row in enumerate(cells) if i not in chosen]
        same_clients = [
            replace(row, runs=runs, waved=runs) for row in others for runs in [row.waved if fit.waves else row.runs]
        ]
        draws.append(errors(others, np.stack([row.figures(fit.profile) for row in same_clients])))
    result["four_rows"] = {name: float(np.mean([draw[name] for draw in draws])) for name in draws[0]}
    return result


def grouped(cells: Iterable[PricedCell]) -> dict[tuple[str, str, str], list[PricedCell]]:
    """Cells by source, engine and device."""
    groups: dict[tuple[str, str, str], list[PricedCell]] = defaultdict(list)
    for row in cells:
        groups[row.cell.source, row.cell.engine, row.cell.device].append(row)
    return dict(sorted(groups.items()))


def run(cells: Sequence[Cell], predictor: Remembering) -> dict[str, Any]:
    """All figures."""
    priced, left_out = price_all(cells, predictor)
    bare, _ = price_all(cells, predictor, KERNELS_ONLY)
    keys = {id(row.cell) for row in priced} & {id(row.cell) for row in bare}
    priced = [row for row in priced if id(row.cell) in keys]
    bare_of = {id(row.cell): row for row in bare}
    rows = []
    sources = Sources(priced)
    domains = defaultdict[str, dict[Any, list[PricedCell]]](lambda: defaultdict(list))
    bounds: dict[int, Array] = {}
    for (source, engine, device), group in grouped(priced).items():
        figures = group_result(group, [bare_of[id(row.cell)] for row in group])
        profile = sources.profiles.get(source_of(group[0]))
        figures["left_out"] = None
        if profile is not None:
            profile = sources.residuals(profile, engine, source_of(group[0]))
            bounds |= {id(row): row.figures(profile) for row in group}
            figures["left_out"] = errors(group, np.stack([bounds[id(row)] for row in group]))
            for row in group:
                domains[row.placed(profile)[1]][source_of(row), row.cell.model].append(row)
        rows.append({"source": source, "engine": engine, "device": device, **figures})
    return {
        "command": COMMAND,
        "model_id": predictor.model_id,
        "groups": rows,
        "domains": [
            {
                "domain": label,
                "models": len(models),
                "rows": sum(map(len, models.values())),
                **{name: float(np.mean([each[name] for each in scores])) for name in ("mean", "covered")},
            }
            for label, models in ((label, domains[label]) for label in LABELS)
            for scores in [[errors(cells, np.stack([bounds[id(row)] for row in cells])) for cells in models.values()]]
        ],
        "points": {name: _points(group) for name, group in sorted(_sources(priced).items())},
        "by_model": _by(priced, lambda row: row.cell.model),
        "by_batch": _by(priced, lambda row: _batch_class(row.cell.batch)),
        "left_out": [
            {"source": s, "engine": e, "reason": reason, "rows": count}
            for (s, e, reason), count in sorted(left_out.items())
        ],
    }


def _sources(cells: Iterable[PricedCell]) -> dict[str, list[PricedCell]]:
    sources: dict[str, list[PricedCell]] = defaultdict(list)
    for row in cells:
        sources[row.cell.source.partition(",")[0]].append(row)
    return sources


def _points(cells: Sequence[PricedCell]) -> list[list[float]]:
    """Measured and predicted seconds of each cell."""
    return [
        [float(f"{v:.4g}") for v in (row.cell.seconds, row.figures(load_engine(row.cell.engine))[0])] for row in cells
    ]


def _batch_class(batch: int) -> str:
    largest = {1: "1", 8: "2-8", 32: "9-32", 128: "33-128"}
    return next((name for limit, name in largest.items() if batch <= limit), "129 and more")


def _by(cells: Sequence[PricedCell], key: Any) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[PricedCell]] = defaultdict(list)
    for row in cells:
        groups[row.cell.source, row.cell.engine, key(row)].append(row)
    rows = []
    for (source, engine, name), group in sorted(groups.items()):
        figures = np.stack([row.figures(load_engine(engine)) for row in group])
        rows.append({"source": source, "engine": engine, "name": name, "rows": len(group), **errors(group, figures)})
    return rows


def fit_shipped(cells: Sequence[Cell], predictor: Remembering) -> None:
    """Print figures for the shipped profiles."""
    priced, _ = price_all(cells, predictor)
    sources = Sources(priced)
    engines: dict[str, list[PricedCell]] = defaultdict(list)
    for row in priced:
        engines[row.cell.engine].append(row)
    for engine, group in sorted(engines.items()):
        weights = Counter((row.cell.source, row.cell.device, row.cell.model) for row in group)
        profile = fitted(even(group), load_engine(engine)).profile
        host = profile.host
        print(
            f"{engine}: kernel_factor {profile.kernel_factor:.3f}, step {1e3 * host.step_s:.3f} ms, sequence "
            f"{1e3 * host.sequence_s:.4f} ms, ranks {1e3 * host.ranks_s:.3f} ms"
        )
        spread = sources.residuals(load_engine(engine), engine)
        print("    " + ", ".join(f"{name} {getattr(spread, name):.3f}" for name in FIELDS))
        for key in sorted(weights):
            rows = [row for row in group if (row.cell.source, row.cell.device, row.cell.model) == key]
            misses = errors(rows, np.stack([row.figures(profile) for row in rows]))
            alone = fitted(rows, load_engine(engine)).profile if len(rows) > 3 else profile
            print(
                f"    {' '.join(key)}: {len(rows)} rows, {percent(misses['mean'])}, bias {misses['bias']:+.2f}; alone "
                f"{alone.kernel_factor:.2f}, {1e3 * alone.host.step_s:.2f}, {1e3 * alone.host.sequence_s:.3f}, "
                f"{1e3 * alone.host.ranks_s:.2f}"
            )


def pages(result: Mapping[str, Any]) -> dict[str, str]:
    """Parts of the page."""
    header = ["measurement", "engine", "device", "rows", "roofline", "kernels only", "shipped profile"]
    header += ["80 % interval covers", "source left out", "80 % interval covers"]
    header += ["four own rows", "80 % interval covers"]
    rows = []
    for g in result["groups"]:
        four, left = g.get("four_rows"), g["left_out"]
        rows.append(
            [
                *(g[name] for name in ("source", "engine", "device")),
                f"{g['rows']:,}",
                *(percent(g[name]["mean"]) for name in ("roofline", "kernels_only")),
                f"**{percent(g['shipped']['mean'])}**",
                percent(g["shipped"]["covered"], 0),
                *(["-"] * 2 if left is None else [percent(left["mean"]), percent(left["covered"], 0)]),
                "-" if four is None else percent(four["mean"]),
                "-" if four is None else percent(four["covered"], 0),
            ]
        )
    parts = {"groups": table(header, rows, left=3)}
    domains = [
        [d["domain"], f"{d['models']}", f"{d['rows']:,}", percent(d["mean"]), percent(d["covered"], 0)]
        for d in result["domains"]
    ]
    parts["domains"] = table(["domain", "models", "rows", "mean error", "80 % interval covers"], domains)
    header = ["measurement", "engine", "", "rows", "mean error", "median", "predicted over measured, median", "covered"]
    for part in ("by_model", "by_batch"):
        cells = [
            [
                *(row[name] for name in ("source", "engine", "name")),
                f"{row['rows']:,}",
                percent(row["mean"]),
                percent(row["median"]),
                f"{100 * row['bias']:+.0f} %",
                percent(row["covered"], 0),
            ]
            for row in result[part]
        ]
        parts[part] = table([*header[:2], part[3:], *header[3:]], cells, left=3)
    reasons = [[row["source"], row["engine"], row["reason"], f"{row['rows']:,}"] for row in result["left_out"]]
    parts |= served.pages(result["served"])
    parts["left_out"] = table(["measurement", "engine", "reason", "rows"], reasons, left=3)
    return parts


def main() -> None:
    """Run the study."""
    parser = truth_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="print figures of the shipped profiles")
    options = parser.parse_args()
    if not options.render:
        data = public_data_dir(options.public_data)
        configs = options.configs or data.parent / "model_configs"
        cells = read_cells(data, configs)
        predictor = Remembering(LatencyPredictor.load(options.model))
        if options.fit:
            fit_shipped(cells, predictor)
            return
        write_result(OUT, {**run(cells, predictor), "served": served.run(data, configs, predictor)})
    result = json.loads(OUT.read_text(encoding="utf-8"))
    parts = pages(result)
    fill_document(DOCUMENT, parts)
    print(parts["groups"])


if __name__ == "__main__":
    main()
