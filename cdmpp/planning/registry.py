"""Every query above single programs, by name: what the command line and the service offer.

A planner is a request model (:class:`cdmpp.compose.Request`) and two functions for people: ``show`` (the
answer in the terminal) and ``draw`` (a picture of it). A new one needs a folder with these and a line here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cdmpp.errors import FieldError

if TYPE_CHECKING:
    from cdmpp.compose.budget import SearchControl
    from cdmpp.compose.solve import AnyRequest
    from cdmpp.prediction import Predictor


@dataclass(frozen=True)
class PlannerSpec:
    """A query above single programs, and where its parts are; nothing is imported before it is used.

    Attributes
    ----------
    name : str
        On the command line (``cdmpp plan NAME``) and of its jobs.
    path : str
        Of its endpoint.
    summary : str
        One line for ``--help`` and the OpenAPI document.
    requests : mapping of str to str
        Field that only this form of the request has -> its model, as ``module:Class``. One entry with the
        key ``""`` where there is only one form.
    show : str
        ``module:function``; ``show(request, answer)`` prints the answer.
    draw : str
        ``module:function``; ``draw(request, answer)`` returns a matplotlib figure.
    """

    name: str
    path: str
    summary: str
    requests: Mapping[str, str]
    show: str
    draw: str

    def models(self) -> list[type[AnyRequest]]:
        """Its request models."""
        return [load(home) for home in self.requests.values()]

    def read(self, value: Any) -> AnyRequest:
        """A request from JSON values.

        Raises
        ------
        FieldError
            It breaks the schema.
        """
        from cdmpp.compose.solve import read_request

        return read_request(self.model_of(value), value)

    def model_of(self, value: Any) -> type[AnyRequest]:
        """Which of the forms a value is meant to have; the first where none can be told."""
        homes = list(self.requests.items())
        if not isinstance(value, Mapping):
            raise FieldError("a request is a JSON object", hint="docs/planning.md has examples")
        home = next((home for key, home in homes if key and key in value), homes[0][1])
        found: type[AnyRequest] = load(home)
        return found


def load(home: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)


#: One entry each, in the order of docs/planning.md.
_ALL: tuple[PlannerSpec, ...] = (
    PlannerSpec(
        "replay",
        "/replay",
        "Replay a graph of programs, transfers and given durations (dPRO).",
        {"": "cdmpp.replay.schema:ReplayRequest"},
        "",
        "cdmpp.replay.view:draw",
    ),
    PlannerSpec(
        "data-parallel",
        "/replay/data-parallel",
        "One iteration of data-parallel training at several bucket sizes (PyTorch DDP).",
        {"": "cdmpp.planning.data_parallel.schema:DataParallelRequest"},
        "",
        "cdmpp.planning.data_parallel.view:draw",
    ),
    PlannerSpec(
        "simulate",
        "/pipeline/simulate",
        "One training step of a pipeline: time, bubbles and peak memory under a schedule.",
        {"": "cdmpp.emulator.schema:SimulateRequest"},
        "",
        "cdmpp.emulator.view:draw",
    ),
    PlannerSpec(
        "split",
        "/pipeline/split",
        "Layers to pipeline stages: the best contiguous split over like or unlike devices.",
        {"": "cdmpp.planning.split.schema:SplitRequest"},
        "",
        "cdmpp.planning.split.view:draw",
    ),
    PlannerSpec(
        "pipeline",
        "/pipeline/search",
        "A pipeline schedule: several models fused on the same ranks (RLHFuse), or the modules of one (PipeWeaver).",
        {
            "models": "cdmpp.planning.fused.schema:FusedRequest",
            "modules": "cdmpp.planning.multimodal.schema:MultimodalRequest",
        },
        "cdmpp.planning.pipeline_forms:show",
        "cdmpp.planning.pipeline_forms:draw",
    ),
    PlannerSpec(
        "precision",
        "/precision/plan",
        "The type of each operator on unlike devices that train together (QSync).",
        {"": "cdmpp.planning.precision.schema:PrecisionRequest"},
        "",
        "cdmpp.planning.precision.view:draw",
    ),
    PlannerSpec(
        "rl",
        "/rl/plan",
        "Pools, dispatch and streaming of an RL post-training step (StreamRL, RLHFuse).",
        {"": "cdmpp.planning.rl.schema:RlRequest"},
        "",
        "cdmpp.planning.rl.view:draw",
    ),
    PlannerSpec(
        "compress",
        "/comm/compress-plan",
        "Which gradients to compress, and where, over the timeline of a backward pass (ByteComp).",
        {"": "cdmpp.planning.compress.schema:CompressRequest"},
        "",
        "cdmpp.planning.compress.view:draw",
    ),
    PlannerSpec(
        "afd",
        "/afd/size",
        "Attention and FFN instance counts under a time a token (Step-3).",
        {"": "cdmpp.planning.afd.schema:AfdRequest"},
        "",
        "cdmpp.planning.afd.view:draw",
    ),
    PlannerSpec(
        "cluster",
        "/cluster/allocate",
        "Workers for elastic training jobs, with lent inference servers (Aryl).",
        {"": "cdmpp.planning.cluster.schema:ClusterRequest"},
        "",
        "cdmpp.planning.cluster.view:draw",
    ),
    PlannerSpec(
        "application",
        "/application/plan",
        "An application's primitives on batching engines (Teola).",
        {"": "cdmpp.planning.application.schema:ApplicationRequest"},
        "",
        "cdmpp.planning.application.view:draw",
    ),
)

PLANNERS: dict[str, PlannerSpec] = {kind.name: kind for kind in _ALL}


def make_plan(
    kind: str,
    request: Mapping[str, Any],
    predictor: Predictor | None = None,
    control: SearchControl | None = None,
    *,
    watch: SearchControl | None = None,
) -> dict[str, Any]:
    """Solve a request given as JSON values; the command line and the service return the same plan.

    Parameters
    ----------
    kind : str
        A name of :data:`PLANNERS`: "pipeline", "rl", ...
    request : mapping
        Described in docs/planning.md.
    predictor : Predictor, optional
        Prices the programs of the request; not needed where the request gives all its costs.
    control : SearchControl, optional
        Receives progress and can end the search; default: the request's own budget.
    watch : SearchControl, optional
        Deprecated name of ``control``.

    Returns
    -------
    dict
        The plan as JSON values.

    Raises
    ------
    FieldError, InfeasibleError
        ``path`` names the wrong field.
    """
    from cdmpp.compose.solve import solve

    if watch is not None:
        warnings.warn("make_plan: watch is now called control", DeprecationWarning, stacklevel=2)
        control = watch
    if kind not in PLANNERS:
        raise FieldError(f"no plan is called {kind!r}", hint="one of: " + ", ".join(PLANNERS))
    return solve(PLANNERS[kind].read(request), predictor, control)
