"""Labels of the ablation study: inverses, the rows they are fitted on, training with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from sklearn.preprocessing import PowerTransformer

from benchmarks.ablation_variants.labels import LabelName, LabelObjective, fit_label, predict_log
from cdmpp.model.nn.batch import Inputs
from cdmpp.train.loop import train
from cdmpp.train.reference.box_cox import BoxCox
from cdmpp.train.step import Objective
from tests.model.nn.synthetic import TINY, dataset, training

pytestmark = pytest.mark.slow

KINDS: tuple[LabelName, ...] = get_args(LabelName)
EXPONENTS = {"latency": 0.0, "box-cox": None}


def latencies(rows: int = 2000) -> np.ndarray:
    return np.random.default_rng(0).normal(-10, 2, rows)


def skewed() -> np.ndarray:
    """Log latencies whose Box-Cox exponent is not zero."""
    return np.log(np.random.default_rng(1).gamma(2.0, 1e-3, 500))


@pytest.mark.parametrize("kind", KINDS)
def test_decode_inverts_encode(kind: LabelName) -> None:
    values = latencies()
    label = BoxCox.fit(values, np.random.default_rng(0), EXPONENTS[kind])
    encoded = label.encode(values)
    np.testing.assert_allclose(label.decode(encoded), values, rtol=1e-6, atol=1e-6)
    assert (np.diff(encoded[np.argsort(values)]) >= 0).all()
    assert encoded.mean() == pytest.approx(0, abs=1e-6)
    assert encoded.std() == pytest.approx(1, abs=1e-6)


def test_box_cox_equals_scikit_learn() -> None:
    values = skewed()
    label = BoxCox.fit(values, np.random.default_rng(0))
    reference = PowerTransformer("box-cox", standardize=True).fit_transform(np.exp(values)[:, None])[:, 0]
    np.testing.assert_allclose(label.encode(values), reference, atol=2e-3)
    assert abs(label.exponent) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_label_without_an_inverse_is_clipped_to_the_training_range(kind: LabelName) -> None:
    values = skewed()
    label = BoxCox.fit(values, np.random.default_rng(0), EXPONENTS[kind])
    np.testing.assert_allclose(label.decode(np.array([-1e6, 1e6])), [values.min() - 1, values.max() + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_label_is_fitted_on_training_rows_only(kind: LabelName) -> None:
    data, config = dataset(), training()
    changed = np.where(data.rows.part == 0, data.rows.log_latency, 5.0)
    other = replace(data, rows=replace(data.rows, log_latency=changed))
    assert fit_label(data, config, kind) == fit_label(other, config, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_network_learns_each_label(tmp_path: Path, kind: LabelName | None) -> None:
    data = dataset()
    # Devices differ by factors of e; the noise is a tenth.
    data = replace(data, rows=replace(data.rows, log_latency=data.rows.log_latency + data.rows.device))
    config = training(steps=100, learning_rate=5e-3).model_copy(
        update={"network": TINY.model_copy(update={"head": "ratio"})}
    )
    objective = partial(LabelObjective, name=kind) if kind else Objective
    network, _ = train(data, config, tmp_path, make_objective=objective)
    label = fit_label(data, config, kind) if kind else None
    predicted = predict_log(network, Inputs(data.store, data.device_matrix), data.rows, label)
    train_part = data.rows.part == 0
    error = np.abs(predicted - data.rows.log_latency)[train_part].mean()
    trivial = np.abs(data.rows.log_latency - np.median(data.rows.log_latency[train_part]))[train_part].mean()
    assert error < 0.5 * trivial


def test_label_needs_the_ratio_head() -> None:
    data, config = dataset(), training()
    inputs = Inputs(data.store, data.device_matrix)
    with pytest.raises(ValueError, match="head = 'ratio'"):
        LabelObjective(data, config, inputs, name="latency")
