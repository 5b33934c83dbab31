"""Specifications of dense matrix products."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from cdmpp.programs.elements import DTYPE_BYTES, DType, Extent, Flag
from cdmpp.programs.quantisation import Scaling, check_types, completed_fields
from cdmpp.programs.spec import OperatorSpec


class Product(OperatorSpec):
    """A matrix product with optional narrow weights and scales (:mod:`cdmpp.programs.quantisation`)."""

    weight_dtype: DType | None = None
    scaling: Scaling | None = None
    structural_fields: ClassVar[tuple[str, ...]] = ("weight_dtype", "scaling")
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPE_BYTES)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        return completed_fields(fields)

    def check_types(self) -> None:
        check_types(self.operator, self.dtype, self.weight_dtype, self.scaling)
        super().check_types()


class Linear(Product):
    """``y[m, n] = x[m, k] @ w[n, k].T (+ bias[n])``: a dense layer or a plain GEMM."""

    operator: Literal["linear"] = "linear"
    m: Extent
    n: Extent
    k: Extent
    bias: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("bias", *Product.structural_fields)


class BatchMatmul(Product):
    """``y[batch, m, n] = a[batch, m, k] @ b[batch, k, n]``."""

    operator: Literal["bmm"] = "bmm"
    batch: Extent
    m: Extent
    n: Extent
    k: Extent
