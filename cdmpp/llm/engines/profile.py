"""An engine profile and its file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field

from cdmpp.errors import DataError, FieldError
from cdmpp.llm import defaults
from cdmpp.model.domain.score import LABELS, Label
from cdmpp.predict.profiles import CLOSED, Profile
from cdmpp.programs.query_options import ProgramFramework
from cdmpp.utils.files import read_toml

Share = Annotated[float, Field(strict=True, gt=0, le=1)]


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("each name once")
    return names


Residual = Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)]
_Names = Annotated[tuple[Annotated[str, Field(max_length=100)], ...], AfterValidator(_different)]


class MeasuredSteps(BaseModel):
    """Steps that a profile was fitted to, or compared with."""

    model_config = CLOSED

    devices: _Names = ()  # names
    products: _Names = ()  # types of the products
    # Least and most of gpus, tp, pp, cp, ep, sequence, tokens (of a micro-batch on a rank), parameters and experts; of
    # a serving engine: tp, pp, ep, dp, batch, tokens (of a request), parameters and experts.
    ranges: dict[Annotated[str, Field(max_length=20)], tuple[float, float]] = {}

    def departures(self, device: str, products: str, values: Mapping[str, float]) -> list[str]:
        """How a step differs from all measured ones: device, products, and values beyond twice their range.

        A value without a range is not compared.
        """
        texts = [f"{name} {stated}" for name, stated, known in self._named(device, products) if stated not in known]
        for name, value in values.items():
            lowest, highest = self.ranges.get(name, (value, value))
            if not lowest / 2 <= value <= highest * 2:
                texts.append(f"{name} {value:.3g}")
        return texts

    def widened(self, device: str, products: str, values: Mapping[str, float]) -> MeasuredSteps:
        """With one more step."""
        known = {
            name: (stated, *(other for other in old if other != stated))
            for name, stated, old in self._named(device, products)
        }
        ranges = {
            name: (min(value, self.ranges.get(name, (value,))[0]), max(value, self.ranges.get(name, (value,))[-1]))
            for name, value in values.items()
        }
        return MeasuredSteps(devices=known["device"], products=known["products"], ranges=ranges)

    def _named(self, device: str, products: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        return (("device", device, self.devices), ("products", products, self.products))


#: Device, type of the products, and values by which :class:`MeasuredSteps` knows a step.
Place = tuple[str, str, dict[str, float]]

#: Parts that selective recomputation runs again where a profile does not say: attention, norms, activation functions.
SELECTIVE = ("attention", "window_attention", "attention_norm", "mlp_norm", "activation", "shared_activation")


class TrainingLoop(BaseModel):
    """What a training framework adds to the kernels of a training step."""

    model_config = CLOSED

    # measured over predicted time of collectives
    communication_factor: float = Field(1.0, strict=True, ge=0.01, le=100, allow_inf_nan=False)
    # framework whose matrix products are predicted; the profile's framework is that of all other kernels
    products: ProgramFramework = "trtllm"
    # Time of the attention, and of the kernels of experts, over that of the predicted kernels.
    attention_factor: float = Field(1.0, strict=True, ge=0.1, le=10, allow_inf_nan=False)
    expert_factor: float = Field(1.0, strict=True, ge=0.1, le=10, allow_inf_nan=False)
    # Further factor on the kernels of gated experts whose products have block scales: frameworks fuse their products,
    # activation and quantisation.
    block_scaled_expert_factor: float = Field(1.0, strict=True, ge=0.1, le=10, allow_inf_nan=False)
    # Share of the peak that long 16-bit products and attention sustain at the power of the architecture's SXM board,
    # by architecture ("sm_90"): predicted kernels are those of short benchmarks. Others: as predicted.
    sustained: dict[Annotated[str, Field(max_length=20)], Share] = {}
    sustained_attention: dict[Annotated[str, Field(max_length=20)], Share] = {}
    # Share by which attention takes longer for each doubling of ``cp``: its pieces are short, and are merged.
    ring: float = Field(0.0, strict=True, ge=0, le=1)
    # Gathers of a half of a layer in the backward pass with ``tp``: of the gradient, and of the input unless it is
    # kept.
    backward_gathers: int = Field(2, strict=True, ge=1, le=2)
    # Share of tensor- and expert-parallel communication that stays exposed with ``overlap="all"``.
    exposed_tp: float = Field(0.3, strict=True, ge=0, le=1)
    exposed_ep: float = Field(1.0, strict=True, ge=0, le=1)
    # Bytes of a gradient where it is accumulated and reduced; of the master weight and moments of a parameter; that
    # the loss holds for each logit.
    gradient_bytes: float = Field(4.0, strict=True, ge=1, le=8)
    optimizer_bytes: float = Field(12.0, strict=True, ge=0, le=24)
    logit_bytes: float = Field(6.0, strict=True, ge=2, le=40)
    # memory that the allocator reserves, over that of the tensors
    memory_factor: float = Field(1.0, strict=True, ge=1, le=2)
    measured: MeasuredSteps = MeasuredSteps()  # steps that the profile was fitted to
    # Shares of the forward passes of parts, by name, that selective recomputation runs again.
    selective: dict[Annotated[str, Field(max_length=100)], Share] = dict.fromkeys(SELECTIVE, 1.0)
    # bytes that the loss and its gradient read and write for each logit
    loss_bytes: float = Field(12.0, strict=True, ge=2, le=100)
    # communication beside computation where the request does not say
    overlap: Literal["none", "gradients", "all"] = "gradients"
    # Share of hidden communication by which the computation beside it takes longer.
    contention: float = Field(0.1, strict=True, ge=0, le=1)


#: Framework of a profile that names none.
DEFAULT_FRAMEWORK: ProgramFramework = "vllm"


class EngineProfile(Profile):
    """What an engine adds to its kernels, beside the fields of :class:`cdmpp.predict.profiles.Profile`."""

    DOCUMENT: ClassVar[str] = "docs/llm.md"

    framework: ProgramFramework | None = None  # framework whose kernels are predicted; None: that of the request
    # Further frameworks whose kernels the engine has in decode, and in steps with prompts: the fastest of each part
    # counts.
    also: Annotated[tuple[ProgramFramework, ...], AfterValidator(_different)] = ()
    also_prefill: Annotated[tuple[ProgramFramework, ...], AfterValidator(_different)] = ()
    # Parts of a decode step, by name, that run inside of another kernel or beside it, and so take no time of their
    # own: always, and where several ranks share a layer.
    fused: _Names = ()
    fused_ranks: _Names = ()
    # Type of the cache of a model with 8- or 4-bit weights, where neither its file nor the request states one.
    kv_dtype: Literal["float8_e4m3", "int8"] | None = None
    # Whether decode and prefill steps are captured graphs (or compiled without launches by the host).
    graph_decode: bool = True
    graph_prefill: bool = False
    # Tokens of a prefill step; longer ones are chunks. None: one step.
    token_budget: Annotated[int, Field(strict=True, ge=1, le=1 << 20)] | None = None
    prefill_first: bool = False  # whether prompts run alone, before the other sequences decode; else both share a step
    # Whether the next step is scheduled while the device runs this one: a new request waits one step more.
    schedules_ahead: bool = False
    max_sequences: int = Field(256, strict=True, ge=1, le=1 << 16)  # of a step of one replica
    # Part of the device's memory that weights, activations and cache may fill.
    cache_share: float = Field(0.9, strict=True, gt=0, le=1)
    first_residual: Residual = 0.0  # the same as ``residual`` of a time to first token, in addition
    # The same as ``residual``, where ``measured`` covers a step but for one difference, or for several.
    near_residual: Residual = 0.13
    out_residual: Residual = 0.22
    # Batches and loads that the profile was fitted to; ``training`` has those of a training framework. Empty: all.
    measured: MeasuredSteps = MeasuredSteps()
    training: TrainingLoop | None = None  # None: a serving engine

    @property
    def frameworks(self) -> tuple[ProgramFramework, ...]:
        """Frameworks whose kernels are predicted in decode; the first one is the engine's."""
        return (self.framework or DEFAULT_FRAMEWORK, *self.also)

    def at(self, place: Place, *differences: str) -> tuple[EngineProfile, Label, str]:
        """The profile with the residual of a step, the domain of the step by ``measured``, and the reason.

        ``differences``: what else sets the step apart from all measured ones.
        """
        measured = self.measured if self.training is None else self.training.measured
        departures = [*measured.departures(*place), *differences] if measured.devices or self.training else []
        added_residual = (0.0, self.near_residual, max(self.near_residual, self.out_residual))[min(2, len(departures))]
        reason = f"no such step was measured with {self.name}: {', '.join(departures)}" if departures else ""
        placed = self.model_copy(update={"residual": max(self.residual, added_residual)})
        return placed, LABELS[min(2, len(departures))], reason

    def runs(self, part: str, ranks: int) -> bool:
        """Whether a part of a decode step takes time of its own."""
        return part not in self.fused and (ranks == 1 or part not in self.fused_ranks)


