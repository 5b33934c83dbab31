"""All planners by name, as the command line and the service offer them.

A planner is a folder with two modules. ``schema`` has the request (:class:`cdmpp.predict.requests.request.Request`)
and the plan. ``solver`` has ``solve(request, control)``, and ``draw(request, plan)`` for the plot. A new planner needs
these, an entry here, and an example in ``cdmpp_server.plan.routes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cdmpp.errors import FieldError

if TYPE_CHECKING:
    from cdmpp.predict.interface import Predictor
    from cdmpp.predict.requests.budget import SearchControl
    from cdmpp.predict.requests.request import Request


@dataclass(frozen=True)
class PlannerSpec:
    """A planner; its modules are imported on first use.

    Attributes
    ----------
    name : str
        Name on the command line (``cdmpp plan NAME``) and of its jobs.
    path : str
        Path of its endpoint.
    summary : str
        One line for ``--help`` and the OpenAPI document.
    requests : str or mapping of str to str
        Request model as ``module:Class``. A planner with several forms of requests maps a field that only one form
        has to the model of this form.
    """

    name: str
    path: str
    summary: str
    requests: str | Mapping[str, str]

    @property
    def homes(self) -> dict[str, str]:
        """Request models by the field that identifies them."""
        return {"": self.requests} if isinstance(self.requests, str) else dict(self.requests)

    def models(self) -> list[type[Request[Any]]]:
        """Its request models."""
        return [load(home) for home in self.homes.values()]

    def read(self, value: Any) -> Request[Any]:
        """A request from JSON values.

        Raises
        ------
        FieldError
            It breaks the schema.
        """
        from cdmpp.plan.base.solve import read_request

        return read_request(self.model_of(value), value)

    def model_of(self, value: Any) -> type[Request[Any]]:
        """The form of a request; the first one if no field identifies it."""
        if not isinstance(value, Mapping):
            raise FieldError("a request is a JSON object", hint="docs/planning.md has examples")
        homes = self.homes
        home = next((home for field, home in homes.items() if field and field in value), next(iter(homes.values())))
        model: type[Request[Any]] = load(home)
        return model


def load(home: str) -> Any:
    """The object that ``module:name`` names."""
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)


#: In the order of docs/planning.md.
_ALL: tuple[PlannerSpec, ...] = (
    PlannerSpec(
        "replay",
        "/replay",
        "Replay a graph of programs, transfers and given durations (dPRO).",
        "cdmpp.simulate.replay.schema:ReplayRequest",
    ),
    PlannerSpec(
        "data-parallel",
        "/replay/data-parallel",
        "One iteration of data-parallel training at several bucket sizes (PyTorch DDP).",
        "cdmpp.plan.data_parallel.schema:DataParallelRequest",
    ),
    PlannerSpec(
        "training",
        "/training/plan",
        "Layout, gradient buckets and compression of a training step of a language model.",
        "cdmpp.plan.training.schema:TrainingRequest",
    ),
    PlannerSpec(
        "simulate",
        "/pipeline/simulate",
        "One training step of a pipeline: time, bubbles and peak memory under a schedule.",
        "cdmpp.simulate.emulator.schema:SimulateRequest",
    ),
    PlannerSpec(
        "split",
        "/pipeline/split",
        "Split of layers into contiguous pipeline stages, on equal or different devices.",
        "cdmpp.plan.split.schema:SplitRequest",
    ),
    PlannerSpec(
        "pipeline",
        "/pipeline/search",
        "A pipeline schedule: several models fused on the same ranks (RLHFuse), or the modules of one (PipeWeaver).",
        {"models": "cdmpp.plan.fused.schema:FusedRequest", "modules": "cdmpp.plan.multimodal.schema:MultimodalRequest"},
    ),
    PlannerSpec(
        "precision",
        "/precision/plan",
        "The number type of each operator on different devices that train together (QSync).",
        "cdmpp.plan.precision.schema:PrecisionRequest",
    ),
    PlannerSpec(
        "rl",
        "/rl/plan",
        "Pools, dispatch and streaming of an RL post-training step (StreamRL, RLHFuse).",
        "cdmpp.plan.rl.schema:RlRequest",
    ),
    PlannerSpec(
        "compress",
        "/comm/compress-plan",
        "Gradients to compress, and where, over the timeline of a backward pass (ByteComp).",
        "cdmpp.plan.compress.schema:CompressRequest",
    ),
    PlannerSpec(
        "afd",
        "/afd/size",
        "Attention and FFN instance counts within a time per token (Step-3).",
        "cdmpp.plan.afd.schema:AfdRequest",
    ),
    PlannerSpec(
        "cluster",
        "/cluster/allocate",
        "Workers for elastic training jobs, with lent inference servers (Aryl).",
        "cdmpp.plan.cluster.schema:ClusterRequest",
    ),
    PlannerSpec(
        "application",
        "/application/plan",
        "An application's primitives on batching engines (Teola).",
        "cdmpp.plan.application.schema:ApplicationRequest",
    ),
)

PLANNERS: dict[str, PlannerSpec] = {spec.name: spec for spec in _ALL}


def make_plan(
    kind: str, request: Mapping[str, Any], predictor: Predictor | None = None, control: SearchControl | None = None
) -> dict[str, Any]:
    """Solve a request given as JSON values; the command line and the service return the same plan.

    Parameters
    ----------
    kind : str
        A name of :data:`PLANNERS`: "pipeline", "rl", ...
    request : mapping
        Described in docs/planning.md. The ``config`` of a language model may be the path of a ``config.json``.
    predictor : Predictor, optional
        Prices the programs of the request; not needed where the request gives all its costs.
    control : SearchControl, optional
        Receives progress and can end the search; default: the request's own budget.

    Returns
    -------
    dict
        The plan as JSON values.

    Raises
    ------
    FieldError, InfeasibleError
        ``path`` names the wrong field.
    """
    from cdmpp.llm.read import with_configs
    from cdmpp.plan.base.solve import solve_request

    if kind not in PLANNERS:
        raise FieldError(f"no plan is called {kind!r}", hint="one of: " + ", ".join(PLANNERS))
    answer: dict[str, Any] = solve_request(PLANNERS[kind].read(with_configs(request)), predictor, control).to_json()
    return answer
