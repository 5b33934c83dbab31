"""A scikit-learn regressor of latencies: the prediction of an operator, corrected by what was measured.

Simulators that fit a regressor of scikit-learn per operator to a profiled table can fit this one in its place. It
knows the operator before the first measurement, and needs measurements only for the ratio to its prediction.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from cdmpp.errors import DataError, InvalidProgramError, MissingDependencyError, install_hint
from cdmpp.llm.estimate_plan import shipped_predictor
from cdmpp.predict.interface import Predictor
from cdmpp.programs.query_options import Protocol

try:
    from sklearn.base import BaseEstimator, RegressorMixin, clone
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data
except ImportError as error:
    raise MissingDependencyError("scikit-learn is not installed", hint=install_hint("train")) from error

Array = np.ndarray[Any, np.dtype[np.float64]]
#: Operator texts of a row, from its columns by name (or by position, for X without names).
Template = str | Sequence[str] | Callable[[Mapping[str | int, float]], str | Sequence[str]]

#: Units of y -> seconds.
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class LatencyRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Predicts latencies of rows whose columns describe an operator.

    Parameters
    ----------
    template : str, sequence of str, or callable
        The operator of a row. In a text, ``{name}`` is the column of that name, rounded to the nearest whole number:
        ``"linear:m={num_tokens},n=12288,k=4096,dtype=float16"``. Columns of an array without names are ``{0}``,
        ``{1}``, ... Of several texts the latencies are added. A callable gets a mapping of columns to floats and
        returns the texts; it must be importable for the regressor to be pickled.
    device : str
        Name of a known device.
    regressor : estimator, optional
        Learns log(measured / predicted) from the columns and the log of the prediction. Default: a
        HistGradientBoostingRegressor, which below 40 rows is the mean ratio.
    protocol, framework, implementation : str, optional
        What was measured (:meth:`cdmpp.LatencyPredictor.predict`).
    unit : {"s", "ms", "us"}
        Unit of y and of predictions.
    model : str, optional
        Folder of a model, or URL of ``cdmpp serve``. Default: the shipped model. Each is loaded once per process and
        is no part of a pickle.

    Attributes
    ----------
    regressor_ : estimator
        The fitted regressor of the ratio.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Notes
    -----
    Columns are numbers, at least 0; y is positive. Columns that the template does not name only correct the ratio.

    Examples
    --------
    >>> LatencyRegressor("linear:m={0},n=4096,k=4096,dtype=float16", device="t4").fit(X, y)     # doctest: +SKIP
    """

    def __init__(
        self,
        template: Template | None = None,
        device: str = "a100-sxm4-80gb",
        *,
        regressor: Any = None,
        protocol: Protocol = "kernel",
        framework: str | None = None,
        unit: Literal["s", "ms", "us"] = "s",
        model: str | None = None,
        implementation: str | None = None,
    ) -> None:
        self.template = template
        self.device = device
        self.regressor = regressor
        self.protocol = protocol
        self.framework = framework
        self.unit = unit
        self.model = model
        self.implementation = implementation

    def fit(self, X: Any, y: Any) -> LatencyRegressor:  # noqa: N803  scikit-learn's name
        """Learn the ratio of measured to predicted latencies.

        Parameters
        ----------
        X : (rows, columns)
            Array, or data frame whose column names the template uses.
        y : (rows,)
            Measured latencies in ``unit``.

        Raises
        ------
        ValueError
            X or y is not numeric, finite and of one length, or y is not positive.
        DataError, InvalidProgramError, UnknownDeviceError
            The template has no such column, a row is no operator, or the device is not known.
        """
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)  # noqa: N806
        if not (y > 0).all():
            raise ValueError(f"y: latencies must be positive; {y[y <= 0][0]} is not")
        base = self._log_base(X)
        self.regressor_ = HistGradientBoostingRegressor() if self.regressor is None else clone(self.regressor)
        self.regressor_.fit(np.column_stack((X, base)), np.log(y) - base)
        return self

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Latencies of rows in ``unit``, (rows,)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)  # noqa: N806
        base = self._log_base(X)
        return np.asarray(np.exp(base + self.regressor_.predict(np.column_stack((X, base)))))

    def predict_unfitted(self, X: Any) -> Array:  # noqa: N803
        """The model's own latencies of rows in ``unit``, (rows,), without any measurement."""
        X = validate_data(self, X, dtype=np.float64)  # noqa: N806
        return np.asarray(np.exp(self._log_base(X)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        return tags

    def _log_base(self, rows: Array) -> Array:
        """Log of the predicted latencies in ``unit``, (rows,)."""
        check_non_negative(rows, type(self).__name__)
        if self.unit not in UNITS:
            raise DataError(f"unit: {self.unit!r} is not known", hint="one of: " + ", ".join(UNITS))
        names = list(getattr(self, "feature_names_in_", range(rows.shape[1])))
        texts = [_operators(self.template, dict(zip(names, row, strict=True))) for row in rows.tolist()]
        place = {text: i for i, text in enumerate(dict.fromkeys(t for row in texts for t in row))}
        predictions = _loaded(self.model).predict(
            list(place),
            self.device,
            protocol=self.protocol,
            framework=self.framework,
            implementation=self.implementation,
        )
        for prediction, text in zip(predictions, place, strict=True):
            if prediction.error is not None:
                row = next(i for i, row_texts in enumerate(texts) if text in row_texts)
                raise InvalidProgramError(f"X, row {row}: {prediction.error.message}", hint=prediction.error.hint)
        seconds = [sum(predictions[place[text]].latency_s or 0.0 for text in row_texts) for row_texts in texts]
        return np.log(np.array(seconds) / UNITS[self.unit])


def _operators(template: Template | None, row: Mapping[str | int, float]) -> list[str]:
    """Operator texts of a row."""
    if template is None:
        raise DataError("template is missing", hint='such as template="linear:m={num_tokens},n=4096,k=4096"')
    texts = template(row) if callable(template) else template
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise DataError("template: it has no operator", hint="give one text or more")
    return texts if callable(template) else [_filled(text, row) for text in texts]


def _filled(text: str, row: Mapping[str | int, float]) -> str:
    """A text with its columns as whole numbers."""
    pieces = []
    for literal, name, _, _ in string.Formatter().parse(text):
        pieces.append(literal)
        if name is None:
            continue
        key = int(name) if name.isdecimal() and name not in row else name
        if key not in row:
            raise DataError(
                f"template: X has no column {name!r}", hint="columns: " + ", ".join(str(column) for column in row)
            )
        pieces.append(str(round(row[key])))
    return "".join(pieces)


@lru_cache(maxsize=4)
def _loaded(model: str | None) -> Predictor:
    """Predictor of a folder or URL."""
    if model is not None and str(model).startswith(("http://", "https://")):
        from cdmpp.client import PredictorClient

        return PredictorClient(str(model))
    if model is None:
        return shipped_predictor()
    from cdmpp.predict.predictor import LatencyPredictor

    return LatencyPredictor.load(model)
