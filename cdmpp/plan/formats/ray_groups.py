"""Placement groups of Ray: bundles of resources and a strategy, for each pool of a plan."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.afd.schema import AfdPlan
from cdmpp.plan.base.solve import read_request
from cdmpp.plan.formats.layers import check_fills_nodes, tensor_parallel
from cdmpp.plan.formats.registry import Exported, Imported, PlanExporter, RequestImporter
from cdmpp.plan.formats.rl_jobs import MISSING, rl_request
from cdmpp.plan.formats.text import read_json
from cdmpp.plan.rl.schema import RlPlan
from cdmpp.predict.requests.request import MAX_COUNT, Answer, Count, Name, Request, Row

Group = dict[str, Any]


class RayExporter(PlanExporter):
    """Writes ``{"groups": [{"name", "strategy", "bundles"}]}``; a group is ``ray.util.placement_group(**group)``."""

    kinds = ("rl", "afd")

    tp: Count | None = Field(None, description="GPUs of a unit; default: ranks of the request's programs, or 1.")
    node_gpus: Count = Field(8, description="GPUs of a node; a larger unit has several bundles.")
    cpus: Count = Field(1, description="CPUs for each GPU.")
    label: Name | None = Field(
        None, description="Label of the nodes that has the name of their pool; default: any nodes."
    )

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """One group for each pool: a bundle for each unit, or for each node of a larger unit."""
        fields = ("decode", "pools") if isinstance(plan, RlPlan) else ("attention", "ffn")
        tp, notes = tensor_parallel(self.tp, request, *fields)
        if isinstance(plan, RlPlan):
            pools = _rl_pools(plan)
        else:
            assert isinstance(plan, AfdPlan)
            pools = [("attention", "attention", plan.attention_instances), ("ffn", "ffn", plan.ffn_instances)]
            if plan.recommended == "colocated":
                notes.append("the plan recommends colocated instances; the groups are of the disaggregated choice")
        groups = [self._group(role, pool, units, tp) for role, pool, units in pools if units]
        if tp > self.node_gpus:
            notes.append(f"a unit of {tp} GPUs has {tp // self.node_gpus} bundles in a row")
        return Exported(json.dumps({"groups": groups}, indent=1) + "\n", tuple(notes))

    def _group(self, role: str, pool: str, units: int, tp: int) -> Group:
        check_fills_nodes(tp, self.node_gpus)
        gpus = min(tp, self.node_gpus)
        bundles = [{"GPU": gpus, "CPU": gpus * self.cpus} for _ in range(units * tp // gpus)]
        group: Group = {"name": role if role == pool else f"{role}-{pool}", "strategy": "PACK", "bundles": bundles}
        return group if self.label is None else group | {"bundle_label_selector": [{self.label: pool} for _ in bundles]}


def _rl_pools(plan: RlPlan) -> list[tuple[str, str, int]]:
    """Role, pool and units of each group."""
    generation = plan.generation
    if generation.parts:
        pools = [("generation", part.pool, part.instances) for part in generation.parts]
    else:
        pools = [("generation", generation.pool, generation.instances)]
    if plan.training is None:
        return pools
    if plan.training.shared:
        return [("shared", generation.pool, generation.instances)]
    return [*pools, ("training", plan.training.pool, plan.training.units)]


class RayImporter(RequestImporter):
    """Reads the groups that :class:`RayExporter` writes for RL plans."""

    kinds = ("rl",)

    tp: Count | None = Field(None, description="GPUs of a unit; default: those of a bundle.")
    samples: Count = Field(description="Samples of a step.")

    def read(self, text: str, kind: str) -> Imported:
        """Pools with their units."""
        units: dict[str, int] = {}
        for group in _groups(text):
            role = group.name.partition("-")[0]
            if role not in ("generation", "training", "shared") or role in units:
                raise FieldError.at(
                    "groups",
                    f"{group.name!r} is no single group of generation, training or shared",
                    hint="an rl request is read from one group of each role",
                )
            units[role] = group.units(self.tp)
        generation = units.get("generation", units.get("shared"))
        if generation is None:
            raise FieldError.at("groups", "no group generates", hint='name one "generation" or "shared"')
        request = rl_request(
            generation=generation,
            training=None if "shared" in units else units.get("training", 0),
            samples=self.samples,
            prompt_tokens=None,
            max_tokens=None,
        )
        if not request["training_units"]:
            del request["training_units"], request["pools"][1], request["layout"]
        return Imported(request, missing=MISSING)


class _PlacementGroup(Row):
    """A placement group, as the keyword arguments of Ray."""

    name: str
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    bundles: list[dict[str, Annotated[float, Field(ge=0, le=MAX_COUNT)]]] = Field(min_length=1)
    bundle_label_selector: list[dict[str, str]] | None = None

    def units(self, tp: int | None) -> int:
        """Units of ``tp`` GPUs; by default a unit is a bundle.

        Raises FieldError: the GPUs are no multiple of a unit.
        """
        gpus = [bundle.get("GPU", 0.0) for bundle in self.bundles]
        size = tp if tp is not None else max(gpus[0], 1.0)
        if sum(gpus) % size or not sum(gpus):
            raise FieldError.at(
                "groups",
                f"{sum(gpus):g} GPUs of {self.name} are no multiple of {size:g}",
                hint="give the option tp: GPUs of a unit",
            )
        return int(sum(gpus) / size)


class _File(Row):
    groups: list[_PlacementGroup] = Field(min_length=1)


def _groups(text: str) -> list[_PlacementGroup]:
    return read_request(_File, read_json(text, '{"groups": [{"name", "strategy", "bundles"}]}')).groups
