"""Ceilings that a device was measured to reach, beside the nominal figures of its data sheet.

Power limits, throttled boards and slow buses make a device's best sustained rate a fraction of the nominal
one. Some twenty micro-benchmarks tell (``cdmpp probe``), or the largest programs of a device's records
(:mod:`cdmpp.data.ceilings`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(ge=1e7, le=1e19)]
Floor = Annotated[float, Field(ge=1e-10, le=1.0)]

#: Suffix of a field -> element type.
_TYPES = {"float32": "flops_fp32", "float16": "flops_fp16", "bfloat16": "flops_bf16", "int8": "ops_int8"}
FAMILIES = ("gemm", "conv", "attention")


class Ceilings(BaseModel):
    """Best sustained rates of one device by library kernels, in base units; ``None``: not measured.

    Parameters
    ----------
    gemm_flops_fp32, gemm_flops_fp16, gemm_flops_bf16, gemm_ops_int8 : float, optional
        Of large matrix products, in flop/s (int8: operations/s).
    conv_flops_fp32, conv_flops_fp16, conv_flops_bf16 : float, optional
        Of large convolutions, by their definition's arithmetic: algorithms that save some of it (winograd)
        may exceed the nominal peak.
    attention_flops_fp32, attention_flops_fp16, attention_flops_bf16 : float, optional
        Of long fused attention.
    bytes_per_s : float, optional
        Of element-wise programs and copies much larger than the caches, reads plus writes.
    floor_kernel_s, floor_graph_s, floor_eager_s : float, optional
        Latency of the smallest programs, in seconds, by measuring protocol.
    source : str
        Where they come from.
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
