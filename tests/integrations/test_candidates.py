"""Candidates of a search: TVM's objects and JSON have one compact AST; each distinct program is encoded once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cdmpp.features.encode import encode_tvm_json
from cdmpp.features.walk import build_ast
from cdmpp.programs.tvm_json import load
from tests.integrations.conftest import TARGET, Draw

pytest.importorskip("tvm")

from tvm import te, topi

from cdmpp.data.measure.sampling import tune_context
from cdmpp.errors import InvalidProgramError
from cdmpp.integrations.candidates import CandidateEncoder
from cdmpp.integrations.object_walk import ObjectNodes, build_asts

pytestmark = pytest.mark.tvm


def test_features_are_those_of_the_programs_text(tvm: Any, draw: Draw) -> None:
    _, candidates = draw(6)
    found = CandidateEncoder().encode([c.sch.mod for c in candidates])
    for each, candidate in zip(found, candidates, strict=True):
        again = encode_tvm_json(str(tvm.ir.save_json(candidate.sch.mod["main"])), schedule=True)
        np.testing.assert_array_equal(each.features.leaves, again.leaves)
        np.testing.assert_array_equal(each.features.positions, again.positions)
        np.testing.assert_array_equal(each.features.totals, again.totals)


def test_equal_programs_are_encoded_once_and_the_oldest_forgotten(draw: Draw) -> None:
    modules = [c.sch.mod for c in draw(4)[1]]
    # The same draw again: other objects of the same structure.
    again = [c.sch.mod for c in draw(4)[1]]
    encoder = CandidateEncoder(kept=2)
    first = encoder.encode(modules)
    assert first[3] is encoder.encode([again[3]])[0]
    assert first[0] is not encoder.encode([again[0]])[0]
    assert first[3] is not encoder.encode([again[3]], "another target")[0]


def convolution() -> list[Any]:
    """Padding makes conditions, and strides make indices of several terms."""
    data, weight = te.placeholder((1, 4, 9, 9), name="data"), te.placeholder((6, 4, 3, 3), name="weight")
    return [data, weight, topi.nn.relu(topi.nn.conv2d_nchw(data, weight, 2, 1, 1))]


def softmax() -> list[Any]:
    """Reductions, library calls and several stages."""
    a = te.placeholder((12, 20), name="A")
    return [a, topi.nn.softmax(a, axis=-1)]


def gather() -> list[Any]:
    """An index that is loaded from memory."""
    table, rows = te.placeholder((30, 8), name="table"), te.placeholder((5,), name="rows", dtype="int32")
    return [table, rows, topi.take(table, rows, axis=0)]


@pytest.mark.parametrize("arguments", [convolution, softmax, gather])
def test_objects_and_json_give_one_ast(tvm: Any, arguments: Callable[[], list[Any]]) -> None:
    from tvm.s_tir import dlight

    untuned = te.create_prim_func(arguments()).with_attr("global_symbol", "main")
    context, spaces = tune_context(str(tvm.ir.save_json(untuned)), TARGET, 3)
    strategy = context.search_strategy
    strategy.pre_tuning(max_trials=6, num_trials_per_iter=6, design_spaces=spaces)
    with tvm.target.Target("nvidia/nvidia-t4"):
        bound = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(tvm.IRModule({"main": untuned}))
    functions = [untuned, bound["main"], *(c.sch.mod["main"] for c in strategy.generate_measure_candidates())]
    nodes = ObjectNodes()
    for function, of_objects in zip(functions, build_asts(functions), strict=True):
        of_json = build_ast(*load(str(tvm.ir.save_json(function))))
        assert repr(of_objects) == repr(of_json)
        assert repr(build_ast(nodes, nodes.key(function))) == repr(of_json)


def test_programs_that_cannot_be_encoded_are_errors_in_their_place(tvm: Any, draw: Callable[..., Any]) -> None:
    size = te.var("n")
    a = te.placeholder((size,), name="a")
    symbolic = te.create_prim_func([a, te.compute((size,), lambda i: a[i] + 1, name="b")])
    good = draw(1)[1][0].sch.mod["main"]
    first, second = build_asts([symbolic, good])
    assert isinstance(first, InvalidProgramError) and "'n' is symbolic" in first.message
    assert not isinstance(second, InvalidProgramError) and second.leaves


def test_candidates_share_nodes(draw: Callable[..., Any]) -> None:
    functions = [candidate.sch.mod["main"] for candidate in draw(4)[1]]
    alone = []
    for function in functions:
        nodes = ObjectNodes()
        build_ast(nodes, nodes.key(function))
        alone.append(len(nodes))
    together = ObjectNodes()
    for function in functions:
        build_ast(together, together.key(function))
    assert max(alone) < len(together) < 0.8 * sum(alone)
