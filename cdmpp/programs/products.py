"""Specifications of matrix products: dense, batched, grouped, and layers of experts (mixture of experts).

The rows of each expert are not measured. They follow from the sizes and from how balanced the routing is: each of
``tokens`` tokens goes to ``topk`` of ``experts`` experts. ``balanced`` gives every expert the same number of
rows. ``power_law_a`` draws the share of expert i from a power law with exponent a; here the quantiles stand in for
the draws, so that equal sizes have equal loads. With expert parallelism, the rank with the highest load counts: the
i-th most loaded expert is placed on rank i modulo ``ep``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import model_validator

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.elements import DTYPE_BYTES, Layout, Scaling, canonical_dtype, check_types, completed_fields
from cdmpp.programs.spec import DType, Extent, Flag, OperatorSpec, Violation


class Product(OperatorSpec):
    """A matrix product with optional narrow weights and scales (:mod:`cdmpp.programs.elements`).

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
        element_size, weight = DTYPE_BYTES[self.dtype], DTYPE_BYTES[self.weight_dtype or self.dtype]
        result = 4 if self.out_dtype or element_size < 2 else element_size
        return m * k * element_size + k * n * weight + m * n * result


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


Balance = Literal["balanced", "power_law_1.01", "power_law_1.2"]
BALANCES: tuple[str, ...] = get_args(Balance)

#: Largest and smallest number of rows of a tile of a grouped product.
MAX_TILE_ROWS, MIN_TILE_ROWS = 128, 16
#: Largest share of the tokens that one expert receives before normalisation, as in the measured tables.
_LARGEST_SHARE = 0.8

#: Most experts of a layer, and groups of a grouped product: their loads are computed one by one.
MAX_EXPERTS = 8192

#: Quantities of :func:`loads`, in order.
LOADS = ("rank_rows", "active", "largest", "tile_rows", "tiles")


