"""Request and plan of an application on batching engines."""

from __future__ import annotations

from pydantic import Field, computed_field

from cdmpp.errors import FieldError
from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.base.solve import check_unique
from cdmpp.plan.base.task_graph import sort_topologically
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.memory import UNLIMITED_BYTES, check_fits, memory_limit
from cdmpp.predict.requests.request import Budget, Closed, Count, MaxSteps, Name, Plan, Request, Row, Seconds, Seed
from cdmpp.utils.units import format_latency


class EngineForm(Closed):
    """An engine. ``batch`` of the curve counts items of primitives."""

    name: Name
    curve: BatchCurve = Field(description="Seconds of a batch by its number of items.")
    device: Name | None = Field(
        None, description="Engines on one device take turns; null: a device for this engine alone."
    )
    max_items: Count | None = Field(None, description="Largest batch; null: the last size of the curve.")

    @property
    def largest_batch(self) -> int:
        """Most items of a batch."""
        return self.max_items or self.curve.batch[-1]


class PartForm(Closed):
    """A part of a primitive that can start earlier than the rest; it follows the part before it."""

    items: Count
    after: list[Name]


class PrimitiveForm(Closed):
    """One step of every request, which may be split into its ``parts`` (such as a prefill in two)."""

    id: Name
    engine: Name
    items: Count = 1
    after: list[Name] = Field(default_factory=list)
    parts: list[PartForm] | None = Field(None, min_length=2)

    @property
    def predecessors(self) -> set[str]:
        """Primitives that this one or one of its parts waits for."""
        return {*self.after, *(name for part in self.parts or [] for name in part.after)}


class Member(Row):
    """A primitive of a request; ``prefill#0`` is the first part of a split one."""

    request: int
    primitive: str


class BatchPlan(Row):
    """Primitives that an engine runs together."""

    engine: str
    start_s: float
    end_s: float
    members: list[Member]


class ApplicationPlan(Plan):
    """Baselines, bound and gap refer to ``mean_latency_s``."""

    objective_field = "mean_latency_s"

    mean_latency_s: float
    makespan_s: float
    latency_s: list[float] = Field(description="One for each request, in their order.")
    policy: str
    online_s: float = Field(description="Mean latency of the best policy found that learns arrivals as they come.")
    known_s: float = Field(description="Mean latency of the best run found with all arrivals known.")
    batches: list[BatchPlan]
    busy: dict[str, float] = Field(description="Share of the makespan that each device works.")
    lower_bound_s: float
    steps: int

    @computed_field(description="online_s over known_s, less one: the price of not knowing the arrivals.")  # type: ignore[prop-decorator]
    @property
    def online_gap(self) -> float:
        """Price of not knowing the arrivals; 0 where no request takes time."""
        return self.online_s / self.known_s - 1 if self.known_s > 0 else 0.0

    def headline(self) -> str:
        """The policy and its latency."""
        return (
            f"{self.policy}: mean latency {format_latency(self.mean_latency_s)} of {len(self.latency_s)} requests; "
            f"the last one ends after {format_latency(self.makespan_s)}"
        )

    def tables(self) -> list[Table]:
        """The use of the devices, the baselines."""
        busy = [(device, f"{100 * share:.0f} %") for device, share in self.busy.items()]
        return [Table(("device", "busy"), busy, right=(1,)), self.baseline_table(), Table.lines(*self.explanation[1:])]


