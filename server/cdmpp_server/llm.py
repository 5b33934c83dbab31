"""``POST /llm``, ``/llm/simulate`` and ``/llm/calibrate``: a language model on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BeforeValidator, Field, create_model

from cdmpp.devices.loading import resolve_device
from cdmpp.errors import CdmppError, DataError
from cdmpp.llm import EstimatePlan, LLMEstimate, defaults, read_config
from cdmpp.llm.engines.profile import load_engine
from cdmpp.llm.estimate_result import EstimateSettings
from cdmpp.llm.options import BATCH, LAYOUT, SERVING, TYPES, RequestOption
from cdmpp.llm.serving.calibrate import MIN_ROWS, CalibrationPlan
from cdmpp.llm.serving.simulate import NETWORK_BYTES_PER_S, ServingPlan, resolved_pool
from cdmpp.predict.prediction import ErrorInfo, Prediction, Query, Seconds
from cdmpp.predict.prediction_matrix import Failed
from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.elements import canonical_dtype
from cdmpp_server.curve import MAX_DEVICES
from cdmpp_server.fields import Device
from cdmpp_server.planned import Endpoint, Find, planned
from cdmpp_server.predict.schema import ModelName
from cdmpp_server.schema_base import AnswerModel, RequestModel

#: Fields of a configuration; published ones have fewer than a hundred.
MAX_CONFIG_FIELDS = 1000
MAX_MEASUREMENTS = 500
#: Requests, and tokens of prompts and answers, of one simulation.
MAX_SIMULATED, MAX_SIMULATED_TOKENS = 20_000, 50_000_000
#: Sequences of steps of one simulation: some six seconds of one core.
MAX_SIMULATED_WORK = 20_000_000

Network = Annotated[
    float | Annotated[str, Field(max_length=64)] | None,
    Field(description="Bytes per second of one device between nodes, or a name such as roce-200; null: assumed."),
]
Config = Annotated[
    dict[str, Any], Field(max_length=MAX_CONFIG_FIELDS, description="The content of a config.json of Hugging Face.")
]
M = TypeVar("M", bound=RequestModel)


def with_options(options: Mapping[str, RequestOption]) -> Callable[[type[M]], type[M]]:
    """Add a field for each option to a request."""

    def extended(model: type[M]) -> type[M]:
        fields: dict[str, Any] = {name: (_annotation(option), option.default) for name, option in options.items()}
        names: dict[str, Any] = {"__doc__": model.__doc__, "__module__": model.__module__}
        return create_model(model.__name__, __base__=model, **names, **fields)

    return extended


def _annotation(option: RequestOption) -> Any:
    limits = Field(ge=option.minimum, le=option.maximum, lt=option.below)
    value: Any = Literal[option.choices] if option.choices else Annotated[option.type, limits]
    if option.type is int:
        value = Annotated[value, WholeNumber]
    if option.is_dtype:
        value = Annotated[value, BeforeValidator(canonical_dtype)]
    text = f"{option.help} null: {option.unset}." if option.unset else option.help
    return Annotated[value | None if option.default is None else value, Field(description=text)]


class _Model(RequestModel):
    config: Config
    engine: str | dict[str, Any] | None = Field(
        None,
        max_length=100,
        description="What the serving engine adds to its kernels: the name of a profile, or the fields of one "
        f"(docs/llm.md). null: the current profile of `framework`, else {defaults.ENGINE}.",
    )
    network: Network = None
    model: ModelName = None


@with_options(BATCH)
class LlmRequest(_Model):
    """A language model on one device."""

    device: Device


@with_options(BATCH)
class LlmDevicesRequest(_Model):
    """A language model on several devices."""

    devices: list[Device] = Field(min_length=1, max_length=MAX_DEVICES)


class CalibrateRequest(RequestModel):
    """Measured durations of a server of one's own."""

    config: dict[str, Any] = Field(max_length=MAX_CONFIG_FIELDS, description="As of `/llm`.")
    device: Device
    measurements: list[dict[str, Any]] = Field(
        min_length=MIN_ROWS,
        max_length=MAX_MEASUREMENTS,
        description=f"Objects with batch (or rate), input, output; optionally {', '.join(LAYOUT | TYPES)}, "
        "config, device, closed_loop, prefix_hit; one or more of total_s, ttft_s, tpot_s.",
    )
    engine: str | dict[str, Any] = Field(
        defaults.ENGINE, max_length=100, description="The profile to start from, by name or fields."
    )
    model: ModelName = None


