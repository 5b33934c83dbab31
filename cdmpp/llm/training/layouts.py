"""Priced layouts of a training step that fit the memory, and the simple ones among them: baselines of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.registry import lookup
from cdmpp.errors import DataError, FieldError, InfeasibleError, InvalidDeviceError, UnknownDeviceError
from cdmpp.llm.engines.profile import load_training_engine
from cdmpp.llm.read import read_config
from cdmpp.llm.training.fitting import rough_cost
from cdmpp.llm.training.gradients import GradientPlan
from cdmpp.llm.training.layout import TrainingLayout
from cdmpp.llm.training.links import Links
from cdmpp.llm.training.search import PlanGroup, fitting_layouts

#: Layouts that are priced.
MAX_PRICED = 400


@dataclass(frozen=True)
class PricedLayouts:
    """Priced layouts; positions of the baselines among them by name, and names of those that do not fit."""

    plans: PlanGroup[GradientPlan]
    baselines: dict[str, int]
    missing: list[str]

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        device: str | Mapping[str, Any],
        *,
        memory_bytes: float | None,
        engine: str | Mapping[str, Any],
        given: Mapping[str, Any],
        compressed: Collection[str],
        sizes: Mapping[str, Any],
        types: Mapping[str, Any],
    ) -> PricedLayouts:
        """Layouts of a model on known devices.

        ``memory_bytes``: limit of a device; infinite: none, None: its published capacity. ``given``: values of
        :class:`TrainingLayout` that all layouts have, None for those of any value. ``compressed``: collectives of
        compressed gradients; with some, copies that hold everything are layouts, too. ``sizes``: ``gpus``,
        ``global_batch``, ``sequence``, ``overlap``; ``types``: ``dtype``, ``products``, ``ranks_per_node`` and
        ``network`` of :func:`cdmpp.llm.training_step`. Raises the errors of :func:`fitting_layouts`, and FieldError
        where the device is not known.
        """
        at = "device"
        try:
            spec, at = resolve_device(device, lookup), "engine"
            profile = load_training_engine(engine, files=False)
        except (UnknownDeviceError, InvalidDeviceError, DataError) as error:
            raise FieldError.at(at, error.message, hint=error.hint) from None
        if memory_bytes is not None:
            limit = memory_bytes if math.isfinite(memory_bytes) else None
            spec = spec.model_copy(update={"memory_bytes": limit})
        model = read_config(config, "model")
        fitting = fitting_layouts(model, spec, profile, given, **sizes, **types)
        if compressed and given.get("sharding") is None:
            with suppress(InfeasibleError):
                fitting += fitting_layouts(model, spec, profile, {**given, "sharding": "none"}, **sizes, **types)
        node = Links.of(spec, types["ranks_per_node"], types["network"]).domain_ranks
        simple = _baselines(fitting, node)
        present = {name: layout for name, layout in simple.items() if layout is not None}
        chosen = list(dict.fromkeys([*sorted(fitting, key=rough_cost)[:MAX_PRICED], *present.values()]))
        options: dict[str, Any] = {**types, "engine": profile, "check_memory": False, "shared": {}}
        plans = [
            GradientPlan(model, spec, x, compressed=compressed if x.sharding == "none" else (), **options)
            for x in chosen
        ]
        places = {name: chosen.index(layout) for name, layout in present.items()}
        return cls(PlanGroup(plans, len(fitting)), places, [name for name in simple if name not in present])


def _baselines(fitting: list[TrainingLayout], node: int) -> dict[str, TrainingLayout | None]:
    """Simple layouts by name; None where none fits."""
    widest = max((x.tp for x in fitting if x.tp <= node), default=1)

    def best(allowed: Callable[[TrainingLayout], bool], key: Callable[[TrainingLayout], Any]) -> TrainingLayout | None:
        return min(filter(allowed, fitting), key=key, default=None)

    return {
        "data_parallel_fsdp": best(lambda x: x.tp * x.pp * x.cp * x.ep == 1 and x.sharding == "fsdp", rough_cost),
        "tp_in_the_node": best(lambda x: x.tp == widest > 1 and x.pp * x.cp == 1, rough_cost),
        "smallest_tp_pp": best(
            lambda x: x.cp == x.micro_batch == x.virtual_pp == 1 and x.sharding != "fsdp",
            lambda x: (x.tp * x.pp, x.pp, rough_cost(x)),
        ),
    }
