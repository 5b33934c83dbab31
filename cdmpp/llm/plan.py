"""Plan of an estimate: queries of a prefill step and of decode steps, and the estimate made of their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.host import host_cost, step_seconds
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import check_memory
from cdmpp.llm.operators import Decode, Prefill, Step, step_operators
from cdmpp.llm.parts import StepPart
from cdmpp.llm.result import Bounded, LLMEstimate, Part, Settings
from cdmpp.prediction import Prediction, Query, check_settings
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Protocol

#: Kernels of a step run back to back, as in a captured graph.
STEP_PROTOCOL: Protocol = "graph"
#: Framework of an estimate that names none: the operators are the fused kernels of serving engines.
DEFAULT_FRAMEWORK = "vllm"
#: Decode steps that are priced; the others are interpolated over the length of the cache.
DECODE_POINTS = 5
MAX_BATCH, MAX_TOKENS = 1_000_000, 16_777_216

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class PricedStep:
    """Seconds of a step's parts: point, lower and upper bound, as array ``(3, parts)``."""

    parts: list[StepPart]
    seconds: Array

    @property
    def launches(self) -> int:
        """Number of launches in the step."""
        return sum(part.count for part in self.parts)

    def totals(self, phase: str, cuda_graph: bool) -> Array:
        """Point, lower and upper bound of the step's duration, host time included; ``(3,)``."""
        cost = host_cost(phase, cuda_graph)
        return np.array([step_seconds(float(row.sum()), self.launches, cost) for row in self.seconds])


class EstimatePlan:
    """Queries of an estimate, and the estimate made of their predictions.

    Parameters and errors are those of :func:`cdmpp.llm.estimate`; ``config`` and ``device`` are read already.

    Attributes
    ----------
    queries : list of Query
        Queries for a predictor; pass their predictions to :meth:`estimate`.
    """

    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        batch: int = 1,
        input: int = 1024,
        output: int = 128,
        dtype: str = "bfloat16",
        weights: str | None = None,
        framework: str | None = None,
        cuda_graph: bool = True,
    ) -> None:
        for name, value, most in (
            ("batch", batch, MAX_BATCH),
            ("input", input, MAX_TOKENS),
            ("output", output, MAX_TOKENS),
        ):
            if type(value) is not int or not 1 <= value <= most:
                raise FieldError(
                    f"{name}: {str(value)[:80]!r} is not allowed", path=name, hint=f"a whole number from 1 to {most}"
                )
        if config.positions and input + output > config.positions:
            raise FieldError(
                f"input: {input} and {output} output tokens exceed the model's {config.positions} positions",
                path="input",
                hint=f"input + output is at most {config.positions}",
            )
        framework = framework or DEFAULT_FRAMEWORK
        check_settings(STEP_PROTOCOL, framework)
        layout, types = Layout(tp, pp, ep), Types.of(config, dtype, weights)
        layout.check(config)
        self.memory = check_memory(config, layout, types, batch, input + output, device.memory_bytes, device.name)
        self.settings = Settings(
            device.name, tp, pp, ep, batch, input, output, types.dtype, types.weights, framework, cuda_graph
        )
        self._config, self._layout = config, layout

        def parts(step: Step) -> list[StepPart]:
            return step_operators(config, layout, step, dtype=types.dtype, weights=types.weights)

        #: Cached tokens in front of each decode step, and of the steps that are priced.
        self._past = np.arange(input, input + output - 1, dtype=np.float64)
        self._priced = _points(self._past)
        self._prefill = parts(Prefill([input] * batch))
        self._decode = [parts(Decode(batch, int(past))) for past in self._priced]
        self.queries = [
            Query(TensorProgram.from_operator(part.program), device, STEP_PROTOCOL, framework)
            for step in (self._prefill, *self._decode)
            for part in step
        ]

    def estimate(self, model_id: str, predictions: Sequence[Prediction]) -> LLMEstimate:
        """The estimate made of the predictions of :attr:`queries`.

        Raises
        ------
        FieldError
            An operator of the model has no prediction.
        """
        position = 0
        steps = []
        for parts in (self._prefill, *self._decode):
            steps.append(_priced_step(parts, predictions[position : position + len(parts)]))
            position += len(parts)
        s = self.settings
        prefill, decode = steps[0], steps[1:]
        prefill_s = prefill.totals("prefill", s.cuda_graph)
        rows = _parts("prefill", [prefill], np.ones(1), prefill_s, predictions)
        total_s, step_s = prefill_s, None
        if decode:
            durations = np.stack([step.totals("decode", s.cuda_graph) for step in decode])
            weights = _weights(self._past, self._priced)
            decode_s = weights @ durations
            step_s = np.array([np.median(np.interp(self._past, self._priced, column)) for column in durations.T])
            rows += _parts("decode", decode, weights, decode_s, predictions[len(self._prefill) :])
            total_s = prefill_s + decode_s
        steps_after = s.output - 1
        return LLMEstimate(
            model_id=model_id,
            settings=s,
            config=self._config,
            gpus=self._layout.gpus,
            prefill=Bounded.of(prefill_s),
            decode=None if step_s is None else Bounded.of(step_s),
            total=Bounded.of(total_s),
            tpot=Bounded.of((total_s - prefill_s) / steps_after) if steps_after else None,
            memory=self.memory,
            parts=rows,
        )


def _points(past: Array) -> Array:
    """Lengths of the cache at which decode steps are priced: evenly spaced, first and last included."""
    if not len(past):
        return past
    return np.unique(np.round(np.linspace(past[0], past[-1], DECODE_POINTS)))


def _weights(past: Array, points: Array) -> Array:
    """Sum over the steps of each point's weight in the linear interpolation; ``(points,)``, adds up to the steps."""
    return np.array([np.interp(past, points, unit).sum() for unit in np.eye(len(points))])


def _priced_step(parts: list[StepPart], predictions: Sequence[Prediction]) -> PricedStep:
    seconds = np.empty((3, len(parts)))
    for i, (part, prediction) in enumerate(zip(parts, predictions, strict=True)):
        if prediction.error is not None:
            raise FieldError(
                f"{part.name} ({part.program.text()}): {prediction.error.message}",
                path="config",
                hint=prediction.error.hint,
            )
        figures = (prediction.latency_s, prediction.lower_s, prediction.upper_s)
        seconds[:, i] = [part.count * (figure or 0.0) for figure in figures]
    return PricedStep(parts, seconds)


def _parts(
    phase: str, steps: Sequence[PricedStep], weights: Array, totals: Array, predictions: Sequence[Prediction]
) -> list[Part]:
    """Parts of a phase; the same part of all steps is one, and host time that kernels do not hide is another."""
    runs = round(float(weights.sum()))
    seconds = sum(weight * step.seconds[0] for weight, step in zip(weights, steps, strict=True))
    rows = [
        Part(phase, part.name, part.program.operator, part.count * runs, float(own), prediction.domain)
        for part, own, prediction in zip(steps[0].parts, seconds, predictions, strict=False)
    ]
    host = float(totals[0] - seconds.sum())
    if host > 1e-9 * float(totals[0]):
        rows.append(Part(phase, "host", "host", runs, host, None))
    return rows
