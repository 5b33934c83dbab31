"""Specifications of dense matrix products."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import model_validator

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.elements import DTYPE_BYTES, DType, Extent, Flag, canonical_dtype
from cdmpp.programs.quantisation import Scaling, check_types, completed_fields
from cdmpp.programs.spec import OperatorSpec

#: Storage of the two operands, row by row: "n" as written in the product, "t" transposed.
Layout = Literal["nn", "nt", "tn", "tt"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


class Product(OperatorSpec):
    """A matrix product with optional narrow weights and scales (:mod:`cdmpp.programs.quantisation`).

    A bare product (without scaling) may state how its operands are stored (``layout``), that sums are kept in 16 bits
    (``accumulate``), and that 16-bit operands give a result of 32 bits (``out_dtype``).
    """

    weight_dtype: DType | None = None
    scaling: Scaling | None = None
    layout: Layout | None = None
    accumulate: Literal["float16"] | None = None
    out_dtype: Literal["float32"] | None = None
    structural_fields: ClassVar[tuple[str, ...]] = ("weight_dtype", "scaling", "layout", "accumulate", "out_dtype")
    #: Layout of an operator that states none.
    default_layout: ClassVar[str] = "nn"
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPE_BYTES)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        fields = completed_fields(fields)
        if not isinstance(fields, dict):
            return fields
        if fields.get("layout") == cls.default_layout:
            fields["layout"] = None
        for name in ("accumulate", "out_dtype"):
            if name in fields:
                fields[name] = canonical_dtype(fields[name])
        return fields

    def check_types(self) -> None:
        check_types(self.operator, self.dtype, self.weight_dtype, self.scaling)
        stated = [name for name in ("layout", "accumulate", "out_dtype") if getattr(self, name) is not None]
        if stated and (self.scaling is not None or self.weight_dtype is not None or getattr(self, "bias", False)):
            raise InvalidProgramError(
                f"{self.operator}: {stated[0]} belongs to bare products",
                hint="leave out scaling, weight_dtype and bias, or " + stated[0],
            )
        if self.accumulate is not None and self.dtype != "float16":
            raise InvalidProgramError(
                f"{self.operator}: sums of {self.dtype} products are not kept in float16", hint="dtype=float16"
            )
        if self.out_dtype is not None and self.dtype not in ("float16", "bfloat16"):
            raise InvalidProgramError(
                f"{self.operator}: out_dtype=float32 belongs to 16-bit operands", hint="dtype float16 or bfloat16"
            )
        super().check_types()

    def operand_bytes(self, m: int, n: int, k: int) -> float:
        """Bytes of one product's operands and result. Results of 8-bit and 4-bit products have up to 32 bits."""
        own, weight = DTYPE_BYTES[self.dtype], DTYPE_BYTES[self.weight_dtype or self.dtype]
        result = 4 if self.out_dtype or own < 2 else own
        return m * k * own + k * n * weight + m * n * result


class Linear(Product):
    """``y[m, n] = x[m, k] @ w[n, k].T (+ bias[n])``: a dense layer or a plain GEMM; its layout is "nt" by default."""

    operator: Literal["linear"] = "linear"
    m: Extent
    n: Extent
    k: Extent
    bias: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("bias", *Product.structural_fields)
    default_layout: ClassVar[str] = "nt"

    def tensor_bytes(self) -> float:
        return self.operand_bytes(self.m, self.n, self.k) + (4 * self.n if self.bias else 0)


class BatchMatmul(Product):
    """``y[batch, m, n] = a[batch, m, k] @ b[batch, k, n]``."""

    operator: Literal["bmm"] = "bmm"
    batch: Extent
    m: Extent
    n: Extent
    k: Extent

    def tensor_bytes(self) -> float:
        return self.batch * self.operand_bytes(self.m, self.n, self.k)
