"""The prediction of a training step, a ranking of layouts, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cdmpp.llm.config import LLMConfig
from cdmpp.llm.memory import parameter_count
from cdmpp.llm.training.layout import TrainingLayout
from cdmpp.llm.training.memory import TrainingMemory
from cdmpp.model.domain.score import Label
from cdmpp.predict.rendering import Rendered, Table, interval_text, percent
from cdmpp.utils.units import format_latency, format_si

#: Operators in the table of a step.
SHOWN_PARTS = 8


@dataclass(frozen=True)
class TrainingStep(Rendered):
    """Duration, memory and breakdown of a training step.

    Attributes
    ----------
    step_s, lower_s, upper_s : float
        Seconds, with an 80 % interval.
    memory : TrainingMemory
        Of the rank that holds most.
    breakdown : dict
        Seconds of ``compute`` (by operator), ``exposed`` communication (tp, cp, ep, dp, pp), ``bubble``, ``optimizer``
        and ``host`` on the slowest rank; they add up to ``step_s``.
    domain_shares : dict
        Share of the predicted time by domain of the kernels.
    domain : {"in", "near", "out"}
        Of the step among those that the engine's profile was fitted to: in none, one, or more of device, products,
        model and layout beyond them.
    domain_reason : str
        What is beyond them, and the part with the largest share whose kernel is not ``in``.
    """

    model_id: str
    device: str
    engine: str
    config: LLMConfig
    layout: TrainingLayout
    dtype: str
    products: str | None
    network_bytes_per_s: float
    layers: tuple[int, ...]
    step_s: float
    lower_s: float
    upper_s: float
    model_flops_utilization: float | None
    memory: TrainingMemory
    breakdown: dict[str, Any]
    domain_shares: dict[Label, float]
    domain: Label
    domain_reason: str
    remarks: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """Figures and parts of the step."""
        return training_tables(self)

    @property
    def memory_bytes(self) -> dict[str, float | None]:
        """Bytes of the rank that holds most, by part."""
        return self.memory.to_dict()

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.layout.global_batch * self.layout.sequence

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of one device."""
        return self.tokens / self.step_s / self.layout.gpus

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of operators, exposed communication, bubble, optimizer and host: the breakdown without levels."""
        b = self.breakdown
        named = {f"{name} communication": seconds for name, seconds in b["exposed"].items() if seconds}
        return {**b["compute"], **named, **{name: b[name] for name in ("bubble", "optimizer", "host")}}

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "model_id": self.model_id,
            "model_type": self.config.model_type,
            "parameters": parameter_count(self.config),
            "device": self.device,
            "engine": self.engine,
            **asdict(self.layout),
            "dp": self.layout.dp,
            "micro_batches": self.layout.micro_batches,
            "layers": list(self.layers),
            "dtype": self.dtype,
            "products": self.products,
            "network_bytes_per_s": self.network_bytes_per_s,
            "step_s": self.step_s,
            "lower_s": self.lower_s,
            "upper_s": self.upper_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "model_flops_utilization": self.model_flops_utilization,
            "memory_bytes": self.memory_bytes,
            "breakdown": self.breakdown,
            "domain": self.domain,
            "domain_shares": self.domain_shares,
            "domain_reason": self.domain_reason,
            "remarks": list(self.remarks),
        }


def training_tables(step: TrainingStep) -> list[Table]:
    """A training step: duration, throughput, memory, and its parts, which add up to it."""
    memory = step.memory
    share = "" if step.model_flops_utilization is None else f", {percent(step.model_flops_utilization)} of the peak"
    capacity = "" if memory.device is None else f" of {memory.device / 1e9:.0f}"
    figures = Table.lines(
        f"{step.config.model_type}, {format_si(parameter_count(step.config), '')} parameters on {step.layout.gpus} "
        f"{step.device}; {step.layout.named()}; dp {step.layout.dp}, {step.layout.micro_batches} micro-batches; "
        f"{step.products or step.dtype}; engine {step.engine}",
        f"step {format_latency(step.step_s)} ({interval_text(step.lower_s, step.upper_s)}), {step.domain}",
        f"{step.tokens_per_s_per_gpu:,.0f} tokens/s for each GPU{share}",
        f"memory {memory.total / 1e9:.1f}{capacity} GB: weights {memory.weights / 1e9:.1f}, gradients "
        f"{memory.gradients / 1e9:.1f}, optimizer {memory.optimizer / 1e9:.1f}, activations "
        f"{memory.activations / 1e9:.1f}",
        f"domain {step.domain}: {step.domain_reason}",
    )
    return [figures, parts_table(step.parts, step.step_s), Table.lines(*(f"note: {remark}" for remark in step.remarks))]


def parts_table(parts: Mapping[str, float], step_s: float) -> Table:
    """The largest operators, the others together, then what is no computation."""
    behind = [name for name in parts if name.endswith(" communication") or name in ("bubble", "optimizer", "host")]
    operators = sorted(((n, s) for n, s in parts.items() if n not in behind), key=lambda item: -item[1])
    shown = operators[:SHOWN_PARTS]
    if operators[SHOWN_PARTS:]:
        rest = sum(seconds for _, seconds in operators[SHOWN_PARTS:])
        shown.append((f"{len(operators) - SHOWN_PARTS} more", rest))
    shown += [(name, parts[name]) for name in behind if parts[name]]
    rows = [(name, format_latency(seconds), percent(seconds / step_s)) for name, seconds in shown]
    return Table(("part", "seconds", "share"), rows, (1, 2))


@dataclass(frozen=True)
class LayoutSearch(Rendered):
    """Layouts in the order of their predicted duration."""

    steps: list[TrainingStep]
    fitting: int  # layouts that fit the memory
    priced: int  # layouts of them that were priced

    def tables(self) -> list[Table]:
        """Layouts, a row each."""
        return search_tables(self)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        steps = [{**step.to_dict(), "binds": binding(step)} for step in self.steps]
        return {"fitting": self.fitting, "priced": self.priced, "layouts": steps}


def binding(step: TrainingStep) -> str:
    """The limit of a layout: the largest share besides computation, or the memory where the rest is small."""
    b = step.breakdown
    shares = {f"{name} communication": seconds for name, seconds in b["exposed"].items()}
    shares |= {"bubble": b["bubble"], "optimizer": b["optimizer"], "host": b["host"]}
    shares["recomputation"] = b["compute"].get("recomputation", 0.0)
    name, seconds = max(shares.items(), key=lambda item: item[1])
    share = seconds / step.step_s
    return f"{name} {100 * share:.0f} %" if share >= 0.05 else "computation"


def search_tables(result: LayoutSearch) -> list[Table]:
    """Layouts, the fastest first, with what binds each."""
    header = ("tp", "pp", "vp", "cp", "ep", "micro", "sharding", "recompute", "step", "interval", "tokens/s per GPU")
    rows = [
        (
            *(str(getattr(s.layout, name)) for name in ("tp", "pp", "virtual_pp", "cp", "ep", "micro_batch")),
            s.layout.sharding,
            s.layout.recompute,
            format_latency(s.step_s),
            interval_text(s.lower_s, s.upper_s),
            f"{s.tokens_per_s_per_gpu:,.0f}",
            f"{s.memory.total / 1e9:.0f}",
            s.domain,
            binding(s),
        )
        for s in result.steps
    ]
    fitting = f"{result.fitting:,} layouts fit the memory with a margin, {result.priced:,} were priced"
    notes = dict.fromkeys(f"note: {remark}" for s in result.steps for remark in s.remarks)
    return [
        Table((*header, "memory GB", "domain", "binds"), rows, (0, 1, 2, 3, 4, 5, 8, 10, 11)),
        Table.lines(fitting, *notes),
    ]
