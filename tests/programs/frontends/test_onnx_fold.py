"""Constant folding: values of ONNX's reference implementation, with a bound on the size of a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cdmpp.programs.frontends.onnx_graph import MAX_ELEMENTS, NotFoldable, fold

INT = np.array


@pytest.mark.parametrize(
    ("op", "opset", "inputs", "attrs", "expected"),
    [
        ("Squeeze", 11, [np.ones((1, 3), np.int64)], {"axes": [0]}, [1, 1, 1]),
        ("Squeeze", 13, [np.ones((1, 3), np.int64), INT([0])], {}, [1, 1, 1]),
        ("Div", 17, [INT([-5, 7]), INT([3, 2])], {}, [-1, 3]),
        ("Slice", 17, [np.arange(6), INT([5]), INT([-9]), INT([0]), INT([-2])], {}, [5, 3, 1]),
        ("Slice", 9, [np.arange(6)], {"starts": [1], "ends": [3]}, [1, 2]),
        ("Reshape", 17, [np.ones((2, 3), np.int64), INT([0, -1])], {}, [[1, 1, 1], [1, 1, 1]]),
        ("ConstantOfShape", 17, [INT([2])], {"value": INT([5])}, [5, 5]),
        ("Gather", 17, [np.arange(6), INT(3)], {"axis": 0}, 3),
        ("CumSum", 17, [np.arange(4), INT(0)], {"exclusive": 1}, [0, 0, 1, 3]),
        ("Trilu", 17, [np.ones((2, 2), np.int64), INT(0)], {"upper": 0}, [[1, 0], [1, 1]]),
        ("Max", 17, [INT([1]), INT([3]), INT([2])], {}, [3]),
        ("Cast", 17, [np.array([1.5], np.float32)], {"to": 16}, [1.5]),
    ],
)
def test_value_equals_the_onnx_definition(
    op: str, opset: int, inputs: list[Any], attrs: dict[str, Any], expected: Any
) -> None:
    [value] = fold(op, opset, inputs, attrs)
    assert value.tolist() == expected
    assert value.dtype.isbuiltin == 1


def test_split_gives_every_output() -> None:
    parts = fold("Split", 13, [np.arange(6), INT([2, 4])], {"axis": 0}, outputs=2)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("Expand", [INT([1]), INT([MAX_ELEMENTS, 2])]),
        ("Tile", [INT([1]), INT([2 * MAX_ELEMENTS])]),
        ("Tile", [INT([1]), INT([-1])]),
        ("Range", [INT(0), INT(2 * MAX_ELEMENTS), INT(1)]),
        ("Range", [INT(0), INT(1), INT(0)]),
        ("ConstantOfShape", [INT([2**40, 2**40])]),
        ("Add", [np.zeros((4096, 1)), np.zeros((1, 4096))]),
        ("Gather", [np.zeros((1, 4096)), np.zeros(4096, np.int64)]),
        ("Add", [INT([1, 2]), INT([1, 2, 3])]),
        ("Add", []),
        ("Conv", [np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 1, 1))]),
    ],
)
def test_too_large_wrong_or_other_is_not_evaluated(op: str, inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr("cdmpp.programs.frontends.onnx_graph._evaluate", refuse)
    with pytest.raises(NotFoldable):
        fold(op, 17, inputs, {"axis": 0} if op == "Gather" else {})
