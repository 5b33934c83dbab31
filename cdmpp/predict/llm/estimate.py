"""Estimates of language models with any predictor: their queries, and the estimate made of the predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from os import PathLike
from typing import Any

import numpy as np

from cdmpp.devices.loading import load_device, resolve_device
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.model.domain.score import LABELS, Label, label_of_total
from cdmpp.predict.interface import Predictor
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.layout import Layout, Types
from cdmpp.predict.llm.memory import Memory, check_memory, parameter_count
from cdmpp.predict.llm.operators import Decode, Prefill, Step, step_operators
from cdmpp.predict.llm.pricing import PricedStep, StepPricing
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.prediction import Prediction, check_settings
from cdmpp.programs.query_options import DEFAULT_PROTOCOL


@dataclass(frozen=True)
class Bounded:
    """A duration in seconds with its bounds."""

    point: float
    lower: float
    upper: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Bounded:
        """From point, lower and upper bound."""
        return cls(*(float(figure) for figure in figures))


@dataclass(frozen=True)
class Settings:
    """Request of an estimate.

    Attributes
    ----------
    device : str
    tp, pp, ep : int
    batch, input, output : int
        Sequences, and tokens of each prompt and each answer.
    dtype : str
    weights : str or None
        Type of quantised weights.
    framework : str
    cuda_graph : bool
    """

    device: str
    tp: int
    pp: int
    ep: int
    batch: int
    input: int
    output: int
    dtype: str
    weights: str | None
    framework: str
    cuda_graph: bool


@dataclass(frozen=True)
class Part:
    """An operator's or collective's time in one phase.

    Attributes
    ----------
    phase : {"prefill", "decode"}
    name : str
        Its place in the model.
    operator : str
        Name of the operator or collective; "host" for host time.
    count : int
        Runs in the phase.
    seconds : float
        Of all runs.
    domain : {"in", "near", "out"} or None
        None for host time.
    """

    phase: str
    name: str
    operator: str
    count: int
    seconds: float
    domain: Label | None


@dataclass(frozen=True)
class LLMEstimate:
    """Latency, throughput and memory of a batch that is served from prompt to last token.

    Attributes
    ----------
    prefill : Bounded
        The step over the prompts; it gives the first token of each answer.
    decode : Bounded or None
        The median decode step; None for a single output token.
    total : Bounded
        Prefill and all decode steps.
    tpot : Bounded or None
        Mean decode step.
    parts : list of Part
        The seconds add up to ``total``.
    gpus : int
        Devices of the layout.
    """

    model_id: str
    settings: Settings
    config: LLMConfig
    gpus: int
    prefill: Bounded
    decode: Bounded | None
    total: Bounded
    tpot: Bounded | None
    memory: Memory
    parts: list[Part]

    @property
    def tokens(self) -> int:
        """Output tokens of the batch."""
        return self.settings.batch * self.settings.output

    @property
    def domain_shares(self) -> dict[Label, float]:
        """Share of the predicted time by domain."""
        seconds: dict[Label, float] = dict.fromkeys(LABELS, 0.0)
        for part in self.parts:
            if part.domain is not None:
                seconds[part.domain] += part.seconds
        whole = sum(seconds.values())
        return {label: value / whole for label, value in seconds.items()}

    @property
    def domain(self) -> Label:
        """Domain of the total, by share of the time."""
        return label_of_total(self.domain_shares)

    def merged_parts(self) -> list[dict[str, Any]]:
        """Parts as JSON: those of one phase, name and operator are one row, in the order of the step."""
        rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        for part in self.parts:
            row = rows.setdefault(
                (part.phase, part.name, part.operator),
                {"phase": part.phase, "name": part.name, "operator": part.operator, "count": 0, "seconds": 0.0},
            )
            row["count"] += part.count
            row["seconds"] += part.seconds
        return [{**row, "share": row["seconds"] / self.total.point} for row in rows.values()]

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON values; durations in seconds."""
        figures: dict[str, float | None] = {}
        durations = (
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("total", self.total),
            ("ttft", self.prefill),
            ("tpot", self.tpot),
        )
        for name, value in durations:
            figures[f"{name}_s"] = None if value is None else value.point
            figures[f"{name}_lower_s"] = None if value is None else value.lower
            figures[f"{name}_upper_s"] = None if value is None else value.upper
        figures["throughput_tokens_per_s"] = self.tokens / self.total.point
        figures["throughput_lower_tokens_per_s"] = self.tokens / self.total.upper
        figures["throughput_upper_tokens_per_s"] = self.tokens / self.total.lower
        return {
            "model_id": self.model_id,
            "model_type": self.config.model_type,
            "parameters": parameter_count(self.config),
            **asdict(self.settings),
            "gpus": self.gpus,
            **figures,
            "memory_bytes": self.memory.to_dict(),
            "domain": self.domain,
            "domain_shares": self.domain_shares,
            "parts": self.merged_parts(),
            "left_out": list(self.config.left_out),
        }


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


