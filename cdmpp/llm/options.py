"""Options of language models: type, default, limits and description, declared once each.

The signatures of the functions, the command line and the schemas of the HTTP service are made from them. Nothing heavy
is imported, because the command line reads this at its start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Annotated, Any, Final, Literal, Required, TypedDict, TypeVar, get_args, get_type_hints

from cdmpp.errors import FieldError
from cdmpp.llm import defaults
from cdmpp.programs.query_options import ProgramFramework

#: Of each degree of parallelism; sequences of a batch; tokens of a prompt or answer; drafted tokens; ranks of a job.
MAX_DEGREE, MAX_BATCH, MAX_TOKENS, MAX_MTP, MAX_RANKS = 1024, 65_536, 1_048_576, 16, 65_536
#: Of a training step: tokens of a sequence, and sequences.
MAX_SEQUENCE, MAX_GLOBAL_BATCH = 1 << 20, 1 << 24
MAX_REQUESTS = 100_000
#: Requests per second.
MIN_RATE, MAX_RATE = 1e-6, 1e6
REQUIRED: Final = ...


def check_whole(name: str, value: Any, maximum: int) -> None:
    """Raise :class:`FieldError` unless a value is a whole number from 1 to ``maximum``."""
    if type(value) is not int or not 1 <= value <= maximum:
        raise FieldError.not_allowed(name, value, hint=f"a whole number from 1 to {maximum}")


@dataclass(frozen=True)
class RequestOption:
    """An option of a request."""

    type: type  # int, float, bool or str
    help: str  # a sentence
    default: Any = REQUIRED
    unset: str = ""  # what the default None means, unless that is clear
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None  # exclusive limit
    choices: tuple[str, ...] = ()  # allowed texts; of element types also their other names, such as "bf16"

    @property
    def is_dtype(self) -> bool:
        """Whether the value is an element type."""
        return "float16" in self.choices


def _int(
    help: str, default: Any, minimum: int, maximum: float | None = None, unset: str = "", below: int | None = None
) -> RequestOption:
    return RequestOption(int, help, default, unset, minimum, maximum, below)


def _share(help: str, default: float | None, unset: str = "", *, maximum: float | None = None) -> RequestOption:
    return RequestOption(float, help, default, unset, 0, maximum, 1 if maximum is None else None)


def _text(help: str, default: str | None, choices: tuple[str, ...], unset: str = "") -> RequestOption:
    return RequestOption(str, help, default, unset, choices=choices)


def _degree(help: str, maximum: int = MAX_DEGREE) -> RequestOption:
    return _int(help, defaults.DEGREE, 1, maximum)


Function = TypeVar("Function", bound=Callable[..., Any])


def options_of(declared: type) -> dict[str, RequestOption]:
    """Options of a declaration below, by name."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(declared, include_extras=True).items()}


