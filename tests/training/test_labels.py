"""Labels other than the ratio: inverses, where they are fitted, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from sklearn.preprocessing import PowerTransformer

from cdmpp.errors import DataError
from cdmpp.nn.batch import Inputs
from cdmpp.training.labels import Label, LabelName
from cdmpp.training.loop import train
from cdmpp.training.run import train_model
from cdmpp.training.step import fit_label
from tests.nn.synthetic import TINY, dataset, training

KINDS: tuple[LabelName, ...] = get_args(LabelName)


def latencies(rows: int = 2000) -> np.ndarray:
    return np.random.default_rng(0).normal(-10, 2, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_has_its_inverse(kind: LabelName) -> None:
    values = latencies()
    label = Label.fit(kind, values, np.random.default_rng(0))
    reference = np.full(len(values), -9.0)
    found = label.decode(label.encode(values, reference), reference)
    np.testing.assert_allclose(found, values, rtol=1e-6, atol=1e-6)
    encoded = label.encode(values, reference)
    assert (np.diff(encoded[np.argsort(values)]) >= 0).all()
    if kind != "ratio":
        assert encoded.mean() == pytest.approx(0, abs=1e-6)
        assert encoded.std() == pytest.approx(1, abs=1e-6)


def test_box_cox_is_the_library_s() -> None:
    # A skewed sample, so that the exponent is not zero.
    values = np.log(np.random.default_rng(1).gamma(2.0, 1e-3, 500))
    label = Label.fit("box-cox", values, np.random.default_rng(0))
    reference = PowerTransformer("box-cox", standardize=True).fit_transform(np.exp(values)[:, None])[:, 0]
    np.testing.assert_allclose(label.encode(values, values), reference, atol=2e-3)
    assert abs(label.exponent) > 0.1


@pytest.mark.parametrize("kind", ["latency", "box-cox"])
def test_what_has_no_inverse_stays_near_the_training_range(kind: LabelName) -> None:
    values = np.log(np.random.default_rng(1).gamma(2.0, 1e-3, 500))
    label = Label.fit(kind, values, np.random.default_rng(0))
    found = label.decode(np.array([-1e6, 1e6]), np.zeros(2))
    np.testing.assert_allclose(found, [values.min() - 1, values.max() + 1])


@pytest.mark.parametrize("kind", ["latency", "box-cox"])
def test_a_label_is_fitted_on_training_rows_alone(kind: LabelName) -> None:
    data = dataset()
    config = training().model_copy(update={"label": kind, "network": TINY.model_copy(update={"head": "ratio"})})
    changed = np.where(data.rows.part == 0, data.rows.log_latency, 5.0)
    assert fit_label(data, config) == fit_label(replace(data, rows=replace(data.rows, log_latency=changed)), config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_learns_each_label(tmp_path: Path, kind: LabelName) -> None:
    data = dataset()
    # Devices differ by factors of e; the noise is a tenth.
    data = replace(data, rows=replace(data.rows, log_latency=data.rows.log_latency + data.rows.device))
    config = training(steps=100, learning_rate=5e-3).model_copy(
        update={"label": kind, "network": TINY.model_copy(update={"head": "ratio"})}
    )
    network, _ = train(data, config, tmp_path)
    label = fit_label(data, config)
    found = label.predict(network, Inputs(data.store, data.device_matrix), data.rows)
    train_part = data.rows.part == 0
    error = np.abs(found - data.rows.log_latency)[train_part].mean()
    trivial = np.abs(data.rows.log_latency - np.median(data.rows.log_latency[train_part]))[train_part].mean()
    assert error < 0.5 * trivial


def test_only_ratios_become_models(tmp_path: Path) -> None:
    config = training().model_copy(update={"label": "latency"})
    with pytest.raises(DataError, match="cannot be served"):
        train_model(config, out=tmp_path / "model", run=tmp_path / "run", records=[tmp_path / "none"])
    assert not (tmp_path / "model").exists()
