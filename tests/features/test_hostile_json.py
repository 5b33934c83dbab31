"""A stranger's TVM JSON: whatever is wrong with it, one clear error, and soon."""

import contextlib
import copy
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import InvalidProgramError
from cdmpp.features.encode import encode_tvm_json
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.templates import template_json
from cdmpp.programs.tvm_json import MAX_BYTES, MAX_NODES
from tests.features.builder import Builder, Document

pytestmark = pytest.mark.slow


def concrete(text: str) -> Document:
    """A valid document without TVM: an operator's template with its sizes written in."""
    spec = parse_operator(text)
    document: Document = json.loads(template_json(spec.structural_class()))
    nodes = document["nodes"]
    sizes = spec.sizes()
    for node in list(nodes):
        if node["type"] == "ir.Var" and nodes[node["data"]["name"]]["data"] in sizes:
            value = sizes[nodes[node["data"]["name"]]["data"]]
            ty = node["data"]["ty"]
            nodes.append({"type": "int", "data": value})
            node["type"], node["data"] = "ir.IntImm", {"ty": ty, "value": len(nodes) - 1}
    return document


MATMUL = concrete("linear:m=4,n=8,k=16")


def both(text: str) -> None:
    """The two ways in: features and identity."""
    encode_tvm_json(text)
    _ = TensorProgram.from_tvm_json(text).hash


def assert_refused(document: Any, seconds: float = 10.0) -> str:
    """Features are refused within some processor time; the hash is either refused or computed."""
    text = document if isinstance(document, str) else json.dumps(document)
    started = time.thread_time()
    with pytest.raises(InvalidProgramError) as caught:
        encode_tvm_json(text)
    with contextlib.suppress(InvalidProgramError):
        _ = TensorProgram.from_tvm_json(text).hash
    assert time.thread_time() - started < seconds
    assert len(caught.value.message) < 400
    return caught.value.message


def test_the_document_itself_is_valid() -> None:
    both(json.dumps(MATMUL))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '"text"',
        "{",
        "\x00",
        "NaN",
        '{"nodes": []}',
        '{"nodes": {}, "root_index": 0}',
        '{"nodes": [1], "root_index": 0}',
        '{"nodes": [{}], "root_index": 0}',
        '{"nodes": [{"type": 3}], "root_index": 0}',
        '{"nodes": [{"type": "ir.IRModule"}], "root_index": 0}',
        '{"nodes": [{"type": "x"}], "root_index": 1}',
        '{"nodes": [{"type": "x"}], "root_index": -1}',
        '{"nodes": [{"type": "x"}], "root_index": true}',
        '{"nodes": [{"type": "x"}], "root_index": "0"}',
        '{"nodes": [{"type": "x"}], "root_index": 0}',
        '{"nodes": [{"type": "tirx.PrimFunc"}], "root_index": 0}',
        '{"nodes": [{"type": "tirx.PrimFunc", "data": 0}], "root_index": 0}',
        '{"nodes": [{"type": "tirx.PrimFunc", "data": {"body": 0, "params": 0}}], "root_index": 0}',
        '{"nodes": [{"type": "tirx.PrimFunc", "data": {"body": "0", "params": null}}], "root_index": 0}',
        '{"nodes": [{"type": "ir.IRModule", "data": {"functions": 0}}], "root_index": 0}',
    ],
)
def test_not_a_program(text: str) -> None:
    assert_refused(text)


def test_json_nested_deeper_than_the_parser() -> None:
    assert_refused("[" * 200_000)
    assert_refused('{"nodes": ' + "[" * 200_000)


def test_too_large() -> None:
    assert "too large" in assert_refused(" " * (MAX_BYTES + 1))
    nodes = ",".join(['{"type":"x"}'] * (MAX_NODES + 1))
    assert "too many" in assert_refused(f'{{"nodes": [{nodes}], "root_index": 0}}')


def test_integers_of_ten_thousand_digits() -> None:
    assert_refused('{"nodes": [{"type": "int", "data": ' + "9" * 10_000 + '}], "root_index": 0}')


# -- programs that are well formed node by node ----------------------------------------------------------


def test_the_builder_makes_programs() -> None:
    b = Builder()
    i = b.variable("i")
    both(json.dumps(b.program(b.loop(b.integer(8), b.store(i), i))))


def a_statement_in_itself(b: Builder) -> int:
    seq = b.array()
    me = b.add("tirx.SeqStmt", seq=seq)
    b.nodes[seq]["data"] = [b.store(), me]
    return me


