"""Curves in requests: seconds by batch size, given, predicted, or those of a language model's steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.llm.engines.profile import DEFAULT_ENGINE, EngineProfile, load_engine, load_training_engine
from cdmpp.llm.estimate_plan import prefill_steps
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import TRAINING_BYTES, parameter_count, part_memory
from cdmpp.llm.operators import Decode, Step, StepPart, padded_decode, step_operators
from cdmpp.llm.options import MAX_BATCH, MAX_DEGREE, MAX_RANKS, MAX_TOKENS
from cdmpp.llm.pricing import StepPricing, cost_of_steps, place_of, stand_ins
from cdmpp.llm.read import read_config
from cdmpp.llm.training import TrainingPlan
from cdmpp.predict.curves.template import Grid, Template
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.profiles import Host
from cdmpp.predict.requests.collective_forms import CollectiveTemplate
from cdmpp.predict.requests.fields import (
    MAX_COUNT,
    MAX_SECONDS,
    Closed,
    Count,
    DeviceForm,
    PriceRequest,
    ProgramForm,
    WholeNumber,
    exactly_one,
)
from cdmpp.predict.requests.pricing import Cost, Priced, PricedProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, ProgramFramework, Protocol
from cdmpp.programs.spec import OperatorSpec

TrainingDegree = Annotated[int, Field(ge=1, le=MAX_RANKS), WholeNumber]
TrainingNetwork = Annotated[
    float | Annotated[str, Field(max_length=64)] | None,
    Field(description="Bytes per second of one device between nodes, or a name; null: 400 Gbit/s."),
]
ModelConfig = Annotated[
    dict[str, Any],
    Field(
        min_length=1,
        max_length=1000,
        description="The content of a config.json of Hugging Face. In Python and on the command line also a path.",
    ),
]
EngineForm = Annotated[str | dict[str, Any], Field(max_length=1000, description="Name of a profile, or its fields.")]


class TrainForm(Closed):
    """What a training step needs besides the model's layout (docs/training-steps.md)."""

    passes: Literal["step", "forward", "backward"] = Field(
        "step",
        description="A whole step of as many sequences as the batch; or one pass of a mean layer over a "
        "micro-batch of as many.",
    )
    virtual_pp: TrainingDegree = Field(1, description="Parts of the model on each stage.")
    cp: TrainingDegree = Field(1, description="Ranks that share each sequence.")
    sharding: Literal["none", "optimizer", "fsdp"] = "none"
    micro_batch: Count = Field(1, description="Sequences of one pass of a copy, in a whole step.")
    products: Literal["float8_e4m3", "mxfp8", "nvfp4"] | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    overlap: Literal["none", "gradients", "all"] | None = None
    network: TrainingNetwork = None


def training_plan(
    config: Mapping[str, Any], device: DeviceSpec, form: TrainForm, batch: int, *, layout: Mapping[str, Any]
) -> TrainingPlan:
    """The plan of a step or pass over ``batch`` sequences; a framework pads a batch that the copies do not divide.

    ``layout``: ``tp``, ``pp``, ``ep``, ``dp``, ``sequence``, ``dtype`` and ``engine``.
    """
    engine = load_training_engine(layout["engine"] or "megatron", files=False)
    whole = form.passes == "step"
    micro = form.micro_batch if whole else batch
    step_batch = micro * layout["dp"]
    options = {name: layout[name] for name in ("tp", "pp", "ep", "sequence", "dtype")}
    options |= form.model_dump(exclude={"passes"}) | {
        "gpus": layout["tp"] * layout["pp"] * form.cp * layout["dp"],
        "micro_batch": micro,
        "global_batch": -(-batch // step_batch) * step_batch if whole else step_batch,
    }
    # The planner compares memory with its devices.
    return TrainingPlan.of(read_config(config), device, engine, options, check_memory=False)


def training_requests(queries: Sequence[Query], path: str, device: DeviceForm) -> list[PriceRequest]:
    """Programs of training steps."""
    requests = []
    for query in queries:
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
    point, lower, upper = map(float, seconds)
    return Cost(point, lower, upper, tuple(PricedProgram(name, 1, value) for name, value in names.items()))


#: Batch sizes of a curve that names none, and most batch sizes of a curve.
DEFAULT_BATCHES = tuple(2**i for i in range(9))
MAX_BATCHES = 256

Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE), WholeNumber]


