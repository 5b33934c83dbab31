"""JSON of queries, programs, devices and observations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.features.encoded import EncodedProgram
from cdmpp.predict.client.answers import ServedPrediction
from cdmpp.predict.curves import Template
from cdmpp.predict.curves.plan import Programs
from cdmpp.predict.prediction import ErrorInfo, Prediction
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.utils.files import MAX_REQUEST_BYTES, read_bytes

ProgramLike = TensorProgram | OperatorSpec | str | Mapping[str, Any]
Observation = tuple[Prediction | str, float] | Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One item of ``POST /predict``.

    Attributes
    ----------
    text : str
        JSON of the item.
    name : str or None
        Name of the program, where the client knows it.
    program : TensorProgram or None
    device, backend, protocol, framework
        Options of the query, for a prediction with an error.
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
        """Hash of the program, where it can be computed."""
        try:
            return self.program.hash if self.program is not None else None
        except CdmppError:
            return None

    def answered(self, result: Mapping[str, Any], model_id: str) -> ServedPrediction:
        """The prediction of a result of the service."""
        error = result.get("error")
        if error is not None:
            return self.failed(ErrorInfo(error["code"], error["message"], error["hint"]), model_id)
        fields = {name: result[name] for name in _FIELDS}
        if self.name is not None:
            fields["name"] = self.name
        fields["domain_reason"] = result.get("domain_reason")
        return ServedPrediction(**fields)

    def failed(self, error: ErrorInfo, model_id: str) -> ServedPrediction:
        """A prediction with an error."""
        return ServedPrediction(
            self.name or "", self.hash, self.device, self.backend, self.protocol, self.framework, model_id, error=error
        )


#: json.dumps would create an encoder per call.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_FIELDS = (
    "name",
    "program_hash",
    "device",
    "backend",
    "protocol",
    "framework",
    "model_id",
    "latency_s",
    "lower_s",
    "upper_s",
    "quantiles",
    "domain",
    "domain_score",
    "roofline_s",
    "prediction_id",
)


class Texts:
    """JSON of programs and devices, computed once per object, because queries of a list share objects."""

    def __init__(self) -> None:
        self._made: dict[int, str] = {}
        self._settings: dict[tuple[str | None, ...], str] = {}

    def item(self, program: Any, device: DeviceSpec | str, protocol: str, framework: str | None) -> Item:
        """An item; raises the errors of :func:`program_fields` and :func:`device_fields`."""
        known = program if isinstance(program, TensorProgram) else None
        backend = known.backend if known is not None else None
        setting = (backend, protocol, framework)
        tail = self._settings.get(setting)
        if tail is None:
            fields = dict(zip(("backend", "protocol", "framework"), setting, strict=True))
            tail = self._settings[setting] = to_json(fields)[1:]
        text = f'{{"program":{self._text(program, program_fields)},"device":{self._text(device, device_fields)},{tail}'
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
        # The caller keeps the objects alive, so an id identifies one of them.
        encoded = self._made.get(id(value))
        if encoded is None:
            encoded = self._made[id(value)] = to_json(fields(value))
        return encoded


def read_program(program: ProgramLike) -> TensorProgram | dict[str, Any]:
    """A program, or an object that only the service can resolve (TVMScript, a hash).

    Raises
    ------
    InvalidProgramError, UnsupportedOperatorError
        The program is invalid; operators are checked here.
    """
    if isinstance(program, Mapping) and set(program) in ({"tvmscript"}, {"hash"}):
        return dict(program)
    return program_from_request(program)


def program_fields(program: TensorProgram | EncodedProgram | dict[str, Any]) -> dict[str, Any]:
    """JSON value of a program.

    Raises
    ------
    InvalidProgramError
        The program has no JSON form.
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

    Raises
    ------
    InvalidDeviceError
        The value is not a device.
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
        A value has no JSON form (NaN, an object).
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


def observation_fields(one: Observation) -> dict[str, Any]:
    """A measurement as an item of ``POST /observe``; raises :class:`DataError` without a prediction or program."""
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


def file_bytes(path: str | PathLike[str]) -> bytes:
    """Content of a local file; raises :class:`DataError`."""
    try:
        return read_bytes(path, MAX_REQUEST_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {fspath(path)}: {error.strerror or error}") from None
