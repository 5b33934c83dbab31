"""The schedule's columns: loop orders and tiles of programs small enough to count by hand."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from cdmpp.features.encode import encode_tvm_json
from cdmpp.features.loop_order import CAPACITIES
from cdmpp.features.schedule import SCHEDULE_COLUMNS, SCHEDULE_FLAGS, SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from tests.features.builder import Builder

SERIAL, PARALLEL, VECTORIZED, UNROLLED = range(4)


def columns(loops: list[tuple[int, int, int]], size: int = 4096) -> dict[str, float]:
    """Of ``x[sum of step * loop] = 0``; loops are (extent, step, kind), outermost first. Own units."""
    b = Builder()
    b.x = b.buffer("x", [size])
    variables = [b.variable(f"i{n}") for n in range(len(loops))]
    index = b.integer(0)
    for (_, step, _), variable in zip(loops, variables, strict=True):
        if step:
            index = b.binary("Add", index, b.binary("Mul", variable, b.integer(step)))
    body = b.store(index)
    for (extent, _, kind), variable in reversed(list(zip(loops, variables, strict=True))):
        body = b.loop(b.integer(extent), body, variable, kind=kind)
    encoded = encode_tvm_json(json.dumps(b.program(body)), schedule=True)
    assert encoded.leaves.shape == (1, 1, WIDTH + SCHEDULE_WIDTH)
    return {
        name: value if name in SCHEDULE_FLAGS else 2**value - 1
        for name, value in zip(SCHEDULE_COLUMNS, encoded.leaves[0, 0, WIDTH:].tolist(), strict=True)
    }


def test_rows_in_order_pass_through_every_cache_once() -> None:
    features = columns([(64, 64, SERIAL), (64, 1, SERIAL)])
    assert [features[f"traffic_{c}"] for c in CAPACITIES] == pytest.approx([16384.0] * len(CAPACITIES), rel=1e-4)
    assert features["working_set_1"] == pytest.approx(256, rel=1e-4)
    assert features["working_set_2"] == pytest.approx(16384, rel=1e-4)


def test_columns_in_order_fetch_a_line_for_every_element_until_a_column_fits() -> None:
    features = columns([(64, 1, SERIAL), (64, 64, SERIAL)])
    assert features["traffic_512"] == pytest.approx(4096 * 64, rel=1e-4)
    assert features["store_traffic_512"] == features["traffic_512"]
    assert features["traffic_4096"] == pytest.approx(16384, rel=1e-4)
    assert features["working_set_1"] == pytest.approx(64 * 64, rel=1e-4)
    # In tiles of 16 columns, 8 rows high, a line is used up while it is there.
    tiled = columns([(4, 16, SERIAL), (8, 512, SERIAL), (16, 1, SERIAL), (8, 64, SERIAL)])
    assert tiled["traffic_512"] == pytest.approx(16384, rel=1e-4)


def test_loops_that_the_address_does_not_follow_reduce() -> None:
    features = columns([(8, 4, SERIAL), (32, 0, SERIAL), (4, 1, SERIAL)], size=32)
    assert features["accumulators"] == pytest.approx(4, rel=1e-4)
    assert features["inner_reduce"] == pytest.approx(32, rel=1e-4)
    assert features["inner_spatial"] == pytest.approx(4, rel=1e-4)
    assert features["store_visits"] == pytest.approx(1024 / 32, rel=1e-4)
    assert features["inner_is_reduce"] == 0
    other = columns([(8, 4, SERIAL), (4, 1, SERIAL), (32, 0, SERIAL)], size=32)
    assert other["inner_is_reduce"] == 1
    assert other["accumulators"] == pytest.approx(1, rel=1e-4)


def test_annotations() -> None:
    features = columns([(8, 128, PARALLEL), (4, 32, SERIAL), (2, 16, UNROLLED), (16, 1, VECTORIZED)], size=1024)
    assert features["vector_extent"] == pytest.approx(16, rel=1e-4)
    assert features["vector_align"] == pytest.approx(4 / 6)
    assert features["inner_is_vector"] == 1
    assert features["unrolled_body"] == pytest.approx(2, rel=1e-4)
    assert features["fully_unrolled"] == 0
    assert features["launches"] == pytest.approx(1, rel=1e-4)
    assert features["iterations_each"] == pytest.approx(4 * 2 * 16, rel=1e-4)
    inside = columns([(4, 256, SERIAL), (8, 32, PARALLEL), (32, 1, SERIAL)], size=1024)
    assert inside["launches"] == pytest.approx(4, rel=1e-4)


def documented() -> list[str]:
    """Columns that docs/features.md explains: names, and ranges "`a` ... `b`" in the order of the schema."""
    text = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    section = text.partition("## Columns of the schedule\n")[2].partition("\n## ")[0]
    features: list[str] = []
    for line in section.splitlines():
        name, _, about = line.removeprefix("| ").partition(" | ")
        if not line.startswith("| `"):
            continue
        assert len(about) > 20, line
        upto = False
        for token in re.findall(r"`\w+`|\.\.\.", name):
            if token == "...":
                upto = True
                continue
            place = SCHEDULE_COLUMNS.index(token.strip("`"))
            start = SCHEDULE_COLUMNS.index(features[-1]) + 1 if upto else place
            features += SCHEDULE_COLUMNS[start : place + 1]
            upto = False
    return features


def test_every_column_is_explained() -> None:
    assert sorted(documented()) == sorted(SCHEDULE_COLUMNS)


def test_schedule_columns_follow_the_leaf_columns() -> None:
    b = Builder()
    text = json.dumps(b.program(b.loop(b.integer(8), b.store())))
    narrow, wide = encode_tvm_json(text), encode_tvm_json(text, schedule=True)
    assert narrow.leaves.shape[2] == WIDTH
    np.testing.assert_array_equal(narrow.leaves, wide.leaves[:, :, :WIDTH])
    assert np.isfinite(wide.leaves).all()
