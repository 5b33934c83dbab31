"""Latencies of a step: queries for its parts, the priced step, and the engine's time beyond its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.engines.profile import DEFAULT_FRAMEWORK, KERNELS_ONLY, EngineProfile, Place, load_engine
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import model_size
from cdmpp.llm.mixers import EAGER_LAYERS, STAND_INS
from cdmpp.llm.operators import Decode, Step, StepPart
from cdmpp.model.domain.score import LABELS
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.requests.pricing import Cost, PricedProgram
from cdmpp.programs.collectives import Collective
from cdmpp.programs.operators import OperatorSpec, operator_family
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import ProgramFramework, Protocol

Array = np.ndarray[Any, np.dtype[np.float64]]

#: Protocols of a captured decode step: both mean device time without the host. The first is used unless training
#: covered the second better (by domain label): most devices were measured with one of them only.
CAPTURED: tuple[Protocol, ...] = ("kernel", "graph")
#: Protocol of steps whose kernels the host launches.
LAUNCHED: tuple[Protocol, ...] = ("kernel",)


#: Width of the log interval of a kernel for which another one stands: that of "near" predictions over that of "in".
STAND_IN_WIDTH = 2.3
#: Standard deviations of a normal distribution from its median to its 90 % quantile.
_TO_BOUND = 1.2816
#: Standard deviation of the log of a time whose kernels are not ``in``: engines run other kernels, or more of them.
UNSURE_RESIDUAL = 0.15
#: Kinds of kernels by family of their operator; "host" comes last.
KINDS = ("gemm", "conv", "attention", "moe", "collective", "vector", "host")


def combined(kinds: Array, residual: float = 0.0) -> Array:
    """Point, lower and upper bound of a sum, ``(3,)``.

    ``kinds``: (4, kinds) or (3, kinds), seconds of each kind of kernel: point, bounds, and the part of the point that
    is not ``in`` (or nothing). Errors within one kind add up, because one model makes them; those of different kinds do
    not. ``residual``: standard deviation of the log of the sum, besides.
    """
    point = kinds[0].sum()
    if not point > 0:
        return np.zeros(3)
    below = np.log(np.maximum(1 - np.maximum(kinds[0] - kinds[1], 0.0) / point, 1e-6))
    above = np.log1p(np.maximum(kinds[2] - kinds[0], 0.0) / point)
    unsure = UNSURE_RESIDUAL * kinds[3].sum() / point if len(kinds) > 3 else 0.0
    besides = _TO_BOUND**2 * (residual**2 + unsure**2)
    wide = [np.sqrt((logs**2).sum() + besides) for logs in (below, above)]
    return np.array([point, point * np.exp(-wide[0]), point * np.exp(wide[1])])


def widened(figures: Array, residual: float) -> Array:
    """Point, lower and upper bound, ``(3,)``, with a further standard deviation of the log."""
    logs = np.log(figures / figures[0])
    return np.asarray(figures[0] * np.exp([0.0, *np.hypot(logs[1:], _TO_BOUND * residual) * [-1, 1]]))


def place_of(config: LLMConfig, device: DeviceSpec, layout: Layout, types: Types, **values: float) -> Place:
    """By what profiles know a measured request; ``values``: its ``batch`` and ``tokens``, where they are known."""
    values |= model_size(config) | {name: float(getattr(layout, name)) for name in ("tp", "pp", "ep", "dp")}
    return device.name, types.weights or ("bfloat16" if types.bytes == 2 else types.dtype), values


def stand_ins(parts: Iterable[StepPart]) -> list[str]:
    """How steps with parts for which others stand differ from measured ones; empty without such parts."""
    names = sorted({part.name for part in parts if is_stand_in(part)})
    return [f"other kernels stand for {', '.join(names)}"] if names else []


@dataclass(frozen=True)
class StepPricing:
    """Programs that price one step."""

    parts: list[StepPart]
    captured: bool  # whether the step is a CUDA graph
    engine: EngineProfile = field(default_factory=lambda: load_engine(KERNELS_ONLY))
    sequences: int = 1  # of a replica
    ranks: int = 1  # that share a layer
    replicas: int = 1  # of the attention
    eager_s: float = 0.0  # seconds of the host for layers outside of the graph of a prefill
    # frameworks whose kernels are predicted; the fastest of each part counts
    frameworks: tuple[ProgramFramework, ...] = (DEFAULT_FRAMEWORK,)

    @classmethod
    def of(
        cls,
        engine: EngineProfile,
        parts: Iterable[StepPart],
        *,
        decode: bool,
        sequences: int,
        ranks: int,
        replicas: int = 1,
        cuda_graph: bool = True,
    ) -> StepPricing:
        """A step as an engine runs it: a graph or launches, without the parts of decode inside of other kernels."""
        captured = (engine.graph_decode and cuda_graph) if decode else engine.graph_prefill
        timed = [part for part in parts if not decode or engine.runs(part.name, ranks)]
        frameworks = engine.frameworks if decode else (engine.frameworks[0], *engine.also_prefill)
        layers = 0 if decode or not captured else sum(part.count for part in timed if part.name in EAGER_LAYERS)
        eager_s = layers * engine.host.eager_layer_s
        return cls(timed, captured, engine, sequences, ranks, replicas, eager_s, frameworks)

    @classmethod
    def of_step(
        cls, engine: EngineProfile, step: Step, layout: Layout, parts: Iterable[StepPart], cuda_graph: bool = True
    ) -> StepPricing:
        """:meth:`of` for a step of all replicas, with its parts."""
        return cls.of(
            engine,
            parts,
            decode=isinstance(step, Decode),
            sequences=-(-step.batch // layout.dp),
            ranks=layout.tp,
            replicas=layout.dp,
            cuda_graph=cuda_graph,
        )

    @property
    def launches(self) -> int:
        """Kernels that the host launches one by one."""
        # The states of all chunks are one kernel.
        return 0 if self.captured else sum(part.count for part in self.parts if part.name != "scan_state")

    @property
    def programs(self) -> list[tuple[OperatorSpec, Protocol, ProgramFramework]]:
        """Programs of all parts with the protocols and frameworks to predict, those of a part next to each other."""
        return [
            (program, protocol, framework)
            for part in self.parts
            for program in (part.program, *part.padded)
            for framework in self.frameworks
            for protocol in _protocols(part, self.captured)
        ]

    def queries(self, device: DeviceSpec) -> list[Query]:
        """Queries for :attr:`programs` on a device."""
        return [
            Query(TensorProgram.from_operator(program), device, protocol, framework)
            for program, protocol, framework in self.programs
        ]

    def priced(self, predictions: Sequence[Prediction]) -> PricedStep:
        """The step made of the predictions of :attr:`programs`; FieldError where an operator of the model has none."""
        remaining = iter(predictions)
        chosen = []
        for part in self.parts:
            sizes = [self._fastest(part, remaining) for _ in (part.program, *part.padded)]
            fastest = min(sizes, key=_latency)
            chosen.append(_of_stand_in(fastest) if is_stand_in(part) else fastest)
        seconds = np.array(
            [
                [part.count * (figure or 0.0) for figure in (p.latency_s, p.lower_s, p.upper_s)]
                for part, p in zip(self.parts, chosen, strict=True)
            ]
        )
        return PricedStep(self, chosen, self.engine.kernel_factor * seconds.reshape(-1, 3).T)

    def _fastest(self, part: StepPart, predictions: Iterator[Prediction]) -> Prediction:
        """The kernel that the engine runs: of its own framework, or a faster one of the others."""
        protocols = _protocols(part, self.captured)
        kernels = [min((next(predictions) for _ in protocols), key=lambda p: _rank(part, p)) for _ in self.frameworks]
        # A kernel of another framework counts where training covered it, and within the device's bounds.
        possible = [p for p in kernels[1:] if _rank(part, p) == 0 and _latency(p) >= (p.roofline_s or 0.0)]
        return min((kernels[0], *possible), key=_latency)


@dataclass(frozen=True)
class PricedStep:
    """A step with its latencies."""

    pricing: StepPricing
    predictions: list[Prediction]  # of one run of each part
    seconds: Array  # (3, parts): seconds of all runs of each part: point, lower and upper bound

    @property
    def parts(self) -> list[StepPart]:
        """Operators and collectives."""
        return self.pricing.parts

    def host(self) -> Array:
        """Host time that the kernels do not hide: point, lower and upper bound, ``(3,)``."""
        host, kernels_s = self.pricing.engine.host, float(self.seconds[0].sum())
        step_s = host.step(self.pricing.sequences, self.pricing.ranks, self.pricing.replicas)
        launched = self.pricing.launches * np.array([host.launch_s, host.launch_lower_s, host.launch_upper_s])
        device = np.maximum(kernels_s, launched)
        whole = np.maximum(device, step_s) if host.overlapped else device + step_s
        return np.asarray(whole - kernels_s + self.pricing.eager_s)

    def kinds(self) -> Array:
        """Seconds of each of :data:`KINDS`, ``(4, kinds)``: see :func:`combined`."""
        out = np.zeros((4, len(KINDS)))
        for part, column, prediction in zip(self.parts, self.seconds.T, self.predictions, strict=True):
            kind = KINDS.index(operator_family(part.program.operator))
            out[:3, kind] += column
            out[3, kind] += column[0] * (prediction.domain != "in")
        out[:3, -1] = self.host()
        return out

    def totals(self) -> Array:
        """Point, lower and upper bound of the step's duration, host time included; ``(3,)``."""
        return combined(self.kinds(), self.pricing.engine.residual)