class ApplicationRequest(Request[ApplicationPlan]):
    """How requests of an application pass through its engines with the least mean latency."""

    engines: list[EngineForm] = Field(min_length=1)
    primitives: list[PrimitiveForm] = Field(min_length=1)
    arrivals_s: list[Seconds] = Field(min_length=1, description="Arrival of each request.")
    knows_arrivals: bool = Field(
        False, description="The plan is that of engines that know all arrivals; false: they learn them as they come."
    )
    budget_s: Budget = 1.0
    seed: Seed = 0
    max_steps: MaxSteps = None

    def sizes(self) -> dict[str, int]:
        """Engines, primitives with their parts, requests, and items of a batch."""
        batches = [engine.largest_batch for engine in self.engines]
        return {
            "engines": len(self.engines),
            "primitives": sum(len(primitive.parts or (0,)) for primitive in self.primitives),
            "requests": len(self.arrivals_s),
            "items": max(*batches, *(primitive.items for primitive in self.primitives)),
        }

    def check(self) -> None:
        """Raise FieldError where names are not unique or unknown, parts do not add up, or there is a cycle."""
        check_unique([engine.name for engine in self.engines], "engines")
        check_unique([primitive.id for primitive in self.primitives], "primitives", "id")
        ids = {primitive.id for primitive in self.primitives}
        engines = {engine.name for engine in self.engines}
        for i, primitive in enumerate(self.primitives):
            path = f"primitives.{i}"
            if primitive.engine not in engines:
                raise FieldError.at(f"{path}.engine", f"no engine is called {primitive.engine!r}")
            items = sum(part.items for part in primitive.parts or [])
            if primitive.parts is not None and items != primitive.items:
                raise FieldError.at(f"{path}.parts", f"they have {items} items, the primitive has {primitive.items}")
            unknown = sorted(primitive.predecessors - ids)
            if unknown:
                raise FieldError.at(f"{path}.after", f"no primitive is called {unknown[0]!r}")
        self.sorted_primitives()
        for device in dict.fromkeys(engine.device or engine.name for engine in self.engines):
            self._check_memory(device)

    def unchecked_memory(self) -> list[str]:
        """Engines whose memory need or limit is not known."""
        others = [engine.name for engine in self.engines if engine.curve.llm is None]
        models = [engine for engine in self.engines if engine.curve.llm is not None]
        unknown = [e.name for e in models if memory_limit(None, [e.curve.device], ignore=False) == UNLIMITED_BYTES]
        reasons = {"are no language models": others, "have a device of unknown capacity": unknown}
        return [f"engines {', '.join(names)} {reason}" for reason, names in reasons.items() if names]

    def _check_memory(self, device: str) -> None:
        """Raise InfeasibleError where the language models on a device do not fit with their largest batches.

        Engines of the same model and layout share its weights.
        """
        weights: dict[str, float] = {}
        caches, devices, path = 0.0, [], ""
        for i, engine in enumerate(self.engines):
            model = engine.curve.llm
            if model is None or (engine.device or engine.name) != device:
                continue
            path = f"engines.{i}"
            model.steps((1,), f"{path}.curve.llm", model.framework)
            held, cache = model.memory()
            other_fields = {"phase", "past_len", "input", "cuda_graph", "engine", "framework"}
            weights[model.model_dump_json(exclude=other_fields)] = held
            caches += cache * -(-engine.largest_batch // model.layout.dp)
            devices.append(engine.curve.device)
        limit, held = memory_limit(None, devices, self.ignore_memory), sum(weights.values())
        room = limit - held
        share = "no batch fits beside the weights" if room <= 0 else f"{room / (caches or 1.0):.3g} of the batches fit"
        check_fits(
            f"{device!r} (language models with the caches of their largest batches)",
            held + caches,
            limit,
            path=path,
            fits=f"{share}: reduce max_items, spread the model over more devices (tp, pp), or use larger ones",
        )

    def sorted_primitives(self) -> list[PrimitiveForm]:
        """Primitives in topological order. Raises FieldError: they wait for each other."""
        number = {primitive.id: i for i, primitive in enumerate(self.primitives)}
        order, cycle = sort_topologically([map(number.__getitem__, p.predecessors) for p in self.primitives])
        if cycle:
            waiting = [i for i in range(len(self.primitives)) if i not in order]
            names = ", ".join(self.primitives[i].id for i in waiting)
            message = f"primitives: these wait for each other: {names}"
            raise FieldError(message, path=f"primitives.{waiting[0]}.after")
        return [self.primitives[i] for i in order]
