"""A whole training run on a small table of synthetic latencies: configuration to model folder to answer."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.records import write_records
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import ArtifactError, DataError
from cdmpp.model.artifact.folder import ERROR_TABLE
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.train.config import DataConfig, FinishConfig, TrainConfig, load_config
from cdmpp.train.dataset import make_dataset
from cdmpp.train.evaluation.tables import evaluate
from cdmpp.train.options import OptimiserConfig
from cdmpp.train.run import train_model
from tests.train.schedules import DEVICES, measured

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic rows in the layout of the public GEMM table: twice the roofline, plus launch."""
    rng = np.random.default_rng(0)
    n = 1500
    m, cols, k = (2 ** rng.integers(4, 12, n) for _ in range(3))
    device = rng.choice(["NVIDIA L40S", "NVIDIA B200"], n)
    peak = np.where(device == "NVIDIA L40S", 362e12, 2250e12)
    latency = 2e6 * (2.0 * m * cols * k / peak) + 5.0
    path = tmp_path_factory.mktemp("data") / "gemm.parquet"
    columns = {
        "op": ["linear"] * n,
        "device": device,
        "framework": ["vllm"] * n,
        "version": ["1"] * n,
        "dtype": ["bfloat16"] * n,
        "m": m.astype(np.int32),
        "n": cols.astype(np.int32),
        "k": k.astype(np.int32),
        "latency_us": latency.astype(np.float32),
    }
    pq.write_table(pa.table(columns), path)
    return path


def config(steps: int = 60, **data: object) -> TrainConfig:
    return TrainConfig(
        name="tiny",
        data=DataConfig(public=False, **data),  # type: ignore[arg-type]
        network=NetworkConfig(width=16, layers=1, heads=2, feed_forward=16, head_width=32, head_layers=1),
        optimiser=OptimiserConfig(
            steps=steps, batch_rows=64, warmup_steps=5, checkpoint_every=20, average_decay=0.9, threads=1
        ),
        finish=FinishConfig(xgboost_trees=10),
    )


def test_run_learns_and_the_folder_answers(table: Path, tmp_path: Path) -> None:
    result = train_model(config(300), out=tmp_path / "model", run=tmp_path / "run", records=[table])
    overall = result["metrics"]["overall"]
    assert overall["mape"] < overall["baselines"]["roofline"]["mape"]
    assert overall["n"] > 50
    assert {"by_source", "groups", "types", "sample"} <= result["metrics"].keys()
    types = result["metrics"]["types"]
    assert [(e["operator"], e["dtype"], e["weight_dtype"], e["scaling"], e["device"]) for e in types] == [
        ("linear", "bfloat16", None, None, name) for name in ("b200", "l40s")
    ]
    assert sum(e["n"] for e in types) == overall["n"] and all(e["rows"] > e["n"] for e in types)
    assert sum(e["n"] * e["mape"] for e in types) / overall["n"] == pytest.approx(overall["mape"])
    predictor = LatencyPredictor.load(tmp_path / "model")
    known = predictor.predict(
        ["linear:m=512,n=1024,k=2048,dtype=bfloat16"], "l40s", protocol="graph", framework="vllm"
    )[0]
    assert known.domain == "in"
    assert known.latency_s == pytest.approx(2 * 2 * 512 * 1024 * 2048 / 362e12 + 5e-6, rel=0.5)
    assert predictor.predict(["softmax:rows=512,cols=1024"], "l40s")[0].domain == "out"
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["metrics"]["overall"] == overall
    check_error_table(tmp_path / "model", result["metrics"])


def check_error_table(folder: Path, metrics: dict[str, object]) -> None:
    """The error table is in the folder, with its checksum in the manifest; a copy may lack it."""
    table = folder / ERROR_TABLE
    written = table.read_bytes()
    assert json.loads(written) == json.loads(json.dumps(metrics))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["sha256"][ERROR_TABLE] == hashlib.sha256(written).hexdigest()
    table.write_bytes(written + b" ")
    with pytest.raises(ArtifactError, match=f"{ERROR_TABLE} does not match its checksum"):
        load_artifact(folder)
    table.unlink()
    loaded = load_artifact(folder)
    for name in ("model.safetensors", "manifest.json", "../escape", "a/b", ""):
        with pytest.raises(ValueError, match="cannot be the name of a further file"):
            save_artifact(
                folder,
                loaded.network,
                loaded.domain,
                name="x",
                devices=[],
                calibration={},
                details={},
                extra={name: b""},
            )
    assert load_artifact(folder).model_id == loaded.model_id


