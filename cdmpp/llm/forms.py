"""A language model as a field of requests, and the programs and costs of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.llm.engines.profile import DEFAULT_ENGINE, EngineProfile, load_engine, load_training_engine
from cdmpp.llm.estimate_plan import prefill_steps
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import TRAINING_BYTES, parameter_count, part_memory
from cdmpp.llm.operators import Decode, Step, StepPart, padded_decode, step_operators
from cdmpp.llm.options import MAX_BATCH, MAX_DEGREE, MAX_RANKS, MAX_TOKENS, Overlap, Recompute, Sharding
from cdmpp.llm.pricing import StepPricing, cost_of_steps, place_of, stand_ins
from cdmpp.llm.read import read_config
from cdmpp.llm.training import TrainingPlan, TrainingStep
from cdmpp.llm.training.layout import TrainingLayout
from cdmpp.llm.training.memory import TrainingMemory
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.profiles import Host
from cdmpp.predict.requests.fields import Closed, Count, DeviceForm, PriceRequest, Row, WholeNumber
from cdmpp.predict.requests.pricing import Cost, PricedProgram
from cdmpp.programs.query_options import Framework, ProgramFramework
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


class LayoutForm(Closed):
    """Values that all layouts have; those left out are searched."""

    tp: TrainingDegree | None = Field(None, description="Ranks that share each layer.")
    pp: TrainingDegree | None = Field(None, description="Stages that share the layers.")
    virtual_pp: TrainingDegree | None = Field(None, description="Parts of the model on each stage.")
    cp: TrainingDegree | None = Field(None, description="Ranks that share each sequence.")
    ep: TrainingDegree | None = Field(None, description="Ranks that share the experts.")
    micro_batch: TrainingDegree | None = Field(None, description="Sequences of one pass of a copy.")
    recompute: Recompute | None = None
    sharding: Sharding | None = Field(
        None, description="null: optimizer, fsdp without stages, and none with compressors."
    )


class LayoutRow(Row):
    """TrainingDegrees of parallelism and batch of a step."""

    tp: int
    pp: int
    virtual_pp: int
    cp: int
    ep: int
    dp: int = Field(description="Copies that divide the batch.")
    sharding: Sharding
    recompute: Recompute
    micro_batch: int
    micro_batches: int = Field(description="Passes of one copy.")
    schedule: Literal["none", "1f1b", "interleaved"]
    layers: list[int] = Field(description="Layers of each stage.")
    overlap: Overlap

    @classmethod
    def of(cls, step: TrainingStep) -> LayoutRow:
        """The layout of a step."""
        x = step.layout
        schedule = "none" if x.pp == 1 else "1f1b" if x.virtual_pp == 1 else "interleaved"
        return cls(**{name: getattr(x, name) for name in cls._own()}, schedule=schedule, layers=list(step.layers))

    @classmethod
    def _own(cls) -> list[str]:
        return [name for name in cls.model_fields if name not in ("schedule", "layers")]

    def is_of(self, layout: TrainingLayout) -> bool:
        """Whether this is a layout."""
        return all(getattr(layout, name) == getattr(self, name) for name in self._own())

    def __str__(self) -> str:
        names = ("tp", "pp", "virtual_pp", "cp", "ep", "dp")
        shown = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return ", ".join([*shown, f"micro-batch {self.micro_batch}", self.sharding, f"recompute {self.recompute}"])


class MemoryRow(Row):
    """Bytes of the rank that holds most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    total: int
    limit: float | None = Field(description="null: not published, or ignored.")

    @classmethod
    def of(cls, memory: TrainingMemory) -> MemoryRow:
        """The memory of a step."""
        parts = memory.to_dict()
        return cls(limit=parts.pop("device"), **parts)


def training_requests(queries: Iterable[Query], path: str, device: DeviceForm) -> list[PriceRequest]:
    """Programs of queries of a training plan."""
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
        parts = tuple(PricedProgram(name, 1, seconds) for name, seconds in step.parts.items())
        return Cost(step.step_s, step.lower_s, step.upper_s, parts)
    seconds, names = plan.layer_pass(predictions, backward=form.passes == "backward")
    parts = tuple(PricedProgram(name, 1, value) for name, value in names.items())
    point, lower, upper = (float(value) for value in seconds)
    return Cost(point, lower, upper, parts)


#: Most batch sizes of a curve.
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
        """The training step, or pass of a layer, over ``batch`` sequences; FieldError where there is none.

        A batch that the copies do not divide is that of the next larger one, as a framework pads it.
        """
        form, dp, whole = self.train, self.dp or 1, self.train.passes == "step"
        micro = form.micro_batch if whole else batch
        options = {name: getattr(self, name) for name in ("tp", "pp", "ep", "dtype")} | {"sequence": self.input}
        options |= form.model_dump(exclude={"passes"}) | {"gpus": self.tp * self.pp * form.cp * dp}
        options |= {"micro_batch": micro, "global_batch": micro * dp * (-(-batch // (micro * dp)) if whole else 1)}
        try:
            spec, engine = known_device(self.device or device), self.engine or "megatron"
            profile = load_training_engine(engine, files=False)
            # The planner compares memory with its devices.
            return TrainingPlan.of(read_config(self.config), spec, profile, options, check_memory=False)
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

        ``path``: place of this form in the request. Raises FieldError: the configuration or the layout is wrong.
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
            where = f"{path}.{error.path}"
            raise FieldError(f"{path}.{error.message}", path=where, hint=error.hint) from None

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
        """Bytes on each device of one instance: weights, and cache of one sequence in each replica.

        ``tokens``: of the sequence; None: those of the step.
        """
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
