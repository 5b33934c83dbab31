"""Trees that correct a network: fitted to residuals, stored with the model, applied to queries of trained contexts."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.errors import ArtifactError
from cdmpp.model.artifact.folder import BOOSTERS
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.boosters import COLUMNS, BoosterGroup, Boosters, Trees
from cdmpp.model.inference.boosting import boost
from cdmpp.model.nn.config import LEVELS, NetworkConfig
from cdmpp.model.nn.inputs import INPUT_WIDTH
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.train import boosters as fitting
from cdmpp.train.boost import boost_model
from cdmpp.train.boosters import fit_trees, relative_error
from cdmpp.train.config import DataConfig, FinishConfig, TrainConfig
from cdmpp.train.options import OptimiserConfig
from cdmpp.train.run import train_model

GROUP = BoosterGroup("vllm", "graph", "gemm", False)
MEDIAN = LEVELS.index(0.5)
Fitted = tuple[Trees, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    """Trees of a residual that depends on the first two columns, and held-out columns with their residual."""
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(4000, COLUMNS)).astype(np.float32)
    residual = 0.2 * (columns[:, 0] > 0) + 0.1 * np.sin(3 * columns[:, 1])
    half = len(columns) // 2
    trees = fit_trees(
        columns[:half], residual[:half], columns[half:], residual[half:], operators=("linear", "bmm"), seed=0
    )
    assert trees is not None
    return trees, columns[half:], residual[half:]


def raw(rows: int) -> RawPredictions:
    return RawPredictions(np.zeros(rows), np.tile(np.linspace(-0.4, 0.4, len(LEVELS)), (rows, 1)))


def boosted(trees: Trees, columns: np.ndarray) -> RawPredictions:
    output = raw(len(columns))
    code = np.zeros(len(columns), dtype=np.int64)
    boost(Boosters({GROUP: trees}), output, columns[:, :INPUT_WIDTH], code, code)
    return output


@pytest.mark.slow
def test_trees_lower_the_error_of_held_out_rows_and_scale_the_quantiles(fitted: Fitted) -> None:
    trees, columns, residual = fitted
    columns = columns.copy()
    columns[:, INPUT_WIDTH:] = 0
    output = boosted(replace(trees, widths=(0.5, 1.0)), columns)
    assert relative_error(residual, output.point) < 0.4 * relative_error(residual, np.zeros(len(residual)))
    np.testing.assert_allclose(output.levels[:, MEDIAN], output.point)
    np.testing.assert_allclose(np.ptp(output.levels, axis=1), 0.4)
    assert np.abs(boosted(replace(trees, reach=0.05), columns).point).max() == 0.05


def test_no_trees_where_the_residual_is_noise() -> None:
    rng = np.random.default_rng(0)
    columns, held = rng.normal(size=(2, 2000, COLUMNS)).astype(np.float32)
    assert fit_trees(columns, rng.normal(size=2000), held, np.zeros(2000), operators=("linear",), seed=0) is None


@pytest.mark.slow
def test_stored_boosters_are_the_same(fitted: Fitted) -> None:
    trees, columns, _ = fitted
    other = replace(trees, operators=("linear",), widths=(0.25,))
    before = Boosters({GROUP: trees, BoosterGroup("", "kernel", "gemm", True): other})
    after = Boosters.load(before.save())
    assert after.index == before.index and after.trees[1].operators == ("linear",) and after.trees[1].widths == (0.25,)
    assert np.array_equal(boosted(after.trees[0], columns).point, boosted(trees, columns).point)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of products whose latency has a step that the network is too small for, and the same with boosters."""
    root = tmp_path_factory.mktemp("boosters")
    rng = np.random.default_rng(0)
    rows = 3000
    m, n, k = (2 ** rng.integers(4, 12, rows) for _ in range(3))
    m = m + 8 * rng.integers(0, 8, rows)
    latency = (2e6 * (2.0 * m * n * k / 362e12) + 5.0) * np.where(m % 16 == 8, 1.4, 1.0)
    columns = {
        "op": ["linear"] * rows,
        "device": ["NVIDIA L40S"] * rows,
        "framework": ["vllm"] * rows,
        "version": ["1"] * rows,
        "dtype": ["bfloat16"] * rows,
        **{name: sizes.astype(np.int32) for name, sizes in (("m", m), ("n", n), ("k", k))},
        "latency_us": latency.astype(np.float32),
    }
    pq.write_table(pa.table(columns), root / "gemm.parquet")
    config = TrainConfig(
        name="tiny",
        data=DataConfig(public=False, records=(str(root / "gemm.parquet"),)),
        network=NetworkConfig(width=16, layers=1, heads=2, feed_forward=16, head_width=32, head_layers=1),
        optimiser=OptimiserConfig(
            steps=100, batch_rows=64, warmup_steps=5, checkpoint_every=50, average_decay=0.9, threads=1
        ),
        finish=FinishConfig(baselines=("roofline", "mean")),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "MIN_CALIBRATION", 50)
        plain = train_model(config, out=root / "plain", run=root / "run")
        finish = config.finish.model_copy(update={"boosters": True})
        with_trees = train_model(config.model_copy(update={"finish": finish}), out=root / "boosted", run=root / "run")
        shutil.copytree(root / "plain", root / "added")
        identity = boost_model(root / "added")
    overall, before = with_trees["metrics"]["overall"], plain["metrics"]["overall"]
    assert overall["mape"] < 0.6 * before["mape"]
    assert overall["baselines"] == before["baselines"]
    assert 0.7 < overall["coverage"] < 0.9
    added = load_artifact(root / "added")
    assert identity == added.model_id != plain["model_id"] and with_trees["model_id"] != plain["model_id"]
    assert added.manifest["metrics"]["overall"]["mape"] == pytest.approx(overall["mape"], rel=0.02)
    assert added.manifest["metrics"]["overall"]["baselines"]["roofline"]["mape"] == pytest.approx(
        before["baselines"]["roofline"]["mape"]
    )
    return root / "plain", root / "boosted"