def estimate(
    config: LLMConfig | Mapping[str, Any] | str | PathLike[str],
    device: DeviceSpec | Mapping[str, Any] | str,
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
    predictor: Predictor | None = None,
) -> LLMEstimate:
    """Estimate latency, throughput and memory of a batch of requests to a language model.

    Parameters
    ----------
    config : path, mapping or LLMConfig
        A ``config.json`` of Hugging Face.
    device : str, DeviceSpec or mapping
        A known device, the path of a specification (.toml, .json), or a specification.
    tp, pp, ep : int
        Degrees of tensor, pipeline and expert parallelism (:class:`cdmpp.predict.llm.Layout`).
    batch, input, output : int
        Sequences, and tokens of each prompt and each answer.
    dtype : {"bfloat16", "float16", "float32"}
        Type of activations, cache, and weights that are not quantised.
    weights : str, optional
        Type of quantised weights: "float8_e4m3", "int8" and "float4_e2m1" quantise the activations too, "int4" does
        not. Default: as ``quantization_config`` states, else ``dtype``.
    framework : str, optional
        Serving engine; default: vllm.
    cuda_graph : bool
        Whether decode steps are captured graphs.
    predictor : Predictor, optional
        Default: the shipped model, loaded once.

    Returns
    -------
    LLMEstimate

    Raises
    ------
    DataError, UnknownDeviceError
        A file cannot be read, or the framework or device is not known.
    FieldError
        The architecture is not known, a field is missing or impossible, or the layout does not divide the model.
    InfeasibleError
        The model does not fit; the message has the smallest number of devices that hold it.

    Notes
    -----
    ``prefill_s`` is one step over all prompts. Decode step i runs behind ``input + i`` cached tokens; five steps are
    priced and the others interpolated. With ``pp`` stages a batch passes them one after the other, so a step takes
    the sum of all stages and of ``pp - 1`` transfers; several batches in flight raise the throughput beyond
    ``throughput_tokens_per_s``, which is that of one batch.

    Examples
    --------
    >>> estimate("examples/llm/llama-3.1-8b.json", "h100-sxm", batch=8).decode.point       # doctest: +SKIP
    0.0063
    """
    predictor = shipped_predictor() if predictor is None else predictor
    plan = EstimatePlan(
        read_config(config),
        resolved_device(device, predictor),
        tp=tp,
        pp=pp,
        ep=ep,
        batch=batch,
        input=input,
        output=output,
        dtype=dtype,
        weights=weights,
        framework=framework,
        cuda_graph=cuda_graph,
    )
    return plan.estimate(predictor.model_id, predictor.predict_queries(plan.queries))


@cache
def shipped_predictor() -> Predictor:
    """The model that ships with the package, loaded once."""
    from cdmpp.predict.predictor import LatencyPredictor

    return LatencyPredictor.load()


def resolved_device(device: DeviceSpec | Mapping[str, Any] | str, predictor: Predictor) -> DeviceSpec:
    """The specification of a device: a name that the predictor knows, a file, or fields."""
    if isinstance(device, str) and device.lower().endswith((".toml", ".json")):
        return load_device(device)
    # A model may know further devices: those of its records, and one that it was adapted to.
    artifact = getattr(predictor, "artifact", None)
    return resolve_device(device, lookup if artifact is None else artifact.device)
