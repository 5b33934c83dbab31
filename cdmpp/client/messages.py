"""Messages between a client and a service: JSON of queries, and predictions and errors in responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from cdmpp.client.transport import HttpAnswer
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, FieldError, InvalidDeviceError, InvalidProgramError, ServiceError
from cdmpp.features.encode import EncodedProgram
from cdmpp.predict.curves import Template
from cdmpp.predict.curves.plan import Programs
from cdmpp.predict.prediction import ErrorInfo, Prediction
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.utils.files import MAX_REQUEST_BYTES, read_bytes


@dataclass(frozen=True)
class ServedPrediction(Prediction):
    """A prediction by a service."""

    #: For ``observe``: names this answer when its program has been measured.
    prediction_id: str | None = None


def content(answer: HttpAnswer) -> Any:
    """The JSON of a response; raises the error of a refusal.

    Raises CdmppError: the class whose code the service gives; ServiceError for anything else.
    """
    check(answer)
    try:
        return json.loads(answer.body)
    except ValueError:
        raise ServiceError("the answer is no JSON", hint="see whether a cdmpp service runs at this URL") from None


def check(answer: HttpAnswer) -> None:
    """Raise the error of a response that is a refusal."""
    if 200 <= answer.status < 300:
        return
    problem = problem_of(answer)
    message = str(problem.get("detail") or f"the service answered with status {answer.status}")
    hint = str(problem.get("hint") or "")
    raise error_of(str(problem.get("code", "")), message, hint, place_of(problem), answer.status)


def error_of(code: str, message: str, hint: str, path: str, status: int | None = None) -> CdmppError:
    """The error with a code of the service: of the class that has this code, else a :class:`ServiceError`."""
    kind = _by_code().get(code)
    if kind is not None and issubclass(kind, FieldError):
        return kind(message, hint=hint, path=path)
    if kind is not None and kind is not ServiceError:
        return kind(message, hint=hint)
    return ServiceError(message, hint=hint, status=status, problem=code)


def _by_code() -> dict[str, type[CdmppError]]:
    """Error classes of the package by their code."""
    # Only classes of this package: subclasses elsewhere must not change which error is raised.
    kinds, classes = list(CdmppError.__subclasses__()), {}
    while kinds:
        kind = kinds.pop()
        if kind.__module__ == CdmppError.__module__:
            classes[kind.code] = kind
            kinds += kind.__subclasses__()
    return classes


def place_of(problem: Mapping[str, Any]) -> str:
    """The first field in the errors of a refusal; may be empty."""
    errors = problem.get("errors")
    first = errors[0] if isinstance(errors, list) and errors else None
    return str(first.get("path", "")) if isinstance(first, dict) else ""


@contextmanager
def understood() -> Iterator[None]:
    """Raise :class:`ServiceError` where a response lacks fields: it is not from a cdmpp service."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise ServiceError(
            f"the answer is not that of a cdmpp service ({type(error).__name__}: {str(error)[:100]})",
            hint="see whether the URL is right and the service of this version",
        ) from None