_SHIPPED = resources.files(__package__)


@cache
def engine_names(*, training: bool = False) -> tuple[str, ...]:
    """Names of the shipped profiles of serving engines, or of training frameworks."""
    names = sorted(f.name.removesuffix(".toml") for f in _SHIPPED.iterdir() if f.name.endswith(".toml"))
    return tuple(name for name in names if (_shipped(name).training is not None) == training)


@cache
def _shipped(name: str) -> EngineProfile:
    text = (_SHIPPED / f"{name}.toml").read_text(encoding="utf-8")
    return EngineProfile.of(tomllib.loads(text), name)


#: Profile of a request that names neither engine nor framework.
DEFAULT_ENGINE = defaults.ENGINE
#: Profile that adds nothing but the launches of a prefill.
KERNELS_ONLY = "kernels-only"

Engine = EngineProfile | Mapping[str, Any] | str | PathLike[str]


def load_engine(engine: Engine | None = None, framework: str | None = None, *, files: bool = True) -> EngineProfile:
    """The profile of a request, with a framework.

    ``engine``: name of a shipped profile, a TOML file, or its fields. ``framework`` alone means the current profile of
    the engine of that name, or :data:`KERNELS_ONLY` with its kernels. ``files``: whether text may be the path of a
    file; not for text of a client. Raises DataError for an unknown profile or unreadable file, and FieldError for a
    wrong field or an engine that contradicts the framework.
    """
    if engine is None:
        engine = DEFAULT_ENGINE if framework is None else framework if framework in engine_names() else KERNELS_ONLY
    profile = _profile(engine, files)
    if profile.training is not None:
        raise FieldError.at(
            "engine",
            f"{profile.name} is a training framework",
            hint="use training_step, or one of " + ", ".join(engine_names()),
        )
    if framework is not None and profile.framework not in (None, framework):
        raise FieldError.at(
            "framework",
            f"{framework}, but the engine {profile.name} has the kernels of {profile.framework}",
            hint="give one of the two",
        )
    return profile.model_copy(update={"framework": profile.framework or framework or DEFAULT_FRAMEWORK})


