"""Errors: stable codes, builtin bases, hints that survive process borders."""

import copy
import pickle

import pytest

from cdmpp import errors
from cdmpp.errors import CdmppError

CODES = {
    "InvalidProgramError": ("invalid_program", ValueError),
    "UnsupportedOperatorError": ("unsupported_operator", ValueError),
    "UnknownDeviceError": ("unknown_device", LookupError),
    "InvalidDeviceError": ("invalid_device", ValueError),
    "ArtifactError": ("artifact_error", ValueError),
    "DataError": ("data_error", ValueError),
    "MeasurementError": ("measurement_error", RuntimeError),
    "OverloadedError": ("overloaded", RuntimeError),
    "DeadlineExceededError": ("deadline_exceeded", RuntimeError),
    "FieldError": ("invalid_field", ValueError),
    "InfeasibleError": ("infeasible", ValueError),
    "MissingDependencyError": ("missing_dependency", ImportError),
    "ServiceError": ("service_error", ConnectionError),
}


def test_the_table_above_is_complete() -> None:
    # The service derives from them too, where other tests have loaded it.
    classes = [cls for cls in _below(CdmppError) if cls.__module__ == errors.__name__]
    assert {cls.__name__ for cls in classes} == set(CODES)


def _below(base: type[CdmppError]) -> list[type[CdmppError]]:
    return [each for cls in base.__subclasses__() for each in (cls, *_below(cls))]


@pytest.mark.parametrize(("name", "code", "builtin"), [(name, *rest) for name, rest in CODES.items()])
def test_code_builtin_base_and_text(name: str, code: str, builtin: type[Exception]) -> None:
    cls = getattr(errors, name)
    error = cls("what is wrong", hint="what to do")
    assert error.code == code
    assert isinstance(error, builtin)
    assert isinstance(error, CdmppError)
    assert str(error) == error.message == "what is wrong"
    assert error.hint == "what to do"
    assert cls("bare").hint == ""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is cls
        assert (again.message, again.hint) == (error.message, error.hint)


def test_measurement_errors_say_whether_to_retry() -> None:
    assert errors.MeasurementError("busy", transient=True).transient
    assert not errors.MeasurementError("crash").transient
    assert pickle.loads(pickle.dumps(errors.MeasurementError("busy", transient=True))).transient


def test_a_field_error_keeps_the_place() -> None:
    error = errors.InfeasibleError("too small", path="memory_bytes")
    assert pickle.loads(pickle.dumps(error)).path == "memory_bytes"
    assert errors.FieldError("wrong").path == ""
