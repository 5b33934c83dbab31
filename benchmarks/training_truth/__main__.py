"""``python -m benchmarks.training_truth --public-data DIR``: training steps against measurements.

Predicts every step of ``e2e_llm_training.csv.gz`` that names one layout and one type (``--configs``: folder of the
models' config.json with ``aliases.csv``), and writes ``benchmarks/results/training_truth.json`` and
docs/training-steps.md. Beside it: six operations per parameter and token at the device's peak, and
``cdmpp plan simulate --from megatron`` where it reads the model.

Source left out: the figures that a source can tell are chosen on the other sources of its kind
(:mod:`.left_out`).

Calibrated: each layout in turn is the one measured step of its source and device (the median of its releases); the
error is that of all other rows.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.markdown import fill_document, percent, table
from benchmarks.report.results import write_result
from benchmarks.spreads import Miss, needed, plain, residuals, truth_parser
from benchmarks.training_truth.left_out import kind_of, left_out_profiles
from benchmarks.training_truth.rows import PublishedStep, read_rows
from cdmpp import LatencyPredictor, make_plan
from cdmpp.data.load import public_data_dir
from cdmpp.errors import CdmppError
from cdmpp.llm import TrainingPlan, read_config
from cdmpp.llm.engines.profile import EngineProfile, load_training_engine
from cdmpp.llm.training.calibrate import TrainingCalibrationPlan
from cdmpp.llm.training.memory import active_parameters
from cdmpp.model.domain.score import LABELS
from cdmpp.plan.formats import import_request

ROOT = Path(__file__).resolve().parents[2]
OUT, DOCUMENT = ROOT / "benchmarks/results/training_truth.json", ROOT / "docs/training-steps.md"
COMMAND = "python -m benchmarks.training_truth --public-data DIR"
#: Releases of Megatron-Bridge that the profile megatron-26.06 stands for.
NEW = ("26.06", "26.08")

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class PredictedStep:
    """A measured layout of one model: its plan and predictions, and its rows."""

    rows: list[PublishedStep]
    plan: TrainingPlan
    predictions: Any

    def figures(self, engine: EngineProfile | None = None) -> Array:
        """Point, lower and upper bound in seconds; default: with the profile of its rows."""
        step = self.plan.result("", self.predictions, engine)
        return np.array([step.step_s, step.lower_s, step.upper_s])

    @property
    def seconds(self) -> float:
        """The median of its rows."""
        return float(np.median([row.seconds for row in self.rows]))

    def measurement(self) -> dict[str, Any]:
        """The step for a calibration."""
        options = {name: value for name, value in self.rows[0].options.items() if value is not None}
        return {**options, "recompute": self.plan.layout.recompute, "step_s": self.seconds}


def price(
    rows: Sequence[PublishedStep], predictor: LatencyPredictor, engine: EngineProfile | None = None
) -> PredictedStep:
    """A layout with its predictions; recomputation that no row states is the least that fits."""
    first = rows[0]
    engine = engine or load_training_engine(first.engine)
    choices = [first.options["recompute"]] if "recompute" in first.options else ["none", "selective", "full"]
    config = read_config(first.config)
    for recompute in choices:
        options = {**first.options, "recompute": recompute}
        plan = TrainingPlan.of(config, first.device, engine, options, check_memory=False)
        if plan.memory.fits or "recompute" in first.options:
            return PredictedStep(list(rows), plan, predictor.predict_queries(plan.queries))
    plan.check_memory()
    raise AssertionError


def six_nd(step: PredictedStep) -> float:
    """Seconds of six operations per parameter and token at the device's peak."""
    layout, plan = step.plan.layout, step.plan
    peak = plan.peak_flops or 1e15
    return 6 * active_parameters(plan.config) * layout.global_batch * layout.sequence / (peak * layout.gpus)


