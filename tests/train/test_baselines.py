"""Baselines: one contract, and each against its definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.inputs import roofline_s
from cdmpp.programs.query_options import FLOOR_S, PROTOCOLS
from cdmpp.train.baselines import (
    BASELINES,
    BaselineName,
    MeanBaseline,
    UtilisationBaseline,
    fit_baselines,
    roofline_log,
    symmetric_error,
)
from cdmpp.train.config import FinishConfig, TrainConfig
from cdmpp.train.dataset import Dataset
from tests.model.nn.synthetic import dataset, training

pytestmark = pytest.mark.slow


def setting(steps: int = 100) -> TrainConfig:
    finish = FinishConfig(xgboost_trees=150, utilisation_steps=steps)
    return training().model_copy(update={"finish": finish})


def index(data: Dataset) -> np.ndarray:
    return np.flatnonzero(data.rows.part == 0)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_answers_row_by_row_and_learns(name: BaselineName) -> None:
    data = dataset()
    inputs = NetworkInputs(data.store, data.device_matrix)
    first, again = (
        fit_baselines(data, inputs, setting(), index(data), [name])[name].predict_log(data.rows) for _ in range(2)
    )
    assert first.shape == (len(data.rows),)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, again)
    model = fit_baselines(data, inputs, setting(), index(data), [name])[name]
    order = np.random.default_rng(0).permutation(len(data.rows))
    np.testing.assert_allclose(model.predict_log(data.rows.take(order)), first[order], rtol=1e-5)
    if name != "roofline":
        error, trivial = (
            np.abs(p - data.rows.log_latency)[index(data)].mean() for p in (first, roofline_log(data, data.rows))
        )
        # A launch floor is out of a utilisation's reach in so few steps.
        assert error < (0.9 if name == "utilisation" else 0.6) * trivial


@pytest.mark.parametrize("name", BASELINES)
def test_only_training_rows_are_fitted_on(name: BaselineName) -> None:
    data = dataset()
    hidden = replace(
        data, rows=replace(data.rows, log_latency=np.where(data.rows.part == 0, data.rows.log_latency, np.nan))
    )
    one, two = (
        fit_baselines(d, NetworkInputs(d.store, d.device_matrix), setting(20), index(d), [name])[name]
        for d in (data, hidden)
    )
    np.testing.assert_array_equal(one.predict_log(data.rows), two.predict_log(data.rows))


def test_roofline_by_hand() -> None:
    data = dataset(rows=50)
    compute, memory = roofline_s(data.store.summary[data.rows.program], data.device_matrix[data.rows.device])
    for i in range(50):
        expected = max(compute[i], memory[i]) + FLOOR_S[PROTOCOLS[data.rows.protocol[i]]]
        assert np.exp(roofline_log(data, data.rows)[i]) == pytest.approx(expected)


def test_mean_is_the_geometric_mean_per_operator_and_protocol() -> None:
    data = dataset()
    kind = (np.arange(120) % 2).astype(np.int16)
    protocol = (np.arange(600) % 2).astype(np.int16)
    data = replace(
        data,
        kind=kind,
        kinds=(("linear", "float32"), ("softmax", "float32")),
        rows=replace(data.rows, protocol=protocol),
    )
    inputs = NetworkInputs(data.store, data.device_matrix)
    rows = data.rows
    used = index(data)
    # One protocol of softmax is not trained on.
    used = used[~((kind[rows.program[used]] == 1) & (protocol[used] == 1))]
    model = MeanBaseline(data, inputs, setting()).fit(used)
    ratio = rows.log_latency - inputs.reference(rows)
    found = model.predict_log(rows) - inputs.reference(rows)
    linear = [ratio[used][(kind[rows.program[used]] == 0) & (protocol[used] == p)].mean() for p in (0, 1)]
    softmax = ratio[used][kind[rows.program[used]] == 1].mean()
    for i in range(600):
        expected = softmax if kind[rows.program[i]] else linear[protocol[i]]
        assert found[i] == pytest.approx(expected)
    only = used[kind[rows.program[used]] == 0]
    found = MeanBaseline(data, inputs, setting()).fit(only).predict_log(rows) - inputs.reference(rows)
    np.testing.assert_allclose(found[kind[rows.program] == 1], ratio[only].mean())


def test_utilisation_never_beats_its_bound() -> None:
    data = dataset()
    # Measured far below any bound.
    data = replace(data, rows=replace(data.rows, log_latency=data.rows.log_latency - 20))
    inputs = NetworkInputs(data.store, data.device_matrix)
    model = UtilisationBaseline(data, inputs, setting(40))
    bound = model.predict_log(data.rows)
    compute, memory = roofline_s(data.store.summary[data.rows.program], data.device_matrix[data.rows.device])
    assert (bound >= np.log(np.maximum(compute, memory)) - 1e-4).all()
    assert (model.fit(index(data)).predict_log(data.rows) >= bound).all()


def test_symmetric_error_is_the_published_formula() -> None:
    predicted, measured = np.array([1.0, 2.0, 5.0]), np.array([1.0, 3.0, 1.0])
    expected = (np.abs(predicted - measured) / ((predicted + measured) / 2)).mean()
    found = symmetric_error(torch.from_numpy(np.log(predicted)), torch.from_numpy(np.log(measured)))
    assert float(found) == pytest.approx(expected)