def expert_rows(rows: int, tokens: int, experts: int, balance: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Rows of each expert, largest first, (experts,) float64; whole numbers that add up to ``rows``.

    ``rows``: tokens times top-k.
    ``tokens``: most rows that one expert can receive.
    """
    if balance == "balanced":
        share = np.full(experts, 1.0 / experts)
    else:
        exponent = 1.0 - float(balance.rpartition("_")[2])
        top = max(_LARGEST_SHARE * tokens, 1.0 + 1e-9)
        quantile = (np.arange(experts) + 0.5) / experts
        share = ((top**exponent - 1.0) * quantile + 1.0) ** (1.0 / exponent)
        share /= share.sum()
    wanted = np.sort(np.minimum(share * rows, tokens))[::-1]
    # Rows that a capped expert cannot take go to the others; then round so that the sum stays.
    for _ in range(8):
        left = rows - wanted.sum()
        room = wanted < tokens
        if left < 1e-6 or not room.any():
            break
        wanted[room] = np.minimum(wanted[room] * (1.0 + left / max(wanted[room].sum(), 1e-9)), tokens)
    whole = np.floor(wanted + 1e-9)
    rest = round(float(rows - whole.sum()))
    if rest > 0:
        whole[np.argsort(whole - wanted, kind="stable")[:rest]] += 1.0
    return np.sort(whole)[::-1]


@lru_cache(maxsize=65536)
def _loads(rows: int, tokens: int, experts: int, ep: int, balance: str) -> tuple[int, int, int, int, int]:
    here = expert_rows(rows, tokens, experts, balance)[::ep]
    active = max(int((here > 0).sum()), 1)
    total, largest = max(int(here.sum()), 1), max(int(here[0]), 1)
    mean = total / active
    tile = MIN_TILE_ROWS
    while tile < min(mean, MAX_TILE_ROWS):
        tile *= 2
    tiles = max(int(np.ceil(here / tile).sum()), 1)
    return total, active, largest, tile, tiles


def loads(rows: Any, tokens: Any, experts: Any, ep: Any, balance: str) -> dict[str, Any]:
    """Loads of the rank with most rows.

    ``rows``: tokens times top-k, over all ranks.
    Returns ``rank_rows``: rows on the rank; ``active``: its experts with at least one row; ``largest``: rows of its
    most loaded expert; ``tile_rows``: rows of a tile, a power of two near the mean load; ``tiles``: tiles of all
    experts. Integers, or int64 arrays.
    """
    if not isinstance(rows, np.ndarray):
        return dict(zip(LOADS, _loads(int(rows), int(tokens), int(experts), int(ep), balance), strict=True))
    table = np.stack(np.broadcast_arrays(rows, tokens, experts, ep), axis=1).astype(np.int64)
    distinct, inverse = np.unique(table, axis=0, return_inverse=True)
    values = np.array([_loads(*row, balance) for row in distinct.tolist()], dtype=np.int64).reshape(-1, len(LOADS))
    return dict(zip(LOADS, values[inverse.reshape(-1)].T, strict=True))


class _Experts(OperatorSpec):
    """A product with one weight per expert."""

    dtype: DType = "bfloat16"
    weight_dtype: DType | None = None
    scaling: Scaling | None = None
    balance: Balance = "balanced"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16", "int8", "float8_e4m3", "float4_e2m1")
    structural_fields: ClassVar[tuple[str, ...]] = ("weight_dtype", "scaling", "balance")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        return completed_fields(fields, default="bfloat16", experts=True)

    def check_types(self) -> None:
        check_types(self.operator, self.dtype, self.weight_dtype, self.scaling, experts=True)
        super().check_types()

    def bytes_of(self, inputs: int, weights: int, results: int) -> float:
        """Bytes of so many elements of each. Results have at least 16 bits."""
        element_size = DTYPE_BYTES[self.dtype]
        return (
            inputs * element_size
            + weights * DTYPE_BYTES[self.weight_dtype or self.dtype]
            + results * max(element_size, 2)
        )


class Moe(_Experts):
    """The expert layer on one rank, fused: first grouped product, activation, second grouped product, combine.

    ``moe_w13`` is the first grouped product alone. ``tokens`` tokens each go to ``topk`` of ``experts`` experts. The
    rank holds ``intermediate / tp`` columns of ``experts / ep`` experts; with unbalanced routing it is the rank with
    most rows (:mod:`cdmpp.programs.products`). Shares that are not whole numbers are rounded up. A gated layer has two
    first products.
    """

    operator: Literal["moe", "moe_w13"]
    tokens: Extent
    hidden: Extent
    intermediate: Extent
    experts: Extent
    topk: Extent
    tp: Extent = 1
    ep: Extent = 1
    gated: Flag = True
    structural_fields: ClassVar[tuple[str, ...]] = (*_Experts.structural_fields, "gated")

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        yield fields["experts"] > MAX_EXPERTS, f"experts exceeds {MAX_EXPERTS}", f"at most {MAX_EXPERTS} experts"
        yield fields["topk"] > fields["experts"], "topk exceeds experts", "a token goes to topk of the experts"
        yield fields["ep"] > fields["experts"], "ep exceeds experts", "each rank holds at least one expert"
        yield fields["tp"] > fields["intermediate"], "tp exceeds intermediate", "each rank holds at least one column"

    @classmethod
    def derived_sizes(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes of the lowered structure besides the fields, for integers or int64 arrays."""
        tokens = fields["tokens"]
        counts = loads(tokens * fields["topk"], tokens, fields["experts"], fields["ep"], fields["balance"])
        return {**counts, "rank_intermediate": -(-fields["intermediate"] // fields["tp"])}

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s, per_row = sizes, 3 * sizes["hidden"] * sizes["intermediate"]
        return np.maximum(s["experts"], s["tokens"] * s["topk"]) * per_row

    def tensor_bytes(self) -> float:
        """All experts of the rank, also those without rows."""
        sizes = self.bindings()
        first = sizes["rank_intermediate"] * (2 if self.gated else 1)
        second = sizes["rank_intermediate"] if self.operator == "moe" else 0
        experts = -(-self.experts // self.ep)
        results = self.tokens * self.hidden if self.operator == "moe" else sizes["rank_rows"] * first
        return self.bytes_of(self.tokens * self.hidden, experts * self.hidden * (first + second), results)


class GroupedGemm(_Experts):
    """``rows`` rows in ``groups`` groups, each group multiplied with its own ``[k, n]`` weight.

    ``balanced`` groups have equal numbers of rows.
    """

    operator: Literal["grouped_gemm"] = "grouped_gemm"
    groups: Extent
    rows: Extent
    n: Extent
    k: Extent

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        yield fields["groups"] > MAX_EXPERTS, f"groups exceeds {MAX_EXPERTS}", f"at most {MAX_EXPERTS} groups"

    @classmethod
    def derived_sizes(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes of the lowered structure besides the fields, for integers or int64 arrays."""
        rows, groups = fields["rows"], fields["groups"]
        ones = np.ones_like(groups) if isinstance(groups, np.ndarray) else 1
        return loads(rows, rows, groups, ones, fields["balance"])

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        return np.maximum(sizes["groups"], sizes["rows"]) * sizes["n"] * sizes["k"]

    def tensor_bytes(self) -> float:
        return self.bytes_of(self.rows * self.k, self.groups * self.n * self.k, self.rows * self.n)
