"""The accuracy report shows the figures of the result files, and names the studies that were not run."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import DOCUMENTS, command_of, rendered
from benchmarks.figures import SOURCES
from benchmarks.report import card, collectives, goals, known, schedules, unseen
from benchmarks.report.figures import draw
from benchmarks.report.markdown import fill
from benchmarks.report.results import STUDIES, Results, rounded, write_result
from cdmpp.data.importers import PROGRAM_SOURCES
from cdmpp.errors import DataError
from tests.waiting import ROOT


def metrics(mape: float, coverage: float | None = 0.8, n: int = 100) -> dict[str, Any]:
    shares = {"within_10": 0.5, "within_20": 0.75, "kendall_tau": 0.9, "coverage": coverage}
    return {"n": n, "mape": mape, "median_ape": mape / 2, **shares}


def figures(gemm: float, conv: float) -> dict[str, Any]:
    macro = (gemm + conv) / 2
    families = {"gemm": metrics(gemm), "conv": metrics(conv)}
    return {"overall": metrics(macro), "families": families, "macro": macro}


def scheduled(methods: dict[str, Any]) -> dict[str, Any]:
    """Figures of the splits, with a sealed evaluation and an adapted configuration."""
    adapted = {name: {"before": m, "after": m | {"mape": m["mape"] / 4}} for name, m in methods.items()}
    sealed = {k: m | {"devices": {"cpu-2t": {"n": 1, "mape": 0.123}}} for k, m in methods.items()}
    read = {"date": "2026-11-23", "model": "0123abcd", "commit": "4567ef", "networks": ["vocoder"]}
    return {
        "command": "run me",
        "splits": {"network": methods, "sealed": sealed},
        "original_training": {"network": {"train_seconds": 1500.0, "samples": 900_000}},
        "sealed_reads": {"issue 17": read},
        "inference_cost": {"network": {"cdmpp and XGBoost, mean": 1.5}},
        "near_twins": {"cpu-1t": ["cpu-2t"]},
        "adapted": {"cpu-1t": {"measurements": 40, "configurations": {"cpu-1t": adapted}}},
    }


def scheduled_gpu(m: dict[str, Any]) -> dict[str, Any]:
    """Equal figures of each GPU, halved by a hundred measurements."""
    by_gpu = dict.fromkeys(schedules.GPUS, m)
    left_out = {gpu: {"0": m, "100": m | {"mape": m["mape"] / 2}} for gpu in schedules.GPUS}
    parts = {"unseen_tasks": by_gpu, "reference": by_gpu, "without": {"registers": by_gpu}, "left_out": left_out}
    return {"command": "run me", "programs": 9000, **parts}


def schedules_study(m: dict[str, Any]) -> dict[str, Any]:
    """Two seeds of one choice and of one device that is left out, the second two points worse."""
    worse = m | {"mape": m["mape"] + 0.02}
    choice = {str(i): {"train_rows": 1000, "gpu": of, "cpu": of} for i, of in enumerate((m, worse))}
    left = {
        seed: run | {"held_out": run["gpu"], "measured": {"0": m, "40 variance": m}} for seed, run in choice.items()
    }
    return {"command": "run me", "steps": 1000, "variants": {"base": choice, "without k80: plain": left}}


def schedules_device(m: dict[str, Any]) -> dict[str, Any]:
    """One device that is adapted, without irregular programs after measurements."""
    after = m | {"mape": 0.123, "better_than_random": 0.9}
    groups = {"new tasks": {"0": m, "40 variance": after}, "irregular": {"0": m, "40 variance": m}}
    return {"command": "run me", "model": "base-1", "devices": {"cpu-1t": groups}}


def schedules_search() -> dict[str, Any]:
    """One group of pools, with a speed that is not known."""
    order = {"trials": 12.34, "median_trials": 6.5, "speed_16": 0.9123, "speed_32": None}
    groups = {"all logs": {"pools": 33, "programs": 8000, "methods": {"random order": order}}}
    return {"command": "run me", "model": "base-1", "seeds": 3, "groups": groups}


def left_out(device: str, source: str, error: float) -> dict[str, Any]:
    """Table of one device whose error falls with the number of measurements."""
    runs = []
    for (i, k), sampler, seed in product(enumerate((10, 40, 100)), ("kmeans", "random"), (0, 1)):
        after = error * (0.8 - 0.2 * i) + 0.001 * seed
        run = {"k": k, "sampler": sampler, "seed": seed, "weight": 1, "width": 1.0}
        runs.append({**run, "before": figures(error, error), "after": figures(after, after)})
    about = {"device": device, "source": source, "available": 1000, "rows": 100, "ceilings": None, "sustained": None}
    return {
        **about,
        "specification": figures(error, error),
        "coverage_curve": {"nominal": [0.5, 0.8, 0.9], "empirical": [0.4, 0.7, 0.8]},
        "baselines": {"roofline": figures(0.5, 0.5), "xgboost": figures(0.3, 0.3)},
        "adapted": runs,
    }


def with_baselines(error: float, n: int = 100) -> dict[str, Any]:
    return metrics(error, n=n) | {"baselines": {"xgboost": {"mape": 0.0555}, "roofline": {"mape": 0.6}}}


@pytest.fixture
def results() -> Results:
    """Small results of every study, with two of the four device groups."""
    domain = {"auc_held_out": 0.6, "auc_pooled": 0.8, "n_held_out": 1, "n_known": 1}
    domain |= {"off_held_out": 0.2, "off_known": 0.01}
    tables = {
        "a100": [left_out("a100-x", "neusight", 0.20), left_out("a100-y", "neusight", 0.30)],
        "v100-l40s": [left_out("v100", "neusight", 0.10), left_out("l40s", "aiconfigurator_gemm", 0.2)],
    }
    groups = {
        name: {"held_out": [one["device"] for one in several], "domain": domain, "tables": several}
        for name, several in tables.items()
    }
    part = {"source": "neusight", "filtered": True, "device": "", "family": "gemm"}
    parts = [
        part | metrics(0.0456),
        {**part, "filtered": False, "family": ""} | metrics(0.05),
        {**part, "device": "t4", "family": ""} | metrics(0.0567),
    ]
    shapes = {
        **{"model_id": "base-1", "n": 3, "parts": parts},
        "coverage": {"nominal": [0.5, 0.8, 0.9], "sources": {"neusight": [0.5, 0.79, 0.9]}},
        "domain": {"labels": {"in": metrics(0.04)}, "auc": 0.77},
    }
    entry = with_baselines(0.0444)
    group = {"source": "vidur", "device": "a40", "op": "linear"}
    model = {
        "overall": entry,
        "by_source": {"vidur": entry, "aiconfigurator_moe": with_baselines(0.0987)},
        "groups": [group | entry, {**group, "device": "h100-sxm"} | with_baselines(0.5)],
        "sample": {"source": ["vidur"] * 2, "measured_s": [1e-5, 2e-5], "predicted_s": [1e-5, 3e-5]},
    }
    ranked = {"task_kendall_tau": 0.61, "top1_score": 0.82, "top5_score": 0.99, "ranked_groups": 7}
    errors = {"cdmpp": 0.4, "XGBoost, PerStoreFeature (packed)": 0.5, "original's network": 0.8}
    methods = {name: metrics(error) | ranked for name, error in errors.items()}
    errors = {"rows": 50, "error": 0.0399}
    exchange = {
        **{"test_error": 0.0399, "test_median": 0.0113, "test_rows": 50},
        "by_operator": {"all_reduce": errors},
        "by_operator_and_device": {"all_reduce|a40": errors},
        "left_out": {"a40": {"rows": 50, "error": 0.3177, "adapted": 0.0533}},
        "left_out_groups": {"a40": {"devices": ["a40", "rtx-a6000"], "rows": 50, "error": 0.4011}},
        **{"left_out_error": 0.3177, "left_out_groups_error": 0.4011, "adapted_error": 0.0533},
    }
    trees = {"rows": 50, "model": 0.0399, "xgboost": 0.0622, "roofline": 0.4}
    left_out_trees = {"left_out": {"a40": trees | {"xgboost": 0.7}}, "left_out_all": trees}
    exchange_baselines = {"test": trees, "by_operator": {"all_reduce": trees}, **left_out_trees}
    return Results(
        {
            **{"model": model, "shapes": shapes, "devices": {"groups": groups}},
            **{"collectives": exchange, "collective_baselines": exchange_baselines},
            "schedules": scheduled(methods),
            "schedules_gpu": scheduled_gpu(metrics(0.4) | ranked),
            "schedules_study": schedules_study(metrics(0.4) | ranked),
            "schedules_device": schedules_device(metrics(0.4) | ranked | {"covered": 0.5}),
            "schedules_search": schedules_search(),
        },
        model_id="base-1",
        manifest={
            "devices": ["", *map(str, range(30))],
            "train": {"train_rows": 1_234_567, "steps": 100, "train_seconds": 60.0, "parameters": 5},
            "config": {"optimiser": {"batch_rows": 600, "start_from": None}},
            "calibration": {"in": 1.0, "near": 2.5},
            "data": {"sources": {"neusight": 777}},
        },
    )


def test_committed_documents_match_committed_results() -> None:
    for path, text in rendered(ROOT, Results.load(ROOT)).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run make accuracy"


def test_headline_is_mean_over_groups_of_means_over_devices(results: Results) -> None:
    devices = results.get("devices")
    read = unseen.readers("neusight")
    spec = unseen.SPECIFICATION
    # The two boards of the A100 (20 and 30 %) are one group, the V100 (10 %) is another.
    value, groups = unseen.headline(devices, "neusight", read[spec])
    assert value == pytest.approx(0.175) and groups == 2
    # At k = 40 the error is 60 % of that; the second seed adds 0.1 %.
    assert unseen.headline(devices, "neusight", read["k = 40"])[0] == pytest.approx(0.175 * 0.6 + 0.0005)
    assert unseen.headline(devices, "neusight", read[unseen.PEAK_RATES]) == (None, 0)


def test_goals_show_whether_they_are_reached_and_how_many_groups_were_measured(results: Results) -> None:
    rows = {tuple(line.split(" | ")[:2]): line for line in goals.goals(results).splitlines()}
    zero = rows["| fp32 operators, device left out", unseen.SPECIFICATION]
    assert "**17.5 %** (2 of 5 groups)" in zero and zero.endswith("| no |")
    assert rows["| fp32 GEMM, held-out shapes", "rows that pass NeuSight's own filter"].endswith("| yes |")
    reduction = "| TVM programs of unseen networks: error reduction over"
    trees = rows[f"{reduction} XGBoost", "XGBoost on PerStoreFeature, same rows"]
    assert trees.endswith("| ≥ 30.0 % | **20.0 %** | no |")
    original = rows[f"{reduction} the original", "the original on PerStoreFeature, same rows"]
    assert original.endswith("| ≥ 30.0 % | **50.0 %** | yes |")


def test_tables_show_the_figures_of_the_results(results: Results) -> None:
    assert "trained on 1.2 million measurements on 30 devices" in known.training(results)
    assert "60,000 in 100 steps, 1 minutes, 1,000 rows a second" in card.model(results)
    assert "| 777 |" in card.sources(results) and "in 1.00, near 2.50" in card.model(results)
    assert all(len(part(results).splitlines()) > 2 for part in (card.devices, card.operators))
    assert "| **4.4 %** |" in known.overview(results) and "| 5.5 %" in known.overview(results)
    assert "| t4 |" in known.details(results) and "**5.7 %**" in known.details(results)
    shown = unseen.zero_shot(results)
    assert "| a100-y | 100 | **30.0 %** | - | 24.1 ± 0.1 % |" in shown
    assert "t4-bx00, p100-rtx-pro" in shown.splitlines()[0]
    assert "random, k = 40" in unseen.samplers(results)
    assert "| a100-x, a100-y | 80 % | 80 % | 0.80 | 0.60 | 20.0 % | 1.0 % |" in unseen.trust(results)
    shown = schedules.schedules(results)
    assert "0.820" in shown and "| sealed networks | cdmpp | 100 | **40.0 %** |" in shown
    assert "evaluated once for issue 17, on 2026-11-23, with model 0123abcd" in shown
    assert "| cpu-1t | cpu-2t | cpu-1t | cdmpp | 40.0 % | 10.0 % |" in shown
    assert "relative to the network: cdmpp and XGBoost, mean 1.50." in shown
    assert "| sealed networks | cdmpp | 12.3 % |" in shown
    shown = schedules.gpu(results)
    assert "| unseen tasks | 40.0 % / 40.0 % / 40.0 % | 20.0 % / 20.0 % / 20.0 % |" in shown
    assert "| device left out, 100 measurements | 20.0 % / 20.0 % / 20.0 % |" in shown and "0.610 / 0.610" in shown
    shown = schedules.study(results)
    assert "| base | 1,000 | 41.0 ± 1.4 % | 20.0 ± 0.0 % | 0.610 | 0.820 | 41.0 ± 1.4 % |" in shown
    assert "| k80 | plain | 41.0 ± 1.4 % | 20.0 ± 0.0 % | 0.610 | 0.820 | 40.0 % / 20.0 % | 40.0 % / 20.0 % |" in shown
    shown = schedules.new_device(results)
    assert "| 40 by variance | 12.3 % / 20.0 % / 50.0 % / 90.0 % / 0.610 / 0.820 | 40.0 % / 20.0 % / 50.0 % /" in shown
    shown = goals.headlines(results)
    assert "| 10.85 % |" in shown and "| 40.0 % | device left out, k = 40 by variance: k80 |" in shown
    # Of CPUs, only those without near twins in training.
    assert "| - | CPU left out, k = 40: not measured |" in shown
    shown = schedules.original(results)
    assert "| networks | original's network | 1,500 | 900,000 | **80.0 %** |" in shown
    shown = schedules.search(results)
    assert "| all logs | 33 | random order | 12.3 | 6.5 | 91.2 % | - |" in shown and "another one" not in shown


def test_goals_of_newer_tables_show_held_out_sizes_and_collectives(results: Results) -> None:
    rows = {tuple(line.split(" | ")[:2]): line for line in goals.goals(results).splitlines()}
    assert rows["| expert layers, held-out shapes", "all rows"].endswith("| 13.6 % | ≤ 10.0 % | **9.9 %** | yes |")
    assert rows["| latent attention, held-out shapes", "all rows"].endswith("| ≤ 7.0 % | - | - |")
    assert rows["| collectives, held-out sizes", "all rows"].endswith("| ≤ 5.5 % | **4.0 %** | yes |")
    assert rows["| collectives, device left out", "all rows, one device at a time"].endswith("| **31.8 %** | no |")
    assert rows["| collectives, device left out", "8 measurements of each link"].endswith("| **5.3 %** | yes |")


def test_collectives_are_shown_with_and_without_baselines(results: Results) -> None:
    assert "| all_reduce | 50 | **4.0 %** | 6.2 % | 40.0 % |" in collectives.sizes(results)
    assert "| all_reduce | a40 | 50 | **4.0 %** |" in collectives.sizes(results)
    assert "| a40 | 50 | **31.8 %** | 5.3 % | 70.0 % | 40.0 % |" in collectives.left_out(results)
    assert "| a40, rtx-a6000 | 50 | **40.1 %** |" in collectives.left_out(results)
    assert "| 50 | **4.0 %** | 1.1 % | - | - | - | - | 6.2 % | 40.0 % |" in known.overview(results)
    alone = Results({"collectives": results.get("collectives")})
    assert "| a40 | 50 | **31.8 %** | 5.3 % | - | - |" in collectives.left_out(alone)
    assert "run `python -m benchmarks.collectives --public-data DIR`" in collectives.sizes(alone)


def test_shapes_of_another_model_do_not_replace_the_error_table(results: Results) -> None:
    part = {"source": "vidur", "filtered": False, "device": "", "family": ""}
    results.get("shapes")["parts"].append(part | metrics(0.07))
    assert goals.held_out_error(results, "vidur") == 0.07
    results.model_id = "base-2"
    assert goals.held_out_error(results, "vidur") == 0.0444
    assert "**4.6 %** (base-1)" in goals.goals(results)


def test_every_public_source_has_a_title_and_a_panel() -> None:
    assert set(PROGRAM_SOURCES) <= set(SOURCES)
    assert not [source for source in SOURCES if known.title(source) == source]


def test_missing_studies_are_named_with_their_commands() -> None:
    nothing = Results({})
    for name, parts in DOCUMENTS.items():
        for part, make in parts.items():
            text = make(nothing)
            assert part == "headlines" or "Not measured yet: run `" in text, (name, part)
    assert nothing.missing() == list(STUDIES)
    # No figure of ours may appear.
    assert " no |" not in goals.goals(nothing) and " yes |" not in goals.goals(nothing)
    assert not draw(nothing, Path("nowhere"))


def test_incomplete_and_outdated_studies_are_missing(results: Results) -> None:
    assert results.missing() == ["devices"]
    results.model_id = "base-2"
    assert results.missing() == ["shapes", "devices"]
    assert "Predicted with base-1, not with base-2" in known.details(results)
    assert "another one, `base-2`: run" in schedules.search(results)


def test_figures_are_drawn_for_existing_studies(results: Results, tmp_path: Path) -> None:
    names = {path.name for path in draw(results, tmp_path)}
    assert names >= {"error_by_k.png", "interval_coverage.png", "error_by_operator.png"}
    for name in names:
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_only_generated_parts_change() -> None:
    text = "by hand\n<!-- generated:a -->\nold\n<!-- end -->\nby hand, too\n"
    made = fill(text, {"a": "new"})
    assert made == "by hand\n<!-- generated:a -->\n\nnew\n\n<!-- end -->\nby hand, too\n"
    assert fill(made, {"a": "new"}) == made
    for parts in ({}, {"a": "x", "b": "y"}):
        with pytest.raises(DataError, match="marked parts"):
            fill(text, parts)
    with pytest.raises(DataError, match="marked parts"):
        fill(text.replace("<!-- end -->", ""), {"a": "new"})


def test_result_files_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    content = {"a": 1, "parts": [{"b": [0.5], "c": {"d": None}}], "e": {"f": {"g": [1, 2]}}, "h": [], "i": {}}
    write_result(path, content)
    assert json.loads(path.read_text()) == content
    assert rounded({"a": [0.123456, (1, "x")]}) == {"a": [0.1235, [1, "x"]]}


def test_file_without_the_part_of_a_study_counts_as_not_run(tmp_path: Path) -> None:
    path = tmp_path / STUDIES["collectives"].path
    path.parent.mkdir(parents=True)
    for content, ran in (({"format": 1}, False), ({"metrics": {}}, False), ({"metrics": {"test_error": 1.0}}, True)):
        path.write_text(json.dumps(content))
        results = Results.load(tmp_path)
        assert ("collectives" not in results.missing()) is ran
        assert results.get("collectives") == ({"test_error": 1.0} if ran else None)


def test_error_names_a_damaged_result_file(tmp_path: Path) -> None:
    path = tmp_path / STUDIES["shapes"].path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(DataError, match=r"unseen_shapes\.json is not valid JSON"):
        Results.load(tmp_path)


def test_commands_use_this_interpreter_and_folder() -> None:
    assert command_of("shapes", "/x y")[1:] == ["-m", "benchmarks.unseen_shapes", "--public-data", "/x y"]
    assert command_of("model", "d")[1:4] == ["-m", "cdmpp.cli.main", "train"]
    assert all(STUDIES[name].public == ("DIR" in STUDIES[name].command) for name in STUDIES)
