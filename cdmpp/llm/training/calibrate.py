"""A training profile from measured steps: factors on kernels, attention, experts, communication and launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, FieldError
from cdmpp.llm.config import ConfigLike, LLMConfig
from cdmpp.llm.engines.profile import Engine, EngineProfile, load_training_engine
from cdmpp.llm.estimate_plan import resolved, resolved_device, shipped_predictor
from cdmpp.llm.read import read_config
from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Device, Prediction, Query
from cdmpp.utils.files import parse_file, parse_json, parse_table

Array = np.ndarray[Any, np.dtype[np.float64]]

#: Columns of a measurement: whole numbers, text, and the duration.
COUNTS = ("gpus", "tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "global_batch", "sequence", "ranks_per_node")
TEXTS = ("sharding", "dtype", "products", "recompute", "overlap", "network", "config", "device")
DURATIONS = ("step_s", "tokens_per_s_per_gpu")
#: Scale of the Cauchy prior of the log of a factor that is common to all: sources differ by so much, and some by more.
COMMON = 0.1
#: Standard deviations in logs of the factors on kernels, attention, experts, communication and launches around it.
SPREAD = np.array([0.07, 0.14, 0.14, 0.2, 0.35])
#: Figures of a profile that a calibration replaces.
FITTED = {
    "kernel_factor",
    "attention_factor",
    "expert_factor",
    "communication_factor",
    "launch_s",
    "residual",
    "measured",
}
#: Standard deviation in logs of a measured step around the fit: that of layouts within one source.
NOISE = 0.1
#: Standard deviations beyond which a measured step weighs less (Huber).
TRUSTED = 2.0
#: Steps that it, or the residual of the starting profile, counts for in the residual of the fitted profile.
SURE = 4.0
#: Rounds of the fit around the last factors, and of the weights within one.
ROUNDS, REWEIGHTINGS = 3, 8
MAX_ROWS = 500


@dataclass(frozen=True)
class TrainingCalibration:
    """A fitted profile, and how well it fits."""

    profile: EngineProfile
    rows: int
    # Mean of |predicted / measured - 1| with the first profile and with the fitted one.
    before: float
    after: float
    left_out: float | None  # the same for each step with the profile of the others; None for one step


class TrainingCalibrationPlan:
    """Queries of measured steps, and the calibration made of their predictions; see :func:`fit_training`."""

    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        measurements: Sequence[Mapping[str, Any]],
        engine: EngineProfile,
        predictor: Predictor | None = None,
    ) -> None:
        if not 1 <= len(measurements) <= MAX_ROWS:
            raise FieldError.at("measurements", f"{len(measurements)} steps", hint=f"1 to {MAX_ROWS} measured steps")
        self._engine, self._plans, seconds = engine, [], []
        for number, row in enumerate(measurements, 1):
            plan, duration = _plan(number, row, config, device, engine, predictor)
            self._plans.append(plan)
            seconds.append(duration)
        self._log_s = np.log(np.array(seconds))
        self.queries: list[Query] = [query for plan in self._plans for query in plan.queries]

    def calibration(self, predictions: Sequence[Prediction]) -> TrainingCalibration:
        """The calibration made of the predictions of :attr:`queries`; each needs one."""
        self._predictions, start = [], 0
        for plan in self._plans:
            self._predictions.append(predictions[start : start + len(plan.queries)])
            start += len(plan.queries)
        factors = np.zeros(len(SPREAD))
        before = self._errors(factors)
        for _ in range(ROUNDS):
            errors = self._errors(factors)
            slopes = np.stack(
                [(self._errors(factors + step) - errors) / 0.01 for step in 0.01 * np.eye(len(SPREAD))], 1
            )
            wanted = slopes @ factors - errors
            factors = fitted_factors(slopes, wanted)
        after, left_out = self._errors(factors), None
        if len(self._plans) > 1:
            others = [np.arange(len(wanted)) != i for i in range(len(wanted))]
            fits = [fitted_factors(slopes[rows], wanted[rows]) for rows in others]
            left_out = np.array([slopes[i] @ fit - wanted[i] for i, fit in enumerate(fits)])
        # The fitted factors are themselves as uncertain as the mean of the steps.
        count, squares = (0, 0.0) if left_out is None else (len(left_out), float((left_out**2).sum()))
        squares += SURE * max(NOISE, self._engine.residual) ** 2 * (1 + 1 / len(wanted))
        residual = min((squares / (SURE + count)) ** 0.5, 2.0)
        source = {name: text for name, text in self._engine.source.items() if not FITTED & set(name.split(", "))}
        source[", ".join(sorted(FITTED))] = f"measured steps: {len(self._plans)}; prior: {self._engine.name}"
        update = {"name": f"{self._engine.name}-calibrated", "source": source, "residual": residual}
        mean = [None if e is None else float(np.abs(np.expm1(e)).mean()) for e in (before, after, left_out)]
        return TrainingCalibration(
            self._with(factors, measured=True).model_copy(update=update),
            len(self._plans),
            mean[0] or 0.0,
            mean[1] or 0.0,
            mean[2],
        )

    def _with(self, logs: Array, *, measured: bool = False) -> EngineProfile:
        """The profile with its factors times the exponentials of ``logs``; ``measured``: which covers the steps."""
        engine, loop = self._engine, self._engine.training
        assert loop is not None
        kernel, attention, expert, communication, launch = (float(f) for f in np.exp(np.clip(logs, -2.2, 2.2)))
        update: dict[str, Any] = {
            "attention_factor": loop.attention_factor * attention,
            "expert_factor": loop.expert_factor * expert,
            "communication_factor": loop.communication_factor * communication,
        }
        if measured:
            for plan in self._plans:
                update["measured"] = update.get("measured", loop.measured).widened(*plan.place)
        host = engine.host.model_copy(update={"launch_s": engine.host.launch_s * launch})
        more = {"kernel_factor": engine.kernel_factor * kernel, "host": host}
        return engine.model_copy(update={**more, "training": loop.model_copy(update=update)})

    def _errors(self, logs: Array) -> Array:
        """Log of predicted over measured of all steps."""
        engine = self._with(logs)
        steps = [
            plan.result("", predictions, engine).step_s
            for plan, predictions in zip(self._plans, self._predictions, strict=True)
        ]
        return np.asarray(np.log(np.array(steps)) - self._log_s)


def fitted_factors(slopes: Array, wanted: Array) -> Array:
    """Logs of the factors whose sum over ``slopes`` (rows, factors) is near the wanted change of each log step.

    The prior is a common change of all factors, which is small or as large as the steps say, and small differences:
    one step tells the sum only.
    """
    rows = np.concatenate([slopes.sum(1, keepdims=True), slopes], 1)
    variance, weights = np.array([0.09, *SPREAD**2]), np.ones(len(rows))
    for _ in range(REWEIGHTINGS):
        inverse = weights[:, None] * rows / NOISE**2
        logs = np.linalg.solve(rows.T @ inverse + np.diag(1 / variance), inverse.T @ wanted)
        variance[0] = (COMMON**2 + logs[0] ** 2) / 2
        weights = np.minimum(1.0, TRUSTED * NOISE / np.maximum(np.abs(rows @ logs - wanted), 1e-9))
    return np.asarray(logs[0] + logs[1:])


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
    """Measured steps of a CSV file, or of a JSON list of objects."""
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
    config: ConfigLike,
    device: Device,
    measurements: Sequence[Mapping[str, Any]] | str | PathLike[str],
    engine: Engine = "megatron",
    predictor: Predictor | None = None,
) -> TrainingCalibration:
    """:func:`calibrate_training` with its errors."""
    predictor, model, spec = resolved(predictor, config, device)
    rows = read_training_measurements(measurements) if isinstance(measurements, str | PathLike) else measurements
    plan = TrainingCalibrationPlan(model, spec, rows, load_training_engine(engine), predictor)
    return plan.calibration(predictor.predict_queries(plan.queries))


def calibrate_training(
    config: ConfigLike,
    device: Device,
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
        With factors fitted and the steps added to ``measured``, for ``engine`` of :func:`cdmpp.llm.training_step`.

    Raises
    ------
    FieldError, DataError
        A measurement cannot be read, or its layout does not fit the model.
    """
    return fit_training(config, device, measurements, engine, predictor).profile