class LanguageModelForm(Closed):
    """A language model whose steps are predicted (docs/llm.md); ``batch`` of the curve counts sequences."""

    config: ModelConfig
    phase: Literal["decode", "prefill", "train"] = Field(
        "decode", description="A step that adds a token to each sequence, one over prompts, or a training step."
    )
    part: Literal["step", "attention", "ffn"] = Field(
        "step", description="The whole step, or the mean over the layers of their attention or feed-forward half."
    )
    past_len: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, description="decode: cached tokens of each sequence."), WholeNumber
    ] = 1024
    input: Annotated[
        int, Field(ge=1, le=MAX_TOKENS, description="prefill, train: tokens of each sequence."), WholeNumber
    ] = 1024
    train: TrainForm = Field(TrainForm(), description="train: passes, recomputation, sharding and further degrees.")
    tp: Degree = Field(1, description="Ranks that share each layer.")
    pp: Degree = Field(1, description="Stages that share the layers.")
    ep: Degree = Field(1, description="Groups that share the experts.")
    dp: Degree | None = Field(
        None, description="Replicas of the attention, which divide the batch; null: max(1, ep // tp)."
    )
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    weights: Literal["float8_e4m3", "int8", "float4_e2m1", "int4", "bfloat16", "float16", "float32"] | None = Field(
        None, description="Type of quantised weights; null: as the configuration says, else `dtype`."
    )
    kv_dtype: Literal["float8_e4m3", "int8", "bfloat16", "float16", "float32"] | None = Field(
        None, description="Type of the cache; null: as the configuration says, else `dtype`."
    )
    engine: str | dict[str, Any] | None = Field(
        None,
        max_length=1000,
        description="What the serving engine adds to its kernels: the name of a profile, or its fields (on the "
        f"command line also a file). null: the current profile of `framework`, else {DEFAULT_ENGINE}.",
    )
    cuda_graph: bool = Field(True, description="Decode steps may be captured graphs.")
    device: DeviceForm | None = Field(None, description="In place of the curve's `device`.")
    framework: ProgramFramework | None = Field(
        None, description="In place of the curve's `framework`; null: that of `engine`."
    )

    @model_validator(mode="after")
    def _of_phase(self) -> Self:
        if self.phase == "train" and self.part != "step":
            raise ValueError("a training step has no part: use train.passes for one layer")
        if self.phase != "train" and "train" in self.model_fields_set:
            raise ValueError('train is for "phase": "train"')
        return self

    def training_plan(self, batch: int, path: str, device: DeviceForm | None) -> TrainingPlan:
        """The training step, or pass of a layer, over ``batch`` sequences."""
        names = ("tp", "pp", "ep", "dtype", "engine")
        layout = {name: getattr(self, name) for name in names} | {"sequence": self.input, "dp": self.dp or 1}
        try:
            return training_plan(self.config, known_device(self.device or device), self.train, batch, layout=layout)
        except FieldError as error:
            raise FieldError(f"{path}.{error.message}", path=f"{path}.{error.path}", hint=error.hint) from None

    def profile(self, framework: str | None) -> EngineProfile:
        """The engine; ``framework`` is that of the curve. The half of a layer has no host time of its own."""
        profile = load_engine(self.engine, framework, files=False)
        return profile if self.part == "step" else profile.model_copy(update={"host": Host()})

    def steps(
        self, batches: Sequence[Count], path: str, framework: str | None, device: DeviceForm | None = None
    ) -> list[Runs]:
        """The steps of each batch size with how often each counts: one, or the chunks of a prefill.

        Raises FieldError: the configuration or the layout is wrong; ``path``: place of this form in the request.
        """
        if len(batches) > MAX_BATCHES or max(batches) > MAX_BATCH:
            raise FieldError.at(
                path,
                f"a language model has at most {MAX_BATCHES} batch sizes of at most {MAX_BATCH} sequences",
                hint="give fewer or smaller sizes in batch",
            )
        try:
            return [self._runs(batch, self.profile(framework), _known(self.device or device)) for batch in batches]
        except FieldError as error:
            raise FieldError(f"{path}.{error.message}", path=f"{path}.{error.path}", hint=error.hint) from None

    @property
    def tokens(self) -> int:
        """Tokens of each sequence when the step ends."""
        return self.past_len + 1 if self.phase == "decode" else self.input

    def _runs(self, batch: int, profile: EngineProfile, device: DeviceSpec | None) -> Runs:
        config, layout = read_config(self.config), self.layout
        types = Types.of(config, self.dtype, self.weights, self.kv_dtype, device, profile.kv_dtype)

        def parts_of(step: Step) -> list[StepPart]:
            only = None if self.part == "step" else self.part
            return step_operators(config, layout, step, **types.stated(), device=device, only=only)

        def pricing(step: Step, parts: list[StepPart]) -> StepPricing:
            return StepPricing.of_step(profile, step, layout, parts, self.cuda_graph)

        if self.phase == "decode":
            decode = Decode(batch, self.past_len)
            runs = [(pricing(decode, padded_decode(decode, parts_of)), 1.0)]
        else:
            budget = None if profile.token_budget is None else profile.token_budget * layout.dp
            chunks = prefill_steps([self.input] * batch, budget)
            runs = [(pricing(step, parts_of(step)), often) for step, often in chunks.items()]
        if device is None:
            return runs
        place = place_of(config, device, layout, types, batch=batch, tokens=self.tokens)
        placed, *_ = profile.at(place, *stand_ins(runs[0][0].parts))
        return [(replace(step, engine=placed), often) for step, often in runs]

    @property
    def layout(self) -> Layout:
        """Degrees of parallelism."""
        return Layout(self.tp, self.pp, self.ep, self.dp)

    def memory(self, tokens: int | None = None) -> tuple[float, float]:
        """Bytes on each device of one instance: weights, and cache of one sequence of ``tokens`` in each replica."""
        config = read_config(self.config)
        if self.phase == "train":
            return TRAINING_BYTES * parameter_count(config) / self.layout.gpus, 0.0
        tokens = self.tokens if tokens is None else tokens
        only = None if self.part == "step" else self.part
        usual = self.profile(self.framework).kv_dtype
        types = Types.of(config, self.dtype, self.weights, self.kv_dtype, None, usual)
        return part_memory(config, self.layout, types, only, tokens)

    def price_requests(
        self, batches: Sequence[Count], path: str, device: DeviceForm, framework: str | None
    ) -> list[PriceRequest]:
        """Programs of all steps, those of the first batch size first."""
        if self.phase == "train":
            plans = [self.training_plan(batch, path, device) for batch in batches]
            return [
                request for plan in plans for request in training_requests(plan.queries, path, self.device or device)
            ]
        return [
            PriceRequest(path, program.canonical(), device, protocol=protocol, framework=kernels)
            for runs in self.steps(batches, path, framework, device)
            for step, _ in runs
            for program, protocol, kernels in step.programs
        ]

    def priced(
        self, batches: Sequence[Count], prices: Iterator[Prediction], framework: str | None, device: DeviceForm | None
    ) -> list[Cost]:
        """The cost of each batch size, divided by the layers for a part of a layer."""
        if self.phase == "train":
            return [training_cost(self.training_plan(batch, "llm", device), self.train, prices) for batch in batches]
        divisor = 1.0 if self.part == "step" else float(read_config(self.config).layers)
        return [
            cost_of_steps(
                [(step.priced([next(prices) for _ in step.programs]), often) for step, often in runs], divisor
            )
            for runs in self.steps(batches, "llm", framework, device)
        ]


