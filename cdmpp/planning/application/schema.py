"""The request and the answer of an application's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import BatchCurve, Cost
from cdmpp.compose.request import Budget, Closed, Explained, MaxSteps, Name, PriceRequest, Seconds, Seed, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.errors import FieldError
from cdmpp.planning.application.graph import Application, Engine, Primitive
from cdmpp.planning.application.search import Found, replay_graph, search, whole_bound
from cdmpp.prediction import Prediction
from cdmpp.replay import Timeline, replay

MAX_ENGINES, MAX_PRIMITIVES, MAX_PARTS, MAX_REQUESTS, MAX_ITEMS = 32, 48, 8, 128, 10_000
Items = Annotated[int, Field(ge=1, le=MAX_ITEMS), WholeNumber]


class EngineForm(Closed):
    """An engine: seconds of a batch by its items. ``batch`` items are what primitives bring."""

    name: Name
    curve: BatchCurve
    device: Annotated[Name | None, Field(description="Engines of one device take turns; null: its own.")] = None
    max_items: Annotated[Items | None, Field(description="Of a batch; null: the curve's last size.")] = None


class PartForm(Closed):
    """A part of a primitive that can begin before the others, after the part before it."""

    items: Items
    after: Annotated[list[Name], Field(max_length=MAX_PRIMITIVES)]


class PrimitiveForm(Closed):
    """One step of every request. With ``parts`` (a prefill in two, say) it may be split; they make it up."""

    id: Name
    engine: Name
    items: Items = 1
    after: Annotated[list[Name], Field(max_length=MAX_PRIMITIVES, default_factory=list)]
    parts: Annotated[list[PartForm] | None, Field(min_length=2, max_length=MAX_PARTS)] = None


class ApplicationRequest(Request):
    """How an application's requests go through its engines with the least mean latency."""

    engines: Annotated[list[EngineForm], Field(min_length=1, max_length=MAX_ENGINES)]
    primitives: Annotated[list[PrimitiveForm], Field(min_length=1, max_length=MAX_PRIMITIVES)]
    arrivals_s: Annotated[
        list[Seconds], Field(min_length=1, max_length=MAX_REQUESTS, description="When each request comes.")
    ]
    budget_s: Budget = 1.0
    seed: Seed = 0
    max_steps: MaxSteps = None

    answer_model: ClassVar[type[BaseModel]]

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the engines' curves."""
        return [one for i, e in enumerate(self.engines) for one in e.curve.price_requests(f"engines.{i}.curve")]

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """See :class:`ApplicationAnswer`."""
        left = iter(prices)
        engines: list[Engine] = []
        costs: list[list[Cost]] = []
        for i, form in enumerate(self.engines):
            form.curve.check(f"engines.{i}.curve")
            sizes, points = form.curve.with_prices(left).points()
            costs.append(points)
            most = form.max_items if form.max_items is not None else form.curve.batch[-1]
            seconds = np.array([cost.latency_s for cost in points])
            engines.append(Engine(form.name, form.device or form.name, sizes, seconds, min(most, MAX_ITEMS)))
        _unique([e.name for e in engines], "engines", "name")
        primitives = self._sorted()
        whole, ids = _application(engines, primitives, False)
        split, split_ids = _application(engines, primitives, True)
        if split_ids == ids:
            split = whole
        lowest = whole_bound((whole, split), self.arrivals_s)

        def answer(found: Found) -> dict[str, Any]:
            names = split_ids if found.app is split else ids
            return {
                "mean_latency_s": found.run.mean_s,
                "makespan_s": found.run.makespan_s,
                "latency_s": found.run.latency_s,
                "policy": found.policy,
                "batches": [
                    {
                        "engine": engines[b.engine].name,
                        "start_s": b.start_s,
                        "end_s": b.end_s,
                        "members": [{"request": r, "primitive": names[p]} for r, p in b.members],
                    }
                    for b in found.run.batches
                ],
                "busy": _busy(engines, found),
                "baselines": {name: run.mean_s for name, run in found.baselines.items()},
                "lower_bound_s": lowest,
                "gap": found.run.mean_s / lowest - 1,
                "steps": found.steps,
                "explanation": _explain(engines, costs, found, self.arrivals_s),
            }

        return answer(search(whole, split, self.arrivals_s, watch, self.seed, self.max_steps, answer))

    def _sorted(self) -> list[PrimitiveForm]:
        """Primitives in topological order, checked."""
        _unique([one.id for one in self.primitives], "primitives", "id")
        index = {one.id: i for i, one in enumerate(self.primitives)}
        engines = {engine.name for engine in self.engines}
        for i, one in enumerate(self.primitives):
            if one.engine not in engines:
                raise FieldError(
                    f"primitives.{i}.engine: no engine is called {one.engine!r}", path=f"primitives.{i}.engine"
                )
            if one.parts is not None and sum(part.items for part in one.parts) != one.items:
                raise FieldError(
                    f"primitives.{i}.parts: they have {sum(p.items for p in one.parts)} items of {one.items}",
                    path=f"primitives.{i}.parts",
                )
            for name in _after(one):
                if name not in index:
                    raise FieldError(
                        f"primitives.{i}.after: no primitive is called {name!r}", path=f"primitives.{i}.after"
                    )
        out: list[PrimitiveForm] = []
        done: set[str] = set()
        rest = list(self.primitives)
        while rest:
            ready = [one for one in rest if _after(one) <= done]
            if not ready:
                names = ", ".join(one.id for one in rest)
                raise FieldError(
                    f"primitives: these wait for each other: {names}", path=f"primitives.{index[rest[0].id]}.after"
                )
            out.append(ready[0])
            done.add(ready[0].id)
            rest.remove(ready[0])
        return out


