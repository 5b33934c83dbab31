"""Reading ONNX bytes: dynamic dimensions, damaged files, hostile graphs; bounded folding of constants."""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.onnx_graph import MAX_ELEMENTS, NotFoldable, fold
from cdmpp.programs.frontends.onnx_library import onnx_library_graph
from cdmpp.programs.operators import parse_operator
from tests.programs.frontends.onnx_models import attention, model, texts, weight

GOOD = attention(mask=np.zeros((8, 8), np.float32))
RELU = helper.make_node("Relu", ["x"], ["y"])
LINEAR = helper.make_node("MatMul", ["x", "w"], ["y"], name="dense")


def refused(data: bytes | Path, **options: object) -> InvalidProgramError:
    with pytest.raises(InvalidProgramError) as caught:
        onnx_library_graph(data, **options)  # type: ignore[arg-type]
    assert caught.value.hint or options
    return caught.value


def test_dynamic_dimension_is_named_and_can_be_set() -> None:
    data = model([LINEAR], {"x": ["batch", 8]}, ["y"], {"w": weight(8, 4)})
    error = refused(data)
    assert "batch (input 'x', axis 0)" in str(error) and "dims={'batch': 1}" in error.hint
    graph = onnx_library_graph(data, dims={"batch": 3})
    assert texts(graph) == {parse_operator("linear:m=3,n=4,k=8").text(): 1}


def test_nameless_dynamic_dimension_goes_by_input_and_axis() -> None:
    built = onnx.load_from_string(model([LINEAR], {"x": [5, 8]}, ["y"], {"w": weight(8, 4)}))
    built.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    assert "x.0" in str(refused(built.SerializeToString()))
    graph = onnx_library_graph(built.SerializeToString(), dims={"x.0": 6})
    assert texts(graph) == {parse_operator("linear:m=6,n=4,k=8").text(): 1}


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4"])
def test_sizes_of_dimensions_are_positive_whole_numbers(value: object) -> None:
    data = model([LINEAR], {"x": ["batch", 8]}, ["y"], {"w": weight(8, 4)})
    refused(data, dims={"batch": value})


def test_unknown_dimension_names_are_an_error() -> None:
    data = model([LINEAR], {"x": ["batch", 8]}, ["y"], {"w": weight(8, 4)})
    error = refused(data, dims={"batch": 1, "sequence": 4})
    assert "'sequence'" in str(error) and "batch" in error.hint


