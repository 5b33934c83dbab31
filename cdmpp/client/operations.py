"""What a client can be asked, as steps: each yields calls and is sent their answers.

The steps know nothing of sockets, so the sync and the async client share all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cdmpp.client.answers import (
    Item,
    ProgramLike,
    ServedPrediction,
    check,
    content,
    device_fields,
    listed,
    problem_of,
    program_fields,
    read_program,
    to_json,
)
from cdmpp.client.transport import Answer, Call
from cdmpp.curves import Curve, Template
from cdmpp.curves.plan import Device, Programs
from cdmpp.curves.template import Axes
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, ServiceError, UnknownDeviceError
from cdmpp.features.bulk import MEDIA_TYPE, FeatureAnswers, FeatureQuestions
from cdmpp.prediction import (
    ErrorInfo,
    Prediction,
    Question,
    check_quantiles,
    check_settings,
)
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.question import Backend, Protocol

T = TypeVar("T")
Steps = Generator[Call, Answer, T]
OCTETS = "application/octet-stream"
#: What the service takes by default, until it says otherwise.
MAX_ITEMS, MAX_BODY_BYTES = 10_000, 15 * 2**20
#: A request that a busy service had no time for is asked again in halves, down to so many items: each has the
#: service's whole deadline, and what was computed is remembered there.
FEW_ITEMS = 256


@dataclass(frozen=True)
class Registered:
    """A program that the service knows by its hash from now on; or why it does not.

    Attributes
    ----------
    hash, name : str or None
        Ask with ``{"hash": hash}``.
    error : ErrorInfo or None
    """

    hash: str | None = None
    name: str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Observed:
    """A measurement that the service keeps; or why it does not."""

    observation_id: str | None = None
    error: ErrorInfo | None = None


class Operations:
    """Steps of every operation; keeps what it learns of the service's limits and model.

    Parameters
    ----------
    model : str, optional
        Which of the service's models answers; the loaded one where none is given.
    """

    def __init__(self, model: str | None) -> None:
        self.model = model
        self.answered_by = model
        self._max_items, self._max_bytes = MAX_ITEMS, MAX_BODY_BYTES

    def model_id(self) -> Steps[str]:
        """Identity of the model that answers: of the last answer, or of the loaded one before any."""
        if self.answered_by is None:
            self.answered_by = str(content((yield Call("GET", "/readyz")))["model_id"])
        return self.answered_by

    def predict(
        self,
        programs: Sequence[ProgramLike],
        device: DeviceSpec | Mapping[str, Any] | str,
        protocol: Protocol,
        framework: str | None,
        quantiles: Sequence[float],
    ) -> Steps[list[Prediction]]:
        """As :meth:`cdmpp.predictor.LatencyPredictor.predict`."""
        if isinstance(programs, str):
            raise DataError("programs is one text, not a sequence of programs", hint="pass a list: [program]")
        check_settings(protocol, framework)
        spec = _as_device(device)
        named = spec if isinstance(spec, str) else spec.name
        items: list[Item | tuple[str, CdmppError]] = []
        texts, kept = _Texts(), []
        for program in programs:
            try:
                kept.append(read_program(program))
                items.append(texts.item(kept[-1], spec, protocol, framework))
            except CdmppError as error:
                items.append((str(program)[:200], error))
        asked = [item for item in items if isinstance(item, Item)]
        answers = yield from self._predict(asked, check_quantiles(quantiles))
        for answer in answers:
            if answer.error is not None and answer.error.code == UnknownDeviceError.code:
                raise UnknownDeviceError(answer.error.message, hint=answer.error.hint)
            if answer.error is None:
                named = answer.device
        model_id = yield from self.model_id()
        left = iter(answers)
        return [
            next(left) if isinstance(item, Item)
            else ServedPrediction(item[0], None, named, "library", protocol, framework, model_id,
                                  error=ErrorInfo.of(item[1]))
            for item in items
        ]  # fmt: skip

    def predict_questions(
        self, questions: Sequence[Question], quantiles: Sequence[float]
    ) -> Steps[list[Prediction]]:
        """As :meth:`cdmpp.predictor.LatencyPredictor.predict_questions`."""
        levels = check_quantiles(quantiles)
        items: list[Item] = []
        texts = _Texts()
        failed: dict[int, tuple[Item, CdmppError]] = {}
        for place, question in enumerate(questions):
            program = question.program
            try:
                check_settings(question.protocol, question.framework)
                items.append(texts.item(program, question.device, question.protocol, question.framework))
            except CdmppError as error:
                device = question.device if isinstance(question.device, str) else question.device.name
                own = program if isinstance(program, TensorProgram) else None
                item = Item(
                    "", program.name, own, device, program.backend, question.protocol, question.framework
                )
                failed[place] = (item, error)
        answers = iter((yield from self._predict(items, levels)))
        if not failed:
            return list(answers)
        model_id = yield from self.model_id()
        out: list[Prediction] = []
        for place in range(len(questions)):
            if place in failed:
                item, reason = failed[place]
                out.append(item.failed(ErrorInfo.of(reason), model_id))
            else:
                out.append(next(answers))
        return out

    def predict_features(self, questions: FeatureQuestions) -> Steps[FeatureAnswers]:
        """As :meth:`cdmpp.predictor.LatencyPredictor.predict_features`, by the binary body."""
        if questions.model is None and self.model is not None:
            questions = replace(questions, model=self.model)
        if not len(questions):
            model_id = yield from self.model_id()
            return FeatureAnswers.none(check_quantiles(questions.quantiles), model_id)
        row_bytes = questions.leaves[:1].nbytes + questions.positions[:1].nbytes + 100
        if len(questions) <= self._max_items and len(questions) * row_bytes <= self._max_bytes:
            order = np.arange(len(questions))
        else:
            # Programs of like leaf counts together: little is padded.
            order = np.argsort(questions.leaf_count, kind="stable")
        parts: list[FeatureAnswers] = []
        start, most = 0, len(order)
        while start < len(order):
            rows = order[start : start + min(most, self._feature_rows(questions, order, start))]
            part = questions.take(rows)
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
                raise ServiceError(f"{len(parts[-1])} answers to {len(rows)} questions")
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
        """As :func:`cdmpp.curves.predict_curve`, computed by the service."""
        levels = check_quantiles(quantiles)
        check_settings(protocol, framework)
        body = {
            **_template_fields(programs),
            "axes": {name: list(values) for name, values in axes.items()},
            "devices": [device_fields(device) for device in devices],
            "backend": backend,
            "protocol": protocol,
            "framework": framework,
            "quantiles": list(levels),
            "monotone": None if monotone is None else list(monotone),
            "model": self.model,
        }
        found = content((yield Call("POST", "/curve", to_json(body).encode())))
        curve = Curve.from_dict(found)
        self.answered_by = curve.model_id
        return curve

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
        data = model if isinstance(model, bytes) else _file(model)
        params = [("device", name) for name in devices]
        params += [("protocol", protocol)] + ([("framework", framework)] if framework else [])
        params += [("dim", f"{name}={size}") for name, size in dims.items()]
        params += [("model", self.model)] if self.model else []
        answer = yield Call("POST", "/models/predict", data, OCTETS, params)
        found: dict[str, Any] = content(answer)
        self.answered_by = found["model_id"]
        return found

    def register(self, programs: Sequence[ProgramLike]) -> Steps[list[Registered]]:
        """``POST /programs``."""
        texts: list[str] = []
        errors: dict[int, ErrorInfo] = {}
        for place, program in enumerate(programs):
            try:
                texts.append(to_json(program_fields(read_program(program))))
            except CdmppError as error:
                errors[place] = ErrorInfo.of(error)
        found = iter((yield from self._in_parts("/programs", "programs", texts, {}, "programs")))
        return [
            Registered(error=errors[place]) if place in errors
            else _registered(next(found)) for place in range(len(programs))
        ]  # fmt: skip

    def observe(
        self, observations: Iterable[tuple[Prediction | str, float] | Mapping[str, Any]]
    ) -> Steps[list[Observed]]:
        """``POST /observe``."""
        texts = [to_json(_observation(one)) for one in observations]
        found = yield from self._in_parts("/observe", "observations", texts, {}, "results", once=True)
        return [
            Observed(error=_error(one["error"])) if "error" in one else Observed(one["observation_id"])
            for one in found
        ]

    def get(self, path: str) -> Steps[Any]:
        """The JSON of a ``GET``."""
        return content((yield Call("GET", path)))

    # -- inside -----------------------------------------------------------------------------------------
    def _predict(self, items: Sequence[Item], levels: Sequence[float]) -> Steps[list[ServedPrediction]]:
        rest = {"quantiles": list(levels), "model": self.model}
        results = yield from self._in_parts("/predict", "items", [i.text for i in items], rest, "results")
        model_id = self.answered_by or ""
        return [item.answered(result, model_id) for item, result in zip(items, results, strict=True)]

    def _in_parts(
        self,
        path: str,
        name: str,
        texts: Sequence[str],
        rest: Mapping[str, Any],
        answered: str,
        *,
        once: bool = False,
    ) -> Steps[list[Any]]:
        """Send a list in as many requests as the service's limits ask for; order is kept."""
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
        """Behind the last item of a request that begins with this one: at least one goes."""
        size, end = 0, start
        while end < len(texts) and end - start < self._max_items:
            # As bytes: a text may hold other letters than ASCII's, escaped as it is.
            size += len(texts[end]) + 1
            if size > self._max_bytes - 4096 and end > start:
                break
            end += 1
        return end

    def _feature_rows(self, questions: FeatureQuestions, order: Any, start: int) -> int:
        """Rows of one body from a place on: leaf counts grow, so the last row is the widest."""
        width = questions.leaves.shape[2]
        budget = self._max_bytes - 2**17
        counts = questions.leaf_count[order[start : start + self._max_items]].astype(np.int64)
        widest = np.maximum.accumulate(counts) * 4 * (width + 1) + 100
        fits = widest * np.arange(1, len(counts) + 1) <= budget
        return max(1, int(fits.sum()))

    def _was_too_much(self, answer: Answer, size: int) -> Steps[bool]:
        """Whether a request was refused for its size; then the next one will be smaller."""
        if answer.status == 413:
            self._max_bytes = max(2**16, size // 2)
            return size > 2**16
        if answer.status != 422 or self._max_items == 1:
            return False
        problem = problem_of(answer)
        lists = {"items", "programs", "observations", "body", "rows"}
        places = {str(each.get("path")) for each in problem.get("errors") or [] if isinstance(each, dict)}
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


class _Texts:
    """JSON of programs and devices, once for each object: most questions of a list share some."""

    def __init__(self) -> None:
        self._made: dict[int, str] = {}
        self._settings: dict[tuple[str | None, ...], str] = {}

    def item(self, program: Any, device: DeviceSpec | str, protocol: str, framework: str | None) -> Item:
        """An item; raises what :func:`program_fields` and :func:`device_fields` raise."""
        known = program if isinstance(program, TensorProgram) else None
        backend = known.backend if known is not None else None
        setting = (backend, protocol, framework)
        tail = self._settings.get(setting)
        if tail is None:
            fields = dict(zip(("backend", "protocol", "framework"), setting, strict=True))
            tail = self._settings[setting] = to_json(fields)[1:]
        text = (
            f'{{"program":{self._text(program, program_fields)},"device":{self._text(device, device_fields)},'
            f"{tail}"
        )
        return Item(
            text,
            known.name if known is not None else None,
            known,
            device if isinstance(device, str) else device.name,
            backend or "tvm",
            protocol,
            framework,
        )

    def _text(self, value: Any, fields: Callable[[Any], Any]) -> str:
        # Whoever asks holds the objects until all are answered, so an identity stands for one of them.
        found = self._made.get(id(value))
        if found is None:
            found = self._made[id(value)] = to_json(fields(value))
        return found


def _as_device(device: DeviceSpec | Mapping[str, Any] | str) -> DeviceSpec | str:
    if isinstance(device, str | DeviceSpec):
        return device
    if isinstance(device, Mapping):
        return from_mapping(device)
    raise InvalidDeviceError(f"{device!r} is not a device", hint="pass a name, a DeviceSpec or its fields")


def _template_fields(programs: Programs) -> dict[str, Any]:
    if isinstance(programs, str):
        programs = Template.parse(programs)
    if isinstance(programs, Mapping):
        return {"program": dict(programs)}
    several = [programs] if isinstance(programs, Template) else programs
    return {"programs": [{"program": dict(each.fields), "count": each.count} for each in several]}


def _observation(one: tuple[Prediction | str, float] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(one, Mapping):
        fields = dict(one)
        if "program" in fields:
            fields["program"] = program_fields(read_program(fields["program"]))
        if "device" in fields:
            fields["device"] = device_fields(fields["device"])
        return fields
    prediction, latency_s = one
    identity = prediction if isinstance(prediction, str) else getattr(prediction, "prediction_id", None)
    if identity is None:
        raise DataError(
            "only a prediction by a service has a prediction_id",
            hint='pass {"program": ..., "device": ..., "latency_s": ...} instead',
        )
    return {"prediction_id": identity, "latency_s": latency_s}


def _error(fields: Mapping[str, Any]) -> ErrorInfo:
    return ErrorInfo(fields["code"], fields["message"], fields["hint"])


def _registered(fields: Mapping[str, Any]) -> Registered:
    if "error" in fields:
        return Registered(error=_error(fields["error"]))
    return Registered(fields["hash"], fields["name"])


def _file(path: str | PathLike[str]) -> bytes:
    try:
        return Path(fspath(path)).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {fspath(path)}: {error.strerror or error}") from None
