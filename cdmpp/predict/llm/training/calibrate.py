"""A training profile from measured steps: factors on all kernels, on those of experts, and on the communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, FieldError
from cdmpp.predict.engines.profile import Engine, EngineProfile, load_training_engine
from cdmpp.predict.interface import Predictor
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.estimate import resolved_device, shipped_predictor
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.llm.training.step import TrainingPlan
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.utils.files import parse_file, parse_json, parse_table

Array = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[Any]]

#: Columns of a measurement: whole numbers, text, and the duration.
COUNTS = ("gpus", "tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "global_batch", "sequence", "ranks_per_node")
TEXTS = ("sharding", "dtype", "products", "recompute", "overlap", "network", "config", "device")
DURATIONS = ("step_s", "tokens_per_s_per_gpu")
#: Standard deviations in logs of the factors on kernels, experts and communication around those of the profile.
SPREAD = np.array([0.05, 0.05, 0.1])
#: Figures of a profile that a calibration replaces.
FITTED = {"kernel_factor", "expert_factor", "communication_factor", "residual"}
#: Smallest standard deviation of a measured step around the fit; otherwise the residual of the profile.
NOISE = 0.03
#: Standard deviations beyond which a measured step weighs less (Huber).
TRUSTED = 1.5
#: Steps that the residual of the starting profile counts for.
SURE = 4.0
MAX_ROWS = 500


@dataclass(frozen=True)
class TrainingCalibration:
    """A fitted profile, and how well it fits.

    Attributes
    ----------
    profile : EngineProfile
    rows : int
    before, after : float
        Mean of |predicted / measured - 1| with the first profile and with the fitted one.
    left_out : float or None
        The same for each step with the profile of the others; None for one step.
    """

    profile: EngineProfile
    rows: int
    before: float
    after: float
    left_out: float | None


class TrainingCalibrationPlan:
    """Queries of measured steps, and the calibration made of their predictions; see :func:`fit_training`.

    Attributes
    ----------
    queries : list of Query
    """

    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        measurements: Sequence[Mapping[str, Any]],
        engine: EngineProfile,
        predictor: Predictor | None = None,
    ) -> None:
        if not 1 <= len(measurements) <= MAX_ROWS:
            raise FieldError(
                f"measurements: {len(measurements)} steps", path="measurements", hint=f"1 to {MAX_ROWS} measured steps"
            )
        self._engine, self._plans, seconds = engine, [], []
        for number, row in enumerate(measurements, 1):
            plan, duration = _plan(number, row, config, device, engine, predictor)
            self._plans.append(plan)
            seconds.append(duration)
        self._log_s = np.log(np.array(seconds))
        self.queries: list[Query] = [query for plan in self._plans for query in plan.queries]

    def calibration(self, predictions: Sequence[Prediction]) -> TrainingCalibration:
        """The calibration made of the predictions of :attr:`queries`.

        Raises
        ------
        FieldError
            An operator of the model has no prediction.
        """
        self._predictions, start = [], 0
        for plan in self._plans:
            self._predictions.append(predictions[start : start + len(plan.queries)])
            start += len(plan.queries)
        everything = np.arange(len(self._plans))
        own = self._factors(self._engine)
        before = self._errors(own, everything)
        fitted = self._fit(everything)
        after = self._errors(fitted, everything)
        left_out = None
        if len(self._plans) > 1:
            left_out = np.array(
                [float(self._errors(self._fit(everything[everything != i]), np.array([i]))[0]) for i in everything]
            )
        seen = after if left_out is None else left_out
        profile = self._with(fitted, self._residual(seen))
        source = {name: text for name, text in profile.source.items() if not FITTED & set(name.split(", "))}
        source[", ".join(sorted(FITTED))] = f"measured steps: {len(self._plans)}; prior: {self._engine.name}"
        mean = [None if e is None else float(np.abs(np.expm1(e)).mean()) for e in (before, after, left_out)]
        return TrainingCalibration(
            profile.model_copy(update={"name": f"{self._engine.name}-calibrated", "source": source}),
            len(self._plans),
            mean[0] or 0.0,
            mean[1] or 0.0,
            mean[2],
        )

    @staticmethod
    def _factors(engine: EngineProfile) -> Array:
        loop = engine.training
        assert loop is not None
        return np.asarray(np.log(np.array([engine.kernel_factor, loop.expert_factor, loop.communication_factor])))

    def _with(self, factors: Array, residual: float | None = None) -> EngineProfile:
        assert self._engine.training is not None
        kernel, expert, communication = (float(f) for f in np.exp(np.clip(factors, -2.2, 2.2)))
        update = {"expert_factor": expert, "communication_factor": communication}
        loop = self._engine.training.model_copy(update=update)
        more = {} if residual is None else {"residual": residual}
        return self._engine.model_copy(update={"kernel_factor": kernel, "training": loop, **more})

    def _errors(self, factors: Array, rows: Indices) -> Array:
        """Log of predicted over measured."""
        engine = self._with(factors)
        steps = [self._plans[i].result("", self._predictions[i], engine).step_s for i in rows]
        return np.asarray(np.log(np.array(steps)) - self._log_s[rows])

    def _residual(self, errors: Array) -> float:
        """Standard deviation of the errors, with that of the first profile as :data:`SURE` of them."""
        squares = SURE * self._engine.residual**2 + float((errors**2).sum())
        return float(np.clip((squares / (SURE + len(errors))) ** 0.5, NOISE, 2.0))

    def _fit(self, rows: Indices) -> Array:
        """Logs of the factors that explain steps best, with the profile as prior; three Gauss-Newton steps."""
        prior = factors = self._factors(self._engine)
        for _ in range(3):
            errors = self._errors(factors, rows)
            slopes = np.stack([(self._errors(factors + step, rows) - errors) / 0.01 for step in 0.01 * np.eye(3)], 1)
            noise = self._residual(errors - errors.mean())
            weights = np.minimum(1.0, TRUSTED * noise / np.maximum(np.abs(errors), 1e-9)) / noise**2
            left = slopes.T @ (weights[:, None] * slopes) + np.diag(SPREAD**-2.0)
            right = -slopes.T @ (weights * errors) + (prior - factors) / SPREAD**2
            factors = factors + np.linalg.solve(left, right)
        return np.asarray(factors)


def _plan(
    number: int,
    row: Mapping[str, Any],
    config: LLMConfig,
    device: DeviceSpec,
    engine: EngineProfile,
    predictor: Predictor | None,
) -> tuple[TrainingPlan, float]:
    """The plan of a measured step, and its seconds."""
    options: dict[str, Any] = {name: value for name, value in row.items() if value not in (None, "")}
    unknown = set(options) - {*COUNTS, *TEXTS, *DURATIONS}
    if unknown:
        raise FieldError(
            f"measurement {number}: {min(unknown)!r} is not known",
            path="measurements",
            hint="known are " + ", ".join((*COUNTS, *TEXTS, *DURATIONS)),
        )
    if len(options.keys() & set(DURATIONS)) != 1:
        raise FieldError(
            f"measurement {number}: one of {' and '.join(DURATIONS)} is needed", path="measurements", hint="give one"
        )
    try:
        if flag := next((name for name in (*COUNTS, *DURATIONS) if isinstance(options.get(name), bool)), None):
            raise ValueError(f"{flag} is {options[flag]}, not a number")
        options |= {name: int(options[name]) for name in COUNTS if name in options}
        duration, rate = (float(options.pop(name, 0.0)) for name in DURATIONS)
        if not 1e-6 < duration + rate < 1e9:
            raise ValueError(f"{duration + rate} is no duration or throughput")
        if "config" in options:
            config = read_config(options.pop("config"))
        if "device" in options:
            device = resolved_device(options.pop("device"), predictor or shipped_predictor())
        plan = TrainingPlan.of(config, device, engine, options, check_memory=False)
    except CdmppError as error:
        raise FieldError(f"measurement {number}: {error.message}", path="measurements", hint=error.hint) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise FieldError(
            f"measurement {number}: {str(error)[:200]}",
            path="measurements",
            hint="gpus, micro_batch, global_batch and sequence are needed",
        ) from None
    layout = plan.layout
    return plan, duration or layout.global_batch * layout.sequence / rate / layout.gpus


def read_training_measurements(source: str | PathLike[str]) -> list[dict[str, Any]]:
    """Measured steps of a CSV file, or of a JSON list of objects.

    Raises
    ------
    DataError
    """
    rows = parse_file(source, _rows, "CSV or JSON", "a header and a row, or an object, for each measured step")
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{fspath(source)}: not a list of objects", hint="one object for each measured step")
    return rows


def _rows(text: bytes) -> list[dict[str, Any]]:
    if not text.lstrip().startswith((b"[", b"{")):
        return list(parse_table(text, MAX_ROWS))
    value = parse_json(text)
    return value if isinstance(value, list) else [value]


def fit_training(
    config: LLMConfig | Mapping[str, Any] | str | PathLike[str],
    device: DeviceSpec | Mapping[str, Any] | str,
    measurements: Sequence[Mapping[str, Any]] | str | PathLike[str],
    engine: Engine = "megatron",
    predictor: Predictor | None = None,
) -> TrainingCalibration:
    """:func:`calibrate_training` with its errors."""
    predictor = shipped_predictor() if predictor is None else predictor
    rows = read_training_measurements(measurements) if isinstance(measurements, str | PathLike) else measurements
    plan = TrainingCalibrationPlan(
        read_config(config), resolved_device(device, predictor), rows, load_training_engine(engine), predictor
    )
    return plan.calibration(predictor.predict_queries(plan.queries))


def calibrate_training(
    config: LLMConfig | Mapping[str, Any] | str | PathLike[str],
    device: DeviceSpec | Mapping[str, Any] | str,
    measurements: Sequence[Mapping[str, Any]] | str | PathLike[str],
    engine: Engine = "megatron",
    predictor: Predictor | None = None,
) -> EngineProfile:
    """Fit the factors of a training profile to measured steps.

    Parameters
    ----------
    config : path, mapping or LLMConfig
        Model of steps that name no other.
    device : str, DeviceSpec or mapping
        Device of steps that name no other.
    measurements : sequence of mappings, or path
        Options of :func:`cdmpp.llm.training_step` with ``step_s`` or ``tokens_per_s_per_gpu``; one step is enough.
    engine : str, path, mapping or EngineProfile
        The profile to start from. Its factors are the prior.

    Returns
    -------
    EngineProfile
        With ``kernel_factor``, ``expert_factor`` and ``communication_factor`` fitted, for ``engine`` of
        :func:`cdmpp.llm.training_step`.

    Raises
    ------
    FieldError, DataError
        A measurement cannot be read, or its layout does not fit the model.
    """
    return fit_training(config, device, measurements, engine, predictor).profile