def test_sequence_of_sizes_through_reshape() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Slice", ["s", "zero", "two"], ["lead"]),
        helper.make_node("Concat", ["lead", "heads"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["h"]),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    constants = {"zero": np.asarray([0]), "two": np.asarray([2]), "heads": np.asarray([4, 2])}
    data = model(nodes, {"x": ["b", "s", 8]}, ["y"], constants)
    graph = onnx_library_graph(data, dims={"b": 3, "s": 5})
    assert texts(graph) == {parse_operator("relu:rows=60,cols=2").text(): 1}


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x00" * 64, b"PK\x03\x04" + b"x" * 99])
def test_invalid_models_are_refused(data: bytes) -> None:
    refused(data)


@given(cut=st.integers(1, len(GOOD) - 1))
@settings(max_examples=60)
def test_truncated_models_are_refused(cut: int) -> None:
    # Protobuf lists what comes last (operator sets) at the end, so no proper prefix is whole.
    refused(GOOD[:cut])


@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
@settings(max_examples=150)
def test_damaged_models_never_give_a_traceback(at: int, value: int) -> None:
    with contextlib.suppress(InvalidProgramError):
        onnx_library_graph(GOOD[:at] + bytes([value]) + GOOD[at + 1 :])


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert "cannot be read" in str(refused(tmp_path / "none.onnx"))
    (tmp_path / "cut.onnx").write_bytes(GOOD[: len(GOOD) // 2])
    assert str(refused(tmp_path / "cut.onnx")).startswith("cut.onnx: ")


def external(tmp_path: Path, constants: dict[str, np.ndarray], nodes: list[onnx.NodeProto]) -> Path:  # type: ignore[type-arg]
    built = onnx.load_from_string(model(nodes, {"x": [4, 64]}, ["y"], constants))
    path = tmp_path / "model.onnx"
    onnx.save(built, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_weights_are_not_read(tmp_path: Path) -> None:
    path = external(tmp_path, {"w": weight(64, 64)}, [LINEAR])
    (tmp_path / "weights.bin").unlink()
    assert texts(onnx_library_graph(path)) == {parse_operator("linear:m=4,n=64,k=64").text(): 1}


def test_external_data_that_sizes_depend_on_must_be_there(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    path = external(tmp_path, {"shape": np.asarray([16, 16])}, nodes)
    assert texts(onnx_library_graph(path)) == {parse_operator("relu:rows=16,cols=16").text(): 1}
    (tmp_path / "weights.bin").unlink()
    error = refused(path)
    assert "external data" in str(error) and "beside" in error.hint
    assert "external data" in str(refused(path.read_bytes()))


@pytest.mark.parametrize(
    ("nodes", "shape", "constants", "says"),
    [
        ([LINEAR], [4, 9], {"w": weight(8, 4)}, "Incompatible dimensions"),
        ([RELU, RELU], [4], {}, "twice"),
        ([helper.make_node("Relu", ["z"], ["y"])], [4], {}, "nothing wrote"),
        ([helper.make_node("Relu", ["x"], ["z"])], [4], {}, "nothing writes"),
        ([RELU], [0, 4], {}, "0"),
        ([RELU], [1] * 65, {}, "65"),
        ([helper.make_node("MaxPool", ["x"], ["y"])], [1, 1, 4, 4], {}, "MaxPool"),
        ([helper.make_node("Reshape", ["x", "s"], ["y"])], [4], {"s": np.ones(4096, np.int64)}, "4096 dimensions"),
    ],
)
def test_contradictory_models_are_refused(nodes: list[Any], shape: list[int], constants: Any, says: str) -> None:
    assert says in str(refused(model(nodes, {"x": shape}, ["y"], constants)))


def functions(count: int, own: bool = False) -> bytes:
    """Functions that call their predecessor twice each: 2 ** count nodes when written out."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    bodies = [helper.make_function("f", "f0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets)]
    for i in range(1, count):
        called = f"f{i if own else i - 1}"
        calls = [helper.make_node(called, ["a"], ["t"], domain="f"), helper.make_node(called, ["t"], ["b"], domain="f")]
        bodies.append(helper.make_function("f", f"f{i}", ["a"], ["b"], calls, opsets))
    node = helper.make_node(f"f{count - 1}", ["x"], ["y"], domain="f")
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, [4])], [value("y", TensorProto.FLOAT, None)])
    built = helper.make_model(graph, opset_imports=opsets, functions=bodies, ir_version=10)
    return built.SerializeToString()


def test_functions_are_written_out() -> None:
    assert texts(onnx_library_graph(functions(3))) == {parse_operator("relu:rows=1,cols=4").text(): 4}


def test_functions_that_explode_or_recur_are_refused() -> None:
    assert "nodes" in str(refused(functions(40)))
    assert "calls itself" in str(refused(functions(3, own=True)))


def test_huge_constants_are_not_built() -> None:
    nodes = [helper.make_node("ConstantOfShape", ["shape"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    data = model(nodes, {"x": [2, 1 << 20]}, ["y"], {"shape": np.asarray([1 << 20, 1 << 20])})
    assert texts(onnx_library_graph(data)) == {parse_operator(f"linear:m=2,n={1 << 20},k={1 << 20}").text(): 1}


def test_shapes_by_the_exporters_word_reach_beyond_foreign_operators() -> None:
    nodes = [helper.make_node("Odd", ["x"], ["h"], domain="other"), helper.make_node("Relu", ["h"], ["y"])]
    built = onnx.load_from_string(model(nodes, {"x": ["n", 3]}, ["y"]))
    built.opset_import.append(helper.make_opsetid("other", 1))
    built.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["n", 6]))
    graph = onnx_library_graph(built.SerializeToString(), dims={"n": 5})
    assert texts(graph) == {parse_operator("relu:rows=5,cols=6").text(): 1}
    assert [u.operator for u in graph.unsupported] == ["other::Odd"]


def doubling(times: int, first: str, op: str = "Concat") -> list[onnx.NodeProto]:
    """Nodes that put a tensor beside itself, again and again: ``d0`` to ``d<times - 1>``."""
    names = [first, *(f"d{i}" for i in range(times))]
    return [helper.make_node(op, [a, a], [b], axis=0) for a, b in itertools.pairwise(names)]


@pytest.mark.timeout(600)
def test_sizes_that_double_are_not_followed() -> None:
    tail = [helper.make_node("Reshape", ["x", "d31"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    nodes = [*doubling(32, "c"), *tail]
    graph = onnx_library_graph(model(nodes, {"x": [4, 4]}, ["y"], {"c": np.asarray([1, 1])}))
    assert [u.operator for u in graph.unsupported] == ["Relu"]
    # From a shape, not from a constant.
    nodes = [helper.make_node("Shape", ["x"], ["s"]), *doubling(32, "s"), *tail]
    onnx_library_graph(model(nodes, {"x": [1, 1]}, ["y"]))


@pytest.mark.timeout(600)
def test_tensors_that_nothing_could_hold_are_refused() -> None:
    nodes = [*doubling(60, "x"), helper.make_node("Relu", ["d59"], ["y"])]
    error = refused(model(nodes, {"x": [4, 4]}, ["y"]))
    assert "2^49.0 elements" in str(error) and "'d44'" in str(error) and "2^48" in error.hint
    error = refused(model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2**40, 2**40]}, ["y"]))
    assert "2^80.0 elements" in str(error)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("inner", [False, True])
def test_ranks_that_double_are_refused(inner: bool) -> None:
    gathers = doubling(40, "i", "Gather")
    data = {"i": np.zeros((1, 1), np.int64)}
    if not inner:
        error = refused(model([*gathers, helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, ["y"], data))
        assert "dimensions" in str(error)
        return
    out = helper.make_tensor_value_info("d39", TensorProto.INT64, None)
    body = helper.make_graph(gathers, "body", [], [out])
    node = helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body)
    data["c"] = np.asarray(True)
    graph = onnx_library_graph(model([node, helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, ["y"], data))
    assert "If" in {u.operator for u in graph.unsupported}


def test_chain_of_sizes_through_many_reshapes() -> None:
    # Every reshape takes its sizes from the result of the one before: one pass has to do.
    nodes = []
    for i in range(40):
        a, b = ("x" if i == 0 else f"h{i - 1}"), f"h{i}"
        nodes += [
            helper.make_node("Shape", [a], [f"s{i}"]),
            helper.make_node("Gather", [f"s{i}", "reverse"], [f"t{i}"]),
            helper.make_node("Reshape", [a, f"t{i}"], [b]),
        ]
    nodes.append(helper.make_node("Relu", ["h39"], ["y"]))
    graph = onnx_library_graph(model(nodes, {"x": [3, 5]}, ["y"], {"reverse": np.asarray([1, 0])}))
    assert texts(graph) == {parse_operator("relu:rows=3,cols=5").text(): 1}


def test_bodies_of_if_still_give_shapes() -> None:
    def branch(op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op, ["x"], ["z"])], op, [], [out])

    nodes = [
        helper.make_node("If", ["c"], ["h"], then_branch=branch("Relu"), else_branch=branch("Tanh")),
        helper.make_node("Sigmoid", ["h"], ["y"]),
    ]
    graph = onnx_library_graph(model(nodes, {"x": [3, 5]}, ["y"], {"c": np.asarray(True)}))
    assert parse_operator("sigmoid:rows=3,cols=5").text() in texts(graph)


def test_an_attribute_too_many_does_not_hide_the_shape() -> None:
    built = onnx.load_from_string(model([LINEAR], {"x": [3, 8]}, ["y"], {"w": weight(8, 4)}))
    built.graph.node[0].attribute.append(helper.make_attribute("exporter_note", "hello"))
    graph = onnx_library_graph(built.SerializeToString())
    assert texts(graph) == {parse_operator("linear:m=3,n=4,k=8").text(): 1}


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
