"""An engine profile from measurements of one's own: the kernels from the model, the rest from a few timings.

The host's times and one factor on the kernels are fitted in logarithms, with the profile at the start as prior, so that
two rows move it sensibly and twenty determine it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from os import PathLike, fspath
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, FieldError
from cdmpp.llm import defaults
from cdmpp.llm.config import ConfigLike
from cdmpp.llm.engines.profile import Engine, EngineProfile, load_engine
from cdmpp.llm.estimate_plan import EstimatePlan, resolved_device, shipped_predictor
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import weights_read
from cdmpp.llm.options import LAYOUT, TYPES
from cdmpp.llm.pricing import PricedStep
from cdmpp.llm.read import read_config
from cdmpp.llm.serving.calibrate_load import MAX_LOAD_ROWS, LoadRow, queues
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Device, Prediction, Query
from cdmpp.utils.files import parse_file, parse_json, parse_number, parse_table

Array = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[Any]]

#: Columns of a measurement besides the durations.
COUNTS = ("batch", "input", "output", *LAYOUT)
DURATIONS = ("total_s", "ttft_s", "tpot_s")
_OTHER = (*TYPES, "config", "device", "closed_loop", "rate", "prefix_hit")
#: Parameters of the fit, their prior where the profile has none, and the prior's standard deviation in logs.
PARAMETERS = ("kernel_factor", "step_s", "sequence_s", "ranks_s")
_CENTRE = np.array([1.0, 1e-3, 2e-5, 4e-4])
_SPREAD = np.array([0.3, 1.0, 1.0, 1.0])
#: Standard deviation of the log of a measured duration around the fitted one.
NOISE = 0.1
#: Rows below this are left out one by one, more in this many parts.
FOLDS = 20
#: Rows that the starting profile's residual counts for.
SURE = 4.0
#: Times by which the other answer to "does the host overlap the kernels" must lower the loss.
SWITCH = 2.0
MIN_ROWS, MAX_ROWS = 2, 500
#: Fits after the first one where rows are simulated, each with the engine of the one before.
REPEATS = 2


@dataclass(frozen=True)
class MeasuredLoad:
    """Durations of the fit, one each of a row, and the priced steps that make them."""

    row: Indices  # (durations,) int: number of the row in the file, from 1
    log_s: Array  # (durations,)
    duration: Indices  # (steps,) int: index of the duration that a step belongs to
    # (steps,), as all below: predicted seconds of the kernels and of the launches; how often the step counts.
    kernels_s: Array
    launched_s: Array
    runs: Array
    sequences: Array  # of the step
    ranks: Array  # 1 where several ranks share a layer
    fixed_s: Array  # host time that is not fitted: that of several replicas, and of layers outside of a graph
    waved: Array  # ``runs`` where requests stay together in waves (:func:`phase_runs`)

    def take(self, keep: Indices) -> MeasuredLoad:
        """The durations where ``keep`` holds."""
        steps = keep[self.duration]
        number = np.cumsum(keep) - 1
        names = ("kernels_s", "launched_s", "runs", "sequences", "ranks", "fixed_s", "waved")
        parts = (getattr(self, name)[steps] for name in names)
        return MeasuredLoad(self.row[keep], self.log_s[keep], number[self.duration[steps]], *parts)

    def predicted(self, parameters: Array, overlapped: bool) -> Array:
        """Log seconds of the durations from the logs of :data:`PARAMETERS`."""
        factor, step_s, sequence_s, ranks_s = np.exp(parameters)
        device = np.maximum(factor * self.kernels_s, self.launched_s)
        host = step_s + sequence_s * self.sequences + ranks_s * self.ranks + self.fixed_s
        step = np.maximum(device, host) if overlapped else device + host
        return np.log(np.bincount(self.duration, self.runs * step, len(self.row)))


@dataclass(frozen=True)
class Calibration:
    """A fitted profile, and how well it fits."""

    profile: EngineProfile
    rows: int  # number of measurements
    # Mean of |predicted / measured - 1| with the first profile and with the fitted one.
    before: float
    after: float
    left_out: float | None  # The same for durations of rows that the fit did not see; None for fewer than three rows.
    undetermined: list[str]  # Parameters that the measurements say little about, and pairs that they cannot tell apart.
    # Whether requests of closed loops stayed together, so that prompts of half of the others delayed a token.
    waves: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "profile": self.profile.model_dump(mode="json", exclude_none=True)}


def calibrate(
    config: ConfigLike,
    device: Device,
    measurements: Iterable[Mapping[str, Any]] | str | PathLike[str],
    engine: Engine = defaults.ENGINE,
    predictor: Predictor | None = None,
) -> EngineProfile:
    """Fit an engine profile to measured durations; two rows are the least.

    ``config``, ``device``: as of :func:`cdmpp.llm.estimate`; defaults of the measurements. ``measurements``: mappings,
    or the path of a CSV file or of a JSON file of the serving benchmarks of vLLM and SGLang. They have ``batch``,
    ``input``, ``output``; optionally ``tp``, ``pp``, ``ep``, ``dp``, ``dtype``, ``weights``, ``kv_dtype``, ``config``,
    ``device``; one or more of ``total_s``, ``ttft_s``, ``tpot_s`` (:data:`DURATIONS`). ``closed_loop``: means at
    ``batch`` requests in flight, whose prefills come between the decode steps; ``rate`` in place of ``batch``: means
    with Poisson arrivals, in requests per second; ``prefix_hit``: share of the prompts that is in the cache already.
    Rows that need it are simulated (:func:`cdmpp.llm.simulate`), 50 at most. ``engine``: the profile to start from.
    ``predictor`` None: the shipped model. Raises DataError with the number of a wrong or impossible row.
    """
    return fit_engine(config, device, measurements, engine, predictor).profile


def fit_engine(
    config: ConfigLike,
    device: Device,
    measurements: Iterable[Mapping[str, Any]] | str | PathLike[str],
    engine: Engine = defaults.ENGINE,
    predictor: Predictor | None = None,
) -> Calibration:
    """:func:`calibrate`, with the errors of the fit."""
    predictor = shipped_predictor() if predictor is None else predictor
    rows = read_measurements(measurements) if isinstance(measurements, str | PathLike) else measurements
    plan = CalibrationPlan(config, lambda name: resolved_device(name, predictor), device, rows, load_engine(engine))
    return plan.fit(predictor.predict_queries(plan.queries))


def fit_profile(measured: MeasuredLoad, profile: EngineProfile) -> Calibration:
    """The profile that fits measured durations, from ``profile`` as prior; DataError where none does."""
    host, rows = profile.host, len(np.unique(measured.row))
    centre = np.array([profile.kernel_factor, host.step_s, host.sequence_s, host.ranks_s])
    centre = np.log(np.where(centre > 0, centre, _CENTRE))
    together = replace(measured, runs=measured.waved)
    # Host time that overlaps the kernels, or does not, and requests in waves, only where the rows speak for it.
    usual = (host.overlapped, False)
    fits = {
        (overlapped, waves): fit(together if waves else measured, centre, overlapped)
        for overlapped in (False, True)
        for waves in (False, True)[: 1 + bool((measured.waved != measured.runs).any())]
    }
    likeliest = min(fits, key=lambda choice: fits[choice].loss)
    overlapped, waves = likeliest if fits[likeliest].loss < fits[usual].loss / SWITCH else usual
    best = fits[overlapped, waves]
    measured = together if waves else measured
    errors = measured.predicted(best.parameters, overlapped) - measured.log_s
    left_out = _left_out(measured, centre, overlapped)
    spread = errors if left_out is None else left_out
    # Few rows say little about the error that is left: the starting profile's counts as SURE rows do.
    prior = max(profile.residual, NOISE)
    residual = float(np.sqrt((np.sum(spread**2) + SURE * prior**2) / (len(spread) + SURE)))
    factor, step_s, sequence_s, ranks_s = (float(f"{value:.4g}") for value in np.exp(best.parameters))
    fitted = {"step_s": step_s, "sequence_s": sequence_s, "overlapped": overlapped}
    if measured.ranks.any():
        fitted["ranks_s"] = ranks_s
    source = {"fitted": f"{rows} measurements, from the profile {profile.name}"}
    if left_out is not None:
        source["error"] = f"{100 * _mean_error(left_out):.1f} % mean error on rows left out"
    kept = {name: text for name, text in profile.source.items() if not name.startswith(("kernel_factor", "residual"))}
    fields = profile.model_dump(exclude_none=True)
    fields |= {
        "name": profile.name if profile.name.endswith("-calibrated") else f"{profile.name}-calibrated",
        "kernel_factor": factor,
        "host": {**fields["host"], **fitted},
        "residual": float(f"{residual:.3g}"),
        "source": {**kept, **source},
    }
    try:
        new = EngineProfile.of(fields, "the fitted profile")
    except FieldError as error:
        worst = int(measured.row[np.argmax(np.abs(errors))])
        times = float(np.exp(np.abs(errors).max()))
        raise DataError(
            f"the rows contradict each other, or the kernels: row {worst} is {times:.3g} times off ({error.message})",
            hint="check that row, and the device, tp, dtype and weights of all",
        ) from None
    return Calibration(
        new,
        rows,
        _mean_error(_initial(measured, profile)),
        _mean_error(errors),
        None if left_out is None else _mean_error(left_out),
        _undetermined(measured, best.covariance),
        waves,
    )


def _initial(measured: MeasuredLoad, profile: EngineProfile) -> Array:
    host = profile.host
    values = np.array([profile.kernel_factor, host.step_s, host.sequence_s, host.ranks_s])
    with np.errstate(divide="ignore"):
        return measured.predicted(np.log(values), host.overlapped) - measured.log_s


def _mean_error(errors: Array) -> float:
    return float(np.mean(np.abs(np.expm1(errors))))


@dataclass(frozen=True)
class Fit:
    """Logs of :data:`PARAMETERS`, their covariance, and the loss."""

    parameters: Array
    covariance: Array
    loss: float


def fit(measured: MeasuredLoad, centre: Array, overlapped: bool) -> Fit:
    """The best of fits that start from ``centre``, from slow hosts and from slow kernels."""
    slow = np.log([1.0, 30.0, 10.0, 10.0])
    starts = (centre, centre + slow, centre + 2 * slow, centre - slow / 2)
    return min((_descend(measured, centre, start, overlapped) for start in starts), key=lambda result: result.loss)


def _descend(measured: MeasuredLoad, centre: Array, start: Array, overlapped: bool) -> Fit:
    """Damped Gauss-Newton steps on the loss: Cauchy of the durations, soft L1 of the distance to the prior.

    A duration far from all others (a full cache, a wrong row) hardly moves the fit. A slow host that all durations show
    does.
    """

    def residuals(at: Array) -> Array:
        return (measured.predicted(at, overlapped) - measured.log_s) / NOISE

    def distances(at: Array) -> Array:
        return np.asarray((at - centre) / _SPREAD)

    def loss(at: Array) -> float:
        return float(np.log1p(residuals(at) ** 2).sum() + 2 * (np.sqrt(1 + distances(at) ** 2) - 1).sum())

    at, damping, count = start.copy(), 1e-3, len(centre)
    hessian = np.diag(1 / _SPREAD**2)
    for _ in range(100):
        here, far = residuals(at), distances(at)
        jacobian = np.stack([(residuals(at + 1e-5 * unit) - here) / 1e-5 for unit in np.eye(count)], axis=1)
        weight, prior_weight = 1 / (1 + here**2), 1 / np.sqrt(1 + far**2)
        hessian = (jacobian.T * weight) @ jacobian + np.diag(prior_weight / _SPREAD**2)
        gradient = jacobian.T @ (weight * here) + prior_weight * far / _SPREAD
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
        if loss(at + step) < loss(at):
            at, damping = at + step, damping / 3
            if np.abs(step).max() < 1e-6:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return Fit(at, np.asarray(np.linalg.inv(hessian)), loss(at))


def _left_out(measured: MeasuredLoad, centre: Array, overlapped: bool) -> Array | None:
    """Log errors of durations whose settings the fit did not see; None for fewer than three settings."""
    # Rows of one setting have the same steps, and so the same prediction.
    at_centre = np.round(measured.predicted(centre, overlapped), 9)
    setting_of = {row: tuple(at_centre[measured.row == row].tolist()) for row in np.unique(measured.row).tolist()}
    settings = sorted(set(setting_of.values()))
    if len(settings) < 3:
        return None
    number = np.array([settings.index(setting_of[row]) for row in measured.row.tolist()])
    errors = np.empty(len(measured.row))
    for part in np.array_split(np.random.default_rng(0).permutation(len(settings)), min(len(settings), FOLDS)):
        out = np.isin(number, part)
        result = _descend(measured.take(~out), centre, centre, overlapped)
        errors[out] = measured.take(out).predicted(result.parameters, overlapped) - measured.log_s[out]
    return errors


def _undetermined(measured: MeasuredLoad, covariance: Array) -> list[str]:
    spread = np.sqrt(np.diag(covariance))
    used = [i for i, name in enumerate(PARAMETERS) if name != "ranks_s" or measured.ranks.any()]
    texts = [
        f"{PARAMETERS[i]}: the rows say little, it stays near its start" for i in used if spread[i] > 0.8 * _SPREAD[i]
    ]
    texts += [
        f"{PARAMETERS[i]} and {PARAMETERS[j]} cannot be told apart: measure other batch sizes"
        for i in used
        for j in used
        if i < j and abs(covariance[i, j]) > 0.95 * spread[i] * spread[j]
    ]
    return texts


class CalibrationPlan:
    """Queries of a calibration, and the fit made of their predictions.

    Arguments and errors are those of :func:`calibrate`; measurements are mappings. ``resolve``: from a device of a
    request to its specification. More queries than ``max_queries`` are refused before the rows that
    follow are read.
    """

    def __init__(
        self,
        config: ConfigLike,
        resolve: Callable[[Any], DeviceSpec],
        device: Device,
        measurements: Iterable[Mapping[str, Any]],
        profile: EngineProfile,
        max_queries: float = math.inf,
        most_work: float = math.inf,
    ) -> None:
        self._profile = profile
        measurements = list(islice(measurements, MAX_ROWS + 1))
        loads = [row for row in measurements if isinstance(row, Mapping) and (row.get("rate") or row.get("prefix_hit"))]
        if len(loads) > MAX_LOAD_ROWS:
            raise DataError(f"{len(loads)} rows are simulated; at most {MAX_LOAD_ROWS}", hint="send fewer such rows")
        self._plans: list[tuple[EstimatePlan | LoadRow, dict[str, Any]]] = []
        # Rows of one model share most of their programs: each is asked once.
        index: dict[Any, int] = {}
        self.queries: list[Query] = []
        self._places: list[list[int]] = []
        for number, row in enumerate(measurements, 1):
            if number > MAX_ROWS:
                raise DataError(f"more than {MAX_ROWS} measurements", hint=f"choose {MAX_ROWS} that cover your use")
            try:
                self._plans.append(_plan(row, config, device, profile, resolve, most_work / len(measurements)))
            except CdmppError as error:
                raise DataError(f"row {number}: {error.message}", hint=error.hint) from None
            if sum(isinstance(plan, LoadRow) for plan, _ in self._plans) > MAX_LOAD_ROWS:
                raise DataError(
                    f"row {number}: more than {MAX_LOAD_ROWS} rows are simulated", hint="send fewer such rows"
                )
            queries = self._plans[-1][0].queries
            keys = [(q.program.operator, id(q.device), q.protocol, q.framework) for q in queries]
            for key, query in zip(keys, queries, strict=True):
                if index.setdefault(key, len(self.queries)) == len(self.queries):
                    self.queries.append(query)
            self._places.append([index[key] for key in keys])
            if len(self.queries) > max_queries:
                raise DataError(f"the rows need more than {max_queries:,} predictions", hint="send fewer rows")
        if len(self._plans) < MIN_ROWS:
            raise DataError(f"{len(self._plans)} measurements", hint=f"a profile is fitted to {MIN_ROWS} or more")

    def fit(self, predictions: Iterable[Prediction]) -> Calibration:
        """The fit made of the predictions of :attr:`queries`."""
        shared = list(predictions)
        shared_values = [[shared[place] for place in places] for places in self._places]
        result = fit_profile(self._measured(shared_values, self._profile), self._profile)
        before = result.before
        # Which steps requests share depends on how fast they are.
        for _ in range(REPEATS if any(isinstance(plan, LoadRow) for plan, _ in self._plans) else 0):
            result = fit_profile(self._measured(shared_values, result.profile), self._profile)
        known = result.profile.measured
        for plan, _ in self._plans if known.devices else ():  # a profile that states none is compared with none
            known = known.widened(*plan.place)
        profile = result.profile.model_copy(update={"measured": known})
        return replace(result, before=before, profile=profile)

    def _measured(self, predictions: Sequence[Sequence[Prediction]], profile: EngineProfile) -> MeasuredLoad:
        """The durations, with the steps of rows under load as an engine makes them."""
        builder = MeasuredBuilder()
        for number, ((plan, row), row_predictions) in enumerate(zip(self._plans, predictions, strict=True), 1):
            names = [name for name in DURATIONS if name in row]
            if isinstance(plan, LoadRow):
                for name, steps in zip(names, plan.steps(names, row_predictions, profile), strict=True):
                    builder.add_steps(number, row[name], steps)
                continue
            prefill, decode = plan.priced(row_predictions)
            for name in names:
                # The engine has no part in the front end of a first token.
                engine_s = row[name] - profile.host.frontend_s * (name == "ttft_s")
                if engine_s <= 0:
                    raise DataError(
                        f"row {number}: ttft_s {row[name]:.4g} is below the front end of {profile.name}, "
                        f"{profile.host.frontend_s:.4g} s",
                        hint="leave ttft_s out, or start from a profile with a smaller host.frontend_s",
                    )
                builder.add(number, engine_s, [*prefill, *decode], *phase_runs(name, plan, row["closed_loop"], profile))
        return builder.measured()


def phase_runs(duration: str, plan: EstimatePlan, closed_loop: bool, engine: EngineProfile) -> tuple[Array, Array]:
    """How often each priced step counts in one of :data:`DURATIONS`, and where requests stay in waves.

    In a closed loop, each of the other requests in flight is prefilled once between the tokens of a request. In waves,
    where all lengths are equal and prompts run alone, it is half of them.
    """
    batch, after = plan.settings.batch, max(plan.settings.output - 1, 1)
    others = (1 - 1 / batch) / after if closed_loop else 0.0
    prefill, decode = {"total_s": (1.0, 1.0), "ttft_s": (1.0, 0.0), "tpot_s": (others, 1 / after)}[duration]
    together = 0.5 if engine.prefill_first and duration == "tpot_s" else 1.0
    runs, waved = (
        np.concatenate([weight * plan.prefill_runs, decode * plan.decode_runs])
        for weight in (prefill, together * prefill)
    )
    return runs, waved


class MeasuredBuilder:
    """Collects durations and the priced steps that make them, for :class:`MeasuredLoad`."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._log_s: list[float] = []
        self._steps: list[tuple[float, ...]] = []

    def add(
        self, row: int, seconds: float, steps: Sequence[PricedStep], runs: Array, waved: Array | None = None
    ) -> None:
        """Add a duration; ``runs`` says how often each step counts, ``waved`` where requests stay in waves."""
        fields = []
        for step, often, together in zip(
            steps, runs.tolist(), (runs if waved is None else waved).tolist(), strict=True
        ):
            pricing = step.pricing
            kernels_s = float(step.seconds[0].sum()) / pricing.engine.kernel_factor
            host = pricing.engine.host
            launched_s = pricing.launches * host.launch_s
            ranks, fixed_s = pricing.ranks > 1, host.replicas_s * (pricing.replicas > 1) + pricing.eager_s
            fields.append((kernels_s, launched_s, often, pricing.sequences, ranks, fixed_s, together))
        self.add_steps(row, seconds, fields)

    def add_steps(self, row: int, seconds: float, steps: Iterable[tuple[float, ...]]) -> None:
        """Add a duration of steps: kernels, launches, how often, sequences, several ranks, host time, runs in waves."""
        self._steps += [(len(self._rows), *step) for step in steps]
        self._rows.append(row)
        self._log_s.append(math.log(seconds))

    def measured(self) -> MeasuredLoad:
        """All durations."""
        columns = np.array(self._steps, dtype=np.float64).T
        return MeasuredLoad(np.array(self._rows), np.array(self._log_s), columns[0].astype(np.int64), *columns[1:])