def an_expression_in_itself(b: Builder) -> int:
    unit = b.integer(1)
    me = b.binary("Add", unit, unit)
    b.nodes[me]["data"]["b"] = me
    return b.store(me)


def a_value_in_itself(b: Builder) -> int:
    unit = b.integer(1)
    me = b.binary("Add", unit, unit)
    b.nodes[me]["data"]["a"] = b.nodes[me]["data"]["b"] = me
    return b.store(value=me)


def many_different_reads(b: Builder) -> int:
    y = b.buffer("y", [8000])
    value = b.load(b.integer(0), y)
    for i in range(1, 8000):
        value = b.binary("Add", value, b.load(b.integer(i), y))
    return b.store(value=value)


def indices_of_a_thousand_loops(b: Builder) -> int:
    """Sequential loops stay known by name; each sum of them is copied at every use."""
    body, index = [], b.integer(0)
    for k in range(1000):
        v = b.variable(f"i{k}")
        body.append(b.loop(b.integer(2), b.add("tirx.SeqStmt", seq=b.empty), v))
        name = b.variable(f"s{k}")
        body.append(b.add("tirx.Bind", var=name, value=b.binary("Add", index, v)))
        index = name
    for _ in range(12):
        index = b.binary("Add", index, index)
    return b.add("tirx.SeqStmt", seq=b.array(*body, b.store(index)))


def squares_of_squares(b: Builder) -> int:
    """Each name is the square of the one before: 2^40 digits."""
    body, value = [], b.integer(10)
    for k in range(40):
        name = b.variable(f"v{k}")
        body.append(b.add("tirx.Bind", var=name, value=b.binary("Mul", value, value)))
        value = name
    return b.add("tirx.SeqStmt", seq=b.array(*body, b.store(value)))


def number_steps_without_end(b: Builder) -> int:
    """:func:`steps_without_end` on the way of a coordinate."""
    i = b.variable("i")
    value = b.cast(b.float32, i)
    for _ in range(100):
        value = b.floats("Mul", value, b.number(1e17))
    return b.loop(b.integer(1), b.store(b.cast(b.int32, value)), i)


def steps_without_end(b: Builder) -> int:
    """A loop of one iteration has the interval [0, 0] whatever its step."""
    i = b.variable("i")
    body, value = [], i
    for k in range(500):
        name = b.variable(f"v{k}")
        body.append(b.add("tirx.Bind", var=name, value=b.binary("Mul", value, b.integer(1 << 59))))
        value = name
    return b.loop(b.integer(1), b.add("tirx.SeqStmt", seq=b.array(*body, b.store(value))), i)


def a_name_for_itself(b: Builder) -> int:
    name = b.variable("v", b.float32)
    return b.sequence(b.bind(name, b.floats("Add", name, name)), b.store(value=name))


def a_name_for_itself_alone(b: Builder) -> int:
    name = b.variable("v", b.float32)
    return b.sequence(b.bind(name, name), b.store(value=name))


def an_index_named_after_itself(b: Builder) -> int:
    name = b.variable("v")
    return b.sequence(b.bind(name, b.binary("Add", name, b.integer(1))), b.store(name))


def two_names_for_each_other(b: Builder) -> int:
    one, two = (b.variable(name, b.float32) for name in "vw")
    half = b.number(0.5)
    names = (b.bind(one, b.floats("Mul", two, half)), b.bind(two, b.floats("Mul", one, half)))
    return b.sequence(*names, b.store(value=one))


def names_shared_exponentially(b: Builder) -> int:
    body, value = [], b.load(b.integer(0))
    for k in range(60):
        name = b.variable(f"v{k}", b.float32)
        body.append(b.bind(name, b.floats("Add", value, value)))
        value = name
    return b.sequence(*body, b.store(value=value))


def a_number_as_index(value: Any) -> Callable[[Builder], int]:
    def make(b: Builder) -> int:
        return b.store(b.cast(b.int32, b.floats("Add", b.number(value), b.number(0.5))))

    make.__name__ = f"a_number_as_index_{value!r:.12}"
    return make


def steps_beyond_all_numbers(b: Builder) -> int:
    """A load stays an index expression, however large its stride."""
    i = b.variable("i")
    value = b.load(i)
    for _ in range(40):
        value = b.floats("Mul", value, b.number(1e17))
    return b.loop(b.integer(4), b.store(b.cast(b.int32, value)), i)


