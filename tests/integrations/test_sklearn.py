"""The scikit-learn regressor: scikit-learn's own checks, and what it learns."""

import pickle
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

from cdmpp.errors import DataError, InvalidProgramError, UnknownDeviceError
from cdmpp.integrations import sklearn as integration
from cdmpp.integrations.sklearn import LatencyRegressor
from cdmpp.predict.predictor import LatencyPredictor

pytestmark = pytest.mark.slow

LINEAR = "linear:m={num_tokens},n=4096,k=4096,dtype=float16"


@pytest.fixture(autouse=True, scope="module")
def _shipped_model_is_loaded_once(predictor: LatencyPredictor) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "_loaded", lambda model: predictor)
        yield


def any_number(row: Mapping[str | int, float]) -> str:
    """Operator of any first column: the checks draw X at random, near 0."""
    return f"softmax:rows={max(1, min(4096, round(next(iter(row.values())))))},cols=1024"


def checks() -> list[Any]:
    regressor = LatencyRegressor(any_number, "t4")
    return [
        pytest.param(estimator, check, id=check.func.__name__)
        for estimator, check in estimator_checks_generator(regressor)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), checks())
def test_scikit_learns_checks_pass(estimator: LatencyRegressor, check: Any) -> None:
    check(estimator)


def measured(rows: int = 60, factor: float = 1.3) -> tuple[pd.DataFrame, np.ndarray[Any, Any]]:
    """Made-up measurements: the prediction times a factor that grows with the size."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"num_tokens": 2 ** rng.integers(3, 13, rows), "replica": rng.integers(0, 4, rows)})
    base = LatencyRegressor(LINEAR, "t4").predict_unfitted(table)
    return table, base * factor * (1 + 0.5 * (table["num_tokens"].to_numpy() > 256))


def test_few_rows_correct_the_prediction_by_their_mean_ratio() -> None:
    table, _ = measured(12)
    base = LatencyRegressor(LINEAR, "t4").predict_unfitted(table)
    fitted = LatencyRegressor(LINEAR, "t4").fit(table, 1.3 * base)
    other = pd.DataFrame({"num_tokens": [3, 100, 5000], "replica": [0, 0, 0]})
    want = 1.3 * LatencyRegressor(LINEAR, "t4").predict_unfitted(other)
    assert fitted.predict(other) == pytest.approx(want)


def test_ratio_depends_on_the_columns_where_there_are_enough_rows() -> None:
    table, latency = measured(400)
    fitted = LatencyRegressor(LINEAR, "t4").fit(table, latency)
    assert np.abs(fitted.predict(table) / latency - 1).max() < 0.02


def test_latencies_of_several_operators_are_added_in_the_unit() -> None:
    table = pd.DataFrame({"num_tokens": [64, 512]})
    norm = "rmsnorm:rows={num_tokens},cols=4096,dtype=float16"
    one, two = (LatencyRegressor(t, "t4").predict_unfitted(table) for t in (LINEAR, norm))
    both = LatencyRegressor([LINEAR, norm], "t4", unit="ms").predict_unfitted(table)
    assert both == pytest.approx(1e3 * (one + two))


def test_columns_of_an_array_are_named_by_position() -> None:
    table = pd.DataFrame({"num_tokens": [64, 512]})
    by_name = LatencyRegressor(LINEAR, "t4").predict_unfitted(table)
    by_place = LatencyRegressor(LINEAR.replace("num_tokens", "0"), "t4").predict_unfitted(table.to_numpy())
    assert (by_name == by_place).all()


def test_clone_pickle_and_joblib_predict_the_same() -> None:
    table, latency = measured()
    fitted = LatencyRegressor(LINEAR, "t4", regressor=Ridge()).fit(table, latency)
    want = fitted.predict(table)
    stored = BytesIO()
    joblib.dump(fitted, stored)
    # The model is no part of it.
    assert stored.tell() < 20_000
    stored.seek(0)
    for other in (pickle.loads(pickle.dumps(fitted)), joblib.load(stored), clone(fitted).fit(table, latency)):
        assert (other.predict(table) == want).all()


def test_grid_search_and_pipelines_use_it() -> None:
    table, latency = measured()
    search = GridSearchCV(
        LatencyRegressor(LINEAR, regressor=Ridge()), {"regressor__alpha": [0.1, 10.0], "device": ["t4", "l4"]}, cv=2
    ).fit(table, latency)
    assert search.best_params_["device"] == "t4"
    tokens = ColumnTransformer([("tokens", "passthrough", ["num_tokens"])])
    pipeline = make_pipeline(tokens, LatencyRegressor(LINEAR.replace("num_tokens", "0"), "t4"))
    assert pipeline.fit(table, latency).score(table, latency) > 0.8


def test_wrong_input_is_named() -> None:
    table, latency = measured(10)
    for regressor, kind, message in (
        (LatencyRegressor(), DataError, "template is missing"),
        (LatencyRegressor([]), DataError, "template: it has no operator"),
        (LatencyRegressor("linear:m={tokens}"), DataError, "X has no column 'tokens'"),
        (LatencyRegressor(LINEAR, unit="h"), DataError, "unit: 'h' is not known"),  # type: ignore[arg-type]
        (LatencyRegressor(LINEAR, "abacus"), UnknownDeviceError, "abacus"),
        (LatencyRegressor("linear:m={num_tokens},n=0,k=1"), InvalidProgramError, "X, row 0"),
    ):
        with pytest.raises(kind, match=message):
            regressor.fit(table, latency)
    with pytest.raises(ValueError, match=r"y: latencies must be positive; 0\.0 is not"):
        LatencyRegressor(LINEAR).fit(table, 0 * latency)
    with pytest.raises(NotFittedError):
        LatencyRegressor(LINEAR).predict(table)