def load_training_engine(engine: Engine, *, files: bool = True) -> EngineProfile:
    """The profile of a training framework; parameters and errors are those of :func:`load_engine`."""
    profile = _profile(engine, files, training=True)
    if profile.training is None:
        raise FieldError.at(
            "engine",
            f"{profile.name} is a serving engine",
            hint="one of " + ", ".join(engine_names(training=True)) + ", or a profile with a table [training]",
        )
    return profile


def engine_fields(engine: Engine | None) -> str | dict[str, Any] | None:
    """A profile for JSON: the name of a shipped one, or its fields."""
    if engine is None or (isinstance(engine, str) and engine in _all_names()):
        return engine
    return _profile(engine, True).model_dump(mode="json", exclude_unset=True)


def _all_names() -> tuple[str, ...]:
    return engine_names() + engine_names(training=True)


def _profile(engine: Engine, files: bool, *, training: bool = False) -> EngineProfile:
    if isinstance(engine, EngineProfile):
        return engine
    if isinstance(engine, Mapping):
        return EngineProfile.of(engine, "engine")
    if isinstance(engine, str) and engine in _all_names():
        return _shipped(engine)
    if not isinstance(engine, str | PathLike):
        raise DataError(f"engine: {str(engine)[:80]!r} is no profile", hint="a name, a path or fields")
    if not files or (isinstance(engine, str) and not engine.endswith(".toml") and not Path(engine).is_file()):
        raise DataError(
            f"no engine profile named {str(engine)[:100]!r}",
            hint=f"one of {', '.join(engine_names(training=training))}"
            + (", or a .toml file of a calibration" if files else ""),
        )
    return EngineProfile.of(read_toml(engine, "cdmpp llm calibrate writes profiles"), str(engine))
