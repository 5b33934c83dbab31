"""Operations of a client: their signatures, and generators that yield calls and receive responses.

The generators do no input or output, so the sync and the async client share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from cdmpp.client.messages import (
    Observation,
    Observed,
    ProgramLike,
    ProgramReceipt,
    QueryItem,
    ServedPrediction,
    Texts,
    check,
    content,
    device_fields,
    error_info,
    error_of,
    file_bytes,
    listed,
    observation_fields,
    place_of,
    problem_of,
    program_fields,
    read_program,
    template_fields,
    to_json,
    understood,
)
from cdmpp.client.transport import HttpAnswer, HttpCall, Steps
from cdmpp.devices.loading import resolve_device
from cdmpp.errors import CdmppError, DataError, FieldError, InvalidProgramError, ServiceError, UnknownDeviceError
from cdmpp.llm import defaults
from cdmpp.llm.engines.profile import Engine, engine_fields
from cdmpp.llm.read import config_fields, with_configs
from cdmpp.llm.serving.calibrate import read_measurements
from cdmpp.predict.bulk import MEDIA_TYPE, FeatureAnswers, FeatureQueries
from cdmpp.predict.curves import Curve
from cdmpp.predict.curves.plan import Programs
from cdmpp.predict.curves.template import Axes
from cdmpp.predict.prediction import (
    DEFAULT_QUANTILES,
    Device,
    ErrorInfo,
    Predictions,
    Query,
    check_quantiles,
    check_query,
    check_settings,
    device_list,
    failed_fields,
)
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Protocol

OCTETS = "application/octet-stream"
#: Default limits of a service, until it reports others.
MAX_ITEMS, MAX_BODY_BYTES = 10_000, 15 * 2**20
#: A request that a busy service could not finish in time is split into halves, down to this number of items. Each half
#: has the service's full deadline, and computed items are cached there.
FEW_ITEMS = 256
#: Observations of one request.
_PAGE = 1000
#: First and longest interval between two queries of a job's state, in seconds.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.1, 2.0
FINAL = ("done", "cancelled", "failed")
_ASYNC = (("prefer", "respond-async"),)


class Operations:
    """Operations of both clients; stores the service's limits, model and planners as they become known.

    Parameters
    ----------
    model : str, optional
        Model of the service that predicts; default: the loaded one.
    timeout_s : float
        The client's time limit of an operation.
    """

    def __init__(self, model: str | None, timeout_s: float) -> None:
        self.model, self._timeout_s = model, timeout_s
        self._answered_by = model
        self._max_items, self._max_bytes = MAX_ITEMS, MAX_BODY_BYTES
        self._plan_paths: dict[str, str] = {}

    def model_id(self) -> Steps[str]:
        """Identity of the model of the last response; before the first, of the loaded model."""
        if self._answered_by is None:
            answer = yield HttpCall("GET", "/readyz")
            with understood():
                self._answered_by = str(content(answer)["model_id"])
        return self._answered_by

    def predict(
        self,
        programs: Sequence[ProgramLike],
        device: Device | Sequence[Device],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        implementation: str | None = None,
    ) -> Steps[Predictions]:
        """Predict programs on one device or each of several, in order; see :meth:`LatencyPredictor.predict`.

        A program may also be ``{"hash": text}`` of a registered one (:meth:`register`).
        """
        if isinstance(programs, str):
            raise DataError(f"programs must be a list, not the text {programs[:60]!r}", hint="pass a list: [program]")
        check_settings(protocol, framework, implementation)
        specs = [resolve_device(device, str) for device in device_list(device)]
        texts = Texts()
        readable: list[tuple[QueryItem, ...] | Failed] = []
        kept = []  # Texts identifies objects by id, so they must stay alive.
        for program in programs:
            try:
                kept.append(read_program(program))
                items = tuple(texts.item(kept[-1], spec, protocol, framework, implementation) for spec in specs)
                readable.append(items)
            except CdmppError as error:
                readable.append(Failed(str(program)[:200], error))
        matrix: PredictionMatrix[tuple[QueryItem, ...], int] = PredictionMatrix(readable, range(len(specs)))
        pairs = matrix.pairs()
        answers = yield from self._predict_items([items[column] for items, column in pairs], check_quantiles(quantiles))
        names = [spec if isinstance(spec, str) else spec.name for spec in specs]
        for answer, (_, column) in zip(answers, pairs, strict=True):
            if answer.error is not None and answer.error.code == UnknownDeviceError.code:
                raise UnknownDeviceError(answer.error.message, hint=answer.error.hint)
            if answer.error is None:
                names[column] = answer.device
        model_id = yield from self.model_id()

        def failed(row: tuple[QueryItem, ...] | Failed, column: int | Failed) -> ServedPrediction:
            assert isinstance(row, Failed) and isinstance(column, int)
            error = ErrorInfo.of(row.error)
            name = names[column]
            return ServedPrediction(row.name, None, name, "library", protocol, framework, model_id, error=error)

        return Predictions(answer for row in matrix.results(answers, failed) for answer in row)

    def predict_queries(
        self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> Steps[Predictions]:
        """Predict queries with different programs, devices and settings, in order; errors are per query."""
        levels = check_quantiles(quantiles)
        items: list[QueryItem] = []
        texts = Texts()
        failed: dict[int, CdmppError] = {}
        for position, query in enumerate(queries):
            try:
                check_query(query)
                options = (query.protocol, query.framework, query.implementation)
                items.append(texts.item(query.program, query.device, *options))
            except CdmppError as error:
                failed[position] = error
        answers = iter((yield from self._predict_items(items, levels)))
        if not failed:
            return Predictions(answers)
        model_id = yield from self.model_id()
        return Predictions(
            ServedPrediction(**failed_fields(query, failed[i], model_id)) if i in failed else next(answers)
            for i, query in enumerate(queries)
        )

    def predict_features(self, queries: FeatureQueries) -> Steps[FeatureAnswers]:
        """Predict encoded programs, as arrays in a binary body; order is kept."""
        if queries.model is None and self.model is not None:
            queries = replace(queries, model=self.model)
        if not len(queries):
            model_id = yield from self.model_id()
            return FeatureAnswers.none(check_quantiles(queries.quantiles), model_id)
        row_bytes = queries.leaves[:1].nbytes + queries.positions[:1].nbytes + 100
        if len(queries) <= self._max_items and len(queries) * row_bytes <= self._max_bytes:
            order = np.arange(len(queries))
        else:
            # Programs with similar leaf counts together, so that little is padded.
            order = np.argsort(queries.leaf_count, kind="stable")
        parts: list[FeatureAnswers] = []
        start, max_rows = 0, len(order)
        while start < len(order):
            rows = order[start : start + min(max_rows, self._feature_rows(queries, order, start))]
            part = queries.take(rows)
            longest = int(part.leaf_count.max(initial=1))
            part = replace(part, leaves=part.leaves[:, :longest], positions=part.positions[:, :longest])
            body = part.to_bytes()
            answer = yield HttpCall("POST", "/predict", body, MEDIA_TYPE)
            if len(rows) > 1 and (yield from self._was_too_much(answer, len(body))):
                continue
            if answer.status == 504 and len(rows) > FEW_ITEMS:
                max_rows = len(rows) // 2
                continue
            check(answer)
            parts.append(FeatureAnswers.from_bytes(answer.body))
            if len(parts[-1]) != len(rows):
                raise ServiceError(f"{len(parts[-1])} answers to {len(rows)} queries")
            start += len(rows)
        answers = parts[0] if len(parts) == 1 else FeatureAnswers.concat(parts)
        self._answered_by = answers.model_id
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return answers.take(back) if len(parts) > 1 else answers

    def curve(
        self,
        programs: Programs,
        axes: Axes,
        devices: Sequence[Device],
        *,
        backend: Backend | None = None,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        monotone: Sequence[str] | None = None,
        implementation: str | None = None,
    ) -> Steps[Curve]:
        """Predict a template over axes on devices; see :func:`cdmpp.predict.curves.predict_curve`."""
        levels = check_quantiles(quantiles)
        check_settings(protocol, framework, implementation)
        body = {
            **template_fields(programs),
            "axes": {name: list(values) for name, values in axes.items()},
            "devices": [device_fields(device) for device in devices],
            "backend": backend,
            "protocol": protocol,
            "framework": framework,
            **({"implementation": implementation} if implementation else {}),
            "quantiles": list(levels),
            "monotone": None if monotone is None else list(monotone),
            "model": self.model,
        }
        answer = content((yield HttpCall("POST", "/curve", to_json(body).encode())))
        with understood():
            curve = Curve.from_dict(answer)
        self._answered_by = curve.model_id
        return curve

    def llm(
        self,
        /,
        config: Mapping[str, Any] | str | PathLike[str],
        device: Device | Sequence[Device],
        *,
        engine: Engine | None = None,
        **options: Any,
    ) -> Steps[Any]:
        """Estimate a language model on a device, or on a list of devices.

        The result is the answer of ``POST /llm``: the dictionary of an estimate, or a list of them. In a list, a
        device without an estimate has an ``error``. ``options`` are those of :func:`cdmpp.llm.estimate`.
        """
        several = isinstance(device, Sequence) and not isinstance(device, str)
        devices = [device_fields(item) for item in device_list(device)]
        fields = {**({"devices": devices} if several else {"device": devices[0]}), **options}
        answer = yield from self._language_model("/llm", config, fields, engine)
        with understood():
            answers = listed(answer, "answers", len(devices)) if several else [answer]
            self._answered_by = next((item["model_id"] for item in answers if "error" not in item), self._answered_by)
        return list(answers) if several else answer

    def llm_simulate(
        self,
        config: Mapping[str, Any] | str | PathLike[str],
        device: Device,
        *,
        engine: Engine | None = None,
        options: Mapping[str, Any],
    ) -> Steps[Any]:
        """Simulate serving; ``options`` are those of :func:`cdmpp.llm.simulate`.

        The result is the answer of ``POST /llm/simulate``.
        """
        return self._language_model("/llm/simulate", config, {"device": device_fields(device), **options}, engine)

    def training_step(
        self,
        /,
        config: Mapping[str, Any] | str | PathLike[str],
        device: Device,
        *,
        engine: Engine = defaults.TRAINING_ENGINE,
        **options: Any,
    ) -> Steps[Any]:
        """Predict a training step; ``options`` are those of :func:`cdmpp.llm.training_step`.

        The result is the answer of ``POST /training-step``.
        """
        return self._language_model("/training-step", config, {"device": device_fields(device), **options}, engine)

    def llm_calibrate(
        self,
        config: Mapping[str, Any] | str | PathLike[str],
        device: Device,
        measurements: Iterable[Mapping[str, Any]] | str | PathLike[str],
        *,
        engine: Engine = defaults.ENGINE,
    ) -> Steps[Any]:
        """Fit an engine profile to measured durations; see :func:`cdmpp.llm.calibrate`.

        The result is the answer of ``POST /llm/calibrate``; its ``profile`` is an ``engine`` of :meth:`llm`.
        """
        rows = read_measurements(measurements) if isinstance(measurements, str | PathLike) else measurements
        fields = {"device": device_fields(device), "measurements": [dict(row) for row in rows]}
        return self._language_model("/llm/calibrate", config, fields, engine)

    def _language_model(
        self,
        path: str,
        config: Mapping[str, Any] | str | PathLike[str],
        fields: Mapping[str, Any],
        engine: Engine | None,
    ) -> Steps[Any]:
        """The answer to a request about a language model."""
        body = {
            "config": dict(config) if isinstance(config, Mapping) else config_fields(config),
            **fields,
            "engine": engine_fields(engine),
            "model": self.model,
        }
        return content((yield HttpCall("POST", path, to_json(body).encode())))

    def predict_onnx(
        self,
        model: str | PathLike[str] | bytes,
        devices: Sequence[str],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        dims: Mapping[str, int] | None = None,
        implementation: str | None = None,
    ) -> Steps[dict[str, Any]]:
        """Predict an ONNX model (a local file, or its bytes) on devices: totals and programs.

        The dictionary is the answer of ``POST /models/predict``.
        """
        check_settings(protocol, framework, implementation)
        data = model if isinstance(model, bytes) else file_bytes(model)
        params = [("device", name) for name in devices]
        options = {"protocol": protocol, "framework": framework, "implementation": implementation}
        params += [(name, value) for name, value in options.items() if value]
        params += [("dim", f"{name}={size}") for name, size in (dims or {}).items()]
        params += [("model", self.model)] if self.model else []
        answer = yield HttpCall("POST", "/models/predict", data, OCTETS, params)
        result: dict[str, Any] = content(answer)
        with understood():
            self._answered_by = result["model_id"]
        return result

    def register(self, programs: Sequence[ProgramLike]) -> Steps[list[ProgramReceipt]]:
        """Register programs, so that they can be named by hash; order is kept."""
        texts: list[str] = []
        errors: dict[int, ErrorInfo] = {}
        for place, program in enumerate(programs):
            try:
                texts.append(to_json(program_fields(read_program(program))))
            except CdmppError as error:
                errors[place] = ErrorInfo.of(error)
        hashes = iter((yield from self._send_in_parts("/programs", "programs", texts, {}, "programs")))
        with understood():
            return [
                ProgramReceipt(error=errors[place]) if place in errors else _registered(next(hashes))
                for place in range(len(programs))
            ]

    def observe(self, observations: Iterable[Observation]) -> Steps[list[Observed]]:
        """Send measured latencies; results with an ``observation_id`` are stored durably. A prediction counts once.

        Parameters
        ----------
        observations : iterable
            (prediction by this service or its ``prediction_id``, seconds), or a mapping with ``program``,
            ``device``, ``latency_s`` and settings.
        """
        texts = [to_json(observation_fields(observation)) for observation in observations]
        results = yield from self._send_in_parts("/observe", "observations", texts, {}, "results", once=True)
        with understood():
            return [_observed(result) for result in results]

    def observations(self, device: str, *, digest: str | None = None, most: int = 1000) -> Steps[list[dict[str, Any]]]:
        """Stored measurements of a device with their programs, newest first: ``GET /observations``.

        Parameters
        ----------
        device, digest : str
            Name of the device, and ``DeviceSpec.digest()``; without a digest every device of this name.
        most : int
            Maximum number of observations.
        """
        rows: list[dict[str, Any]] = []
        params = [("device", device)] + ([("digest", digest)] if digest else [])
        before: str | None = None
        while len(rows) < most:
            page = [("limit", str(min(most - len(rows), _PAGE)))] + ([("before", before)] if before else [])
            value = content((yield HttpCall("GET", "/observations", params=(*params, *page))))
            rows += listed(value, "observations")
            before = value.get("next")
            if not before:
                break
        return rows

    def plan(self, kind: str, request: Mapping[str, Any], *, timeout_s: float | None = None) -> Steps[dict[str, Any]]:
        """Compute a replay or plan by the service, like :func:`cdmpp.make_plan`; waits for long searches.

        Parameters
        ----------
        kind : str
            "replay", "pipeline", ...: as ``cdmpp plan`` calls it.
        request : mapping
            As in docs/planning.md.
        timeout_s : float, optional
            Default: the client's own, beyond the request's ``budget_s``.

        Raises
        ------
        FieldError, InfeasibleError
            ``path`` names the field that is wrong.
        """
        limit_s = self._timeout_s + _budget_s(request) if timeout_s is None else timeout_s
        answer = yield from self._post_plan(kind, request, wait=True, limit_s=limit_s)
        plan: dict[str, Any] = _plan_content(answer)
        if answer.status != 202:
            return plan
        with understood():
            path, wait_s = _job_path(str(plan["job_id"])), FIRST_LOOK_S
        while True:
            job = content((yield HttpCall("GET", path, after_s=wait_s)))
            with understood():
                if job["state"] in FINAL:
                    return answer_of(job)
            wait_s = min(LONGEST_LOOK_S, 1.5 * wait_s)

    def submit(self, kind: str, request: Mapping[str, Any]) -> Steps[str]:
        """Submit a plan as a job, with any budget; returns its id for :meth:`job` and :meth:`cancel`."""
        submitted = _plan_content((yield from self._post_plan(kind, request, wait=False)))
        with understood():
            return str(submitted["job_id"])

    def job(self, job_id: str) -> Steps[dict[str, Any]]:
        """State, progress, best value and bound of a job, and its answer or the best so far."""
        job: dict[str, Any] = content((yield HttpCall("GET", _job_path(job_id))))
        return job

    def jobs(self, limit: int = 100) -> Steps[list[dict[str, Any]]]:
        """Jobs of this client's key or address without their answers, newest first: at most ``limit``, up to 1,000."""
        return list(listed(content((yield HttpCall("GET", "/jobs", params=(("limit", str(limit)),)))), "jobs"))

    def cancel(self, job_id: str) -> Steps[dict[str, Any]]:
        """Cancel a job, which keeps its best answer; returns the job."""
        job: dict[str, Any] = content((yield HttpCall("POST", f"{_job_path(job_id)}/cancel")))
        return job

    def remove(self, job_id: str) -> Steps[None]:
        """Remove a job with its answer; a queued or running one is cancelled first."""
        # Not retried after it may have been received: the second attempt would find no job.
        check((yield HttpCall("DELETE", _job_path(job_id), once=True)))

    def observed(self) -> Steps[list[dict[str, Any]]]:
        """Current error and drift by device: ``devices`` of ``GET /observe``."""
        return list(listed(content((yield HttpCall("GET", "/observe"))), "devices"))

    def support(self) -> Steps[dict[str, Any]]:
        """Coverage of the loaded model, as :meth:`LatencyPredictor.support`."""
        coverage: dict[str, Any] = content((yield HttpCall("GET", "/support")))
        return coverage

    def devices(self) -> Steps[list[dict[str, Any]]]:
        """Every known device with its figures."""
        return list(listed(content((yield HttpCall("GET", "/devices"))), "devices"))

    def _predict_items(self, items: Sequence[QueryItem], levels: Sequence[float]) -> Steps[list[ServedPrediction]]:
        rest = {"quantiles": list(levels), "model": self.model}
        results = yield from self._send_in_parts("/predict", "items", [i.text for i in items], rest, "results")
        model_id = self._answered_by or ""
        with understood():
            return [item.answered(result, model_id) for item, result in zip(items, results, strict=True)]

    def _post_plan(
        self, kind: str, request: Mapping[str, Any], *, wait: bool, limit_s: float | None = None
    ) -> Steps[HttpAnswer]:
        if self.model is not None:
            raise DataError(
                "the service prices plans with the model that is loaded",
                hint="a client without `model`; or cdmpp.make_plan with this client as the predictor",
            )
        if kind not in self._plan_paths:
            planners = listed(content((yield HttpCall("GET", "/plans", limit_s=limit_s))), "kinds")
            with understood():
                self._plan_paths = {str(planner["kind"]): str(planner["path"]) for planner in planners}
        if kind not in self._plan_paths:
            raise FieldError(f"no plan is called {kind!r}", hint="one of: " + ", ".join(self._plan_paths))
        try:
            body = to_json(with_configs(request)).encode()
        except InvalidProgramError as error:
            raise FieldError(f"the request: {error.message}", hint="plain JSON values") from None
        # Not retried: a job that is submitted twice would run twice.
        headers = () if wait else _ASYNC
        answer = yield HttpCall("POST", self._plan_paths[kind], body, once=not wait, headers=headers, limit_s=limit_s)
        return answer

    def _send_in_parts(
        self, path: str, name: str, texts: Sequence[str], rest: Mapping[str, Any], answered: str, *, once: bool = False
    ) -> Steps[list[Any]]:
        """Send a list in as many requests as the service's limits require; order is kept."""
        out: list[Any] = []
        start, max_texts = 0, len(texts)
        tail = "".join(f',"{key}":{to_json(value)}' for key, value in rest.items())
        while start < len(texts):
            end = min(self._end(texts, start), start + max_texts)
            body = f'{{"{name}":[{",".join(texts[start:end])}]{tail}}}'.encode()
            answer = yield HttpCall("POST", path, body, once=once)
            if end - start > 1 and (yield from self._was_too_much(answer, len(body))):
                continue
            if answer.status == 504 and end - start > FEW_ITEMS and not once:
                max_texts = (end - start) // 2
                continue
            value = content(answer)
            out += listed(value, answered, end - start)
            self._answered_by = value.get("model_id", self._answered_by)
            start = end
        return out

    def _end(self, texts: Sequence[str], start: int) -> int:
        """End of the request that starts with this item; it has at least one item."""
        size, end = 0, start
        while end < len(texts) and end - start < self._max_items:
            # JSON escapes other letters than ASCII, so characters are bytes.
            size += len(texts[end]) + 1
            if size > self._max_bytes - 4096 and end > start:
                break
            end += 1
        return end

    def _feature_rows(self, queries: FeatureQueries, order: Any, start: int) -> int:
        """Rows of the next body from ``start``; leaf counts increase, so the last row is the widest."""
        width = queries.leaves.shape[2]
        budget = self._max_bytes - 2**17
        counts = queries.leaf_count[order[start : start + self._max_items]].astype(np.int64)
        widest = np.maximum.accumulate(counts) * 4 * (width + 1) + 100
        fits = widest * np.arange(1, len(counts) + 1) <= budget
        return max(1, int(fits.sum()))

    def _was_too_much(self, answer: HttpAnswer, size: int) -> Steps[bool]:
        """Whether a request was refused for its size; if so, reduces the size of the next one."""
        if answer.status == 413:
            self._max_bytes = max(2**16, size // 2)
            return size > 2**16
        if answer.status != 422 or self._max_items == 1:
            return False
        problem = problem_of(answer)
        lists = {"items", "programs", "observations", "body", "rows"}
        places = {str(error.get("path")) for error in problem.get("errors") or [] if isinstance(error, dict)}
        if not places & lists:
            return False
        document = content((yield HttpCall("GET", "/openapi.json")))
        try:
            limit = int(document["components"]["schemas"]["PredictRequest"]["properties"]["items"]["maxItems"])
        except (KeyError, TypeError, ValueError):
            return False
        if limit >= self._max_items:
            return False
        self._max_items = max(1, limit)
        return True


def answer_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a finished job.

    Raises the class of CdmppError whose code the job's error has; ServiceError where somebody cancelled it.
    """
    if job["state"] == "cancelled":
        raise ServiceError("the job was cancelled", hint="its best answer so far: client.job(id)", problem="cancelled")
    error = job["error"]
    if error is not None:
        raise error_of(error["code"], error["message"], error["hint"], error["path"])
    answer: dict[str, Any] = job["answer"]
    return answer


def _budget_s(request: Mapping[str, Any]) -> float:
    """Seconds that a search may take; 0 where the request has no valid budget."""
    budget = request.get("budget_s")
    return max(0.0, min(float(budget), 3600.0)) if isinstance(budget, int | float) else 0.0


def _plan_content(answer: HttpAnswer) -> Any:
    """As :func:`content`; a violation of the schema becomes a :class:`FieldError`."""
    if answer.status == 422:
        problem = problem_of(answer)
        if problem.get("code") == "invalid_request":
            raise FieldError(str(problem.get("detail", "")), hint=str(problem.get("hint", "")), path=place_of(problem))
    return content(answer)


def _job_path(id: str) -> str:
    if not id.isalnum() or not id.isascii():
        raise ServiceError(f"{id[:80]!r} names no job", status=404, problem="unknown_job")
    return f"/jobs/{id}"


def _registered(result: Mapping[str, Any]) -> ProgramReceipt:
    """A result of ``POST /programs``."""
    if "error" in result:
        return ProgramReceipt(error=error_info(result["error"]))
    return ProgramReceipt(result["hash"], result["name"])


def _observed(result: Mapping[str, Any]) -> Observed:
    """A result of ``POST /observe``."""
    if "error" in result:
        return Observed(error=error_info(result["error"]))
    return Observed(result["observation_id"])
