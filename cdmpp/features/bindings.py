"""Thread bindings of programs given as TIR: a GPU cannot run a store outside of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InvalidProgramError
from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.encoded import TIR, EncodedProgram, operator_name
from cdmpp.features.schema import COLUMN
from cdmpp.programs.program import TensorProgram

Array = np.ndarray[Any, np.dtype[Any]]


def unbound(leaves: Array, padding: Array | None = None) -> Array:
    """Programs with a store outside of any thread binding, (programs,) bool.

    Parameters
    ----------
    leaves : (programs, leaves, columns)
    padding : (programs, leaves) bool, optional
        Leaves that are not the program's.
    """
    loose = leaves[:, :, COLUMN["is_gpu"]] == 0
    return np.asarray((loose if padding is None else loose & ~padding).any(axis=1))


def unbound_error(name: str, device: str) -> InvalidProgramError:
    """The error for a program that a GPU cannot run."""
    return InvalidProgramError(
        f"{name}: it has stores outside of thread bindings, and {device} is a GPU, which cannot run it",
        hint="bind its loops to blockIdx and threadIdx, or pass the operator instead: linear:m=128,n=128,k=128",
    )


def binding_error(
    program: TensorProgram | EncodedProgram, features: EncodedPrograms, device: DeviceSpec
) -> InvalidProgramError | None:
    """The error for TIR that the device cannot run as scheduled; None for any other program.

    Operators are not affected: their features come from a lowered structure without a schedule.
    """
    if device.kind != "gpu" or program.backend != "tvm" or operator_name(program) != TIR:
        return None
    return unbound_error(program.name, device.name) if unbound(features.leaves)[0] else None