#: Steps of one batch size, and how often each counts.
Runs = list[tuple[StepPricing, float]]


def _known(device: DeviceForm | None) -> DeviceSpec | None:
    """The specification of a device, where it is one or its name is known."""
    try:
        return None if device is None else resolve_device(device, lookup)
    except CdmppError:
        return None


def known_device(device: DeviceForm | None) -> DeviceSpec:
    """The specification of a device; raises FieldError where it is not known."""
    if (spec := _known(device)) is None:
        raise FieldError.at("device", "a training step needs a known device", hint="give a name or a specification")
    return spec


class TemplateWork(Closed):
    """An operator with expressions over ``batch`` ("m": "batch*128"), and how often it runs."""

    program: ProgramForm
    count: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] = 1


class BatchCurve(Priced):
    """Seconds by batch size: given, or predicted from programs whose sizes depend on ``batch``, or a language model.

    Exactly one of ``seconds``, ``programs``, ``collective`` and ``llm``; ``device`` comes with all but ``seconds``.
    """

    batch: list[Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber]] = Field(
        min_length=1, description="Batch sizes, growing. With `llm`, the default is 1, 2, 4, ..., 256."
    )
    seconds: list[Annotated[float, Field(gt=0, le=MAX_SECONDS)]] | None = Field(
        None, description="Seconds at each batch size."
    )
    programs: list[TemplateWork] | None = Field(
        None, description='Instead of seconds: operators with expressions over "batch", predicted and summed.'
    )
    collective: CollectiveTemplate | None = Field(
        None, description='Instead of programs; its bytes may be an expression over "batch".'
    )
    llm: LanguageModelForm | None = Field(None, description="Instead of programs: a language model (docs/llm.md).")
    device: DeviceForm | None = None
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None

    _costs: list[Cost] | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _of_language_model(cls, fields: Any) -> Any:
        """Device and framework of ``llm`` are those of the curve."""
        if not isinstance(fields, dict) or not isinstance(llm := fields.get("llm"), dict):
            return fields
        stated = {name: llm[name] for name in ("device", "framework") if llm.get(name) is not None}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"batch": list(DEFAULT_BATCHES), **stated, **given}

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "seconds", "programs", "collective", "llm")

    @property
    def is_predicted(self) -> bool:
        """Whether a predictor gives the seconds."""
        return self.seconds is None

    def program_count(self) -> int:
        """Number of programs to price, at all batch sizes; raises FieldError for a wrong configuration."""
        if self.llm is not None:
            return len(self.llm.price_requests(self.batch, "llm", self.device or "", self.framework))
        return len(self.batch) * len(self.works or ())

    @property
    def works(self) -> list[TemplateWork] | None:
        """Programs by template; None where seconds or a language model are given."""
        return self.programs if self.collective is None else [TemplateWork(program=self.collective.program())]

    def check(self, path: str) -> None:
        """Raise :class:`FieldError` where the parts contradict each other."""
        if any(b <= a for a, b in zip(self.batch, self.batch[1:], strict=False)):
            raise FieldError.at(f"{path}.batch", "sizes must grow")
        if self.seconds is not None and len(self.seconds) != len(self.batch):
            raise FieldError.at(f"{path}.seconds", f"{len(self.seconds)} values for {len(self.batch)} batch sizes")
        if self.is_predicted and self.device is None:
            raise FieldError.at(f"{path}.device", "programs need a device")

    def price_requests(self, path: str) -> list[PriceRequest]:
        """Programs at each batch size, sizes outermost; none where seconds are given."""
        self.check(path)
        if not self.is_predicted:
            return []
        assert self.device is not None
        if self.llm is not None:
            return self.llm.price_requests(self.batch, f"{path}.llm", self.device, self.framework)
        assert self.works is not None
        field = f"{path}.{'programs' if self.collective is None else 'collective'}"
        templates = [Template(work.program, work.count) for work in self.works]
        try:
            grid = Grid(templates, {"batch": self.batch})
            made = [grid.programs(at, self.backend or "library") for at in grid.points()]
        except CdmppError as error:
            raise FieldError.at(field, error.message, hint=error.hint) from None
        out: list[PriceRequest] = []
        for point in made:
            if isinstance(point, CdmppError):
                raise FieldError.at(field, point.message, hint=point.hint)
            for i, (program, _) in enumerate(point):
                assert program.operator is not None
                form: dict[str, Any] = program.operator.canonical()
                place = field if self.collective is not None else f"{field}.{i}"
                out.append(PriceRequest(place, form, self.device, self.backend, self.protocol, self.framework))
        return out

    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A copy with its costs."""
        filled = self.model_copy()
        if self.llm is not None:
            filled._costs = self.llm.priced(self.batch, prices, self.framework, self.device)
        elif self.works is not None:
            counts = [work.count for work in self.works]
            filled._costs = [Cost.of(counts, [next(prices) for _ in counts]) for _ in self.batch]
        return filled

    def points(self) -> tuple[np.ndarray, list[Cost]]:
        """Batch sizes (float64, growing) and the cost at each; only after :meth:`with_prices`."""
        costs = self._costs if self.seconds is None else [Cost.given(s) for s in self.seconds]
        assert costs is not None, "not priced"
        return np.array(self.batch, dtype=np.float64), costs


def interpolate(sizes: np.ndarray, seconds: np.ndarray, at: np.ndarray | float) -> Any:
    """Seconds at any batch size: linear between the points, proportional beyond the last.

    Below the first point the seconds of the first point hold: a smaller batch is not assumed to be faster.
    """
    inside = np.interp(at, sizes, seconds)
    return np.where(np.asarray(at) > sizes[-1], seconds[-1] * np.asarray(at) / sizes[-1], inside)