class CalibrateAnswer(AnswerModel):
    """A fitted profile, and how well it fits; errors are means of abs(predicted / measured - 1)."""

    profile: dict[str, Any] = Field(description="An `engine` of `/llm`.")
    rows: int
    before: float = Field(description="Error with the profile at the start.")
    after: float = Field(description="Error with the fitted profile.")
    left_out: float | None = Field(description="Error of rows left out of the fit; null for two rows.")
    undetermined: list[str] = Field(description="What the measurements say little about.")
    waves: bool = Field(description="Whether requests of closed loops stayed together.")


@with_options(LAYOUT)
class PrefillPoolFields(RequestModel):
    """Devices that compute the prompts, while those of the request decode."""

    device: Device | None = Field(None, description="null: the same.")
    bytes_per_s: float = Field(
        NETWORK_BYTES_PER_S,
        ge=1e6,
        le=1e14,
        description="At which each device sends its part of the cache; default assumed.",
    )


@with_options(
    SERVING
    | {
        "count": replace(SERVING["count"], maximum=MAX_SIMULATED),
        "warmup": replace(SERVING["warmup"], below=MAX_SIMULATED),
    }
)
class SimulateRequest(_Model):
    """Requests to a language model that is served: one of requests, concurrency and rate."""

    device: Device
    requests: list[Annotated[list[float], Field(min_length=3, max_length=3)]] | None = Field(
        None, min_length=1, max_length=MAX_SIMULATED, description="Arrival in seconds, tokens of prompt and answer."
    )
    prefill_pool: PrefillPoolFields | None = None


class Spread(AnswerModel):
    """Seconds over the requests."""

    mean: float = Field(ge=0)
    p50: float = Field(ge=0)
    p90: float = Field(ge=0)
    p99: float = Field(ge=0)


class BoundedSpread(Spread):
    """Seconds over the requests, with an 80 % interval of the mean."""

    mean_lower: float = Field(ge=0)
    mean_upper: float = Field(ge=0)


class SimulateAnswer(AnswerModel):
    """Requests that were served."""

    model_id: str
    device: str
    engine: str
    gpus: int
    requests: int
    warmup_requests: int = Field(description="Of them, those at the beginning that the spreads leave out.")
    warmup_ttft_s: Spread | None = Field(description="First tokens of those; null without a warm-up.")
    ttft_s: BoundedSpread = Field(description="From arrival to the first token.")
    tpot_s: BoundedSpread | None = Field(description="Between tokens; null where all have one token.")
    latency_s: BoundedSpread = Field(description="From arrival to the last token.")
    queue_s: Spread = Field(description="From the front end to the first step of the prompt.")
    single_token: int = Field(description="Requests of one token, left out of tpot_s.")
    duration_s: float
    requests_per_s: float
    throughput_tokens_per_s: float
    throughput_lower_tokens_per_s: float
    throughput_upper_tokens_per_s: float
    throughput_tokens_per_s_per_gpu: float
    steps: int
    preemptions: int = Field(description="Requests that gave up their cache and were computed again.")
    cache_share: float = Field(description="Largest share of the cache in use.")
    relative_lower: float = Field(description="80 % interval of a step's duration, as factors of it.")
    relative_upper: float
    domain: Literal["in", "near", "out"]
    domain_reason: str = Field(description="The engine, and the largest part that is not `in`.")
    domain_shares: dict[str, float] = Field(description="Share of the predicted time by domain.")
    remarks: list[str] = Field(description="What was assumed.")


class LlmMemory(AnswerModel):
    """Bytes on the rank that holds most."""

    weights: int
    kv_cache: int
    activations: int
    total: int
    device: float | None = Field(description="Capacity of the device; null: not published.")


class LlmPart(AnswerModel):
    """Time of an operator or collective in one phase."""

    phase: Literal["prefill", "decode"]
    name: str = Field(description="Its place in the model, such as qkv_proj.")
    operator: str = Field(description="Operator or collective; `host` for host time.")
    count: int = Field(ge=1, description="Runs in the phase.")
    seconds: float = Field(ge=0)
    share: float = Field(ge=0, description="Of total_s.")