@pytest.mark.slow
def test_only_queries_of_trained_contexts_are_corrected(models: tuple[Path, Path]) -> None:
    plain, with_trees = (LatencyPredictor.load(folder) for folder in models)
    program = TensorProgram.from_operator(parse_operator("linear:m=72,n=1024,k=1024,dtype=bfloat16"))

    def latency(predictor: LatencyPredictor, device: str, framework: str | None, protocol: str = "graph") -> float:
        query = Query(program, device, protocol=protocol, framework=framework)  # type: ignore[arg-type]
        [prediction] = predictor.predict_queries([query])
        assert prediction.latency_s is not None
        return prediction.latency_s

    measured_s = 1.4 * (2 * 2 * 72 * 1024 * 1024 / 362e12 + 5e-6)
    off_by = [abs(latency(predictor, "l40s", "vllm") / measured_s - 1) for predictor in (plain, with_trees)]
    assert off_by[1] < 0.6 * off_by[0]
    for framework, protocol in ((None, "graph"), ("vllm", "eager")):
        assert latency(plain, "l40s", framework, protocol) == latency(with_trees, "l40s", framework, protocol)
    # The peer of an unseen device is corrected.
    assert latency(plain, "a100-pcie-40gb", "vllm") < latency(with_trees, "a100-pcie-40gb", "vllm")


@pytest.mark.slow
def test_missing_or_damaged_boosters_are_an_error(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(models[1], tmp_path / "model")
    content = (folder / BOOSTERS).read_bytes()
    (folder / BOOSTERS).write_bytes(content[:-1] + b"x")
    with pytest.raises(ArtifactError, match="does not match its checksum"):
        load_artifact(folder)
    (folder / BOOSTERS).unlink()
    with pytest.raises(ArtifactError, match=BOOSTERS):
        load_artifact(folder)
