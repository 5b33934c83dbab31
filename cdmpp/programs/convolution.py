"""Specifications of image operators: convolution, pooling, batch normalisation (NCHW)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.elements import DTYPE_BYTES, Extent, Flag, Offset
from cdmpp.programs.spec import OperatorSpec


def output_hw(sizes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Output height and width of conv2d and of the pools, from their sizes as integers or as arrays."""

    def along(axis: str) -> Any:
        span = (sizes["k" + axis] - 1) * sizes.get("dil_" + axis, 1) + 1
        return (sizes[axis] + 2 * sizes["pad_" + axis] - span) // sizes["stride_" + axis] + 1

    return along("h"), along("w")


class Conv2d(OperatorSpec):
    """2-D convolution, NCHW, written as the forward problem whatever the direction."""

    operator: Literal["conv2d"] = "conv2d"
    direction: Literal["fwd", "bwd_data", "bwd_weight"] = "fwd"
    n: Extent
    c_in: Extent
    h: Extent
    w: Extent
    c_out: Extent
    kh: Extent
    kw: Extent
    stride_h: Extent = 1
    stride_w: Extent = 1
    pad_h: Offset = 0
    pad_w: Offset = 0
    dil_h: Extent = 1
    dil_w: Extent = 1
    groups: Extent = 1
    bias: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("direction", "bias")

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        padded = bool(fields["pad_h"] > 0 or fields["pad_w"] > 0)
        return {"padded": padded, "grouped": bool(fields["groups"] > 1)}

    def output_hw(self) -> tuple[int, int]:
        """Height and width of the forward output."""
        return output_hw(self.sizes())

    def check(self) -> None:
        if self.c_in % self.groups or self.c_out % self.groups:
            raise InvalidProgramError(
                f"conv2d: groups={self.groups} divides neither or only one of c_in={self.c_in} and c_out={self.c_out}",
                hint="groups must divide both channel counts",
            )
        if min(self.output_hw()) < 1:
            raise InvalidProgramError(
                f"conv2d: the kernel ({self.kh}x{self.kw}, dilation {self.dil_h}x{self.dil_w}) is larger "
                f"than the padded input ({self.h + 2 * self.pad_h}x{self.w + 2 * self.pad_w})",
                hint="enlarge h, w or the padding, or shrink the kernel",
            )
        if self.bias and self.direction != "fwd":
            raise InvalidProgramError("conv2d: a backward direction has no bias", hint="leave bias out")
        super().check()

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s, (oh, ow) = sizes, output_hw(sizes)
        per_group = s["c_in"] // s["groups"]
        padded = s["n"] * s["c_in"] * (s["h"] + 2 * s["pad_h"]) * (s["w"] + 2 * s["pad_w"])
        weight = s["c_out"] * per_group * s["kh"] * s["kw"]
        return np.maximum(np.maximum(padded, weight), s["n"] * oh * ow * weight)

    def tensor_bytes(self) -> float:
        height, width = self.output_hw()
        images = self.n * (self.c_in * self.h * self.w + self.c_out * height * width)
        weight = self.c_out * (self.c_in // self.groups) * self.kh * self.kw
        return DTYPE_BYTES[self.dtype] * (images + weight)


class Pool2d(OperatorSpec):
    """2-D pooling, NCHW."""

    operator: Literal["max_pool2d", "avg_pool2d"]
    n: Extent
    c: Extent
    h: Extent
    w: Extent
    kh: Extent
    kw: Extent
    stride_h: Extent = 1
    stride_w: Extent = 1
    pad_h: Offset = 0
    pad_w: Offset = 0

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"padded": bool(fields["pad_h"] > 0 or fields["pad_w"] > 0)}

    def check(self) -> None:
        if self.h + 2 * self.pad_h < self.kh or self.w + 2 * self.pad_w < self.kw:
            raise InvalidProgramError(
                f"{self.operator}: the window {self.kh}x{self.kw} is larger than the padded input",
                hint="enlarge h, w or the padding, or shrink the window",
            )
        super().check()

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s = sizes
        padded = (s["h"] + 2 * s["pad_h"]) * (s["w"] + 2 * s["pad_w"])
        return s["n"] * s["c"] * padded * s["kh"] * s["kw"]

    def tensor_bytes(self) -> float:
        height, width = output_hw(self.sizes())
        return float(DTYPE_BYTES[self.dtype] * self.n * self.c * (self.h * self.w + height * width))


class BatchNorm(OperatorSpec):
    """Inference batch normalisation, NCHW: one scale and one shift per channel."""

    operator: Literal["batch_norm"] = "batch_norm"
    n: Extent
    c: Extent
    h: Extent
    w: Extent

    def tensor_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype] * 2 * self.n * self.c * self.h * self.w
