"""``DeviceSpec``: properties of a device that the model uses, in base units.

A specification holds nominal figures (boost clocks, dense rates), so a device that nobody has timed can be
described by its data sheet. The one figure that may be measured is a CPU's memory bandwidth
(:mod:`cdmpp.devices.host`); ``source`` says so.

:class:`Ceilings` are rates that a device was measured to reach. Power limits, throttled boards and slow buses make a
device's best sustained rate a fraction of the nominal one. Some twenty micro-benchmarks tell (``cdmpp probe``), or the
largest programs of a device's records (:mod:`cdmpp.data.ceilings`).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from cdmpp.devices.links import LINK_SCHEMA, canonical_link


def _whole_number(value: Any) -> Any:
    """JSON and TOML writers may put 20.0 for 20; 20.5 stays what it is and is refused."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _link_name(value: Any) -> Any:
    return canonical_link(value) if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]
Count = Annotated[int, BeforeValidator(_whole_number), Field(ge=1, le=100_000)]
Flops = Annotated[float, Field(ge=1e8, le=1e19)]


Rate = Annotated[float, Field(ge=1e7, le=1e19)]
Floor = Annotated[float, Field(ge=1e-10, le=1.0)]

#: Suffix of a field -> element type.
_TYPES = {"float32": "flops_fp32", "float16": "flops_fp16", "bfloat16": "flops_bf16", "int8": "ops_int8"}
FAMILIES = ("gemm", "conv", "attention")


