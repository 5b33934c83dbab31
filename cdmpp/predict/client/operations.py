"""Operations of a client as generators that yield calls and receive responses.

The generators do no input or output, so the sync and the async client share them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar

import numpy as np

from cdmpp.devices.loading import resolve_device
from cdmpp.errors import CdmppError, DataError, ServiceError, UnknownDeviceError
from cdmpp.predict.bulk import MEDIA_TYPE, FeatureAnswers, FeatureQueries
from cdmpp.predict.client.answers import (
    Observed,
    Registered,
    ServedPrediction,
    check,
    content,
    listed,
    observed,
    problem_of,
    registered,
    understood,
)
from cdmpp.predict.client.queries import (
    Item,
    Observation,
    ProgramLike,
    Texts,
    device_fields,
    file_bytes,
    observation_fields,
    program_fields,
    read_program,
    template_fields,
    to_json,
)
from cdmpp.predict.client.transport import Answer, Call
from cdmpp.predict.curves import Curve
from cdmpp.predict.curves.plan import Programs
from cdmpp.predict.curves.template import Axes
from cdmpp.predict.llm.read import config_fields
from cdmpp.predict.prediction import (
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
from cdmpp.programs.query_options import Backend, Protocol

T = TypeVar("T")
Steps = Generator[Call, Answer, T]
OCTETS = "application/octet-stream"
#: Default limits of a service, until it reports others.
MAX_ITEMS, MAX_BODY_BYTES = 10_000, 15 * 2**20
#: A request that a busy service could not finish in time is split into halves, down to this number of items. Each half
#: has the service's full deadline, and computed items are cached there.
FEW_ITEMS = 256
#: Observations of one request.
_PAGE = 1000


class Operations:
    """Steps of every operation; stores the service's limits and model as they become known.

    Parameters
    ----------
    model : str, optional
        Model of the service that predicts; default: the loaded one.
    """

    def __init__(self, model: str | None) -> None:
        self.model = model
        self.answered_by = model
        self._max_items, self._max_bytes = MAX_ITEMS, MAX_BODY_BYTES

    def model_id(self) -> Steps[str]:
        """Identity of the model of the last response; before the first, of the loaded model."""
        if self.answered_by is None:
            answer = yield Call("GET", "/readyz")
            with understood():
                self.answered_by = str(content(answer)["model_id"])
        return self.answered_by

    def predict(
        self,
        programs: Sequence[ProgramLike],
        device: Device | Sequence[Device],
        protocol: Protocol,
        framework: str | None,
        quantiles: Sequence[float],
    ) -> Steps[Predictions]:
        """See :meth:`cdmpp.predict.predictor.LatencyPredictor.predict`."""
        if isinstance(programs, str):
            raise DataError(f"programs must be a list, not the text {programs[:60]!r}", hint="pass a list: [program]")
        check_settings(protocol, framework)
        specs = [resolve_device(device, str) for device in device_list(device)]
        texts = Texts()
        readable: list[tuple[Item, ...] | Failed] = []
        kept = []  # Texts identifies objects by id, so they must stay alive.
        for program in programs:
            try:
                kept.append(read_program(program))
                readable.append(tuple(texts.item(kept[-1], spec, protocol, framework) for spec in specs))
            except CdmppError as error:
                readable.append(Failed(str(program)[:200], error))
        matrix: PredictionMatrix[tuple[Item, ...], int] = PredictionMatrix(readable, range(len(specs)))
        pairs = matrix.pairs()
        answers = yield from self._predict([items[column] for items, column in pairs], check_quantiles(quantiles))
        names = [spec if isinstance(spec, str) else spec.name for spec in specs]
        for answer, (_, column) in zip(answers, pairs, strict=True):
            if answer.error is not None and answer.error.code == UnknownDeviceError.code:
                raise UnknownDeviceError(answer.error.message, hint=answer.error.hint)
            if answer.error is None:
                names[column] = answer.device
        model_id = yield from self.model_id()

        def failed(row: tuple[Item, ...] | Failed, column: int | Failed) -> ServedPrediction:
            assert isinstance(row, Failed) and isinstance(column, int)
            error = ErrorInfo.of(row.error)
            name = names[column]
            return ServedPrediction(row.name, None, name, "library", protocol, framework, model_id, error=error)

        return Predictions(answer for row in matrix.results(answers, failed) for answer in row)

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float]) -> Steps[Predictions]:
        """See :meth:`cdmpp.predict.predictor.LatencyPredictor.predict_queries`."""
        levels = check_quantiles(quantiles)
        items: list[Item] = []
        texts = Texts()
        failed: dict[int, CdmppError] = {}
        for position, query in enumerate(queries):
            try:
                check_query(query)
                items.append(texts.item(query.program, query.device, query.protocol, query.framework))
            except CdmppError as error:
                failed[position] = error
        answers = iter((yield from self._predict(items, levels)))
        if not failed:
            return Predictions(answers)
        model_id = yield from self.model_id()
        return Predictions(
            ServedPrediction(**failed_fields(query, failed[i], model_id)) if i in failed else next(answers)
            for i, query in enumerate(queries)
        )

    def predict_features(self, queries: FeatureQueries) -> Steps[FeatureAnswers]:
        """See :meth:`cdmpp.predict.predictor.LatencyPredictor.predict_features`; sends binary bodies."""
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
        start, most = 0, len(order)
        while start < len(order):
            rows = order[start : start + min(most, self._feature_rows(queries, order, start))]
            part = queries.take(rows)
            longest = int(part.leaf_count.max(initial=1))
            part = replace(part, leaves=part.leaves[:, :longest], positions=part.positions[:, :longest])
            body = part.to_bytes()
            answer = yield Call("POST", "/predict", body, MEDIA_TYPE)
            if len(rows) > 1 and (yield from self._was_too_much(answer, len(body))):
                continue
            if answer.status == 504 and len(rows) > FEW_ITEMS:
                most = len(rows) // 2
                continue
            check(answer)
            parts.append(FeatureAnswers.from_bytes(answer.body))
            if len(parts[-1]) != len(rows):
                raise ServiceError(f"{len(parts[-1])} answers to {len(rows)} queries")
            start += len(rows)
        answers = parts[0] if len(parts) == 1 else FeatureAnswers.concat(parts)
        self.answered_by = answers.model_id
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return answers.take(back) if len(parts) > 1 else answers

    def curve(
        self,
        programs: Programs,
        axes: Axes,
        devices: Sequence[Device],
        backend: Backend | None,
        protocol: Protocol,
        framework: str | None,
        quantiles: Sequence[float],
        monotone: Sequence[str] | None,
    ) -> Steps[Curve]:
        """See :func:`cdmpp.predict.curves.predict_curve`; computed by the service."""
        levels = check_quantiles(quantiles)
        check_settings(protocol, framework)
        body = {
            **template_fields(programs),
            "axes": {name: list(values) for name, values in axes.items()},
            "devices": [device_fields(device) for device in devices],
            "backend": backend,
            "protocol": protocol,
            "framework": framework,
            "quantiles": list(levels),
            "monotone": None if monotone is None else list(monotone),
            "model": self.model,
        }
        answer = content((yield Call("POST", "/curve", to_json(body).encode())))
        with understood():
            curve = Curve.from_dict(answer)
        self.answered_by = curve.model_id
        return curve

    def llm(
        self,
        config: Mapping[str, Any] | str | PathLike[str],
        device: Device | Sequence[Device],
        options: Mapping[str, Any],
    ) -> Steps[Any]:
        """``POST /llm``: the answer, or a list of answers for a list of devices."""
        several = isinstance(device, Sequence) and not isinstance(device, str)
        devices = [device_fields(one) for one in device_list(device)]
        body = {
            "config": dict(config) if isinstance(config, Mapping) else config_fields(config),
            **({"devices": devices} if several else {"device": devices[0]}),
            **options,
            "model": self.model,
        }
        answer = content((yield Call("POST", "/llm", to_json(body).encode())))
        with understood():
            answers = listed(answer, "answers", len(devices)) if several else [answer]
            self.answered_by = next((one["model_id"] for one in answers if "error" not in one), self.answered_by)
        return list(answers) if several else answer

    def predict_onnx(
        self,
        model: str | PathLike[str] | bytes,
        devices: Sequence[str],
        protocol: Protocol,
        framework: str | None,
        dims: Mapping[str, int],
    ) -> Steps[dict[str, Any]]:
        """``POST /models/predict``."""
        check_settings(protocol, framework)
        data = model if isinstance(model, bytes) else file_bytes(model)
        params = [("device", name) for name in devices]
        params += [("protocol", protocol)] + ([("framework", framework)] if framework else [])
        params += [("dim", f"{name}={size}") for name, size in dims.items()]
        params += [("model", self.model)] if self.model else []
        answer = yield Call("POST", "/models/predict", data, OCTETS, params)
        result: dict[str, Any] = content(answer)
        with understood():
            self.answered_by = result["model_id"]
        return result

    def register(self, programs: Sequence[ProgramLike]) -> Steps[list[Registered]]:
        """``POST /programs``."""
        texts: list[str] = []
        errors: dict[int, ErrorInfo] = {}
        for place, program in enumerate(programs):
            try:
                texts.append(to_json(program_fields(read_program(program))))
            except CdmppError as error:
                errors[place] = ErrorInfo.of(error)
        hashes = iter((yield from self._in_parts("/programs", "programs", texts, {}, "programs")))
        with understood():
            return [
                Registered(error=errors[place]) if place in errors else registered(next(hashes))
                for place in range(len(programs))
            ]

    def observe(self, observations: Iterable[Observation]) -> Steps[list[Observed]]:
        """``POST /observe``."""
        texts = [to_json(observation_fields(observation)) for observation in observations]
        results = yield from self._in_parts("/observe", "observations", texts, {}, "results", once=True)
        with understood():
            return [observed(result) for result in results]

    def observations(self, device: str, digest: str | None, most: int) -> Steps[list[dict[str, Any]]]:
        """``GET /observations`` in pages, newest first, at most ``most`` of them."""
        rows: list[dict[str, Any]] = []
        params = [("device", device)] + ([("digest", digest)] if digest else [])
        before: str | None = None
        while len(rows) < most:
            page = [("limit", str(min(most - len(rows), _PAGE)))] + ([("before", before)] if before else [])
            value = content((yield Call("GET", "/observations", params=(*params, *page))))
            rows += listed(value, "observations")
            before = value.get("next")
            if not before:
                break
        return rows

    def get(self, path: str, name: str | None = None) -> Steps[Any]:
        """The JSON of a ``GET``, or a list in it."""
        value = content((yield Call("GET", path)))
        return value if name is None else list(listed(value, name))

    # -- inside -----------------------------------------------------------------------------------------
    def _predict(self, items: Sequence[Item], levels: Sequence[float]) -> Steps[list[ServedPrediction]]:
        rest = {"quantiles": list(levels), "model": self.model}
        results = yield from self._in_parts("/predict", "items", [i.text for i in items], rest, "results")
        model_id = self.answered_by or ""
        with understood():
            return [item.answered(result, model_id) for item, result in zip(items, results, strict=True)]

    def _in_parts(
        self, path: str, name: str, texts: Sequence[str], rest: Mapping[str, Any], answered: str, *, once: bool = False
    ) -> Steps[list[Any]]:
        """Send a list in as many requests as the service's limits require; order is kept."""
        out: list[Any] = []
        start, most = 0, len(texts)
        tail = "".join(f',"{key}":{to_json(value)}' for key, value in rest.items())
        while start < len(texts):
            end = min(self._end(texts, start), start + most)
            body = f'{{"{name}":[{",".join(texts[start:end])}]{tail}}}'.encode()
            answer = yield Call("POST", path, body, once=once)
            if end - start > 1 and (yield from self._was_too_much(answer, len(body))):
                continue
            if answer.status == 504 and end - start > FEW_ITEMS and not once:
                most = (end - start) // 2
                continue
            value = content(answer)
            out += listed(value, answered, end - start)
            self.answered_by = value.get("model_id", self.answered_by)
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

    def _was_too_much(self, answer: Answer, size: int) -> Steps[bool]:
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
        document = content((yield Call("GET", "/openapi.json")))
        try:
            most = int(document["components"]["schemas"]["PredictRequest"]["properties"]["items"]["maxItems"])
        except (KeyError, TypeError, ValueError):
            return False
        if most >= self._max_items:
            return False
        self._max_items = max(1, most)
        return True