def is_stand_in(part: StepPart) -> bool:
    """Whether another kernel stands for that of a part: it has no operator, or each engine has its own.

    Experts with 16-bit activations and narrower weights are of the second kind: Triton, Marlin and CUTLASS kernels and
    their routing differ by a factor of two.
    """
    packed = part.name == "experts" and getattr(part.program, "weight_dtype", None) is not None
    return part.name in STAND_INS or (packed and part.program.dtype in ("bfloat16", "float16"))


def _protocols(part: StepPart, captured: bool) -> tuple[Protocol, ...]:
    if not captured:
        return LAUNCHED
    return ("graph",) if isinstance(part.program, Collective) else CAPTURED


def _of_stand_in(prediction: Prediction) -> Prediction:
    """The prediction of another kernel of about this cost: at best "near", with a wider interval."""
    if prediction.domain != "in" or prediction.latency_s is None:
        return prediction
    lower, upper = prediction.lower_s or prediction.latency_s, prediction.upper_s or prediction.latency_s
    return replace(
        prediction,
        domain="near",
        domain_reason=f"{prediction.name} stands for another kernel of about this cost",
        lower_s=prediction.latency_s * (lower / prediction.latency_s) ** STAND_IN_WIDTH,
        upper_s=prediction.latency_s * (upper / prediction.latency_s) ** STAND_IN_WIDTH,
    )


def _latency(prediction: Prediction) -> float:
    return prediction.latency_s or 0.0


def _rank(part: StepPart, prediction: Prediction) -> int:
    if prediction.error is not None:
        raise FieldError(
            f"{part.name} ({part.program.text()}): {prediction.error.message}",
            path="config",
            hint=prediction.error.hint,
        )
    return LABELS.index(prediction.coverage or "out")


def cost_of_steps(runs: Sequence[tuple[PricedStep, float]], divisor: float) -> Cost:
    """The duration of a language model's steps with their host time, divided by ``divisor``.

    ``runs``: steps of one engine, and how often each counts.
    """
    parts = tuple(
        PricedProgram(part.name, part.count, often * float(seconds) / divisor)
        for step, often in runs
        for part, seconds in zip(step.parts, step.seconds[0], strict=True)
    )
    kinds = np.sum([often * step.kinds() for step, often in runs], axis=0)
    latency_s, lower_s, upper_s = (float(t) / divisor for t in combined(kinds, runs[0][0].pricing.engine.residual))
    return Cost(latency_s, lower_s, upper_s, parts)
