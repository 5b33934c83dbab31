"""A model folder with a second model for programs of backend tvm."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import ArtifactError
from cdmpp.features.schedule import SCHEDULE_VERSION
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.scheduled import attach_scheduled, joined_errors, main
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.program import TensorProgram
from tests.features.shapes import random_specs
from tests.model.nn.synthetic import TINY, write_artifact

SCHEDULED = replace(TINY, schedule=True, head="ratio")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A general model, a model for schedules, and the former with the latter."""
    root = tmp_path_factory.mktemp("models")
    general, schedules, both = root / "general", root / "schedules", root / "both"
    write_artifact(general)
    write_artifact(schedules, 1, SCHEDULED)
    shutil.copytree(general, both)
    attach_scheduled(both, schedules)
    return general, schedules, both


def queries(backend: str) -> list[Query]:
    programs = [TensorProgram.from_operator(spec, backend) for spec in random_specs(6, 4)]
    return [Query(program, device) for program in programs for device in ("t4", "h100-sxm5-80gb")]


def test_each_part_predicts_its_backend(folders: tuple[Path, Path, Path]) -> None:
    general, schedules, both = (LatencyPredictor.load(folder) for folder in folders)
    assert both.model_id not in (general.model_id, schedules.model_id)
    library, tvm = queries("library"), queries("tvm")
    mixed = [query for pair in zip(library, tvm, strict=True) for query in pair]
    predicted = both.predict_queries(mixed)
    for part, found in (
        (general.predict_queries(library), predicted[::2]),
        (schedules.predict_queries(tvm), predicted[1::2]),
    ):
        assert [(p.latency_s, p.lower_s, p.upper_s, p.domain, p.domain_score) for p in part] == [
            (p.latency_s, p.lower_s, p.upper_s, p.domain, p.domain_score) for p in found
        ]


def errors(sources: list[str], mape: float) -> dict[str, Any]:
    entries = [{"source": source, "device": "t4", "n": 2, "mape": mape} for source in sources]
    return {
        "overall": {"n": 2 * len(sources), "mape": mape},
        "by_source": {source: {"n": 2, "mape": mape} for source in sources},
        "tables": entries,
        "groups": [{**entry, "op": "tvm"} for entry in entries],
        "types": [{"operator": op, "device": "t4", "rows": 3, "mape": mape} for op in ("tir", "matmul")],
        "sample": {"source": sources, "measured_s": [1e-6] * len(sources), "predicted_s": [mape] * len(sources)},
    }


def test_error_table_has_the_figures_of_the_part_that_predicts() -> None:
    part = errors(["own"], 0.2)
    part["types"] = part["types"][:1]
    joined = joined_errors(errors(["own", "vidur"], 0.5), part)
    assert {source: m["mape"] for source, m in joined["by_source"].items()} == {"own": 0.2, "vidur": 0.5}
    for key in ("tables", "groups"):
        assert {entry["source"]: entry["mape"] for entry in joined[key]} == {"own": 0.2, "vidur": 0.5}
        assert len(joined[key]) == 2
    assert {entry["operator"]: entry["mape"] for entry in joined["types"]} == {"tir": 0.2, "matmul": 0.5}
    assert joined["sample"] == {"source": ["vidur", "own"], "measured_s": [1e-6] * 2, "predicted_s": [0.5, 0.2]}
    assert joined_errors({}, part) == {}


def test_identity_covers_the_part(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    general, schedules, both = folders
    copied = tmp_path / "copied"
    shutil.copytree(both, copied)
    shutil.rmtree(copied / "scheduled")
    with pytest.raises(ArtifactError, match="scheduled is not a model folder"):
        load_artifact(copied)
    write_artifact(copied / "scheduled", 2, SCHEDULED)
    with pytest.raises(ArtifactError, match="names synthetic-"):
        load_artifact(copied)
    attach_scheduled(copied, schedules)
    assert load_artifact(copied).model_id == load_artifact(both).model_id
    with pytest.raises(ArtifactError, match="no model for scheduled programs"):
        attach_scheduled(copied, general)


def test_adaptation_corrects_the_part_that_predicts_the_records(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    both = LatencyPredictor.load(folders[2])
    library, tvm = ([query for query in queries(backend) if query.device == "t4"] for backend in ("library", "tvm"))
    measured = [(query.program, 3 * p.latency_s) for query, p in zip(tvm, both.predict_queries(tvm), strict=True)]
    adapted = both.adapt(measured, device="t4")
    report = adapted.adaptation
    assert report is not None
    assert report["weight"] == 1.0
    after = adapted.predict_queries(tvm)
    assert [p.latency_s for p in after] == pytest.approx([latency_s for _, latency_s in measured], rel=0.3)
    # The other part keeps its predictions.
    assert [p.latency_s for p in adapted.predict_queries(library)] == [
        p.latency_s for p in both.predict_queries(library)
    ]
    adapted.save(tmp_path / "adapted")
    again = LatencyPredictor.load(tmp_path / "adapted")
    assert again.model_id == adapted.model_id
    assert [p.latency_s for p in again.predict_queries(tvm)] == [p.latency_s for p in after]


def test_records_of_both_parts_adapt_the_general_one(folders: tuple[Path, Path, Path]) -> None:
    both = LatencyPredictor.load(folders[2])
    mixed = [query for backend in ("library", "tvm") for query in queries(backend) if query.device == "t4"]
    measured = [(query.program, 2 * p.latency_s) for query, p in zip(mixed, both.predict_queries(mixed), strict=True)]
    adapted = both.adapt(measured, device="t4")
    report = adapted.adaptation
    assert report is not None
    assert [entry["code"] for entry in report["warnings"]].count("scheduled_not_used") == 1
    tvm = [query for query in mixed if query.program.backend == "tvm"]
    assert [p.latency_s for p in adapted.predict_queries(tvm)] == [p.latency_s for p in both.predict_queries(tvm)]


def test_command_reports_what_it_cannot_read(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*nothing(.|\n)*hint: "):
        main([str(tmp_path / "nothing"), "--into", str(folders[2])])


@pytest.mark.parametrize("version", [1, SCHEDULE_VERSION + 1])
def test_unknown_version_of_the_schedule_columns_is_refused(version: int) -> None:
    with pytest.raises(ValueError, match="schedule_version"):
        NetworkConfig(schedule=True, schedule_version=version)
