"""Questions as the service reads them, and its answers as a predictor gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdmpp.client.transport import Answer, by_code
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidDeviceError, InvalidProgramError, ServiceError
from cdmpp.features.encoded import EncodedProgram
from cdmpp.prediction import ErrorInfo, Prediction
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram

ProgramLike = TensorProgram | OperatorSpec | str | Mapping[str, Any]


@dataclass(frozen=True)
class ServedPrediction(Prediction):
    """A prediction by a service.

    Attributes
    ----------
    prediction_id : str or None
        For ``observe``: names this answer when its program has been measured.
    """

    prediction_id: str | None = None


@dataclass(frozen=True)
class Item:
    """One item of ``POST /predict`` and what is known of it here.

    Attributes
    ----------
    text : str
        Its JSON.
    name : str or None
        The program's, where that is known before it is answered.
    program : TensorProgram or None
    device, backend, protocol, framework
        As asked, for an answer that is an error.
    """

    text: str
    name: str | None
    program: TensorProgram | None
    device: str
    backend: str
    protocol: str
    framework: str | None

    @property
    def hash(self) -> str | None:
        """The program's, where it has one."""
        try:
            return self.program.hash if self.program is not None else None
        except CdmppError:
            return None

    def answered(self, result: Mapping[str, Any], model_id: str) -> ServedPrediction:
        """The prediction that a result of the service is."""
        error = result.get("error")
        if error is not None:
            return self.failed(ErrorInfo(error["code"], error["message"], error["hint"]), model_id)
        fields = {name: result[name] for name in _FIELDS}
        if self.name is not None:
            fields["name"] = self.name
        return ServedPrediction(**fields)

    def failed(self, error: ErrorInfo, model_id: str) -> ServedPrediction:
        """An answer that is an error."""
        return ServedPrediction(
            self.name or "", self.hash, self.device, self.backend, self.protocol, self.framework, model_id,
            error=error,
        )  # fmt: skip


#: Made once: json.dumps makes an encoder for every value.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_FIELDS = (
    "name", "program_hash", "device", "backend", "protocol", "framework", "model_id", "latency_s", "lower_s",
    "upper_s", "quantiles", "domain", "domain_score", "roofline_s", "prediction_id",
)  # fmt: skip


def read_program(program: ProgramLike) -> TensorProgram | dict[str, Any]:
    """A program, or an object that only the service can read (TVMScript, a hash).

    Raises
    ------
    InvalidProgramError, UnsupportedOperatorError
        It is none: operators are checked here.
    """
    if isinstance(program, TensorProgram):
        return program
    if isinstance(program, str | OperatorSpec):
        return TensorProgram.from_operator(program)
    if isinstance(program, Mapping) and set(program) in ({"tvmscript"}, {"hash"}):
        return dict(program)
    return TensorProgram.from_request(program)


def program_fields(program: TensorProgram | EncodedProgram | dict[str, Any]) -> dict[str, Any]:
    """A program as JSON has it.

    Raises
    ------
    InvalidProgramError
        There is no such form of it.
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
            f"{program.name}: one function of a module does not travel alone",
            hint="make the module have one PrimFunc",
        )
    return {"tvm_json": program.tvm_json}


def device_fields(device: DeviceSpec | Mapping[str, Any] | str) -> Any:
    """A device as JSON has it.

    Raises
    ------
    InvalidDeviceError
        It is none.
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

    Raises
    ------
    InvalidProgramError
        A value is no JSON (NaN, an object).
    """
    try:
        return _encode(value)
    except (TypeError, ValueError) as error:
        raise InvalidProgramError(f"this is no JSON: {str(error)[:100]}") from None


def content(answer: Answer) -> Any:
    """The JSON of an answer, or the error that it stands for.

    Raises
    ------
    CdmppError
        The class whose code the service gives; ServiceError for anything else.
    """
    check(answer)
    try:
        return json.loads(answer.body)
    except ValueError:
        raise ServiceError(
            "the answer is no JSON", hint="see whether a cdmpp service runs at this URL"
        ) from None


def check(answer: Answer) -> None:
    """Raise what an answer that is a refusal stands for."""
    if 200 <= answer.status < 300:
        return
    problem = problem_of(answer)
    code = str(problem.get("code", ""))
    message = str(problem.get("detail") or f"the service answered with status {answer.status}")
    hint = str(problem.get("hint") or "")
    kind = by_code().get(code)
    if kind is not None and kind is not ServiceError:
        raise kind(message, hint=hint)
    raise ServiceError(message, hint=hint, status=answer.status, problem=code)


def problem_of(answer: Answer) -> dict[str, Any]:
    """The problem+json of a refusal; empty where it is none."""
    try:
        problem = json.loads(answer.body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def listed(value: Any, name: str, length: int | None = None) -> Sequence[Any]:
    """A list of an answer.

    Raises
    ------
    ServiceError
        It is not there, or of another length than was asked.
    """
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, list) or (length is not None and len(found) != length):
        raise ServiceError(
            f"the answer has no {name} as they were asked", hint="is this a cdmpp service of this version?"
        )
    return found
