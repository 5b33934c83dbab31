"""Request and response models of ``/llm``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cdmpp.predict.llm.estimate import DEFAULT_FRAMEWORK, MAX_BATCH, MAX_TOKENS
from cdmpp.predict.llm.layout import MAX_DEGREE
from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.elements import canonical_dtype
from cdmpp.programs.query_options import ProgramFramework
from cdmpp_server.curve.schema import MAX_DEVICES
from cdmpp_server.fields import Device
from cdmpp_server.predict.schema import ModelName, Seconds

#: Fields of a configuration; published ones have fewer than a hundred.
MAX_CONFIG_FIELDS = 1000
_CLOSED = ConfigDict(extra="forbid", strict=True)
_ANSWER = ConfigDict(extra="forbid")

Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE), WholeNumber]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), WholeNumber]


class _Request(BaseModel):
    model_config = _CLOSED

    config: Annotated[
        dict[str, Any], Field(max_length=MAX_CONFIG_FIELDS, description="The content of a config.json of Hugging Face.")
    ]
    tp: Annotated[Degree, Field(description="Ranks that share each layer.")] = 1
    pp: Annotated[Degree, Field(description="Stages that share the layers.")] = 1
    ep: Annotated[Degree, Field(description="Groups that share the experts.")] = 1
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH, description="Sequences."), WholeNumber] = 1
    input: Annotated[Tokens, Field(description="Tokens of each prompt.")] = 1024
    output: Annotated[Tokens, Field(description="Tokens of each answer.")] = 128
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        BeforeValidator(canonical_dtype),
        Field(description="Type of activations and cache."),
    ] = "bfloat16"
    weights: Annotated[
        Literal["float8_e4m3", "int8", "float4_e2m1", "int4", "bfloat16", "float16", "float32"] | None,
        BeforeValidator(canonical_dtype),
        Field(
            description="Type of quantised weights. int4 quantises the weights alone, the others the activations too. "
            "null: as the configuration says, else `dtype`."
        ),
    ] = None
    framework: Annotated[ProgramFramework | None, Field(description=f"Serving engine; null: {DEFAULT_FRAMEWORK}.")] = (
        None
    )
    cuda_graph: Annotated[bool, Field(description="Decode steps are captured graphs.")] = True
    model: ModelName = None


class LlmRequest(_Request):
    """A language model on one device."""

    device: Device


class LlmDevicesRequest(_Request):
    """A language model on several devices."""

    devices: Annotated[list[Device], Field(min_length=1, max_length=MAX_DEVICES)]


class LlmMemory(BaseModel):
    """Bytes on the rank that holds most."""

    model_config = _ANSWER

    weights: int
    kv_cache: int
    activations: int
    total: int
    device: Annotated[float | None, Field(description="Capacity of the device; null: not published.")]


class LlmPart(BaseModel):
    """Time of an operator or collective in one phase."""

    model_config = _ANSWER

    phase: Literal["prefill", "decode"]
    name: Annotated[str, Field(description="Its place in the model, such as qkv_proj.")]
    operator: Annotated[str, Field(description="Operator or collective; `host` for host time.")]
    count: Annotated[int, Field(ge=1, description="Runs in the phase.")]
    seconds: Annotated[float, Field(ge=0)]
    share: Annotated[float, Field(ge=0, description="Of total_s.")]


Step = Annotated[Seconds | None, Field(description="null for a single output token.")]


class LlmAnswer(BaseModel):
    """Estimate of a batch from prompt to last token, with the settings of the request."""

    model_config = _ANSWER

    model_id: str
    model_type: str
    parameters: Annotated[int, Field(description="Number of parameters of the language model.")]
    device: str
    tp: int
    pp: int
    ep: int
    batch: int
    input: int
    output: int
    dtype: str
    weights: str | None
    framework: str
    cuda_graph: bool
    gpus: int
    prefill_s: Annotated[Seconds, Field(description="The step over all prompts.")]
    prefill_lower_s: Seconds
    prefill_upper_s: Seconds
    decode_s: Annotated[Seconds | None, Field(description="The median decode step; null for a single output token.")]
    decode_lower_s: Step
    decode_upper_s: Step
    total_s: Annotated[Seconds, Field(description="Prefill and all decode steps.")]
    total_lower_s: Seconds
    total_upper_s: Seconds
    ttft_s: Annotated[Seconds, Field(description="Time to the first token.")]
    ttft_lower_s: Seconds
    ttft_upper_s: Seconds
    tpot_s: Annotated[Seconds | None, Field(description="The mean decode step; null for a single output token.")]
    tpot_lower_s: Step
    tpot_upper_s: Step
    throughput_tokens_per_s: Annotated[float, Field(gt=0, description="Output tokens of the batch over total_s.")]
    throughput_lower_tokens_per_s: Annotated[float, Field(gt=0)]
    throughput_upper_tokens_per_s: Annotated[float, Field(gt=0)]
    memory_bytes: LlmMemory
    domain: Literal["in", "near", "out"]
    domain_shares: Annotated[dict[str, float], Field(description="Share of the predicted time by domain.")]
    parts: list[LlmPart]
    left_out: Annotated[list[str], Field(description="Parts of the configuration for other inputs than text.")]


class LlmError(BaseModel):
    """Reason why a device has no estimate, for example that the model does not fit."""

    model_config = _ANSWER

    code: str
    message: str
    hint: str


class LlmFailure(BaseModel):
    """A device without an estimate."""

    model_config = _ANSWER

    device: str
    error: LlmError


class LlmAnswers(BaseModel):
    """One answer for each device, in their order."""

    model_config = _ANSWER

    answers: list[LlmAnswer | LlmFailure]
