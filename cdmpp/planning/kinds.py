"""Every question above single programs, by name: what the command line and the service offer.

A planner is a request model (:class:`cdmpp.compose.Request`) and two functions for people: ``show`` (the
answer in the terminal) and ``draw`` (a picture of it). A new one needs a folder with these and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cdmpp.errors import FieldError

if TYPE_CHECKING:
    from cdmpp.compose.request import Request
    from cdmpp.compose.watch import Watch
    from cdmpp.prediction import Predictor


@dataclass(frozen=True)
class Kind:
    """A question above single programs, and where its parts are; nothing is imported before it is used.

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

    def models(self) -> list[type[Request]]:
        """Its request models."""
        return [load(home) for home in self.requests.values()]

    def read(self, value: Any) -> Request:
        """A request from JSON values.

        Raises
        ------
        FieldError
            It breaks the schema.
        """
        from cdmpp.compose.solve import read_request

        return read_request(self.model_of(value), value)

    def model_of(self, value: Any) -> type[Request]:
        """Which of the forms a value is meant to have; the first where none can be told."""
        homes = list(self.requests.items())
        if not isinstance(value, Mapping):
            raise FieldError("a request is a JSON object", hint="docs/planning.md has examples")
        home = next((home for key, home in homes if key and key in value), homes[0][1])
        found: type[Request] = load(home)
        return found


def load(home: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)


#: One entry each, in the order of docs/planning.md.
_ALL: tuple[Kind, ...] = (
    Kind(
        "replay",
        "/replay",
        "Replay a graph of programs, transfers and given durations (dPRO).",
        {"": "cdmpp.replay.wire:ReplayRequest"},
        "cdmpp.replay.words:show",
        "cdmpp.replay.picture:draw",
    ),
    Kind(
        "data-parallel",
        "/replay/data-parallel",
        "One iteration of data-parallel training at several bucket sizes (PyTorch DDP).",
        {"": "cdmpp.replay.data_parallel_wire:DataParallelRequest"},
        "cdmpp.replay.data_parallel_words:show",
        "cdmpp.replay.data_parallel_words:draw",
    ),
    Kind(
        "simulate",
        "/pipeline/simulate",
        "One training step of a pipeline: time, bubbles and peak memory under a schedule.",
        {"": "cdmpp.emulator.wire:SimulateRequest"},
        "cdmpp.emulator.words:show",
        "cdmpp.emulator.picture:draw",
    ),
    Kind(
        "split",
        "/pipeline/split",
        "Layers to pipeline stages: the best contiguous split over like or unlike devices.",
        {"": "cdmpp.planning.split.wire:SplitRequest"},
        "cdmpp.planning.split.words:show",
        "cdmpp.planning.split.picture:draw",
    ),
    Kind(
        "pipeline",
        "/pipeline/search",
        "A pipeline schedule: several models fused on the same ranks (RLHFuse), or the modules of one "
        "(PipeWeaver).",
        {
            "models": "cdmpp.planning.fused.wire:FusedRequest",
            "modules": "cdmpp.planning.multimodal.wire:MultimodalRequest",
        },
        "cdmpp.planning.pipeline_forms:show",
        "cdmpp.planning.pipeline_forms:draw",
    ),
    Kind(
        "precision",
        "/precision/plan",
        "The type of each operator on unlike devices that train together (QSync).",
        {"": "cdmpp.planning.precision.wire:PrecisionRequest"},
        "cdmpp.planning.precision.words:show",
        "cdmpp.planning.precision.picture:draw",
    ),
    Kind(
        "rl",
        "/rl/plan",
        "Pools, dispatch and streaming of an RL post-training step (StreamRL, RLHFuse).",
        {"": "cdmpp.planning.rl.wire:RlRequest"},
        "cdmpp.planning.rl.words:show",
        "cdmpp.planning.rl.picture:draw",
    ),
    Kind(
        "compress",
        "/comm/compress-plan",
        "Which gradients to compress, and where, over the timeline of a backward pass (ByteComp).",
        {"": "cdmpp.planning.compress.wire:CompressRequest"},
        "cdmpp.planning.compress.words:show",
        "cdmpp.planning.compress.picture:draw",
    ),
    Kind(
        "afd",
        "/afd/size",
        "Attention and FFN instance counts under a time a token (Step-3).",
        {"": "cdmpp.planning.afd.wire:AfdRequest"},
        "cdmpp.planning.afd.words:show",
        "cdmpp.planning.afd.picture:draw",
    ),
    Kind(
        "cluster",
        "/cluster/allocate",
        "Workers for elastic training jobs, with lent inference servers (Aryl).",
        {"": "cdmpp.planning.cluster.wire:ClusterRequest"},
        "cdmpp.planning.cluster.words:show",
        "cdmpp.planning.cluster.picture:draw",
    ),
    Kind(
        "application",
        "/application/plan",
        "An application's primitives on batching engines (Teola).",
        {"": "cdmpp.planning.application.wire:ApplicationRequest"},
        "cdmpp.planning.application.words:show",
        "cdmpp.planning.application.picture:draw",
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def make_plan(
    kind: str, request: Mapping[str, Any], predictor: Predictor | None = None, watch: Watch | None = None
) -> dict[str, Any]:
    """Answer a request given as JSON values: what the command line and the service answer.

    Parameters
    ----------
    kind : str
        A name of :data:`KINDS`: "pipeline", "rl", ...
    request : mapping
        As in docs/planning.md.
    predictor : Predictor, optional
        Prices the programs of the request; may be left out where it gives all its costs.
    watch : Watch, optional
        Hears of progress and can end the search; default: the request's own budget.

    Raises
    ------
    FieldError, InfeasibleError
        ``path`` names the field that is wrong.
    """
    from cdmpp.compose.solve import solve

    if kind not in KINDS:
        raise FieldError(f"no plan is called {kind!r}", hint="one of: " + ", ".join(KINDS))
    return solve(KINDS[kind].read(request), predictor, watch)