class Ceilings(BaseModel):
    """Best sustained rates of one device by library kernels, in base units; ``None``: not measured.

    ``gemm``: large matrix products, in flop/s (int8: operations/s). ``conv``: large convolutions, by their definition's
    arithmetic: algorithms that save some of it (winograd) may exceed the nominal peak. ``attention``: long fused
    attention. ``bytes_per_s``: element-wise programs and copies much larger than the caches, reads plus writes.
    ``floor``: latency of the smallest programs, in seconds, by measuring protocol.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    gemm_flops_fp32: Rate | None = None
    gemm_flops_fp16: Rate | None = None
    gemm_flops_bf16: Rate | None = None
    gemm_ops_int8: Rate | None = None
    conv_flops_fp32: Rate | None = None
    conv_flops_fp16: Rate | None = None
    conv_flops_bf16: Rate | None = None
    attention_flops_fp32: Rate | None = None
    attention_flops_fp16: Rate | None = None
    attention_flops_bf16: Rate | None = None
    bytes_per_s: Rate | None = None
    floor_kernel_s: Floor | None = None
    floor_graph_s: Floor | None = None
    floor_eager_s: Floor | None = None
    source: Annotated[str, Field(max_length=500)] = ""

    def flops(self, family: str, dtype: str) -> float | None:
        """Sustained flop/s of a family ("gemm", "conv", "attention") and element type; None: not known.

        No other family or type stands in: what to fall back to is the caller's decision.
        """
        value: float | None = getattr(self, flops_field(family, dtype), None)
        return value

    def floor_s(self, protocol: str) -> float | None:
        """Latency of the smallest program by a protocol, in seconds; None: not known."""
        value: float | None = getattr(self, f"floor_{protocol}_s", None)
        return value

    def figures(self) -> dict[str, float]:
        """The figures that there are, by field."""
        rates: dict[str, float] = self.model_dump(exclude={"source"}, exclude_none=True)
        return rates


def flops_field(family: str, dtype: str) -> str:
    """Field of :class:`Ceilings` for a family and element type, such as "gemm_flops_fp16"."""
    return f"{family}_{_TYPES.get(dtype, dtype)}"


def read_ceilings(value: Any) -> Any:
    """A mapping, as files and requests have it, as :class:`Ceilings`; anything else is left to pydantic."""
    return Ceilings.model_validate(value) if isinstance(value, dict) else value


#: Vector peaks further from 2 x units x cores x clock than this factor are a slip of units.
#: Dual issue and packed instructions make 2 or 4 of it, hybrid and throttled parts less than 1.
_PEAK_PLAUSIBLE_FACTOR = 16.0

_BYTE_TYPES = ("int8", "uint8", "int4")

#: Fields that are no part of :meth:`DeviceSpec.digest`, or in another form.
_NO_FIGURES = ("name", "source", "aliases", "arch", "sustained", "status", "nominal_memory_bytes")
#: Figures that are no part of :meth:`DeviceSpec.digest`: they were added after digests had been stored.
LATER_FIGURES = (
    *("peak_flops_fp64", "peak_flops_tf32_matrix", "peak_flops_fp8_matrix", "peak_flops_fp4_matrix"),
    *("l2_bandwidth_bytes_per_s", "sustained_clock_hz", "matrix_flops_per_cycle_per_unit", "link"),
    *("ranks_per_node", "network_bytes_per_s", "nvlink_domain"),
)


class DeviceSpec(BaseModel):
    """Published figures of one device, in base units: Hz, bytes, flop/s (a multiply-add is two).

    ``None`` means not published or not there; it is never replaced by a guess in silence:
    :meth:`peak` states its fallbacks, and the encoding carries a flag for every missing figure.

    Parameters
    ----------
    name : str
        Identifier, such as ``"a100-pcie-40gb"``.
    vendor, arch : str
        Maker and architecture, for people.
    kind : {"gpu", "cpu"}
        "gpu" includes other accelerators that a host launches programs on (TPU).
    compute_units : int
        Streaming multiprocessors (NVIDIA), compute units (AMD), Xe cores (Intel), TensorCores (TPU) or CPU cores.
    cores_per_unit : int
        fp32 multiply-add lanes of one unit, as the vendor counts them.
    clock_hz : float
        Nominal boost clock (CPUs: base clock).
    memory_bytes : float, optional
        Capacity as the driver reports it to programs.
    nominal_memory_bytes : float, optional
        Capacity that the data sheet names, an input of the network. None: as ``memory_bytes``.
    mem_bandwidth_bytes_per_s : float
        Peak bandwidth of the device memory.
    peak_flops_fp32 : float
        fp32 rate of the vector units.
    peak_flops_fp32_matrix : float, optional
        fp32 rate of matrix units that take true fp32 (AMD CDNA). TF32 is not fp32 and not meant here.
    peak_flops_fp16_matrix : float, optional
        Dense fp16 rate of matrix products accumulated in fp32: of matrix units, or of packed
        vector instructions on devices without them.
    peak_flops_bf16_matrix : float, optional
        The same for bfloat16, where it differs from fp16; ``None`` means as fp16.
    peak_ops_int8 : float, optional
        Dense int8 rate.
    peak_flops_fp64 : float, optional
        Best dense fp64 rate, of the matrix units where they take fp64.
    peak_flops_tf32_matrix : float, optional
        Dense TF32 rate (AMD: XF32) of the matrix units.
    peak_flops_fp8_matrix, peak_flops_fp4_matrix : float, optional
        Dense fp8 and fp4 rates of matrix products accumulated in fp32.
    l2_bytes : float, optional
        Last cache level shared by all units, total over the device.
    l2_bandwidth_bytes_per_s : float, optional
        Read bandwidth of that cache, total over the device.
    sustained_clock_hz : float, optional
        Clock under matrix load, at which the matrix peaks hold; ``clock_hz`` is the highest clock.
    matrix_flops_per_cycle_per_unit : float, optional
        Dense fp16 operations of one unit's matrix units in one cycle, accumulated in fp32 (a multiply-add is two).
    tdp_w : float, optional
        Board power limit.
    link : str, optional
        The device's own link to its neighbours: a name of :data:`cdmpp.devices.links.LINKS`, such as ``"nvlink4"`` or
        ``"pcie4-x16"``, or a bandwidth of one direction, such as ``"64GB/s"``. None: as the generation usually has it.
    ranks_per_node : int, optional
        Devices of one node. None: :data:`cdmpp.devices.paths.RANKS_PER_NODE`, 8.
    network_bytes_per_s : float, optional
        Of a device's own share of its node's network adapters, one direction. None: as such nodes commonly have it.
    nvlink_domain : int, optional
        Devices that one switched link connects, where they are several nodes (GB200 NVL72: 72). None: one node.
    status : {"", "stand-in", "unreleased"}
        "stand-in": figures of a card that stands in for a board that its source does not name. "unreleased":
        announced hardware. Predictions for either are never ``in`` the domain.
    source : str
        Where the figures come from.
    aliases : tuple of str
        Other names; the first is the one the driver or the public tables use.
    sustained : Ceilings, optional
        What the device was measured to reach (``cdmpp probe``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Name
    vendor: Name
    arch: Name
    kind: Literal["gpu", "cpu"]
    compute_units: Count
    cores_per_unit: Count
    clock_hz: Annotated[float, Field(ge=1e7, le=2e10)]
    memory_bytes: Annotated[float, Field(ge=1e6, le=1e15)] | None = None
    nominal_memory_bytes: Annotated[float, Field(ge=1e6, le=1e15)] | None = None
    mem_bandwidth_bytes_per_s: Annotated[float, Field(ge=1e8, le=1e16)]
    peak_flops_fp32: Flops
    peak_flops_fp32_matrix: Flops | None = None
    peak_flops_fp16_matrix: Flops | None = None
    peak_flops_bf16_matrix: Flops | None = None
    peak_ops_int8: Flops | None = None
    peak_flops_fp64: Flops | None = None
    peak_flops_tf32_matrix: Flops | None = None
    peak_flops_fp8_matrix: Flops | None = None
    peak_flops_fp4_matrix: Flops | None = None
    l2_bytes: Annotated[float, Field(ge=1e3, le=1e12)] | None = None
    l2_bandwidth_bytes_per_s: Annotated[float, Field(ge=1e8, le=1e17)] | None = None
    sustained_clock_hz: Annotated[float, Field(ge=1e7, le=2e10)] | None = None
    matrix_flops_per_cycle_per_unit: Annotated[float, Field(ge=1, le=1e7)] | None = None
    tdp_w: Annotated[float, Field(ge=0.1, le=1e5)] | None = None
    link: Annotated[
        Annotated[str, Field(max_length=60), WithJsonSchema(LINK_SCHEMA)] | None, BeforeValidator(_link_name)
    ] = None
    ranks_per_node: Count | None = None
    network_bytes_per_s: Annotated[float, Field(ge=1e6, le=1e14)] | None = None
    nvlink_domain: Count | None = None
    status: Literal["", "stand-in", "unreleased"] = ""
    source: Annotated[str, Field(max_length=2000)] = "user"
    aliases: Annotated[tuple[Name, ...], BeforeValidator(_as_tuple), Field(max_length=32)] = ()
    sustained: Annotated[Ceilings | None, BeforeValidator(read_ceilings)] = None

    @model_validator(mode="after")
    def _units_fit_together(self) -> Self:
        by_clock = 2.0 * self.compute_units * self.cores_per_unit * self.clock_hz
        ratio = self.peak_flops_fp32 / by_clock
        if not 1.0 / _PEAK_PLAUSIBLE_FACTOR <= ratio <= _PEAK_PLAUSIBLE_FACTOR:
            raise ValueError(
                f"peak_flops_fp32 = {self.peak_flops_fp32:.3g} does not fit 2 x compute_units x "
                f"cores_per_unit x clock_hz = {by_clock:.3g}: check the units (flop/s, Hz)"
            )
        return self

    def peak(self, dtype: str, matrix: bool) -> float:
        """Nominal arithmetic rate for operands of ``dtype``, in flop/s (int8: operations/s).

        Parameters
        ----------
        dtype : str
            Type of the operands, such as ``"float16"``.
        matrix : bool
            True for matrix products and convolutions, False for everything else.

        Returns
        -------
        float
            Always a figure, by these stated fallbacks. Not ``matrix``: the fp32 vector rate for every
            type, for libraries compute half-precision elementwise programs in fp32. ``matrix``:
            float32 takes the fp32 matrix rate, else the vector rate; float16 its matrix rate, else
            as float32; bfloat16 its own, else as float16; int8 its own, else as float16; int4 as int8;
            float8 its own, else as float16; float4 its own, else as float8; tfloat32 its own, else as
            float32; float64 its own, else the fp32 vector rate, which any other type takes (int32, ...).
        """
        if not matrix:
            return self.peak_flops_fp32
        single = self.peak_flops_fp32_matrix or self.peak_flops_fp32
        half = self.peak_flops_fp16_matrix or single
        if dtype == "float32":
            return single
        if dtype == "float16":
            return half
        if dtype == "bfloat16":
            return self.peak_flops_bf16_matrix or half
        if dtype in _BYTE_TYPES:
            return self.peak_ops_int8 or half
        if dtype.startswith("float8"):
            return self.peak_flops_fp8_matrix or half
        if dtype.startswith("float4"):
            return self.peak_flops_fp4_matrix or self.peak_flops_fp8_matrix or half
        if dtype == "tfloat32":
            return self.peak_flops_tf32_matrix or single
        if dtype == "float64":
            return self.peak_flops_fp64 or self.peak_flops_fp32
        return self.peak_flops_fp32

    def has_units(self, dtype: str) -> bool:
        """Whether products of ``dtype`` have a rate of their own; a GPU without one computes them in another type.

        A bfloat16 rate that is not above the fp32 vector rate is that of arithmetic in fp32.
        """
        if self.kind != "gpu":
            return True
        if dtype == "bfloat16":
            return self.peak(dtype, matrix=True) > self.peak_flops_fp32
        rates = {"int8": self.peak_ops_int8, "float8": self.peak_flops_fp8_matrix, "float4": self.peak_flops_fp4_matrix}
        return rates.get(dtype.partition("_")[0], 1.0) is not None

    @property
    def sheet_memory_bytes(self) -> float | None:
        """Capacity that the network was trained with; None: not published."""
        return self.nominal_memory_bytes or self.memory_bytes

    def nominal(self) -> DeviceSpec:
        """The same device by its data sheet alone, without sustained ceilings."""
        return self if self.sustained is None else self.model_copy(update={"sustained": None})

    def digest(self) -> str:
        """Hash that identifies a device by its figures: equal devices under two names share it.

        Sustained ceilings are among them where there are any; :meth:`nominal` is the device without.
        :data:`LATER_FIGURES` are not, so that models and observations stored before they existed still match:
        two devices of one digest may differ in them (:meth:`agrees`, :meth:`cache_key`). Its memory is the nominal one.
        """
        figures = self.model_dump(exclude={*_NO_FIGURES, *LATER_FIGURES})
        figures["memory_bytes"] = self.sheet_memory_bytes
        if self.sustained is not None:
            figures["sustained"] = self.sustained.figures()
        if self.status:
            figures["status"] = self.status
        return _hash(figures)

    def cache_key(self) -> str:
        """Hash of every figure that a prediction may depend on; the digest where no later figure is stated."""
        later = {name: value for name, value in self.later_figures() if value is not None}
        return _hash({"digest": self.digest(), **later}) if later else self.digest()

    def later_figures(self) -> tuple[tuple[str, float | str | None], ...]:
        """Names and values of :data:`LATER_FIGURES`."""
        return tuple((name, getattr(self, name)) for name in LATER_FIGURES)

    def agrees(self, other: DeviceSpec) -> bool:
        """Whether no figure of :data:`LATER_FIGURES` that both devices state differs; links are not compared."""
        return all(
            value is None or another is None or value == another or name in ("link", "network_bytes_per_s")
            for (name, value), (_, another) in zip(self.later_figures(), other.later_figures(), strict=True)
        )


def _hash(figures: dict[str, Any]) -> str:
    text = json.dumps(figures, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


#: Fields that a specification must have, and those that it may have, as text.
REQUIRED = ", ".join(name for name, field in DeviceSpec.model_fields.items() if field.is_required())
OPTIONAL = ", ".join(
    name
    for name, field in DeviceSpec.model_fields.items()
    if not field.is_required() and name not in ("source", "aliases", "sustained")
)

SPECIFICATION_HINT = (
    f"a device need not be known: pass a .toml or .json file (over HTTP and in Python an object) with "
    f"{REQUIRED}, in base units (Hz, bytes, flop/s); optional: {OPTIONAL}"
)