class MemberAnswer(BaseModel):
    """A primitive of a request; ``prefill#0`` is the first part of a split one."""

    model_config = ConfigDict(extra="forbid")

    request: int
    primitive: str


class BatchAnswer(BaseModel):
    """What an engine runs together."""

    model_config = ConfigDict(extra="forbid")

    engine: str
    start_s: float
    end_s: float
    members: list[MemberAnswer]


class ApplicationAnswer(Explained):
    """Baselines, bound and gap are of ``mean_latency_s``."""

    mean_latency_s: float
    makespan_s: float
    latency_s: Annotated[list[float], Field(description="Of each request, in their order.")]
    policy: str
    batches: list[BatchAnswer]
    busy: Annotated[dict[str, float], Field(description="Share of the makespan that each device works.")]
    lower_bound_s: float
    steps: int


ApplicationRequest.answer_model = ApplicationAnswer


def _after(one: PrimitiveForm) -> set[str]:
    return {*one.after, *(name for part in one.parts or [] for name in part.after)}


def _unique(names: Sequence[str], where: str, field: str) -> None:
    for i, name in enumerate(names):
        if names.index(name) != i:
            raise FieldError(f"{where}.{i}.{field}: {name!r} is there twice", path=f"{where}.{i}.{field}")


def _application(
    engines: Sequence[Engine], primitives: Sequence[PrimitiveForm], split: bool
) -> tuple[Application, list[str]]:
    """The graph and its primitives' names."""
    at = {engine.name: i for i, engine in enumerate(engines)}
    last: dict[str, int] = {}  # of each primitive, its last part
    out: list[Primitive] = []
    names: list[str] = []
    for one in primitives:
        parts = one.parts if split and one.parts is not None else None
        for k, (items, after) in enumerate(
            [(part.items, {*one.after, *part.after}) for part in parts] if parts else [(one.items, _after(one))]
        ):
            before = {last[name] for name in after} | ({len(out) - 1} if k else set())
            name = f"{one.id}#{k}" if parts else one.id
            out.append(Primitive(name, at[one.engine], items, tuple(sorted(before))))
            names.append(name)
        last[one.id] = len(out) - 1
    return Application(tuple(engines), tuple(out)), names


def _busy(engines: Sequence[Engine], found: Found) -> dict[str, float]:
    busy = {engine.device: 0.0 for engine in engines}
    for batch in found.run.batches:
        busy[engines[batch.engine].device] += batch.end_s - batch.start_s
    whole = found.run.makespan_s
    return {device: seconds / whole if whole else 0.0 for device, seconds in busy.items()}


def _explain(
    engines: Sequence[Engine], costs: Sequence[Sequence[Cost]], found: Found, arrivals_s: Sequence[float]
) -> list[str]:
    """What the last request waits for: the critical path of the replayed batches, by engine."""
    timeline: Timeline = replay(replay_graph(found.app, found.run, arrivals_s))
    shares = [0.0] * len(engines)
    for i in timeline.critical_path:
        if i >= len(arrivals_s):
            shares[found.run.batches[i - len(arrivals_s)].engine] += float(timeline.duration_s[i])
    out = []
    for share, e in sorted(((share, e) for e, share in enumerate(shares) if share), reverse=True):
        largest = costs[e][-1].largest()
        out.append(
            f"{engines[e].name}: {100 * share / timeline.makespan_s:.0f} % of what the last request waits for"
            + (f": {largest}" if largest else "")
        )
    return out
