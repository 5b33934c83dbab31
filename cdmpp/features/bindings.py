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

#: Element types of operands by their bytes; the features do not tell the two types of 16 bits apart.
_DTYPES = {4: "float32", 2: "float16 (or bfloat16)"}


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


def unbound_error(name: str, device: str, leaves: Array | None = None) -> InvalidProgramError:
    """The error for a program that a GPU cannot run; ``leaves`` (leaves, columns) are its features."""
    product = None if leaves is None else product_text(leaves)
    instead = f": {product}" if product else ", with its sizes (cdmpp support lists the operators)"
    return InvalidProgramError(
        f"{name}: it has stores outside of thread bindings, and {device} is a GPU, which cannot run it",
        hint=f"bind its loops to blockIdx and threadIdx, or pass the operator instead{instead}",
    )


def product_text(leaves: Array) -> str | None:
    """The operator of a program with one matrix product, such as ``linear:m=512,n=512,k=1024,dtype=float32``.

    None for several products, for convolutions and for other programs.
    """
    products = leaves[leaves[:, COLUMN["is_contraction"]] == 1]
    if len(products) != 1:
        return None

    def value(name: str) -> float:
        return float(np.exp2(products[0, COLUMN[name]].astype(np.float64)) - 1.0)

    batch, m, n, k = (round(value(f"contraction_{name}")) for name in ("batch", "m", "n", "k"))
    element_bytes = round(value("read_0_element_bytes"))
    dtype = _DTYPES.get(element_bytes)
    # A convolution reads less than its operands have elements, and the single precision of features blurs long axes.
    operands = sorted((batch * m * k * element_bytes, batch * k * n * element_bytes))
    read = sorted((value("read_0_unique_bytes"), value("read_1_unique_bytes")))
    if dtype is None or not np.allclose(operands, read, rtol=1e-4):
        return None
    sizes = f"m={m},n={n},k={k},dtype={dtype}"
    return f"linear:{sizes}" if batch == 1 else f"bmm:batch={batch},{sizes}"


def binding_error(
    program: TensorProgram | EncodedProgram, features: EncodedPrograms, device: DeviceSpec
) -> InvalidProgramError | None:
    """The error for TIR that the device cannot run as scheduled; None for any other program.

    Operators are not affected: their features come from a lowered structure without a schedule.
    """
    if device.kind != "gpu" or program.backend != "tvm" or operator_name(program) != TIR:
        return None
    leaves = features.leaves
    return unbound_error(program.name, device.name, leaves[0]) if unbound(leaves)[0] else None