def test_interrupted_run_ends_where_an_unbroken_one_does(table: Path, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def kill(step: int, steps: int, metrics: dict[str, float]) -> None:
        raise KilledError  # after step 50; the last checkpoint is from step 40

    whole = train_model(config(), out=tmp_path / "a", run=tmp_path / "run-a", records=[table])
    with pytest.raises(KilledError):
        train_model(config(), out=tmp_path / "b", run=tmp_path / "run-b", records=[table], progress=kill)
    assert not (tmp_path / "b").exists()
    resumed = train_model(config(), out=tmp_path / "b", run=tmp_path / "run-b", records=[table])
    assert resumed["model_id"] == whole["model_id"]


def test_held_out_device_is_reported_and_not_known(table: Path, tmp_path: Path) -> None:
    settings = config(holdout_devices=("b200",))
    result = train_model(settings, out=tmp_path / "m", run=tmp_path / "r", records=[table])
    held = result["metrics"]["held_out_devices"]
    # The baselines are fitted on the other devices and evaluated on the held-out one.
    assert set(held["overall"]["baselines"]) == set(settings.finish.baselines)
    assert {(t["source"], t["device"]) for t in held["tables"]} == {("aiconfigurator_gemm", "b200")}
    assert {g["device"] for g in held["groups"]} == {"b200"}
    assert {g["device"] for g in result["metrics"]["groups"]} == {"l40s"}
    program = "linear:m=512,n=1024,k=2048,dtype=bfloat16"
    predictor = LatencyPredictor.load(tmp_path / "m")
    answer = predictor.predict([program], "b200", protocol="graph", framework="vllm")[0]
    # One known device alone says nothing of another.
    assert answer.domain == "out"


@pytest.mark.parametrize("split", ["shape", "network"])
def test_schedules_of_tasks_are_ranked(tmp_path: Path, split: str) -> None:
    write_records(measured(30), tmp_path / "records.parquet")
    data = {"test_share": 0.3, "validation_share": 0.2, "split": split}
    data |= {"test_networks": ("net0",)} if split == "network" else {}
    settings = config(250, records=(str(tmp_path / "records.parquet"),), **data)
    result = train_model(settings, out=tmp_path / "model", run=tmp_path / "run")
    overall = result["metrics"]["overall"]
    assert overall["ranked_groups"] == len(DEVICES) * overall["n"] // (10 * len(DEVICES))
    # The made-up latency follows from the schedule: an order is there to be learned.
    assert overall["task_kendall_tau"] > 0.5
    assert overall["top1_score"] <= overall["top5_score"] <= 1
    # The roofline sees the task, not its schedule.
    assert abs(overall["baselines"]["roofline"]["task_kendall_tau"]) < 0.3
    assert overall["baselines"]["xgboost"]["ranked_groups"] == overall["ranked_groups"]
    table = load_table(tmp_path / "records.parquet")
    evaluated = evaluate(LatencyPredictor.load(tmp_path / "model"), [table])
    assert evaluated["overall"]["ranked_groups"] == 30 * len(DEVICES)
    assert evaluated["overall"]["task_kendall_tau"] > 0.5


def test_few_tasks_are_split_by_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The configuration of docs/training.md trains on the schedules of one task."""
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (tmp_path / "tiny.toml").write_text(guide.partition("```toml\n")[2].partition("```")[0].replace("= 300", "= 20"))
    monkeypatch.chdir(tmp_path)
    write_records(measured(1), Path("records.parquet"))
    result = train_model(load_config("tiny.toml"), out="model", run="run")
    assert result["split"] == "program" and result["metrics"]["overall"]["n"] == len(DEVICES)
    assert "train 16, validation 2, test 2 rows" in caplog.text
    assert json.loads(Path("model/manifest.json").read_text())["data"]["split"] == "program"


def test_too_few_programs_are_refused_before_training(tmp_path: Path) -> None:
    few = measured(1).select(np.arange(4))
    with pytest.raises(DataError, match="2 usable programs: training, validation and test need one each"):
        make_dataset(few, every_part=True)
    with pytest.raises(DataError, match=r"validation part is empty with data\.test_networks = net0"):
        make_dataset(measured(2), DataConfig(split="network", test_networks=("net0",)), every_part=True)


def test_rows_that_cannot_be_trained_on_have_reasons() -> None:
    table = load_table(Path(__file__).parents[2] / "examples" / "cpu_core.csv")
    with pytest.raises(DataError, match="0 usable programs") as error:
        make_dataset(table, every_part=True)
    says = error.value.message
    assert f"unusable of {len(table)} rows: {len(table)} unknown_device (the device is not in" in says
    assert "For cpu-core" in says and "device_spec" in says and "cdmpp adapt --device" in says


def test_another_configuration_does_not_continue_a_run(table: Path, tmp_path: Path) -> None:
    train_model(config(20), out=tmp_path / "m", run=tmp_path / "r", records=[table])
    with pytest.raises(DataError, match="another configuration"):
        train_model(config(30), out=tmp_path / "m", run=tmp_path / "r", records=[table])


def test_further_records_do_not_continue_a_run(table: Path, tmp_path: Path) -> None:
    """What the command line adds is not in the configuration."""
    settings = config(20, records=(str(table),))
    first = train_model(settings, out=tmp_path / "m", run=tmp_path / "r")
    own = tmp_path / "own.parquet"
    write_records(load_table(table).select(np.arange(100)), own)
    for records in ([own], [table]):
        with pytest.raises(DataError, match="other data") as caught:
            train_model(settings, out=tmp_path / "n", run=tmp_path / "r", records=records)
        assert "--run" in caught.value.hint
    assert not (tmp_path / "n").exists()
    second = train_model(settings, out=tmp_path / "n", run=tmp_path / "r2", records=[own])
    assert second["train"]["train_rows"] > first["train"]["train_rows"]


def test_a_program_in_two_parts_is_refused(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_table(table)
    assert set(np.unique(make_dataset(loaded).rows.part)) == {0, 1, 2}
    same = property(lambda self: ("same",) * self.n_programs)
    monkeypatch.setattr(MeasurementTable, "program_hashes", same)
    with pytest.raises(DataError, match="program same is in train and in validation"):
        make_dataset(loaded)


def test_wrong_configurations_say_what_is_wrong(tmp_path: Path, table: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[optimiser]\nstepps = 3\n")
    with pytest.raises(DataError, match=r"optimiser\.stepps"):
        load_config(bad)
    with pytest.raises(DataError, match="nothing to train on"):
        train_model(config(), out=tmp_path / "m", run=tmp_path / "r")
    with pytest.raises(DataError, match="holdout_devices"):
        train_model(config(holdout_devices=("t4",)), out=tmp_path / "m", run=tmp_path / "r", records=[table])


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    load_config(path)
