"""Training steps of language models as costs of plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.llm.engines.profile import load_training_engine
from cdmpp.llm.options import MAX_RANKS
from cdmpp.llm.read import read_config
from cdmpp.llm.training import TrainingPlan
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.fields import Closed, Count, DeviceForm, PriceRequest, WholeNumber
from cdmpp.predict.requests.pricing import Cost, PricedProgram
from cdmpp.programs.query_options import Framework
from cdmpp.programs.spec import OperatorSpec

Degree = Annotated[int, Field(ge=1, le=MAX_RANKS), WholeNumber]


class TrainForm(Closed):
    """What a training step needs besides the model's layout (docs/training-steps.md)."""

    passes: Annotated[
        Literal["step", "forward", "backward"],
        Field(
            description="A whole step of as many sequences as the batch; or one pass of a mean layer over a "
            "micro-batch of as many."
        ),
    ] = "step"
    virtual_pp: Annotated[Degree, Field(description="Parts of the model on each stage.")] = 1
    cp: Annotated[Degree, Field(description="Ranks that share each sequence.")] = 1
    sharding: Literal["none", "optimizer", "fsdp"] = "none"
    micro_batch: Annotated[Count, Field(description="Sequences of one pass of a copy, in a whole step.")] = 1
    products: Literal["float8_e4m3", "mxfp8", "nvfp4"] | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    overlap: Literal["none", "gradients", "all"] | None = None
    network: Annotated[
        float | Annotated[str, Field(max_length=64)] | None,
        Field(description="Bytes per second of one device between nodes, or a name; null: 400 Gbit/s."),
    ] = None


def training_plan(
    config: Mapping[str, Any], device: DeviceSpec, form: TrainForm, batch: int, *, layout: Mapping[str, Any]
) -> TrainingPlan:
    """The plan of a step or pass over ``batch`` sequences.

    A batch that the copies do not divide is that of the next larger one, as a framework pads it.

    Parameters
    ----------
    layout : mapping
        ``tp``, ``pp``, ``ep``, ``dp``, ``sequence``, ``dtype`` and ``engine``.

    Raises
    ------
    FieldError
    """
    engine = load_training_engine(layout["engine"] or "megatron", files=False)
    whole = form.passes == "step"
    micro = form.micro_batch if whole else batch
    each = micro * layout["dp"]
    options = {name: layout[name] for name in ("tp", "pp", "ep", "sequence", "dtype")}
    options |= form.model_dump(exclude={"passes"}) | {
        "gpus": layout["tp"] * layout["pp"] * form.cp * layout["dp"],
        "micro_batch": micro,
        "global_batch": -(-batch // each) * each if whole else each,
    }
    # The planner compares memory with its devices.
    return TrainingPlan.of(read_config(config), device, engine, options, check_memory=False)


def training_requests(plan: TrainingPlan, path: str, device: DeviceForm) -> list[PriceRequest]:
    """Programs of a plan."""
    requests = []
    for query in plan.queries:
        assert isinstance(query.program.operator, OperatorSpec)
        form, framework = query.program.operator.canonical(), cast("Framework | None", query.framework)
        requests.append(PriceRequest(path, form, device, protocol=query.protocol, framework=framework))
    return requests


def training_cost(plan: TrainingPlan, form: TrainForm, prices: Iterator[Prediction]) -> Cost:
    """The cost of a step, or of a pass of one layer; takes as many prices as the plan has queries."""
    predictions = list(islice(prices, len(plan.queries)))
    if form.passes == "step":
        step = plan.result("", predictions)
        named = step.breakdown["compute"] | {
            **{f"{name} communication": seconds for name, seconds in step.breakdown["exposed"].items() if seconds},
            **{name: step.breakdown[name] for name in ("bubble", "optimizer", "host")},
        }
        parts = tuple(PricedProgram(name, 1, seconds) for name, seconds in named.items())
        return Cost(step.step_s, step.lower_s, step.upper_s, parts)
    seconds, names = plan.layer_pass(predictions, backward=form.passes == "backward")
    parts = tuple(PricedProgram(name, 1, value) for name, value in names.items())
    point, lower, upper = (float(value) for value in seconds)
    return Cost(point, lower, upper, parts)


def needs_device(path: str) -> FieldError:
    """The error of a training step without a known device."""
    return FieldError.at(path, "a training step needs a known device", hint="give a name or a specification")
