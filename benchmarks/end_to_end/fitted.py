"""Factors of a device and its host, learned from whole networks of some families and tested on the others.

A network's time is that of one stream: the host issues the kernels one by one, the device works them off as they
come. Per measured machine one factor is fitted for each family of operators and element type, one for the host's
time per kernel in each mode, and one for the time in which the images are sent to the device. Which families are
fitted is decided by a hash of the family's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.end_to_end.labels import Label
from cdmpp.programs.operators import OperatorSpec

Array = np.ndarray[Any, np.dtype[Any]]

#: Families of networks, the longer names first; DeiT is the same network as ViT.
FAMILIES: Mapping[str, str] = {
    "wide_resnet": "wide_resnet",
    "resnext": "resnext",
    "resnet": "resnet",
    "densenet": "densenet",
    "vgg": "vgg",
    "squeezenet": "squeezenet",
    "mnasnet": "mnasnet",
    "shufflenet": "shufflenet",
    "mobilenet": "mobilenet",
    "vit": "vit",
    "deit": "vit",
}
#: Families of operators that have a factor each: products and attention; convolutions; grouped and depthwise
#: convolutions; all passes over memory.
PRODUCTS, CONVOLUTIONS, GROUPED, PASSES = range(4)
OPERATOR_FAMILIES = 4
MODES = ("inference", "training")
#: Expected errors, in logarithms: of a network, and of a factor before anything is measured.
NETWORK_ERROR, FACTOR_ERROR = 0.05, 0.5


def family_of(model: str) -> str:
    """Family of an image network, by its name."""
    return next(family for name, family in FAMILIES.items() if name in model)


def is_fitted(family: str) -> bool:
    """Whether networks of the family are fitted; the others are held out. By the first bit of its SHA-256."""
    return hashlib.sha256(family.encode()).digest()[0] < 128


def operator_family(spec: OperatorSpec) -> int:
    """Index of the factor of an operator."""
    if spec.operator == "conv2d":
        return CONVOLUTIONS if spec.sizes().get("groups", 1) == 1 else GROUPED
    return PRODUCTS if spec.operator in ("linear", "bmm") or "attention" in spec.operator else PASSES


@dataclass(frozen=True)
class Measured:
    """A label with what its time is made of.

    ``device_s``: predicted time of each kernel on the device, (kernels,). ``families``: their
    :func:`operator_family`, (kernels,). ``host_s``: predicted time of the host per kernel. ``upload_s``: predicted
    time in which the input is sent.
    """

    label: Label
    device_s: Array
    families: Array
    host_s: float
    upload_s: float


def stream_s(device_s: Array, host_s: float) -> float:
    """End of the last kernel: each starts when the one before has ended and the host has issued it."""
    if not len(device_s):
        return 0.0
    remaining_s = np.cumsum(device_s[::-1])[::-1]
    return float((host_s * np.arange(1, len(device_s) + 1) + remaining_s).max())


class Machine:
    """Factors of one measured machine, 1 before :meth:`fit`.

    Parameters
    ----------
    precisions : sequence of str
        Element types that were measured on it.
    """

    def __init__(self, precisions: Sequence[str]) -> None:
        self._precisions = list(precisions)
        self._logs = np.zeros(OPERATOR_FAMILIES * len(self._precisions) + len(MODES) + 1)

    @property
    def factors(self) -> dict[str, dict[str, float]]:
        """Fitted factors: of operators by precision, of the host by mode, of the upload."""
        values = np.exp(self._logs).round(3).tolist()
        names = ("products", "convolutions", "grouped convolutions", "passes")
        found = {
            precision: dict(zip(names, values[OPERATOR_FAMILIES * i :], strict=False))
            for i, precision in enumerate(self._precisions)
        }
        return {**found, "host": {**dict(zip(MODES, values[-3:], strict=False)), "upload": values[-1]}}

    def fit(self, measured: Sequence[Measured]) -> None:
        """Least squares of relative errors; factors without evidence stay near 1."""
        if not measured:
            return
        times = np.log([one.label.measured_s for one in measured])

        def residuals(logs: Array) -> Array:
            predicted = np.log([self._seconds(logs, one) for one in measured])
            return np.concatenate([(predicted - times) / NETWORK_ERROR, logs / FACTOR_ERROR])

        self._logs = least_squares(residuals, self._logs).x

    def seconds(self, one: Measured) -> float:
        """Predicted time of a network."""
        return self._seconds(self._logs, one)

    def _seconds(self, logs: Array, one: Measured) -> float:
        start = OPERATOR_FAMILIES * self._precisions.index(one.label.precision)
        factors = np.exp(logs)
        host_s = one.host_s * factors[-3 + MODES.index(one.label.mode)]
        device_s = one.device_s * factors[start : start + OPERATOR_FAMILIES][one.families]
        return stream_s(device_s, host_s) + one.upload_s * float(factors[-1])


def fit_machines(measured: Iterable[Measured]) -> dict[tuple[str, str, str], Machine]:
    """A machine for each source, device and run of image networks, fitted to the families of :func:`is_fitted`."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault(machine_of(one.label), []).append(one)
    machines = {}
    for name, own in groups.items():
        machines[name] = Machine(sorted({one.label.precision for one in own}))
        machines[name].fit([one for one in own if is_fitted(family_of(one.label.model))])
    return machines


def machine_of(label: Label) -> tuple[str, str, str]:
    """What shares factors: source, device, and the source's name of the machine."""
    return label.source, label.device, label.run
