"""Tensor programs: their three forms and their identity."""

import json
import random
from typing import Any

import pytest

from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.templates import template_json
from cdmpp.programs.tvm_json import find_prim_func, load, prim_funcs, structural_hash

TEMPLATE = template_json("softmax:float32")


def hash_of(document: dict[str, Any]) -> str:
    return TensorProgram.from_tvm_json(json.dumps(document)).hash


def shuffled(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same document with its nodes in another order."""
    nodes = document["nodes"]
    order = list(range(len(nodes)))
    random.Random(seed).shuffle(order)
    new = {old: i for i, old in enumerate(order)}
    values = {"iter_type", "kind", "data_alignment", "offset_factor", "ndim"}

    def moved(data: Any) -> Any:
        if isinstance(data, dict):
            return {
                k: v if k in values or isinstance(v, bool) or not isinstance(v, int) else new[v]
                for k, v in data.items()
            }
        return [new[i] for i in data] if isinstance(data, list) else data

    def entry(node: dict[str, Any]) -> dict[str, Any]:
        return node | ({"data": moved(node["data"])} if "data" in node else {})

    out = [entry(nodes[old]) for old in order]
    return {"nodes": out, "root_index": new[document["root_index"]]}


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_nodes_does_not_matter(seed: int) -> None:
    document = json.loads(TEMPLATE)
    assert hash_of(shuffled(document, seed)) == hash_of(document)


def test_names_do_not_matter_and_extents_do() -> None:
    document = json.loads(TEMPLATE)
    renamed = json.loads(TEMPLATE)
    strings = 0
    for node in renamed["nodes"]:
        if node["type"] == "ir.Var":
            renamed["nodes"][node["data"]["name"]]["data"] = f"name_{strings}"
            strings += 1
    assert strings > 5
    assert hash_of(renamed) == hash_of(document)
    for node in document["nodes"]:
        if node["type"] == "int":
            node["data"] += 1
            break
    assert hash_of(document) != hash_of(renamed)


def test_sharing_does_not_matter() -> None:
    """A copy of a shared constant in place of a reference to it."""
    document = json.loads(TEMPLATE)
    nodes = document["nodes"]
    plain = hash_of(document)
    copied = 0
    for node in list(nodes):
        data = node.get("data")
        for key in ("a", "b", "extent", "min") if isinstance(data, dict) else ():
            if key in data and nodes[data[key]]["type"] == "ir.IntImm":
                nodes.append(json.loads(json.dumps(nodes[data[key]])))
                data[key] = len(nodes) - 1
                copied += 1
    assert copied
    assert hash_of(document) == plain


@pytest.mark.tvm
def test_tvmscript_names_and_statement_order() -> None:
    script = """
@T.prim_func(s_tir=True)
def {name}({x}: T.Buffer(({n}, 16), "float32"), {y}: T.Buffer(({n}, 16), "float32")):
    for {i}, {j} in T.grid({n}, 16):
        with T.sblock("{block}"):
            a = T.axis.spatial({n}, {i})
            b = T.axis.spatial(16, {j})
            {y}[a, b] = {x}[a, b] + T.float32({c})
"""
    names = {"name": "f", "x": "x", "y": "y", "i": "i", "j": "j", "block": "copy", "n": 8, "c": 1}
    others = {"name": "g", "x": "source", "y": "sink", "i": "row", "j": "column", "block": "b"}

    def hash_of_script(**changes: Any) -> str:
        return program_from_request({"tvmscript": script.format(**(names | changes))}).hash

    assert hash_of_script(**others) == hash_of_script()
    assert hash_of_script(n=16) != hash_of_script()
    assert hash_of_script(c=2) != hash_of_script()


def test_an_operator_and_its_lowering_are_two_programs() -> None:
    # One is what a library launches, the other what TVM runs as scheduled.
    operator = TensorProgram.from_operator("softmax:rows=4,cols=8")
    assert operator.backend == "library"
    assert TensorProgram.from_tvm_json(TEMPLATE).backend == "tvm"
    assert operator.hash == parse_operator("softmax:rows=4,cols=8").hash()
    assert operator.hash != TensorProgram.from_tvm_json(TEMPLATE).hash


def test_forms_of_an_operator() -> None:
    text = "linear:m=8,n=8,k=8"
    fields = {"operator": "linear", "m": 8, "n": 8, "k": 8}
    programs = [
        TensorProgram.from_operator(text),
        TensorProgram.from_operator(fields),
        TensorProgram.from_operator(parse_operator(text)),
        TensorProgram.from_request(fields),
        program_from_request(fields),
    ]
    assert len({p.hash for p in programs}) == 1
    assert programs[0].name == "linear:dtype=float32,m=8,n=8,k=8"


@pytest.mark.parametrize(
    "request_body",
    [
        None,
        3,
        [],
        {},
        {"tvm_json": 3},
        {"tvm_json": "{}", "more": 1},
        {"tvmscript": 3},
        {"tvmscript": "x = 1", "more": 1},
        {"onnx": "model"},
    ],
)
def test_requests_that_are_no_program(request_body: Any) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        program_from_request(request_body)
    assert "tvm_json" in caught.value.hint


def test_a_request_with_an_unknown_operator() -> None:
    with pytest.raises(UnsupportedOperatorError):
        program_from_request({"operator": "fft", "n": 8})


def test_a_program_is_one_thing_of_a_known_backend() -> None:
    spec = parse_operator("linear:m=8,n=8,k=8")
    for bad in ({"operator": spec, "tvm_json": TEMPLATE}, {}):
        with pytest.raises(InvalidProgramError, match="either"):
            TensorProgram("x", "tvm", **bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidProgramError, match="backend"):
        TensorProgram("x", "cuda", operator=spec)  # type: ignore[arg-type]


def two_functions() -> str:
    """A module with a second function beside ``main``."""
    document = json.loads(TEMPLATE)
    nodes = document["nodes"]
    functions = nodes[nodes[document["root_index"]]["data"]["functions"]]["data"]
    nodes.append({"type": "ffi.String", "data": "other"})
    nodes.append({"type": "ir.GlobalVar", "data": {"name_hint": len(nodes) - 1}})
    functions += [len(nodes) - 1, functions[1]]
    return json.dumps(document)


def test_a_module_of_several_functions_needs_a_name() -> None:
    text = two_functions()
    nodes, root = load(text)
    assert sorted(prim_funcs(nodes, root)) == ["main", "other"]
    with pytest.raises(InvalidProgramError, match="2 PrimFuncs: main, other"):
        _ = TensorProgram.from_tvm_json(text).hash
    with pytest.raises(InvalidProgramError, match="no PrimFunc 'third'"):
        _ = TensorProgram.from_tvm_json(text, function="third").hash
    single = TensorProgram.from_tvm_json(text, function="other")
    assert single.name == "other"
    assert single.hash == structural_hash(nodes, find_prim_func(nodes, root, "main"))
