"""The estimate of a language model: figures of a batch from prompt to last token, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cdmpp.llm.config import LLMConfig
from cdmpp.llm.memory import Memory, parameter_count
from cdmpp.model.domain.score import Label, TotalDomain
from cdmpp.predict.rendering import Rendered, Table, interval_text, out_reasons, percent
from cdmpp.utils.units import format_latency, format_si


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
class EstimateSettings:
    """Options of an estimate as they were used: what an answer repeats."""

    device: str
    tp: int
    pp: int
    ep: int
    dp: int
    batch: int
    input: int
    output: int
    dtype: str
    weights: str | None  # type of quantised weights
    kv_dtype: str
    engine: str  # name of the profile
    framework: str
    cuda_graph: bool
    mtp: int
    acceptance: float


@dataclass(frozen=True)
class EstimatePart:
    """An operator's or collective's time in one phase."""

    phase: str  # "prefill" or "decode"
    name: str  # its place in the model
    operator: str  # name of the operator or collective; "host" for host time
    count: int  # runs in the phase
    seconds: float  # of all runs
    domain: Label | None  # None for host time
    domain_reason: str | None = None  # reason of its worst prediction


@dataclass(frozen=True)
class LLMEstimate(Rendered):
    """Latency, throughput and memory of a batch that is served from prompt to last token.

    Attributes
    ----------
    prefill : Bounded
        The steps over the prompts; they give the first token of each answer.
    decode : Bounded or None
        The median decode step; None for a single output token.
    ttft : Bounded
        Prefill and the engine's front end.
    total : Bounded
        Prefill and all decode steps, without the front end.
    tpot : Bounded or None
        Mean time of a token in decode.
    parts : list of EstimatePart
        The seconds add up to ``total``.
    engine_domain : (Label, str)
        Domain by what the engine's profile was fitted to, and its reason.
    gpus : int
        Devices of the layout.
    remarks : tuple of str
        What the reader should know: weights that the device widens, prompts beyond the model's context.
    """

    model_id: str
    settings: EstimateSettings
    config: LLMConfig
    gpus: int
    prefill: Bounded
    decode: Bounded | None
    ttft: Bounded
    total: Bounded
    tpot: Bounded | None
    memory: Memory
    parts: list[EstimatePart]
    engine_domain: tuple[Label, str] = ("in", "")
    remarks: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """The estimate as a row, and its most expensive parts."""
        return estimate_tables([self])

    @property
    def tokens(self) -> int:
        """Output tokens of the batch."""
        return self.settings.batch * self.settings.output

    @property
    def _total_domain(self) -> TotalDomain:
        parts = ((f"{p.name} of {p.phase}", p.domain, p.seconds, p.domain_reason) for p in self.parts if p.domain)
        domain = TotalDomain.of(parts)
        assert domain is not None
        return domain.and_of(*self.engine_domain)

    @property
    def domain_shares(self) -> dict[Label, float]:
        """Share of the predicted time by domain."""
        return self._total_domain.shares

    @property
    def domain(self) -> Label:
        """Domain of the total, by share of the time."""
        return self._total_domain.label

    @property
    def domain_reason(self) -> str:
        """The engine, and the part with the largest share of the time that is not ``in``."""
        return f"engine {self.settings.engine}; {self._total_domain.reason or 'all kernels in'}"

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
        for name in ("prefill", "decode", "total", "ttft", "tpot"):
            for suffix, field in (("", "point"), ("_lower", "lower"), ("_upper", "upper")):
                figures[f"{name}{suffix}_s"] = getattr(getattr(self, name), field, None)
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
            "domain_reason": self.domain_reason,
            "domain_shares": self.domain_shares,
            "parts": self.merged_parts(),
            "left_out": list(self.config.left_out),
            "remarks": list(self.remarks),
        }


#: Rows of the table of parts.
SHOWN_PARTS = 8


def estimate_tables(estimates: Sequence[LLMEstimate], parts: int = SHOWN_PARTS) -> list[Table]:
    """One model on devices, a row each; then the ``parts`` most expensive parts of each device, and notes."""
    first = estimates[0]
    s = first.settings
    types = s.dtype if s.weights is None else f"{s.dtype}, weights {s.weights}"
    types += "" if s.kv_dtype == s.dtype else f", cache {s.kv_dtype}"
    title = (
        f"{first.config.model_type}, {format_si(parameter_count(first.config), '')} parameters; tp {s.tp}, pp {s.pp}, "
        f"ep {s.ep}, dp {s.dp}; batch {s.batch}, input {s.input}, output {s.output}; {types}; engine {s.engine}, "
        f"kernels of {s.framework}"
    )
    rows = [
        (
            e.settings.device,
            str(e.gpus),
            *_bounded(e.prefill),
            *_bounded(e.decode),
            *_bounded(e.total),
            _rate(e.tokens / e.total.point),
            _memory(e),
            e.domain,
        )
        for e in estimates
    ]
    header = ("device", "gpus", "prefill", "interval", "decode step", "interval", "total", "interval")
    whole = Table((*header, "tokens/s", "memory", "domain"), rows, (1, 2, 4, 6, 8, 9), title)
    shares = "; ".join(f"{e.settings.device} {_shares(e)}" for e in estimates)
    notes = [
        *(f"not included: {name}" for name in first.config.left_out),
        *dict.fromkeys(f"note: {remark}" for e in estimates for remark in e.remarks),
        f"kernels by share of the time: {shares}",
        *(f"{e.settings.device} is near: {e.engine_domain[1]}" for e in estimates if e.engine_domain[0] == "near"),
        *out_reasons((e.settings.device, e) for e in estimates),
        f"interval: 10 % – 90 %; memory: of one GPU; model {first.model_id}",
    ]
    return [whole, *(_parts(e, parts) for e in estimates if parts), Table.lines(*notes)]


def _parts(estimate: LLMEstimate, most: int) -> Table:
    parts = sorted(estimate.merged_parts(), key=lambda part: -part["seconds"])
    rows = [
        (p["phase"], p["name"], p["operator"], f"{p['count']:,} x", format_latency(p["seconds"]), percent(p["share"]))
        for p in parts[:most]
    ]
    if rest := parts[most:]:
        seconds, share = (sum(part[name] for part in rest) for name in ("seconds", "share"))
        rows.append(("", f"{len(rest)} more", "", "", format_latency(seconds), percent(share)))
    return Table((estimate.settings.device, "part", "operator", "count", "time", "share"), rows, (3, 4, 5))


def _bounded(value: Bounded | None) -> tuple[str, str]:
    return ("-", "-") if value is None else (format_latency(value.point), interval_text(value.lower, value.upper))


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _memory(estimate: LLMEstimate) -> str:
    used = f"{estimate.memory.total / 1e9:.1f}"
    return f"{used} GB" if estimate.memory.device is None else f"{used} of {estimate.memory.device / 1e9:.0f} GB"


def _shares(estimate: LLMEstimate) -> str:
    return ", ".join(f"{100 * share:.0f} % {label}" for label, share in estimate.domain_shares.items() if share)