def from_megatron(step: PredictedStep, predictor: LatencyPredictor) -> float | None:
    """Seconds by ``cdmpp plan simulate --from megatron``; None where it does not read the model or layout."""
    c, x = step.plan.config, step.plan.layout
    if c.experts is not None or c.latent is not None or c.norm != "rmsnorm" or x.cp > 1:
        return None
    arguments = {
        "num-layers": c.layers,
        "hidden-size": c.hidden,
        "num-attention-heads": c.heads,
        "ffn-hidden-size": c.intermediate,
        "num-query-groups": c.kv_heads,
        "vocab-size": c.vocab,
        "seq-length": x.sequence,
        "micro-batch-size": x.micro_batch,
        "global-batch-size": x.global_batch,
        "tensor-model-parallel-size": x.tp,
        "pipeline-model-parallel-size": x.pp,
    }
    if x.virtual_pp > 1 and c.layers % (x.pp * x.virtual_pp) == 0:
        arguments["num-layers-per-virtual-pipeline-stage"] = c.layers // (x.pp * x.virtual_pp)
    flags = "--group-query-attention --swiglu --bf16 --sequence-parallel"
    if step.plan.products is not None:
        flags += " --fp8-format hybrid --fp8-recipe " + ("mxfp8" if step.plan.products == "mxfp8" else "tensorwise")
    text = " ".join([*(f"--{name} {value}" for name, value in arguments.items()), flags])
    try:
        value = import_request("megatron", text, "simulate", device=step.plan.device.name, dp=x.dp).request
        # The memory of a step is another question.
        answer = make_plan("simulate", {**value, "memory_bytes": 1e15}, predictor)
    except CdmppError:
        return None
    return float(answer["step_s"])


def errors(rows: Sequence[PublishedStep], figures: Array) -> dict[str, float]:
    """Mean of |predicted / measured - 1|, median ratio, and the share inside the interval; figures (rows, 3)."""
    measured = np.array([row.seconds for row in rows])
    ratio = figures[:, 0] / measured
    inside = (figures[:, 1] <= measured) & (measured <= figures[:, 2])
    return {
        "rows": len(rows),
        "mean": float(np.abs(ratio - 1).mean()),
        "bias": float(np.median(ratio)),
        "covered": float(inside.mean()),
    }


def profile_of(row: PublishedStep) -> str:
    """The profile of a row's release."""
    return "megatron-26.06" if row.engine == "megatron" and row.release.startswith(NEW) else row.engine


def expanded(steps: Sequence[PredictedStep], values: Sequence[Array]) -> Array:
    """Figures of steps, once for each of their rows."""
    return np.stack([value for step, value in zip(steps, values, strict=True) for _ in step.rows])


def rows_of(steps: Sequence[PredictedStep]) -> list[PublishedStep]:
    """Rows of steps."""
    return [row for step in steps for row in step.rows]


def kind_profile(engine: EngineProfile, source: str) -> EngineProfile:
    """The profile of a source's kind in place of one that was fitted to it alone."""
    kind = load_training_engine(kind_of(source))
    return engine if engine.framework != kind.framework else kind


def misses(steps: Iterable[PredictedStep], profile: EngineProfile) -> list[Miss]:
    """The residuals that measured steps need."""
    bare = plain(profile)
    return [
        Miss(
            kind_of(row.source),
            (row.source, row.device.name, row.model),
            bare.at(step.plan.place)[1],
            needed(step.figures(bare), row.seconds, widest=True),
        )
        for step in steps
        for row in step.rows
    ]