def problem_of(answer: HttpAnswer) -> dict[str, Any]:
    """The problem+json of a refusal; empty where the body is not problem+json."""
    try:
        problem = json.loads(answer.body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def listed(value: Any, name: str, length: int | None = None) -> Sequence[Any]:
    """A list in a response.

    Raises ServiceError: it is not there, or of another length than was asked.
    """
    items = value.get(name) if isinstance(value, dict) else None
    if not isinstance(items, list) or (length is not None and len(items) != length):
        raise ServiceError(
            f"the answer has no {name} as they were asked", hint="is this a cdmpp service of this version?"
        )
    return items


@dataclass(frozen=True)
class ProgramReceipt:
    """A registered program, or the error that prevented it."""

    #: Ask with ``{"hash": hash}``.
    hash: str | None = None
    name: str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Observed:
    """A stored measurement, or the error that prevented it."""

    observation_id: str | None = None
    error: ErrorInfo | None = None


def error_info(error: Mapping[str, Any]) -> ErrorInfo:
    """The error of a result."""
    return ErrorInfo(error["code"], error["message"], error["hint"])


ProgramLike = TensorProgram | OperatorSpec | str | Mapping[str, Any]
Observation = tuple[Prediction | str, float] | Mapping[str, Any]


@dataclass(frozen=True)
class QueryItem:
    """One item of ``POST /predict``."""

    #: JSON of the item.
    text: str
    #: Name of the program, where the client knows it.
    name: str | None
    program: TensorProgram | None
    #: Options of the query, for a prediction with an error.
    device: str
    backend: str
    protocol: str
    framework: str | None

    @property
    def hash(self) -> str | None:
        """Hash of the program, where it can be computed."""
        try:
            return self.program.hash if self.program is not None else None
        except CdmppError:
            return None

    def answered(self, result: Mapping[str, Any], model_id: str) -> ServedPrediction:
        """The prediction of a result of the service."""
        error = result.get("error")
        if error is not None:
            return self.failed(error_info(error), model_id)
        values: dict[str, Any] = {
            name: result.get(name) if declaration.optional else result[name]
            for name, declaration in ServedPrediction.declarations().items()
        }
        values["prediction_id"] = result["prediction_id"]
        if self.name is not None:
            values["name"] = self.name
        return ServedPrediction(**values)

    def failed(self, error: ErrorInfo, model_id: str) -> ServedPrediction:
        """A prediction with an error."""
        return ServedPrediction(
            self.name or "", self.hash, self.device, self.backend, self.protocol, self.framework, model_id, error=error
        )


#: json.dumps would create an encoder per call.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Texts:
    """JSON of programs and devices, computed once per object, because queries of a list share objects."""

    def __init__(self) -> None:
        self._made: dict[int, str] = {}
        self._settings: dict[tuple[str | None, ...], str] = {}

    def item(
        self,
        program: Any,
        device: DeviceSpec | str,
        protocol: str,
        framework: str | None,
        implementation: str | None = None,
    ) -> QueryItem:
        """An item; raises the errors of :func:`program_fields` and :func:`device_fields`."""
        known = program if isinstance(program, TensorProgram) else None
        backend = known.backend if known is not None else None
        setting = (backend, protocol, framework, implementation)
        tail = self._settings.get(setting)
        if tail is None:
            options = dict(zip(("backend", "protocol", "framework", "implementation"), setting, strict=True))
            # A service of an earlier version refuses a field that it does not know.
            if implementation is None:
                del options["implementation"]
            tail = self._settings[setting] = to_json(options)[1:]
        text = f'{{"program":{self._text(program, program_fields)},"device":{self._text(device, device_fields)},{tail}'
        return QueryItem(
            text,
            known.name if known is not None else None,
            known,
            device if isinstance(device, str) else device.name,
            backend or "tvm",
            protocol,
            framework,
        )

    def _text(self, value: Any, as_fields: Callable[[Any], Any]) -> str:
        # The caller keeps the objects alive, so an id identifies one of them.
        encoded = self._made.get(id(value))
        if encoded is None:
            encoded = self._made[id(value)] = to_json(as_fields(value))
        return encoded


def read_program(program: ProgramLike) -> TensorProgram | dict[str, Any]:
    """A program, or an object that only the service can resolve (TVMScript, a hash).

    Raises InvalidProgramError, UnsupportedOperatorError: the program is invalid; operators are checked here.
    """
    if isinstance(program, Mapping) and set(program) in ({"tvmscript"}, {"hash"}):
        return dict(program)
    return program_from_request(program)


def program_fields(program: TensorProgram | EncodedProgram | dict[str, Any]) -> dict[str, Any]:
    """JSON value of a program.

    Raises InvalidProgramError: the program has no JSON form.
    """
    if isinstance(program, dict):
        return program
    if isinstance(program, EncodedProgram):
        raise InvalidProgramError(
            f"{program.name}: features do not travel as JSON", hint="ask for them with predict_features"
        )
    if program.operator is not None:
        return program.operator.model_dump()
    if program.function is not None:
        raise InvalidProgramError(
            f"{program.name}: one function of a module does not travel alone", hint="make the module have one PrimFunc"
        )
    return {"tvm_json": program.tvm_json}


def device_fields(device: DeviceSpec | Mapping[str, Any] | str) -> Any:
    """JSON value of a device.

    Raises InvalidDeviceError: the value is not a device.
    """
    if isinstance(device, DeviceSpec):
        return device.model_dump(mode="json", exclude_none=True)
    if isinstance(device, str):
        return device
    if isinstance(device, Mapping):
        return dict(device)
    raise InvalidDeviceError(f"{device!r} is not a device", hint="pass a name, a DeviceSpec or its fields")


def to_json(value: Any) -> str:
    """JSON without spaces.

    Raises InvalidProgramError: a value has no JSON form (NaN, an object).
    """
    try:
        return _encode(value)
    except (TypeError, ValueError) as error:
        raise InvalidProgramError(f"a value has no JSON form: {str(error)[:100]}") from None


def template_fields(programs: Programs) -> dict[str, Any]:
    """Programs of a curve as fields of ``POST /curve``."""
    if isinstance(programs, str):
        programs = Template.parse(programs)
    if isinstance(programs, Mapping):
        return {"program": dict(programs)}
    several = [programs] if isinstance(programs, Template) else programs
    return {"programs": [{"program": dict(work.fields), "count": work.count} for work in several]}


def observation_fields(observation: Observation) -> dict[str, Any]:
    """A measurement as an item of ``POST /observe``; raises :class:`DataError` without a prediction or program."""
    if isinstance(observation, Mapping):
        item = dict(observation)
        if "program" in item:
            item["program"] = program_fields(read_program(item["program"]))
        if "device" in item:
            item["device"] = device_fields(item["device"])
        return item
    prediction, latency_s = observation
    identity = prediction if isinstance(prediction, str) else getattr(prediction, "prediction_id", None)
    if identity is None:
        raise DataError(
            "only a prediction by a service has a prediction_id",
            hint='pass {"program": ..., "device": ..., "latency_s": ...} instead',
        )
    return {"prediction_id": identity, "latency_s": latency_s}


def file_bytes(path: str | PathLike[str]) -> bytes:
    """Content of a local file; raises :class:`DataError`."""
    try:
        return read_bytes(path, MAX_REQUEST_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {fspath(path)}: {error.strerror or error}") from None