Step = Annotated[Seconds | None, Field(description="null for a single output token.")]


class _EstimatedModel(AnswerModel):
    model_id: str
    model_type: str
    parameters: int = Field(description="Number of parameters of the language model.")


_SETTINGS: dict[str, Any] = {name: (hint, ...) for name, hint in get_type_hints(EstimateSettings).items()}
_SETTINGS["engine"] = (Annotated[str, Field(description="Name of the profile.")], ...)
_WithSettings: Any = create_model("_WithSettings", __base__=_EstimatedModel, **_SETTINGS)


class LlmAnswer(_WithSettings):  # its fields begin with those of EstimateSettings
    """Estimate of a batch from prompt to last token, with the settings of the request."""

    gpus: int
    prefill_s: Seconds = Field(description="The step over all prompts.")
    prefill_lower_s: Seconds
    prefill_upper_s: Seconds
    decode_s: Seconds | None = Field(description="The median decode step; null for a single output token.")
    decode_lower_s: Step
    decode_upper_s: Step
    total_s: Seconds = Field(description="Prefill and all decode steps.")
    total_lower_s: Seconds
    total_upper_s: Seconds
    ttft_s: Seconds = Field(description="Time to the first token.")
    ttft_lower_s: Seconds
    ttft_upper_s: Seconds
    tpot_s: Seconds | None = Field(description="The mean decode step; null for a single output token.")
    tpot_lower_s: Step
    tpot_upper_s: Step
    throughput_tokens_per_s: float = Field(gt=0, description="Output tokens of the batch over total_s.")
    throughput_lower_tokens_per_s: float = Field(gt=0)
    throughput_upper_tokens_per_s: float = Field(gt=0)
    memory_bytes: LlmMemory
    domain: Literal["in", "near", "out"]
    domain_reason: str = Field(description="The engine, and the largest part that is not `in`.")
    domain_shares: dict[str, float] = Field(description="Share of the predicted time by domain.")
    parts: list[LlmPart]
    left_out: list[str] = Field(description="Parts of the configuration for other inputs than text.")
    remarks: list[str]


class LlmError(AnswerModel):
    """Reason why a device has no estimate, for example that the model does not fit."""

    code: str
    message: str
    hint: str


class LlmFailure(AnswerModel):
    """A device without an estimate."""

    device: str
    error: LlmError


class LlmAnswers(AnswerModel):
    """One answer for each device, in their order."""

    answers: list[LlmAnswer | LlmFailure]


_MEANING = {
    404: "The model is not loaded (unknown_model), or `device` is not known (unknown_device).",
    409: "The request fits the schema, but the architecture is not known, a field of the configuration is missing or "
    "impossible, the layout does not divide the model (invalid_field), the model does not fit on `device` "
    "(infeasible), `device` is invalid (invalid_device), or there are more predictions than items of one request "
    "(data_error).",
}
EXAMPLE_MODEL: dict[str, Any] = {
    "config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "device": "h100-sxm",
}
_MEASURED = [{"batch": n, "input": 1024, "output": 128, "total_s": s} for n, s in ((1, 1.2), (32, 2.6))]


Body = LlmRequest | LlmDevicesRequest


def _simulation(request: SimulateRequest, find: Find, max_predictions: int) -> ServingPlan:
    options = request.model_dump(exclude={"config", "device", "model"})
    options["engine"] = load_engine(request.engine, options.pop("framework"), files=False)
    options["prefill_pool"] = resolved_pool(options["prefill_pool"], lambda device: resolve_device(device, find))
    device = resolve_device(request.device, find)
    plan = ServingPlan(read_config(request.config), device, most_work=MAX_SIMULATED_WORK, **options)
    if len(plan.queries) > max_predictions:
        raise DataError(f"the tables need more than {max_predictions:,} predictions", hint="shorter requests")
    if plan.tokens > MAX_SIMULATED_TOKENS:
        raise DataError(
            f"{plan.tokens:,} tokens in all; at most {MAX_SIMULATED_TOKENS:,}", hint="fewer or shorter requests"
        )
    return plan