def group_result(steps: list[PredictedStep], predictor: LatencyPredictor) -> dict[str, Any]:
    """Errors of the steps of one source and device."""
    rows = rows_of(steps)
    shipped = [step.figures() for step in steps]
    result: dict[str, Any] = {"layouts": len(steps), "shipped": errors(rows, expanded(steps, shipped))}
    release = [step.figures(load_training_engine(profile_of(row))) for step in steps for row in step.rows]
    result["by_release"] = errors(rows, np.stack(release))
    result["six_nd"] = errors(rows, expanded(steps, [np.full(3, six_nd(step)) for step in steps]))
    imported = [(step, value) for step in steps if (value := from_megatron(step, predictor)) is not None]
    if imported:
        answered = [step for step, _ in imported]
        figures = expanded(answered, [np.full(3, value) for _, value in imported])
        result["from_megatron"] = errors(rows_of(answered), figures)
    if len(steps) > 2:
        scores: dict[str, list[dict[str, float]]] = {"calibrated": [], "rescaled": []}
        for i, basis in enumerate(steps):
            plan = TrainingCalibrationPlan(
                basis.plan.config, basis.plan.device, [basis.measurement()], basis.plan.engine
            )
            fitted = plan.calibration(predictor.predict_queries(plan.queries)).profile
            others = steps[:i] + steps[i + 1 :]
            by_method = {
                "calibrated": [step.figures(fitted) for step in others],
                "rescaled": [v * basis.seconds / shipped[i][0] for v in shipped[:i] + shipped[i + 1 :]],
            }
            for name, values in by_method.items():
                scores[name].append(errors(rows_of(others), expanded(others, values)))
        result |= {
            name: {n: float(np.mean([e[n] for e in values])) for n in ("mean", "covered")}
            for name, values in scores.items()
        }
    return result


def run(public_data: Path, configs: Path, predictor: LatencyPredictor) -> dict[str, Any]:
    """All figures."""
    rows, left_out = read_rows(public_data, configs)
    layouts: dict[tuple[str, ...], list[PublishedStep]] = defaultdict(list)
    for row in rows:
        layouts[row.source, row.device.name, row.model, row.engine + str(row.options)].append(row)
    groups: dict[tuple[str, str], list[PredictedStep]] = defaultdict(list)
    refused = Counter[tuple[str, str, str]]()
    for (source, device, _, _), same in sorted(layouts.items()):
        try:
            groups[source, device].append(price(same, predictor))
        except CdmppError as error:
            refused[source, device, error.message[:160]] += len(same)
    results, by_model = [], []
    by_kind = {
        key: [price(step.rows, predictor, kind_profile(step.plan.engine, key[0])) for step in steps]
        for key, steps in groups.items()
    }
    profiles = left_out_profiles(by_kind)
    between = {key: misses(by_kind[key], profile) for key, profile in profiles.items()}
    within = {key: misses(steps, steps[0].plan.engine) for key, steps in groups.items()}
    domains = defaultdict[str, dict[Any, list[float]]](lambda: defaultdict(list))
    for (source, device), steps in sorted(groups.items()):
        group_key = (source, device)
        # The spread of the others: of their steps that shipped profiles cover, and of those left out.
        others = [m for found in (between, within) for key in found if key != group_key for m in found[key]]
        profile = profiles[group_key].model_copy(update=residuals(others, kind_of(source)))
        without = [step.figures(profile) for step in by_kind[group_key]]
        held_out = errors(rows_of(steps), expanded(steps, without))
        for step, figures in zip(by_kind[group_key], without, strict=True):
            label = profile.at(step.plan.place)[1]
            domains[label][group_key, step.rows[0].model] += [figures[0] / row.seconds - 1 for row in step.rows]
        entry = {**group_result(steps, predictor), "left_out": held_out}
        results.append({"source": source, "device": device, **entry})
        models: dict[tuple[str, str], list[PredictedStep]] = defaultdict(list)
        for step in steps:
            models[step.rows[0].model, step.plan.products or "bfloat16"].append(step)
        for (model, products), own_steps in sorted(models.items()):
            own_rows, figures = rows_of(own_steps), expanded(own_steps, [step.figures() for step in own_steps])
            named = {"source": source, "device": device, "model": model, "products": products}
            by_model.append({**named, **errors(own_rows, figures)})
    every = [(step, row) for steps in groups.values() for step in steps for row in step.rows if row.memory_bytes]
    memory = [
        {
            "model": row.model,
            "engine": row.engine,
            "layout": f"{step.plan.layout.gpus} GPUs, {step.plan.layout.named()}",
            "measured": row.memory_bytes,
            "predicted": step.plan.memory.total,
        }
        for step, row in every
    ]
    return {
        "command": COMMAND,
        "model_id": predictor.model_id,
        "answerable": len(rows),
        "groups": results,
        "by_model": by_model,
        "domains": [
            {"domain": label, "models": len(found), "mean": float(np.mean([np.abs(e).mean() for e in found.values()]))}
            for label, found in ((label, domains[label]) for label in LABELS)
            if found
        ],
        "residuals": {
            kind: residuals(every, kind)
            for every in [[*chain(*between.values(), *within.values())]]
            for kind in sorted({m.engine for m in every})
        },
        "memory": memory,
        "left_out": [{"source": s, "reason": reason, "rows": n} for (s, reason), n in sorted(left_out.items())],
        "refused": [{"source": s, "device": d, "reason": r, "rows": n} for (s, d, r), n in sorted(refused.items())],
    }


