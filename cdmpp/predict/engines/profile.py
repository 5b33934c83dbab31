"""An engine profile and its file."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cdmpp.devices.loading import toml_value
from cdmpp.errors import DataError, FieldError
from cdmpp.predict import llm_defaults as defaults
from cdmpp.programs.query_options import ProgramFramework
from cdmpp.utils.files import read_toml
from cdmpp.utils.writing import replacing

Seconds = Annotated[float, Field(strict=True, ge=0, le=10, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("each name once")
    return names


_Names = Annotated[tuple[Annotated[str, Field(max_length=100)], ...], AfterValidator(_different)]
#: Most entries of a list or table of a profile.
MAX_ENTRIES = 64
_CLOSED = ConfigDict(extra="forbid", frozen=True)


class Host(BaseModel):
    """Host time by kind, in seconds.

    Attributes
    ----------
    step_s, sequence_s, ranks_s, replicas_s : float
        Of a step: always, for each of its sequences, where several ranks share a layer, and where several replicas of
        the attention run their steps together.
    eager_layer_s : float
        Of a prefill step whose graph leaves out recurrent and sparse layers, for each of them: the host launches their
        kernels.
    launch_s, launch_lower_s, launch_upper_s : float
        Of a kernel outside of a graph, with bounds. The host runs ahead of the device: the longer of kernels and
        launches counts.
    frontend_s : float
        Of a request, before the engine may schedule it: HTTP, tokenisation, queues between processes.
    overlapped : bool
        The host prepares the next step while the device computes: the longer of both counts, not their sum.
    """

    model_config = _CLOSED

    step_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    ranks_s: Seconds = 0.0
    replicas_s: Seconds = 0.0
    eager_layer_s: Seconds = 0.0
    launch_s: Seconds = 0.0
    launch_lower_s: Seconds = 0.0
    launch_upper_s: Seconds = 0.0
    frontend_s: Seconds = 0.0
    overlapped: bool = False

    def step(self, sequences: int, ranks: int, replicas: int) -> float:
        """Seconds of a step, without launches."""
        together = self.ranks_s * (ranks > 1) + self.replicas_s * (replicas > 1)
        return self.step_s + self.sequence_s * sequences + together


class Measured(BaseModel):
    """Training steps that a profile was fitted to.

    Attributes
    ----------
    devices, products : tuple of str
        Names of devices, and types of the products.
    ranges : dict of str to (float, float)
        Least and most of gpus, tp, pp, cp, ep, sequence, tokens (of a micro-batch on a rank), parameters and experts.
    """

    model_config = _CLOSED

    devices: _Names = ()
    products: _Names = ()
    ranges: dict[Annotated[str, Field(max_length=20)], tuple[float, float]] = {}

    def departures(self, device: str, products: str, values: Mapping[str, float]) -> list[str]:
        """How a step differs from all measured ones: device, products, and values beyond twice the range."""
        found = [f"{name} {own}" for name, own, known in self._named(device, products) if own not in known]
        for name, value in values.items():
            least, most = self.ranges.get(name, (0.0, 0.0))
            if not least / 2 <= value <= most * 2:
                found.append(f"{name} {value:.3g}")
        return found

    def widened(self, device: str, products: str, values: Mapping[str, float]) -> Measured:
        """With one more step."""
        known = {
            name: (own, *(other for other in old if other != own)) for name, own, old in self._named(device, products)
        }
        ranges = {
            name: (min(value, self.ranges.get(name, (value,))[0]), max(value, self.ranges.get(name, (value,))[-1]))
            for name, value in values.items()
        }
        return Measured(devices=known["device"], products=known["products"], ranges=ranges)

    def _named(self, device: str, products: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        return (("device", device, self.devices), ("products", products, self.products))


#: Parts that selective recomputation runs again where a profile does not say: attention, norms, activation functions.
SELECTIVE = ("attention", "window_attention", "attention_norm", "mlp_norm", "activation", "shared_activation")


class TrainingLoop(BaseModel):
    """What a training framework adds to the kernels of a training step.

    Attributes
    ----------
    communication_factor : float
        Measured over predicted time of collectives.
    products : str
        Framework whose matrix products are predicted; the profile's framework is that of all other kernels.
    attention_factor, expert_factor : float
        Time of the attention, and of the kernels of experts, over that of the predicted kernels.
    block_scaled_expert_factor : float
        Further factor on the kernels of gated experts whose products have block scales: frameworks fuse their products,
        activation and quantisation.
    sustained, sustained_attention : dict of str to float
        Share of the peak that long 16-bit products and attention sustain at the power of the architecture's SXM board,
        by architecture ("sm_90"): predicted kernels are those of short benchmarks. None: as predicted.
    ring : float
        Share by which attention takes longer for each doubling of ``cp``: its pieces are short, and are merged.
    backward_gathers : int
        Gathers of a half of a layer in the backward pass with ``tp``: of the gradient, and of the input unless it is
        kept.
    exposed_tp, exposed_ep : float
        Share of tensor- and expert-parallel communication that stays exposed with ``overlap="all"``.
    gradient_bytes, optimizer_bytes, logit_bytes : float
        Bytes of a gradient where it is accumulated and reduced; of the master weight and moments of a parameter; that
        the loss holds for each logit.
    memory_factor : float
        Memory that the allocator reserves, over that of the tensors.
    measured : Measured
        Steps that the profile was fitted to.
    selective : dict of str to float
        Shares of the forward passes of parts, by name, that selective recomputation runs again.
    loss_bytes : float
        Bytes that the loss and its gradient read and write for each logit.
    overlap : {"none", "gradients", "all"}
        Communication that runs beside computation where the request does not say.
    contention : float
        Share of hidden communication by which the computation beside it takes longer.
    """

    model_config = _CLOSED

    communication_factor: Annotated[float, Field(strict=True, ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    products: ProgramFramework = "trtllm"
    attention_factor: Annotated[float, Field(strict=True, ge=0.1, le=10, allow_inf_nan=False)] = 1.0
    expert_factor: Annotated[float, Field(strict=True, ge=0.1, le=10, allow_inf_nan=False)] = 1.0
    block_scaled_expert_factor: Annotated[float, Field(strict=True, ge=0.1, le=10, allow_inf_nan=False)] = 1.0
    sustained: dict[Annotated[str, Field(max_length=20)], Share] = {}
    sustained_attention: dict[Annotated[str, Field(max_length=20)], Share] = {}
    ring: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    backward_gathers: Annotated[int, Field(strict=True, ge=1, le=2)] = 2
    exposed_tp: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.3
    exposed_ep: Annotated[float, Field(strict=True, ge=0, le=1)] = 1.0
    gradient_bytes: Annotated[float, Field(strict=True, ge=1, le=8)] = 4.0
    optimizer_bytes: Annotated[float, Field(strict=True, ge=0, le=24)] = 12.0
    logit_bytes: Annotated[float, Field(strict=True, ge=2, le=40)] = 6.0
    memory_factor: Annotated[float, Field(strict=True, ge=1, le=2)] = 1.0
    measured: Measured = Measured()
    selective: dict[Annotated[str, Field(max_length=100)], Share] = dict.fromkeys(SELECTIVE, 1.0)
    loss_bytes: Annotated[float, Field(strict=True, ge=2, le=100)] = 12.0
    overlap: Literal["none", "gradients", "all"] = "gradients"
    contention: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.1


#: Framework of a profile that names none.
DEFAULT_FRAMEWORK: ProgramFramework = "vllm"


class EngineProfile(BaseModel):
    """What an engine adds to its kernels.

    Attributes
    ----------
    name : str
    versions : str
        Versions of the software that it stands for.
    framework : str or None
        Framework whose kernels are predicted; None: that of the request.
    also, also_prefill : tuple of str
        Further frameworks whose kernels the engine has in decode, and in steps with prompts: the fastest of each part
        counts.
    kernel_factor : float
        Measured over predicted time of the kernels.
    fused, fused_ranks : tuple of str
        Parts of a decode step, by name, that run inside of another kernel or beside it, and so take no time of their
        own: always, and where several ranks share a layer.
    kv_dtype : str or None
        Type of the cache of a model with 8- or 4-bit weights, where neither its file nor the request states one.
    host : Host
    graph_decode, graph_prefill : bool
        Whether decode and prefill steps are captured graphs (or compiled without launches by the host).
    token_budget : int or None
        Tokens of a prefill step; longer ones are chunks. None: one step.
    prefill_first : bool
        Whether prompts run alone, before the other sequences decode; else both share a step.
    schedules_ahead : bool
        Whether the next step is scheduled while the device runs this one: a new request waits one step more.
    max_sequences : int
        Most sequences of a step of one replica.
    cache_share : float
        Part of the device's memory that weights, activations and cache may fill.
    residual : float
        Standard deviation of log(measured / predicted) that the profile leaves, besides the kernels' own interval.
    first_residual : float
        The same of a time to first token, in addition.
    training : TrainingLoop or None
        Of a training framework; None: a serving engine.
    source : dict of str to str
        Where each figure comes from.
    """

    model_config = _CLOSED
    DOCUMENT: ClassVar[str] = "docs/llm.md"

    name: Annotated[str, Field(min_length=1, max_length=100)]
    versions: Annotated[str, Field(max_length=200)] = ""
    framework: ProgramFramework | None = None
    also: Annotated[tuple[ProgramFramework, ...], AfterValidator(_different)] = ()
    also_prefill: Annotated[tuple[ProgramFramework, ...], AfterValidator(_different)] = ()
    kernel_factor: Annotated[float, Field(strict=True, ge=0.01, le=10, allow_inf_nan=False)] = 1.0
    fused: _Names = ()
    fused_ranks: _Names = ()
    kv_dtype: Literal["float8_e4m3", "int8"] | None = None
    host: Host = Host()
    graph_decode: bool = True
    graph_prefill: bool = False
    token_budget: Annotated[int, Field(strict=True, ge=1, le=1 << 20)] | None = None
    prefill_first: bool = False
    schedules_ahead: bool = False
    max_sequences: Annotated[int, Field(strict=True, ge=1, le=1 << 16)] = 256
    cache_share: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.9
    residual: Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)] = 0.0
    first_residual: Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)] = 0.0
    training: TrainingLoop | None = None
    source: dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=2000)]] = {}

    @property
    def frameworks(self) -> tuple[ProgramFramework, ...]:
        """Frameworks whose kernels are predicted in decode; the first one is the engine's."""
        return (self.framework or DEFAULT_FRAMEWORK, *self.also)

    def runs(self, part: str, ranks: int) -> bool:
        """Whether a part of a decode step takes time of its own."""
        return part not in self.fused and (ranks == 1 or part not in self.fused_ranks)

    @classmethod
    def of(cls, value: Mapping[str, Any], where: str) -> Self:
        """A profile from fields; ``where`` names their place in messages.

        Raises
        ------
        FieldError
        """
        for name, item in value.items():
            if isinstance(item, Collection) and not isinstance(item, str) and len(item) > MAX_ENTRIES:
                raise FieldError(
                    f"{where}: {str(name)[:40]}: {len(item):,} entries, at most {MAX_ENTRIES}",
                    path=f"engine.{str(name)[:40]}",
                    hint=f"{cls.DOCUMENT} has the fields",
                )
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            raise FieldError(
                f"{where}: {path or 'engine'}: {first['msg']}",
                path=f"engine.{path}".rstrip("."),
                hint=f"{cls.DOCUMENT} has the fields",
            ) from None

    def to_toml(self) -> str:
        """The profile as the text of its file."""
        return "\n".join(_toml(self.model_dump(exclude_none=True))) + "\n"

    def write(self, path: str | PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        with replacing(path) as aside:
            aside.write_text(self.to_toml(), encoding="utf-8")


def _toml(fields: Mapping[str, Any], table: str = "") -> Iterator[str]:
    tables = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    for name, value in fields.items():
        if name not in tables:
            yield f"{toml_value(name) if table else name} = {toml_value(value)}"
    for name, inner in tables.items():
        yield f"\n[{table}{name}]"
        yield from _toml(inner, f"{table}{name}.")


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
    """The profile of a request.

    Parameters
    ----------
    engine : str, path, mapping or EngineProfile, optional
        Name of a shipped profile, a TOML file, or its fields.
    framework : str, optional
        Alone it means the current profile of the engine of that name, or :data:`KERNELS_ONLY` with its kernels.
    files : bool
        Whether text may be the path of a file; not for text of a client.

    Returns
    -------
    EngineProfile
        With a framework.

    Raises
    ------
    DataError
        The profile is not known, or its file cannot be read.
    FieldError
        A field is wrong, or engine and framework contradict.
    """
    if engine is None:
        engine = DEFAULT_ENGINE if framework is None else framework if framework in engine_names() else KERNELS_ONLY
    profile = _profile(engine, files)
    if profile.training is not None:
        raise FieldError(
            f"engine: {profile.name} is a training framework",
            path="engine",
            hint="use training_step, or one of " + ", ".join(engine_names()),
        )
    if framework is not None and profile.framework not in (None, framework):
        raise FieldError(
            f"framework: {framework}, but the engine {profile.name} has the kernels of {profile.framework}",
            path="framework",
            hint="give one of the two",
        )
    return profile.model_copy(update={"framework": profile.framework or framework or DEFAULT_FRAMEWORK})


def load_training_engine(engine: Engine, *, files: bool = True) -> EngineProfile:
    """The profile of a training framework; parameters and errors are those of :func:`load_engine`."""
    profile = _profile(engine, files, training=True)
    if profile.training is None:
        raise FieldError(
            f"engine: {profile.name} is a serving engine",
            path="engine",
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