def _calibration(request: CalibrateRequest, find: Find, max_predictions: int) -> CalibrationPlan:
    for number, row in enumerate(request.measurements, 1):
        if "config" in row and not isinstance(row["config"], dict):
            raise DataError(f"row {number}: config is no object", hint="send the content of config.json")
    profile = load_engine(request.engine, files=False)
    config, rows = read_config(request.config), request.measurements
    # By name and never load_device: a client's text must not be used as a path on this machine.
    return CalibrationPlan(
        config,
        lambda device: resolve_device(device, find),
        request.device,
        rows,
        profile,
        max_predictions,
        MAX_SIMULATED_WORK,
    )


class Estimates:
    """A plan for each device, or the reason why it has none."""

    def __init__(self, request: Body, find: Find, max_predictions: int) -> None:
        options = request.model_dump(exclude={"config", "device", "devices", "model"})
        self._single = isinstance(request, LlmRequest)
        sent = [request.device] if isinstance(request, LlmRequest) else request.devices
        self._plans: list[EstimatePlan | Failed] = []
        self.queries: list[Query] = []
        config = read_config(request.config)
        # By name or fields, never a file: a client's text must not be used as a path on this machine.
        options["engine"] = load_engine(request.engine, options["framework"], files=False)
        for device in sent:
            try:
                plan = EstimatePlan(config, resolve_device(device, find), **options)
            except CdmppError as error:
                if self._single:
                    raise
                self._plans.append(
                    Failed(str(device if isinstance(device, str) else device.get("name", ""))[:100], error)
                )
                continue
            self._plans.append(plan)
            self.queries += plan.queries
            if len(self.queries) > max_predictions:
                raise DataError(
                    f"the devices need more than {max_predictions:,} predictions",
                    hint="send fewer devices in one request",
                )

    def answer(self, model_id: str, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """The estimate of the device, or of each of several."""
        results = [_answer(result) for result in self._results(model_id, iter(predictions))]
        return results[0] if self._single else {"answers": results}

    def _results(self, model_id: str, predictions: Iterator[Prediction]) -> Iterator[LLMEstimate | Failed]:
        for plan in self._plans:
            if isinstance(plan, Failed):
                yield plan
                continue
            answers = list(islice(predictions, len(plan.queries)))
            try:
                yield plan.estimate(model_id, answers)
            except CdmppError as error:
                if self._single:
                    raise
                yield Failed(plan.settings.device, error)


def _answer(result: LLMEstimate | Failed) -> dict[str, Any]:
    if isinstance(result, Failed):
        return {"device": result.name, "error": asdict(ErrorInfo.of(result.error))}
    return result.to_dict()


router = planned(
    Endpoint(
        "/llm",
        "Estimate a language model",
        "Estimate latency, throughput and memory of a batch of requests to a language model.\n\n"
        "With `devices`, a device without an estimate is an `error` at its place.",
        Estimates,
        Estimates.answer,
        (LlmRequest, LlmDevicesRequest),
        (LlmAnswer, LlmAnswers),
        "The estimate, or those of `devices`.",
        {**EXAMPLE_MODEL, "batch": 8, "input": 1024, "output": 128},
        _MEANING,
        "A model has some 50 to 200 predictions for each device; at most {most} in one request. ",
        several="devices",
    ),
    Endpoint(
        "/llm/simulate",
        "Simulate serving",
        "Simulate how an engine serves requests: times to first token and between tokens, queue, throughput.",
        _simulation,
        lambda plan, *made: plan.run(*made).to_dict(),
        (SimulateRequest,),
        (SimulateAnswer,),
        "Times, throughput and use of the cache.",
        {**EXAMPLE_MODEL, "concurrency": 16, "output": 64, "count": 32},
        _MEANING,
    ),
    Endpoint(
        "/llm/calibrate",
        "Fit an engine profile",
        "Fit what an engine adds to its kernels to a few measured durations of a server.",
        _calibration,
        lambda plan, _, predictions: plan.fit(predictions).to_dict(),
        (CalibrateRequest,),
        (CalibrateAnswer,),
        "The profile and its errors.",
        {**EXAMPLE_MODEL, "measurements": _MEASURED},
        _MEANING,
    ),
)
