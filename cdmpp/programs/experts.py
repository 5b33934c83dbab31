"""Specifications of layers of experts (mixture of experts) and of grouped products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from cdmpp.programs.elements import DTYPE_BYTES, DType, Extent, Flag
from cdmpp.programs.quantisation import Scaling, check_types, completed_fields
from cdmpp.programs.routing import MAX_EXPERTS, Balance, loads
from cdmpp.programs.spec import OperatorSpec, Violation


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
        own = DTYPE_BYTES[self.dtype]
        return inputs * own + weights * DTYPE_BYTES[self.weight_dtype or self.dtype] + results * max(own, 2)


class Moe(_Experts):
    """The expert layer on one rank, fused: first grouped product, activation, second grouped product, combine.

    ``moe_w13`` is the first grouped product alone. ``tokens`` tokens each go to ``topk`` of ``experts`` experts. The
    rank holds ``intermediate / tp`` columns of ``experts / ep`` experts; with unbalanced routing it is the rank with
    most rows (:mod:`cdmpp.programs.routing`). Shares that are not whole numbers are rounded up. A gated layer has two
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
        one = np.ones_like(groups) if isinstance(groups, np.ndarray) else 1
        return loads(rows, rows, groups, one, fields["balance"])

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        return np.maximum(sizes["groups"], sizes["rows"]) * sizes["n"] * sizes["k"]

    def tensor_bytes(self) -> float:
        return self.bytes_of(self.rows * self.k, self.groups * self.n * self.k, self.rows * self.n)
