"""Features from a structural class's template equal those of the operator's own lowering."""

import numpy as np
import pytest

from cdmpp.features.encode import EncodedPrograms, encode_operator, encode_operators, encode_shapes, encode_tvm_json
from cdmpp.features.schema import COLUMNS
from cdmpp.programs.operators import OperatorSpec, lowered_operators, parse_operator
from tests.features.shapes import random_specs, reads_only_padding

pytestmark = pytest.mark.slow


def differences(one: EncodedPrograms, two: EncodedPrograms) -> list[str]:
    """Columns in which two programs differ; float32 keeps log2 of a size to about 1e-6."""
    if one.leaves.shape != two.leaves.shape:
        return [f"{one.leaves.shape[1]} and {two.leaves.shape[1]} leaves"]
    if one.positions.tolist() != two.positions.tolist():
        return ["positions"]
    return [COLUMNS[j] for j in np.unique(np.nonzero(np.abs(one.leaves - two.leaves) > 1e-5)[2])]


@pytest.mark.tvm
@pytest.mark.parametrize("seed", range(2))
def test_class_and_direct_way_agree(seed: int) -> None:
    from cdmpp.programs.lowering import lower, to_json

    specs = random_specs(300, seed)
    # A seed covers every operator; together they are 600 shapes.
    assert {s.operator for s in specs} == set(lowered_operators())
    different = {}
    for spec in specs:
        direct, by_class = encode_tvm_json(to_json(lower(spec))), encode_operator(spec)
        wrong = differences(direct, by_class)
        # Bytes and outputs; flops of an operator are those that its result needs, by design.
        if not wrong and not np.allclose(direct.totals[:, [1, 4]], by_class.totals[:, [1, 4]], rtol=1e-6):
            wrong = ["totals"]
        if wrong and not reads_only_padding(spec):
            different[spec.text()] = wrong
    assert not different


@pytest.mark.tvm
def test_the_known_exception_still_differs() -> None:
    # Two output rows, at -3 and 1, and an image of one row: nothing of x is ever read.
    from cdmpp.programs.lowering import lower, to_json

    sizes = "n=1,c_in=1,h=1,w=1,c_out=3,kh=1,kw=3,stride_h=4,pad_h=3,pad_w=1,dil_h=4"
    spec = parse_operator(f"conv2d:{sizes},direction=bwd_weight")
    assert reads_only_padding(spec)
    direct, by_class = encode_tvm_json(to_json(lower(spec))), encode_operator(spec)
    assert "read_1_touched_bytes" in differences(direct, by_class)
    assert not reads_only_padding(parse_operator(f"conv2d:{sizes.replace('stride_h=4', 'stride_h=3')}"))


def groups(specs: list[OperatorSpec]) -> dict[tuple[str, ...], list[OperatorSpec]]:
    """Specifications that one call of encode_shapes takes."""
    result: dict[tuple[str, ...], list[OperatorSpec]] = {}
    for spec in specs:
        fixed = (str(getattr(spec, name)) for name in type(spec).structural_fields)
        result.setdefault((spec.operator, spec.dtype, *fixed), []).append(spec)
    return result


def test_in_bulk_equals_one_by_one() -> None:
    for members in groups(random_specs(500, 99)).values():
        first = members[0]
        sizes = {k: np.array([s.sizes()[k] for s in members], dtype=np.int64) for k in first.sizes()}
        sizes = {k: v for k, v in sizes.items() if k not in type(first).structural_fields}
        fixed = {name: getattr(first, name) for name in type(first).structural_fields}
        seen: list[int] = []
        for rows, bulk in encode_shapes(first.operator, first.dtype, fixed, sizes):
            seen += rows.tolist()
            for i, row in enumerate(rows):
                # Integers one by one, arrays in bulk.
                single = encode_operator(members[row])
                assert single.positions.tolist() == bulk.positions.tolist()
                np.testing.assert_array_equal(single.leaves[0], bulk.leaves[i], err_msg=members[row].text())
                np.testing.assert_array_equal(single.totals[0], bulk.totals[i], err_msg=members[row].text())
                assert (single.family, single.dtype) == (bulk.family, bulk.dtype)
        assert sorted(seen) == list(range(len(members)))


@pytest.mark.parametrize(
    "text",
    [
        "linear:m=2147483647,n=256,k=256",
        "bmm:batch=65536,m=1,n=1,k=2147483647,dtype=float16",
        "conv2d:n=64,c_in=3,h=1024,w=1024,c_out=64,kh=7,kw=7,pad_h=3,pad_w=3,stride_h=2,stride_w=2",
        "attention_decode:batch=1024,past_len=131072,heads=64,kv_heads=8,head_dim=128,dtype=bfloat16",
        "embedding:rows=16777216,cols=16384,table_rows=16777216",
        "softmax:rows=1,cols=2147483647",
    ],
)
def test_the_largest_sizes_stay_finite(text: str) -> None:
    encoded = encode_operator(parse_operator(text))
    assert np.isfinite(encoded.leaves).all()
    assert np.isfinite(encoded.totals).all()
    assert (encoded.totals[:, 1:3] >= 0).all()


def test_many_operators_equal_each_alone() -> None:
    specs = random_specs(300, 31)
    for spec, found in zip(specs, encode_operators(specs), strict=True):
        single = encode_operator(spec)
        assert isinstance(found, EncodedPrograms)
        assert (found.positions.tolist(), found.family, found.dtype) == (
            single.positions.tolist(),
            single.family,
            single.dtype,
        )
        np.testing.assert_array_equal(found.leaves, single.leaves, err_msg=spec.text())
        np.testing.assert_array_equal(found.totals, single.totals, err_msg=spec.text())
    assert encode_operators([]) == []
