"""Pools of an RL plan in GPUs and nodes, as RL frameworks configure them, and requests from such pools."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.formats import Exporter, Imported, Importer
from cdmpp.plan.formats.sizes import nodes, tensor_parallel
from cdmpp.plan.rl.plan_schema import RlPlan
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.predict.requests.request import Answer, Count, DeviceForm, Request


@dataclass(frozen=True)
class Pool:
    """Equal units: generation instances or data-parallel training units.

    Attributes
    ----------
    name : str
    units, unit_gpus : int
        Units; GPUs of each.
    nodes, node_gpus : int
        Nodes; GPUs of each.
    """

    name: str
    units: int
    unit_gpus: int
    nodes: int
    node_gpus: int


@dataclass(frozen=True)
class Pools:
    """Pools of a plan.

    Attributes
    ----------
    generation, training : Pool
        The same pool where the plan is shared.
    shared : bool
        The units generate, then train.
    tp : int
        GPUs of a generation instance.
    notes : tuple of str
    """

    generation: Pool
    training: Pool
    shared: bool
    tp: int
    notes: tuple[str, ...]


class RlExporter(Exporter, ABC):
    """Base of the formats of RL frameworks."""

    kinds = ("rl",)

    tp: Annotated[Count | None, Field(description="GPUs of a unit; default: ranks of the decode programs, or 1.")] = (
        None
    )
    node_gpus: Annotated[Count, Field(description="GPUs of a node.")] = 8
    samples_per_prompt: Annotated[Count, Field(description="Responses to one prompt.")] = 1

    def pools(self, request: Request[Any], plan: Answer) -> tuple[RlRequest, RlPlan, Pools]:
        """The pools of a plan.

        Raises
        ------
        FieldError
            Several pools generate, or nothing trains.
        """
        assert isinstance(request, RlRequest) and isinstance(plan, RlPlan)
        if plan.generation.parts:
            raise FieldError(
                f"generation: {len(plan.generation.parts)} pools generate at once ({plan.generation.pool}); the format "
                "has one rollout pool",
                path="mix_pools",
                hint="plan without mix_pools, or use the format ray",
            )
        if plan.training is None:
            raise FieldError(
                "training: the plan only generates, and the format has a trainer",
                path="training",
                hint="give the training cost, or use the format ray",
            )
        tp, notes = (self.tp, []) if self.tp is not None else tensor_parallel(request, "decode", "pools")
        generation = self._pool(plan.generation.pool, plan.generation.instances, tp)
        shared = plan.training.shared
        training = generation if shared else self._pool(plan.training.pool, plan.training.units, tp)
        notes += [note for pool in {generation, training} if (note := self._spread(pool))]
        pools = Pools(generation, training, shared, tp, (*sorted(notes), *_unsaid(request, plan)))
        return request, plan, pools

    def _pool(self, name: str, units: int, tp: int) -> Pool:
        return Pool(name, units, tp, *nodes(units, tp, self.node_gpus))

    def _spread(self, pool: Pool) -> str:
        """A note where equal nodes cannot be filled."""
        if pool.nodes <= -(-pool.units * pool.unit_gpus // self.node_gpus):
            return ""
        return (
            f"{pool.units} units of {pool.unit_gpus} GPUs in pool {pool.name!r} take {pool.nodes} nodes of "
            f"{pool.node_gpus} GPUs: all nodes have equally many"
        )

    def prompts(self, request: RlRequest) -> int:
        """Prompts of a step.

        Raises
        ------
        FieldError
            The responses to a prompt do not divide the samples of a step.
        """
        if request.samples_per_step % self.samples_per_prompt:
            raise FieldError(
                f"samples_per_prompt: {self.samples_per_prompt} does not divide the {request.samples_per_step} samples "
                "of a step",
                path="samples_per_prompt",
                hint="choose a divisor",
            )
        return request.samples_per_step // self.samples_per_prompt


class RlImporter(Importer, ABC):
    """Base of the configurations of RL frameworks."""

    kinds = ("rl",)

    model: Annotated[
        str | None,
        Field(description="config.json of Hugging Face: the decode curve is predicted; default: the file's model."),
    ] = None
    device: Annotated[DeviceForm | None, Field(description="Device of the pools, for the decode curve.")] = None

    def imported(
        self, request: dict[str, Any], tp: int, model: Any, ignored: tuple[str, ...], notes: Sequence[str]
    ) -> Imported:
        """The request with the decode curve of a language model, where model and device are known.

        Parameters
        ----------
        request : dict
            Of :func:`rl_request`.
        tp : int
            GPUs of a generation instance.
        model : str or None
            Model of the file: used where it is a local folder with a ``config.json``.
        ignored : tuple of str
        notes : sequence of str
        """
        path = Path(self.model) if self.model is not None else Path(str(model)) / "config.json"
        if self.device is None or (self.model is None and not (model and path.is_file())):
            more = ["options model and device give the decode curve of a language model"]
            return Imported(request, ignored, (*notes, *more), MISSING)
        context = request.get("prompt_tokens", 0) + request.get("lengths", {}).get("max_tokens", 0) // 2
        curve = {"config": str(path), "past_len": context, "tp": tp}
        pools = [pool | {"device": self.device} for pool in request["pools"]]
        more = [f"decoding is priced with {context} cached tokens of each sample: the prompt and half a response"]
        return Imported(request | {"pools": pools, "decode": {"llm": curve}}, ignored, (*notes, *more), MISSING)


def _unsaid(request: RlRequest, plan: RlPlan) -> list[str]:
    """Parts of a plan that no RL framework's configuration has."""
    notes = []
    if plan.tail_split.used:
        tail, regular = plan.tail_split.tail, plan.tail_split.regular
        notes.append(
            f"the tail split is not in the file: {tail.samples} samples on {tail.instances} instances, "
            f"{regular.samples} on {regular.instances}"
        )
    if plan.streaming is not None and plan.streaming.batches > 1:
        notes.append(f"streaming is not in the file: training starts on each of {plan.streaming.batches} batches")
    if plan.migration is not None and plan.migration.applied:
        notes.append(f"migration is not in the file: at {plan.migration.threshold} unfinished samples")
    devices = {pool.name: pool.device for pool in request.pools if pool.device is not None}
    if len({str(device) for device in devices.values()}) > 1:
        each = ", ".join(f"{name}: {device}" for name, device in devices.items())
        notes.append(f"the file does not say which nodes a pool has ({each})")
    return notes