def with_options(declared: type) -> Callable[[Function], Function]:
    """Give a function with ``**options: Unpack[declared]`` their names and defaults in its signature and calls."""
    types = get_type_hints(declared)
    named = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is REQUIRED else option.default,
            annotation=types[name],
        )
        for name, option in options_of(declared).items()
    ]

    def replaced(function: Function) -> Function:
        *stated, _ = inspect.signature(function).parameters.values()
        signature = inspect.Signature([*stated, *named])

        @wraps(function)
        def call(*positional: Any, **keywords: Any) -> Any:
            bound = signature.bind(*positional, **keywords)
            bound.apply_defaults()
            return function(*bound.args, **bound.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return replaced


_REPLICAS = "Replicas of the attention, which divide the batch: tp * pp * dp devices."
_FLOATS = ("bfloat16", "float16", "float32")
_WEIGHT_TYPES = ("float8_e4m3", "int8", "float4_e2m1", "int4", *_FLOATS)
_WEIGHTS = "Type of quantised weights (int4: the weights alone, others: the activations too)."
_STATED = "as the configuration says, else dtype"
_ENGINE = "Alone: the current profile of this engine. With the engine kernels-only: whose kernels."
_ENGINE_UNSET = f"that of the engine {defaults.ENGINE}"
_DRAFTED = "Tokens that a decode step drafts (prediction of several tokens)."
_ACCEPTED = "Share of drafted tokens that is right, where those before are."
_CACHED = "Share of each prompt that is in the cache already."
_IN_FLIGHT = "Requests in flight of simulated serving."
_RATE = "Requests per second (Poisson) of simulated serving."
_COUNT_UNSET = "8 for each in flight, 1,000 for a rate"
_WARMUP = "Requests at the beginning that percentiles leave out."
_WARMUP_UNSET = "those in flight of concurrency, else 0"
_SPREAD = "Share by which lengths vary around input and output."
_UNSPREAD = "0.05 for concurrency of engines that mix prompts and decoding, else 0"
OUTPUT = _int("Tokens of each answer.", defaults.OUTPUT, 1, MAX_TOKENS)


class LayoutOptions(TypedDict, total=False):
    """Degrees of parallelism."""

    tp: Annotated[int, _degree("Ranks that share each layer (tensor parallelism).")]
    pp: Annotated[int, _degree("Stages that share the layers (pipeline parallelism).")]
    ep: Annotated[int, _degree("Groups that share the experts (expert parallelism); ep <= tp * dp.")]
    dp: Annotated[int | None, _int(_REPLICAS, None, 1, MAX_DEGREE, "max(1, ep // tp)")]


class TypeOptions(TypedDict, total=False):
    """Element types."""

    dtype: Annotated[str, _text("Type of activations.", defaults.DTYPE, _FLOATS)]
    weights: Annotated[str | None, _text(_WEIGHTS, None, _WEIGHT_TYPES, _STATED)]
    kv_dtype: Annotated[str | None, _text("Type of the cache.", None, ("float8_e4m3", "int8", *_FLOATS), _STATED)]


class ModelOptions(LayoutOptions, TypeOptions, total=False):
    """Options of a model on devices, whatever it computes."""

    framework: Annotated[str | None, _text(_ENGINE, None, get_args(ProgramFramework), _ENGINE_UNSET)]
    cuda_graph: Annotated[bool, RequestOption(bool, "Decode steps may be captured graphs.", defaults.CUDA_GRAPH)]
    input: Annotated[int, _int("Tokens of each prompt.", defaults.INPUT, 1, MAX_TOKENS)]
    mtp: Annotated[int, _int(_DRAFTED, defaults.MTP, 0, MAX_MTP)]
    acceptance: Annotated[float, _share(_ACCEPTED, defaults.ACCEPTANCE, maximum=1)]


class BatchOptions(ModelOptions, total=False):
    """Options of the estimate of a batch."""

    batch: Annotated[int, _int("Sequences of all replicas.", defaults.BATCH, 1, MAX_BATCH)]
    output: Annotated[int, OUTPUT]


class ServingOptions(ModelOptions, total=False):
    """Options of simulated serving."""

    concurrency: Annotated[int | None, _int(_IN_FLIGHT, None, 1, MAX_BATCH)]
    rate: Annotated[float | None, RequestOption(float, _RATE, None, "", MIN_RATE, MAX_RATE)]
    output: Annotated[int, replace(OUTPUT, default=defaults.SERVED_OUTPUT)]
    count: Annotated[int | None, _int("Requests.", None, 1, MAX_REQUESTS, _COUNT_UNSET)]
    warmup: Annotated[int | None, _int(_WARMUP, None, 0, None, _WARMUP_UNSET, MAX_REQUESTS)]
    seed: Annotated[int, _int("Of arrivals and lengths.", defaults.SEED, 0, below=2**32)]
    spread: Annotated[float | None, _share(_SPREAD, None, _UNSPREAD)]
    prefix_hit: Annotated[float, _share(_CACHED, defaults.PREFIX_HIT)]


Sharding = Literal["none", "optimizer", "fsdp"]
Recompute = Literal["none", "selective", "full"]
Overlap = Literal["none", "gradients", "all"]
_RECOMPUTED = "Activations that the backward pass computes again."
_OVERLAP = "Communication beside computation."
_PRODUCTS = ("float8_e4m3", "mxfp8", "nvfp4")


class TrainingOptions(TypedDict, total=False):
    """Options of a training step."""

    gpus: Annotated[Required[int], _int("Devices of the job.", REQUIRED, 1, MAX_RANKS)]
    global_batch: Annotated[Required[int], _int("Sequences of the step.", REQUIRED, 1, MAX_GLOBAL_BATCH)]
    sequence: Annotated[Required[int], _int("Tokens of a sequence.", REQUIRED, 1, MAX_SEQUENCE)]
    tp: Annotated[int, _degree("Ranks that share each layer.", MAX_RANKS)]
    pp: Annotated[int, _degree("Stages that share the layers.", MAX_RANKS)]
    virtual_pp: Annotated[int, _degree("Parts of the model on each stage (interleaving).", MAX_RANKS)]
    cp: Annotated[int, _degree("Ranks that share each sequence.", MAX_RANKS)]
    ep: Annotated[int, _degree("Ranks that share the experts.", MAX_RANKS)]
    sharding: Annotated[Sharding, _text("What data-parallel copies divide.", defaults.SHARDING, get_args(Sharding))]
    micro_batch: Annotated[int, _int("Sequences of one pass of a copy.", defaults.MICRO_BATCH, 1, MAX_GLOBAL_BATCH)]
    dtype: Annotated[str, _text("Type of weights and activations.", defaults.DTYPE, _FLOATS)]
    products: Annotated[str | None, _text("Type of the layers' products.", None, _PRODUCTS, "dtype")]
    recompute: Annotated[Recompute, _text(_RECOMPUTED, defaults.RECOMPUTE, get_args(Recompute))]
    overlap: Annotated[Overlap | None, _text(_OVERLAP, None, get_args(Overlap), "as the engine does")]
    ranks_per_node: Annotated[int | None, _int("Devices of a node.", None, 1, 1024, "the device's")]


LAYOUT, TYPES, MODEL = options_of(LayoutOptions), options_of(TypeOptions), options_of(ModelOptions)
BATCH, SERVING, TRAINING = options_of(BatchOptions), options_of(ServingOptions), options_of(TrainingOptions)
