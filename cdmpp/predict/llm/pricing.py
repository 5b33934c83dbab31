"""Latencies of a step: queries for its parts, the priced step, and the host time beyond its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.model.domain.score import LABELS
from cdmpp.predict.llm.operators import StepPart
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.programs.collectives import Collective
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Protocol


@dataclass(frozen=True)
class HostCost:
    """Host time of one step.

    Attributes
    ----------
    launch_s : (float, float, float)
        Seconds in which the host launches one kernel: point, lower and upper bound. The host runs ahead of the
        device: launches are visible only where they take longer than the kernels.
    step_s : float
        Seconds of the step in which the device waits: scheduling, preparation of inputs, sampled tokens.
    """

    launch_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    step_s: float = 0.0


#: A step that is one captured graph.
GRAPH = HostCost()
#: A step whose kernels the host launches. Median, 10 % and 90 % quantile of the difference of event time (a call from
#: the host) and kernel time (profiler) of the same call, over 4,407 calls of vLLM's layers with kernels below 20 us
#: (table ``ops_frontier``, docs/data.md). No table separates the host's time between steps.
EAGER = HostCost(launch_s=(19.5e-6, 3.7e-6, 50e-6))


def host_cost(captured: bool) -> HostCost:
    """Host time of a step; ``captured``: whether it is one CUDA graph. Prefill steps are not: their sizes differ."""
    return GRAPH if captured else EAGER


def step_seconds(kernels_s: float, launches: int, launch_s: float, step_s: float) -> float:
    """Duration of a step: the longer of kernels and launches, and the host's time between steps."""
    return max(kernels_s, launches * launch_s) + step_s


Array = np.ndarray[Any, np.dtype[np.float64]]

#: Protocols of a captured decode step: both mean device time without the host. The first is used unless training
#: covered the second better (by domain label): most devices were measured with one of them only.
CAPTURED: tuple[Protocol, ...] = ("kernel", "graph")
#: Protocol of steps whose kernels the host launches; its time is added by :mod:`cdmpp.predict.llm.pricing`.
LAUNCHED: tuple[Protocol, ...] = ("kernel",)


@dataclass(frozen=True)
class StepPricing:
    """Programs that price one step.

    Attributes
    ----------
    parts : list of StepPart
    captured : bool
        Whether the step is a CUDA graph.
    """

    parts: list[StepPart]
    captured: bool

    @property
    def programs(self) -> list[tuple[OperatorSpec, Protocol]]:
        """Programs of all parts with the protocols to predict, those of a part next to each other."""
        return [(part.program, protocol) for part in self.parts for protocol in _protocols(part, self.captured)]

    def queries(self, device: DeviceSpec, framework: str) -> list[Query]:
        """Queries for :attr:`programs` on a device."""
        return [
            Query(TensorProgram.from_operator(program), device, protocol, framework)
            for program, protocol in self.programs
        ]

    def priced(self, predictions: Sequence[Prediction]) -> PricedStep:
        """The step made of the predictions of :attr:`programs`.

        Raises
        ------
        FieldError
            An operator of the model has no prediction.
        """
        remaining = iter(predictions)
        chosen = [
            min((next(remaining) for _ in _protocols(part, self.captured)), key=lambda p: _rank(part, p))
            for part in self.parts
        ]
        seconds = np.array(
            [
                [part.count * (figure or 0.0) for figure in (p.latency_s, p.lower_s, p.upper_s)]
                for part, p in zip(self.parts, chosen, strict=True)
            ]
        )
        return PricedStep(self.parts, chosen, seconds.T, self.captured)


@dataclass(frozen=True)
class PricedStep:
    """A step with its latencies.

    Attributes
    ----------
    parts : list of StepPart
    predictions : list of Prediction
        Prediction of one run of each part.
    seconds : (3, parts)
        Seconds of all runs of each part: point, lower and upper bound.
    captured : bool
        Whether the step is a CUDA graph.
    """

    parts: list[StepPart]
    predictions: list[Prediction]
    seconds: Array
    captured: bool

    def totals(self) -> Array:
        """Point, lower and upper bound of the step's duration, host time included; ``(3,)``."""
        launches, cost = sum(part.count for part in self.parts), host_cost(self.captured)
        return np.array(
            [
                step_seconds(float(row.sum()), launches, launch_s, cost.step_s)
                for row, launch_s in zip(self.seconds, cost.launch_s, strict=True)
            ]
        )


def _protocols(part: StepPart, captured: bool) -> tuple[Protocol, ...]:
    if not captured:
        return LAUNCHED
    return ("graph",) if isinstance(part.program, Collective) else CAPTURED


def _rank(part: StepPart, prediction: Prediction) -> int:
    if prediction.error is not None:
        raise FieldError(
            f"{part.name} ({part.program.text()}): {prediction.error.message}",
            path="config",
            hint=prediction.error.hint,
        )
    return LABELS.index(prediction.domain or "out")