def folded(count: int, step: Callable[[int], int], node: int) -> int:
    """The node that is left when ``step`` was applied so often."""
    for _ in range(count):
        node = step(node)
    return node


#: Programs of one statement.
SHORT: dict[str, Callable[[Builder], int]] = {
    "a_number_by_next_to_nothing": lambda b: b.store(b.cast(b.int32, b.floats("Div", b.number(1.0), b.number(5e-324)))),
    "too_many_computations": lambda b: b.add("tirx.SeqStmt", seq=b.array(*(b.store() for _ in range(3000)))),
    "no_iteration": lambda b: b.loop(b.integer(0), b.store()),
    "minus_five_iterations": lambda b: b.loop(b.integer(-5), b.store()),
    "an_extent_of_a_hundred_digits": lambda b: b.loop(b.integer(10**100), b.store()),
    "an_extent_that_is_text": lambda b: b.loop(b.integer("8"), b.store()),
    "an_extent_that_is_not_whole": lambda b: b.loop(b.integer(2.5), b.store()),
    "an_extent_that_is_true": lambda b: b.loop(b.integer(True), b.store()),
    "a_buffer_larger_than_any_memory": lambda b: b.store(buffer=b.buffer("y", [2**31, 2**31])),
    "a_buffer_of_no_elements": lambda b: b.store(buffer=b.buffer("y", [0])),
    "a_buffer_of_text": lambda b: b.store(buffer=b.buffer("y", ["many"])),
    "an_element_type_of_many_lanes": lambda b: b.store(buffer=b.buffer("y", [8], "float32x" + "9" * 5000)),
    "an_element_type_that_is_none": lambda b: b.store(buffer=b.buffer("y", [8], "float32; drop table")),
    "a_symbolic_size": lambda b: b.loop(b.variable("n"), b.store()),
    "a_while_loop": lambda b: b.add("tirx.While", condition=b.integer(1), body=b.store()),
    "an_unknown_statement": lambda b: b.add("tirx.Goto" + "x" * 5000, body=b.store()),
    "an_unknown_index": lambda b: b.store(b.add("prim.Quantum", a=0)),
    "an_unknown_loop_kind": lambda b: b.loop(b.integer(4), b.store(), kind=9),
    "a_thread_without_a_binding": lambda b: b.loop(b.integer(4), b.store(), kind=4),
    "annotations_of_odd_length": lambda b: b.loop(b.integer(4), b.store(), annotations=b.plain("ffi.Map", [b.scope])),
    "a_step_of_zero": lambda b: b.loop(b.integer(4), b.store(), step=b.integer(0)),
    "nothing_stored": lambda b: b.loop(b.integer(4), b.add("tirx.SeqStmt", seq=b.empty)),
    "a_missing_field": lambda b: b.add("tirx.For", body=b.store()),
    "a_reference_before_the_first": lambda b: b.loop(-1, b.store()),
    "a_reference_beyond_the_last": lambda b: b.loop(10**9, b.store()),
    "statements_in_each_other": lambda b: folded(5000, b.sequence, b.store()),
    "loops_in_each_other": lambda b: folded(120, lambda body: b.loop(b.integer(1), body), b.store()),
    "more_iterations_than_time": lambda b: folded(5, lambda body: b.loop(b.integer(2**31), body), b.store()),
    "statements_shared_exponentially": lambda b: b.sequence(
        b.store(), folded(60, lambda body: b.sequence(body, body), b.sequence())
    ),
    "stores_shared_exponentially": lambda b: folded(60, lambda body: b.sequence(body, body), b.store()),
    "indices_shared_exponentially": lambda b: b.store(folded(60, lambda x: b.binary("Sub", x, x), b.integer(1))),
    "values_shared_exponentially": lambda b: b.store(
        value=folded(60, lambda x: b.binary("Add", x, x), b.load(b.integer(0)))
    ),
    "conditions_shared_exponentially": lambda b: b.add(
        "tirx.IfThenElse",
        condition=folded(60, lambda x: b.binary("And", x, x), b.binary("LT", b.integer(0), b.integer(1))),
        then_case=b.store(),
        else_case=0,
    ),
    "squares_of_numbers": lambda b: b.store(
        b.cast(b.int32, folded(40, lambda x: b.floats("Mul", x, x), b.number(1e17)))
    ),
    "a_reference_that_is_a_list": lambda b: b.add("tirx.SeqStmt", seq=b.plain("ffi.Array", [[b.store()]])),
}
HOSTILE = SHORT | {
    make.__name__: make
    for make in (
        a_statement_in_itself,
        an_expression_in_itself,
        a_value_in_itself,
        many_different_reads,
        indices_of_a_thousand_loops,
        squares_of_squares,
        a_name_for_itself,
        a_name_for_itself_alone,
        an_index_named_after_itself,
        two_names_for_each_other,
        names_shared_exponentially,
        steps_beyond_all_numbers,
        *(a_number_as_index(value) for value in (float("nan"), float("inf"), -1e300, "x", [0], None)),
    )
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_refused_soon(name: str) -> None:
    builder = Builder()
    assert_refused(builder.program(HOSTILE[name](builder)))


@pytest.mark.parametrize("make", [steps_without_end, number_steps_without_end])
@pytest.mark.parametrize("schedule", [False, True])
def test_steps_without_end_change_nothing_or_are_refused(make: Callable[[Builder], int], schedule: bool) -> None:
    b = Builder()
    text = json.dumps(b.program(make(b)))
    started = time.thread_time()
    with contextlib.suppress(InvalidProgramError):
        assert np.isfinite(encode_tvm_json(text, schedule=schedule).leaves).all()
    assert time.thread_time() - started < 10


def test_the_hash_of_shared_nodes_is_soon_there() -> None:
    """Linear in the nodes: features refuse 2^60 visits, the identity needs each node once."""
    for name in ("stores_shared_exponentially", "values_shared_exponentially"):
        b = Builder()
        started = time.thread_time()
        assert len(TensorProgram.from_tvm_json(json.dumps(b.program(HOSTILE[name](b)))).hash) == 32
        assert time.thread_time() - started < 1


def test_hash_refuses_a_cycle() -> None:
    b = Builder()
    with pytest.raises(InvalidProgramError, match="cycle"):
        _ = TensorProgram.from_tvm_json(json.dumps(b.program(a_statement_in_itself(b)))).hash


def test_text_that_is_no_unicode_is_hashed() -> None:
    b = Builder()
    b.nodes[b.scope]["data"] = "\ud800"
    assert len(TensorProgram.from_tvm_json(json.dumps(b.program(b.store()))).hash) == 32


def test_a_step_other_than_one_divides_the_trips() -> None:
    b = Builder()
    i = b.variable("i")
    strided = encode_tvm_json(json.dumps(b.program(b.loop(b.integer(7), b.store(i), i, step=b.integer(2)))))
    assert np.exp2(strided.leaves[0, 0, 14]) - 1 == pytest.approx(4, rel=1e-5)  # 0, 2, 4, 6


# -- damage at random ----------------------------------------------------------------------------------


def damaged(rng: random.Random, document: Document) -> Document:
    """A copy with one to three fields replaced, dropped or redirected."""
    broken = copy.deepcopy(document)
    nodes = broken["nodes"]
    junk: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), "", "x", [], [0], {}, {"a": 1}]
    junk.append(len(nodes))
    for _ in range(rng.randint(1, 3)):
        node = rng.choice(nodes)
        data = node.get("data")
        value = rng.choice([*junk, rng.randrange(len(nodes))])
        choice = rng.random()
        if choice < 0.6 and isinstance(data, dict) and data:
            data[rng.choice(list(data))] = value
        elif choice < 0.7 and isinstance(data, dict) and data:
            del data[rng.choice(list(data))]
        elif choice < 0.85 and isinstance(data, list) and data:
            data[rng.randrange(len(data))] = value
        elif choice < 0.95:
            node["data"] = value
        else:
            node["type"] = rng.choice(nodes)["type"]
    return broken


@pytest.mark.parametrize(
    "text", ["linear:m=4,n=8,k=16", "softmax:rows=3,cols=5", "max_pool2d:n=1,c=2,h=5,w=5,kh=3,kw=3"]
)
def test_damaged_programs_are_encoded_or_refused(text: str) -> None:
    document = concrete(text)
    rng = random.Random(1)
    refused = 0
    for _ in range(250):
        broken = json.dumps(damaged(rng, document))
        for way in (encode_tvm_json, lambda t: TensorProgram.from_tvm_json(t).hash):
            try:
                way(broken)
            except InvalidProgramError:
                refused += 1
    assert refused > 100
