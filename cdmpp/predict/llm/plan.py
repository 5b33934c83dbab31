"""Plan of an estimate: queries of a prefill step and of decode steps, and the estimate made of their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.layout import Layout, Types
from cdmpp.predict.llm.memory import check_memory
from cdmpp.predict.llm.operators import Decode, Prefill, Step, step_operators
from cdmpp.predict.llm.pricing import PricedStep, StepPricing
from cdmpp.predict.llm.result import Bounded, LLMEstimate, Part, Settings
from cdmpp.predict.prediction import Prediction, check_settings
from cdmpp.programs.query_options import DEFAULT_PROTOCOL

#: Framework of an estimate that names none: the operators are the fused kernels of serving engines.
DEFAULT_FRAMEWORK = "vllm"
#: Decode steps that are priced; the others are interpolated over the length of the cache.
DECODE_POINTS = 5
MAX_BATCH, MAX_TOKENS = 65_536, 1_048_576

Array = np.ndarray[Any, np.dtype[np.float64]]


class EstimatePlan:
    """Queries of an estimate, and the estimate made of their predictions.

    Parameters and errors are those of :func:`cdmpp.predict.llm.estimate`; ``config`` and ``device`` are read already.

    Parameters
    ----------
    lengths : sequence of int, optional
        Tokens of each prompt; replaces ``batch`` and ``input``, which are then their number and their mean.

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
        lengths: Sequence[int] | None = None,
    ) -> None:
        if lengths is not None:
            batch, input = len(lengths), max(1, round(sum(lengths) / max(1, len(lengths))))
        for name, value, most in (
            ("batch", batch, MAX_BATCH),
            ("input", input, MAX_TOKENS),
            ("output", output, MAX_TOKENS),
        ):
            if type(value) is not int or not 1 <= value <= most:
                raise FieldError(
                    f"{name}: {str(value)[:80]!r} is not allowed", path=name, hint=f"a whole number from 1 to {most}"
                )
        lengths = [input] * batch if lengths is None else lengths
        longest = max(lengths)
        if config.positions and longest + output > config.positions:
            raise FieldError(
                f"input: {longest} and {output} output tokens exceed the model's {config.positions} positions",
                path="input",
                hint=f"input + output is at most {config.positions}",
            )
        framework = framework or DEFAULT_FRAMEWORK
        check_settings(DEFAULT_PROTOCOL, framework)
        layout, types = Layout(tp, pp, ep), Types.of(config, dtype, weights)
        layout.check(config)
        self.memory = check_memory(config, layout, types, batch, input + output, device.memory_bytes, device.name)
        self.settings = Settings(
            device.name, tp, pp, ep, batch, input, output, types.dtype, types.weights, framework, cuda_graph
        )
        self._config, self._layout = config, layout

        def pricing(step: Step) -> StepPricing:
            parts = step_operators(config, layout, step, dtype=types.dtype, weights=types.weights)
            return StepPricing(parts, cuda_graph and isinstance(step, Decode))

        #: Decode steps, and those of them that are priced.
        self._steps = np.arange(output - 1, dtype=np.float64)
        self._points = _points(self._steps)
        self._prefill = pricing(Prefill(lengths))
        cached = sum(lengths)
        self._decode = [pricing(Decode(batch, past_total=cached + batch * int(step))) for step in self._points]
        self.queries = [query for step in (self._prefill, *self._decode) for query in step.queries(device, framework)]

    def estimate(self, model_id: str, predictions: Sequence[Prediction]) -> LLMEstimate:
        """The estimate made of the predictions of :attr:`queries`.

        Raises
        ------
        FieldError
            An operator of the model has no prediction.
        """
        remaining = iter(predictions)
        prefill, *decode = [
            step.priced([next(remaining) for _ in step.programs]) for step in (self._prefill, *self._decode)
        ]
        s = self.settings
        prefill_s = prefill.totals()
        rows = _parts("prefill", [prefill], np.ones(1), prefill_s)
        total_s, step_s = prefill_s, None
        if decode:
            durations = np.stack([step.totals() for step in decode])
            weights = _weights(self._steps, self._points)
            decode_s = weights @ durations
            step_s = np.array([np.median(np.interp(self._steps, self._points, column)) for column in durations.T])
            rows += _parts("decode", decode, weights, decode_s)
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


def _points(steps: Array) -> Array:
    """Decode steps that are priced: evenly spaced, first and last included."""
    if not len(steps):
        return steps
    return np.unique(np.round(np.linspace(steps[0], steps[-1], DECODE_POINTS)))


def _weights(steps: Array, points: Array) -> Array:
    """Sum over the steps of each point's weight in the linear interpolation; ``(points,)``, adds up to the steps."""
    return np.array([np.interp(steps, points, unit).sum() for unit in np.eye(len(points))])


def _parts(phase: str, steps: Sequence[PricedStep], weights: Array, totals: Array) -> list[Part]:
    """Parts of a phase; the same part of all steps is one, and host time that kernels do not hide is another."""
    runs = round(float(weights.sum()))
    seconds = sum(weight * step.seconds[0] for weight, step in zip(weights, steps, strict=True))
    rows = [
        Part(phase, part.name, part.program.operator, part.count * runs, float(own), prediction.domain)
        for part, own, prediction in zip(steps[0].parts, seconds, steps[0].predictions, strict=True)
    ]
    host = float(totals[0] - seconds.sum())
    if host > 1e-9 * float(totals[0]):
        rows.append(Part(phase, "host", "host", runs, host, None))
    return rows