def _plan(
    row: Mapping[str, Any],
    config: ConfigLike,
    device: Device,
    profile: EngineProfile,
    resolve: Callable[[Any], DeviceSpec],
    most_work: float,
) -> tuple[EstimatePlan | LoadRow, dict[str, Any]]:
    """The plan of a measurement, and its durations."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"{str(row)[:40]!r} is no measurement", hint="a mapping with batch, input, output and a duration"
        )
    if None in row:
        raise DataError("it has more cells than the header", hint="one cell for each column")
    stated = {name: value for name, value in row.items() if value not in (None, "")}
    if unknown := sorted(set(stated) - {*COUNTS, *DURATIONS, *_OTHER}):
        raise DataError(f"unknown column {unknown[0]!r}", hint="columns: " + ", ".join((*COUNTS, *_OTHER, *DURATIONS)))
    rate, prefix_hit = (_number(stated.get(name), name) for name in ("rate", "prefix_hit"))
    needed = ("input", "output") if rate is not None else ("batch", "input", "output")
    if missing := [name for name in needed if name not in stated]:
        raise DataError(f"{missing[0]} is missing", hint="batch (or rate), input and output are needed")
    counts: dict[str, Any] = {name: _whole(stated[name], name) for name in COUNTS if name in stated}
    durations: dict[str, Any] = {name: _seconds(stated[name], name) for name in DURATIONS if name in stated}
    if not durations:
        raise DataError("no duration", hint="give one of " + ", ".join(DURATIONS))
    if "tpot_s" in durations and counts["output"] == 1:
        raise DataError("tpot_s of a single output token", hint="leave it out")
    types: dict[str, Any] = {name: stated[name] for name in TYPES if name in stated}
    dimensions = read_config(stated.get("config", config))
    spec = resolve(stated.get("device", device))
    durations["closed_loop"] = _flag(stated.get("closed_loop", False), "closed_loop")
    if rate is not None and (durations["closed_loop"] or "batch" in counts):
        raise DataError("rate beside batch or closed_loop", hint="give the requests per second, or those in flight")
    layout = Layout(counts.get("tp", 1), counts.get("pp", 1), counts.get("ep", 1), counts.get("dp"))
    exact = Types.of(dimensions, **types)
    batch, tokens = counts.pop("batch", 1), counts["input"] + counts["output"]
    simulated = rate is not None or bool(prefix_hit)
    if durations["closed_loop"] and not simulated:
        queue = queues(dimensions, spec, profile, layout, exact, batch, tokens)
        simulated = queue or bool({"ttft_s", "total_s"} & set(durations))
    plan: EstimatePlan | LoadRow
    if simulated:
        request = {**counts, **types, "prefix_hit": prefix_hit or 0.0}
        plan = LoadRow(dimensions, spec, profile, batch, rate, durations["closed_loop"], request, most_work)
    else:
        plan = EstimatePlan(dimensions, spec, engine=profile, batch=batch, **counts, **types)
    read_s = weights_read(dimensions, layout, exact) / spec.mem_bandwidth_bytes_per_s
    steps = {"total_s": counts["output"], "ttft_s": 1, "tpot_s": 1}
    for name in (name for name in DURATIONS if name in durations):
        seconds = durations[name]
        if seconds < (shortest_s := steps[name] * read_s):
            raise DataError(
                f"{name} {seconds:.4g} is below the {shortest_s:.4g} s in which {spec.name} reads the weights",
                hint="check device, tp, dtype and weights of the row",
            )
    return plan, durations


def _flag(value: Any, name: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    try:
        return known[str(value).strip().lower()]
    except KeyError:
        raise DataError(f"{name} {str(value)[:40]!r} is neither true nor false", hint="true or false") from None


def _parsed(value: Any, name: str, kind: str, example: str, is_allowed: Callable[[float], bool]) -> float:
    try:
        number = parse_number(value)
        if not is_allowed(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{name} {str(value)[:40]!r} is no {kind}", hint=example) from None
    return number


def _number(value: Any, name: str) -> float | None:
    """A number of a row, if it is there; :class:`LoadRow` checks its range."""
    return None if value is None else _parsed(value, name, "number", "for example 0.5", lambda number: True)


def _whole(value: Any, name: str) -> int:
    return int(_parsed(value, name, "whole number", "for example 16", lambda number: number == int(number)))


def _seconds(value: Any, name: str) -> float:
    return _parsed(value, name, "duration", "seconds, for example 1.25", lambda number: 0 < number < 1e7)


def read_measurements(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Measurements of a CSV file, a JSON list, or results of vLLM's and SGLang's serving benchmarks (JSON lines)."""
    name = fspath(path)
    if not name.lower().endswith((".json", ".jsonl")):
        return parse_file(
            path, lambda text: parse_table(text, MAX_ROWS), "CSV", "a header and a row for each measurement"
        )
    value = parse_file(path, _json_or_lines, "JSON", "a list of measurements, or a benchmark's result")
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, dict) for item in values):
        raise DataError(f"{name}: not a list of measurements", hint="each is a JSON object")
    return [_of_benchmark(item, i) if "completed" in item else item for i, item in enumerate(values, 1)]


def _json_or_lines(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return [parse_json(line) for line in text.splitlines() if line.strip()]


def _of_benchmark(result: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The measurement of a result of ``vllm bench serve`` or ``sglang.bench_serving``."""

    def figure(name: str) -> float:
        value = result.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise DataError(
                f"row {number}: a benchmark's result has no {name}: {str(value)[:40]}",
                hint="completed, total_input_tokens, total_output_tokens, mean_tpot_ms are needed; without "
                "max_concurrency also mean_ttft_ms and duration",
            )
        return float(value)

    completed, tpot_ms = figure("completed"), figure("mean_tpot_ms")
    output = figure("total_output_tokens") / completed
    if result.get("max_concurrency") is None:
        # Requests in flight by Little's law.
        latency_s = (figure("mean_ttft_ms") + tpot_ms * max(output - 1, 0)) / 1e3
        in_flight = latency_s * completed / figure("duration")
    else:
        in_flight = min(figure("max_concurrency"), completed)
    return {
        "batch": max(1, round(in_flight)),
        "input": max(1, round(figure("total_input_tokens") / completed)),
        "output": max(1, round(output)),
        "tpot_s": tpot_ms / 1e3,
        "closed_loop": True,
    }
