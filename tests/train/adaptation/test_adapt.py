"""Adapting: what is gained, what stays as it was, what is refused and what is warned of."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdmpp.data.labels import Labels
from cdmpp.data.records import write_records
from cdmpp.devices import lookup
from cdmpp.errors import ArtifactError, DataError, UnknownDeviceError
from cdmpp.model.adapter import ResidualProcess, ResidualSettings, kernel
from cdmpp.model.domain.score import LABELS
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.operators import parse_operator
from cdmpp.train.adaptation.adapt import adapt
from cdmpp.train.adaptation.records import as_table, device_records, survey
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.tables import evaluate
from tests.train.adaptation.conftest import DEVICE, pairs, programs

pytestmark = pytest.mark.slow


def figures(predictor: LatencyPredictor, device: Any, queries: list[Any]) -> list[tuple[Any, ...]]:
    answers = predictor.predict(queries, device)
    return [(p.latency_s, p.lower_s, p.upper_s, p.domain, p.domain_score) for p in answers]


def mape(predictor: LatencyPredictor, measured: list[tuple[Any, float]]) -> float:
    answers = predictor.predict([p for p, _ in measured], DEVICE)
    return float(np.mean([abs((a.latency_s or 0) / s - 1) for a, (_, s) in zip(answers, measured, strict=True)]))


def codes(predictor: LatencyPredictor) -> list[str]:
    return [w["code"] for w in (predictor.adaptation or {})["warnings"]]


def test_a_few_measurements_teach_the_device_and_leave_the_others(base: LatencyPredictor) -> None:
    adapted = base.adapt(pairs(base, 40), DEVICE)
    others = pairs(base, 60, seed=1)
    assert mape(adapted, others) < 0.1 < mape(base, others)
    report = adapted.adaptation or {}
    assert report["cross_validated"]["after"] < 0.1 < report["cross_validated"]["before"]
    assert report["weight"] == 1 and report["k"] == 40 and codes(adapted) == []
    assert adapted.model_id != base.model_id
    queries = programs(20, 3)
    assert figures(adapted, "t4", queries) == figures(base, "t4", queries)
    assert figures(adapted, "b200", queries) == figures(base, "b200", queries)
    assert figures(adapted, DEVICE, queries) != figures(base, DEVICE, queries)


def test_intervals_hold_and_the_domain_is_nearer(base: LatencyPredictor) -> None:
    adapted = base.adapt(pairs(base, 60), DEVICE)
    others = pairs(base, 100, seed=1)
    answers = adapted.predict([p for p, _ in others], DEVICE)
    inside = [(a.lower_s or 0) <= s <= (a.upper_s or 0) for a, (_, s) in zip(answers, others, strict=True)]
    assert np.mean(inside) > 0.6
    before = base.predict([p for p, _ in others], DEVICE)
    assert all((a.domain_score or 0) <= (b.domain_score or 0) for a, b in zip(answers, before, strict=True))


def test_answers_of_an_adapted_model_do_not_depend_on_the_batch(base: LatencyPredictor) -> None:
    adapted = base.adapt(pairs(base, 30), DEVICE)
    queries = [Query(p, d) for p in programs(35, 5) for d in (DEVICE, "l4")]
    together = adapted.predict_queries(queries)
    order = random.Random(0).sample(range(len(queries)), len(queries))
    fresh = LatencyPredictor(adapted.artifact)
    assert [fresh.predict_queries([queries[i]])[0] for i in order] == [together[i] for i in order]


def test_saved_and_loaded_model_predicts_the_same(base: LatencyPredictor, tmp_path: Path) -> None:
    adapted = base.adapt(pairs(base, 30), DEVICE)
    adapted.save(tmp_path / "mine")
    loaded = LatencyPredictor.load(tmp_path / "mine")
    queries = programs(20, 3)
    assert figures(loaded, DEVICE, queries) == figures(adapted, DEVICE, queries)
    assert loaded.model_id == adapted.model_id
    assert sum(f.stat().st_size for f in (tmp_path / "mine").iterdir()) < 100_000
    adapted.save(tmp_path / "mine")  # an older one is replaced


@pytest.mark.parametrize("sampler", ["kmeans", "random", "variance"])
def test_k_chosen_records_and_the_errors_on_the_others(base: LatencyPredictor, tmp_path: Path, sampler: str) -> None:
    measured = pairs(base, 80)
    rows = device_records(measured, lookup(DEVICE), base.artifact)
    made = adapt(base.artifact, rows, k=12, sampler=sampler, seed=3)
    report = made.report
    assert len(set(report["selected"])) == report["k"] == 12
    assert all(0 <= row < 80 for row in report["selected"])
    rest = np.setdiff1d(np.arange(80), report["selected"])
    for name, artifact in (("before", base.artifact), ("after", made.artifact)):
        expected = evaluate(artifact, [rows.table.select(rest)])["overall"]
        assert report[name]["overall"] == pytest.approx(expected, rel=1e-6)
    assert report["after"]["overall"]["mape"] < report["before"]["overall"]["mape"]


def test_the_choice_never_reads_a_latency(base: LatencyPredictor) -> None:
    measured = pairs(base, 60)
    shuffled = [s for _, s in measured]
    random.Random(1).shuffle(shuffled)
    other = [(p, s) for (p, _), s in zip(measured, shuffled, strict=True)]
    chosen = [
        base.adapt(given, DEVICE, k=10, sampler=sampler, seed=2).adaptation["selected"]  # type: ignore[index]
        for given in (measured, other)
        for sampler in ("kmeans", "random", "variance")
    ]
    assert chosen[:3] == chosen[3:]


def test_a_device_of_ones_own_is_known_by_name_afterwards(base: LatencyPredictor, tmp_path: Path) -> None:
    spec = lookup(DEVICE).model_copy(update={"name": "my-gpu", "clock_hz": 1.5e9, "aliases": ()})
    adapted = base.adapt(pairs(base, 12), spec)
    adapted.save(tmp_path / "mine")
    loaded = LatencyPredictor.load(tmp_path / "mine")
    queries = programs(3, 3)
    assert figures(loaded, "my-gpu", queries) == figures(adapted, spec, queries)
    with pytest.raises(UnknownDeviceError):
        base.predict(queries, "my-gpu")


def test_a_trained_device_can_be_adapted_too(base: LatencyPredictor) -> None:
    queries = programs(40)
    measured = [(p, 1.4 * (a.latency_s or 0)) for p, a in zip(queries, base.predict(queries, "t4"), strict=True)]
    adapted = base.adapt(measured, "t4")
    report = adapted.adaptation or {}
    assert report["cross_validated"]["after"] < 0.5 * report["cross_validated"]["before"]


def swinging(base: LatencyPredictor, count: int, spread: float, seed: int) -> list[tuple[Any, float]]:
    """Measurements that scatter about the predictions without any pattern."""
    rng, queries = np.random.default_rng(seed), programs(count, seed)
    output = base.predict(queries, DEVICE)
    noise = np.exp(rng.normal(0, spread, count))
    return [(p, (a.latency_s or 0) * float(e)) for p, a, e in zip(queries, output, noise, strict=True)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 12, 30])
def test_adapted_model_is_never_worse_than_the_base_in_cross_validation(base: LatencyPredictor, count: int) -> None:
    weights = set()
    for seed in range(12):
        adapted = base.adapt(swinging(base, count, 0.4, seed), DEVICE)
        report = adapted.adaptation or {}
        checked, warnings = report["cross_validated"], codes(adapted)
        weights.add(report["weight"])
        if report["weight"]:
            assert count > 1 and checked["after"] < checked["before"]
            assert ("little_gain" in warnings) == (report["weight"] < 1)
        else:
            assert checked["after"] == checked["before"]
            assert ("not_checked" if count == 1 else "no_gain") in warnings
            other = programs(10, 99)
            assert figures(adapted, DEVICE, other) == figures(base, DEVICE, other)
    assert 0 in weights, "no case without a gain was tested"


def test_correction_is_shrunk_where_all_of_it_is_worse_than_the_base(base: LatencyPredictor) -> None:
    shrunk = []
    for seed in range(40):
        adapted = base.adapt(swinging(base, 6, 0.4, seed), DEVICE)
        if 0 < (adapted.adaptation or {})["weight"] < 1:
            shrunk.append(adapted)
    assert shrunk, "no case with a part of the correction was tested"
    for adapted in shrunk[:3]:
        assert adapted.artifact.adapter is not None
        whole = LatencyPredictor(replace(adapted.artifact, adapter=replace(adapted.artifact.adapter, weight=1.0)))
        queries = programs(10, 99)
        for less, more, none in zip(*(m.predict(queries, DEVICE) for m in (adapted, whole, base)), strict=True):
            less_s, more_s, none_s = (np.log(x.latency_s or 0) for x in (less, more, none))
            assert min(none_s, more_s) <= less_s <= max(none_s, more_s)
            assert LABELS.index(more.domain) <= LABELS.index(less.domain) <= LABELS.index(none.domain)


def test_number_of_fits_does_not_grow_with_the_measurements(
    base: LatencyPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = ResidualProcess.__init__

    def counted(self: ResidualProcess, features: Any, residual: Any, settings: Any) -> None:
        made.append(len(residual))
        plain(self, features, residual, settings)

    monkeypatch.setattr(ResidualProcess, "__init__", counted)
    for count in (20, 90):
        base.adapt(pairs(base, count), DEVICE)
        assert made == [count]
        made.clear()


def test_likelihood_by_eigenvalues_chooses_the_most_likely_scales(base: LatencyPredictor) -> None:
    rng = np.random.default_rng(0)
    rows = device_records(pairs(base, 30), lookup(DEVICE), base.artifact)
    features = survey(InferencePipeline(base.artifact), rows, FeatureCache(schedule=False)).features
    for spread in (0.02, 0.2, 0.8):
        residual = 0.3 + rng.normal(0, spread, len(features))
        process = ResidualProcess.fit(features, residual)
        given = ResidualSettings()
        best = (-np.inf, given)
        for amplitude, noise in itertools.product(given.amplitudes, given.noises):
            scales = ("constant", "family", "operator", "setting", "sizes", "peers")
            scaled = replace(
                given, **{name: getattr(given, name) * amplitude for name in scales}, noise=given.noise * noise
            )
            covariance = kernel(features, features, scaled) + scaled.noise**2 * np.eye(len(features))
            middle = np.median(residual)
            used = np.clip(residual, middle - given.clip, middle + given.clip)
            logs = -0.5 * (used @ np.linalg.solve(covariance, used) + np.linalg.slogdet(covariance)[1])
            best = max(best, (float(logs), scaled), key=lambda pair: pair[0])
        assert (process.settings.constant, process.settings.noise) == (best[1].constant, best[1].noise)


def test_named_warnings(base: LatencyPredictor) -> None:
    assert codes(base.adapt(pairs(base, 1), DEVICE))[-1] == "not_checked"
    gemms = [(p, s) for p, s in pairs(base, 60) if p.name.startswith("linear")]
    softmax_pair = next((p, s) for p, s in pairs(base, 60) if p.name.startswith("softmax"))
    adapted = base.adapt([*gemms[:20], softmax_pair], DEVICE)
    assert codes(adapted) == ["few_of_family"]
    table = as_table(pairs(base, 20), "kernel", None)
    mixed = replace(table, protocol=Labels.of(["kernel", "eager"] * 10))
    assert "mixed_protocols" in codes(base.adapt(mixed, DEVICE))
    slow = [*pairs(base, 20), (programs(1, 9)[0], 1000.0)]
    assert "implausible_records" in codes(base.adapt(slow, DEVICE))


def test_a_protocol_has_an_offset_of_its_own(base: LatencyPredictor) -> None:
    table = as_table(pairs(base, 80), "kernel", None)
    mixed = replace(table, protocol=Labels.of(["kernel", "eager"] * 40))
    latency = np.where(mixed.protocol.is_("eager"), 1.3, 1.0) * table.latency_s
    adapted = base.adapt(replace(mixed, latency_s=latency), DEVICE)
    queries = [p for p, _ in pairs(base, 30, seed=1)]
    moved = {}
    for protocol in ("kernel", "eager"):
        before, after = (m.predict(queries, DEVICE, protocol=protocol) for m in (base, adapted))  # type: ignore[arg-type]
        moved[protocol] = np.mean(
            [np.log((a.latency_s or 1) / (b.latency_s or 1)) for a, b in zip(after, before, strict=True)]
        )
    assert moved["eager"] != pytest.approx(moved["kernel"], abs=0.02)


def test_what_is_refused(base: LatencyPredictor, tmp_path: Path) -> None:
    measured = pairs(base, 10)
    with pytest.raises(DataError, match="k = 11, but 10 records"):
        base.adapt(measured, DEVICE, k=11)
    with pytest.raises(DataError, match=r"contradict the specification of h100.*factor"):
        base.adapt([(p, s / 1e4) for p, s in measured], DEVICE)
    with pytest.raises(DataError, match="do not say their device"):
        base.adapt(measured)
    with pytest.raises(DataError, match="empty"):
        base.adapt([], DEVICE)
    with pytest.raises(DataError, match="record 1: latency_s -1"):
        base.adapt([measured[0], (measured[1][0], -1)], DEVICE)
    with pytest.raises(DataError, match="record 0"):
        base.adapt([("linear:m=1", 1.0)], DEVICE)
    with pytest.raises(DataError, match="sampler"):
        base.adapt(measured, DEVICE, k=5, sampler="nearest")
    with pytest.raises(UnknownDeviceError):
        base.adapt(measured, "h1000")
    adapted = base.adapt(measured, DEVICE)
    with pytest.raises(ArtifactError, match="adapted already"):
        adapted.adapt(measured, DEVICE)
    with pytest.raises(ArtifactError, match="not adapted"):
        base.save(tmp_path / "x")


def test_rows_of_a_device_are_selected_by_name_or_figures(base: LatencyPredictor, tmp_path: Path) -> None:
    table = as_table(pairs(base, 20), "kernel", None)
    names = Labels.of(["t4"] * 8 + ["l4"] * 12)
    both = replace(table, device=names, device_name=names, unsupported=Labels.constant("", 20))
    with pytest.raises(DataError, match=r"2 devices: l4 \(12\), t4 \(8\)"):
        device_records(both, None, base.artifact)
    l4 = device_records(both, "l4", base.artifact)
    assert l4.device.name == "l4" and l4.origin.tolist() == list(range(8, 20))
    with pytest.raises(DataError, match="no record is of a40"):
        device_records(both, "a40", base.artifact)
    custom_device = lookup("l4").model_copy(update={"name": "mine", "aliases": ()})
    assert len(device_records(both, custom_device, base.artifact).usable) == 12  # the same figures
    custom_device = custom_device.model_copy(update={"clock_hz": 1e9})
    with pytest.raises(DataError, match="no record is of mine"):
        device_records(both, custom_device, base.artifact)
    only = both.select(np.arange(8))
    assert device_records(only, None, base.artifact).device.name == "t4"
    assert len(device_records(only, custom_device, base.artifact).usable) == 8
    write_records(only, tmp_path / "r.parquet")
    assert len(device_records(tmp_path / "r.parquet", None, base.artifact).usable) == 8


def test_a_csv_of_ones_own(base: LatencyPredictor, tmp_path: Path) -> None:
    lines = ["program,latency_us", *(f'"{p.name}",{s * 1e6!r}' for p, s in pairs(base, 20)), '"linear:m=1,n=1,k=1",']
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines), encoding="utf-8")
    adapted = base.adapt(file, DEVICE, k=10)
    report = adapted.adaptation or {}
    assert report["before"]["overall"]["n"] == 10 and report["unsupported"] == {"no_latency": 1}


@pytest.mark.parametrize(("operator", "framework"), [("rmsnorm", None), ("silu_and_mul", None), ("softmax", "vllm")])
def test_adapted_records_are_predicted_without_limits(operator: str, framework: str | None) -> None:
    """Queries like the records get what was measured, also beyond physics and under a framework without rows."""
    texts = [f"{operator}:dtype=float16,rows={2**n},cols={cols}" for n in range(7, 15) for cols in (1024, 4096, 8192)]
    measured = [(text, 4e-4 * parse_operator(text).tensor_bytes() / 1e8 + 2e-5) for text in texts]
    adapted = LatencyPredictor.load().adapt(measured, "rtx-4090", framework=framework)
    answers = adapted.predict(texts, "rtx-4090", framework=framework)
    errors = [abs((p.latency_s or 0) / latency_s - 1) for p, (_, latency_s) in zip(answers, measured, strict=True)]
    assert float(np.median(errors)) < 0.05 and all(p.domain_reason is None for p in answers)