def pages(result: Mapping[str, Any]) -> dict[str, str]:
    """Parts of the page."""
    header = ["source", "device", "rows", "layouts", "6 N D at peak", "`--from megatron` (rows)"]
    header += ["`training-step`", "predicted over measured, median", "80 % interval covers", "profile by release"]
    header += ["source left out", "80 % interval covers"]
    header += ["one measured step", "80 % interval covers", "one measured step, plain rescaling"]
    rows = []
    for g in result["groups"]:
        shipped, imported, calibrated, held_out = (
            g.get(n) for n in ("shipped", "from_megatron", "calibrated", "left_out")
        )
        rows.append(
            [
                g["source"],
                g["device"],
                f"{shipped['rows']}",
                f"{g['layouts']}",
                percent(g["six_nd"]["mean"]),
                "-" if imported is None else f"{percent(imported['mean'])} ({imported['rows']})",
                f"**{percent(shipped['mean'])}**",
                f"{shipped['bias']:.2f}",
                percent(shipped["covered"], 0),
                percent(g["by_release"]["mean"]),
                percent(held_out["mean"]),
                percent(held_out["covered"], 0),
                "-" if calibrated is None else percent(calibrated["mean"]),
                "-" if calibrated is None else percent(calibrated["covered"], 0),
                "-" if calibrated is None else percent(g["rescaled"]["mean"]),
            ]
        )
    domains = ", ".join(f"{percent(d['mean'])} {d['domain']} ({d['models']})" for d in result["domains"])
    header_model = ["device", "model", "products", "rows", "error", "predicted over measured, median", "covered"]
    models = [
        [
            r["device"],
            r["model"],
            r["products"],
            f"{r['rows']}",
            percent(r["mean"]),
            f"{r['bias']:.2f}",
            percent(r["covered"], 0),
        ]
        for r in result["by_model"]
    ]
    left = [[r["source"], r["reason"], f"{r['rows']}"] for r in (*result["left_out"], *result["refused"])]
    memory = [
        [
            m["model"],
            m["engine"],
            m["layout"],
            *(f"{m[name] / 2**30:.1f}" for name in ("measured", "predicted")),
            f"{m['predicted'] / m['measured']:.2f}",
        ]
        for m in result["memory"]
    ]
    answered = sum(g["shipped"]["rows"] for g in result["groups"])
    return {
        "groups": table(header, rows, left=2)
        + f"\n\nMean error of sources left out by domain (models on devices, each counts the same): {domains}."
        + f"\n\nAnswered: {answered} of {result['answerable']} rows. Model {result['model_id']}.",
        "models": table(header_model, models, left=3),
        "left-out": table(["source", "reason", "rows"], left, left=2),
        "memory": table(["model", "engine", "layout", "measured GiB", "predicted GiB", "ratio"], memory, left=3),
    }


def main() -> None:
    """Run the study."""
    options = truth_parser(__doc__).parse_args()
    if not options.render:
        data = public_data_dir(options.public_data)
        configs = options.configs or data.parent / "model_configs"
        write_result(OUT, run(data, configs, LatencyPredictor.load(options.model)))
    parts = pages(json.loads(OUT.read_text(encoding="utf-8")))
    fill_document(DOCUMENT, parts)
    print(parts["groups"])


if __name__ == "__main__":
    main()