def rl_request(
    *,
    generation: int,
    training: int | None,
    samples: int,
    prompt_tokens: int | None,
    max_tokens: int | None,
    max_batch: int | None = None,
    staleness: int | None = None,
) -> dict[str, Any]:
    """A request with the sizes of a job; lengths, costs and weights are missing.

    Parameters
    ----------
    generation : int
        Generation instances.
    training : int or None
        Training units of another pool; None: the generation instances train too.
    samples : int
        Samples of a step.
    prompt_tokens, max_tokens : int or None
        Tokens of a prompt; most tokens of a response.
    max_batch : int, optional
        Most samples of an instance at once.
    staleness : int, optional
        Steps by which weights may be behind.
    """
    if training is None:
        pools: list[dict[str, Any]] = [{"name": "shared", "units": generation}]
        layout = "shared"
    else:
        pools = [
            {"name": "rollout", "units": generation, "stages": ["generation"]},
            {"name": "trainer", "units": training, "stages": ["training"]},
        ]
        layout = "separate"
    request: dict[str, Any] = {
        "samples_per_step": samples,
        "pools": pools,
        "layout": layout,
        "generation_units": generation,
        "training_units": generation if training is None else training,
    }
    optional = {
        "prompt_tokens": prompt_tokens,
        "lengths": None if max_tokens is None else {"max_tokens": max_tokens},
        "kv": None if max_batch is None else {"max_batch": max_batch},
        "staleness": staleness,
    }
    return request | {name: value for name, value in optional.items() if value is not None}


#: Fields that no configuration of an RL framework has.
MISSING = ("lengths.quantiles", "decode", "training")
