"""Estimate of a language model's serving latency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cdmpp.model.domain.score import LABELS, Label, label_of_total
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.memory import Memory
from cdmpp.predict.llm.parameters import parameter_count


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
