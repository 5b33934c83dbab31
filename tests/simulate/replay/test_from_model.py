"""Models as replay requests: names, programs and devices that need care."""

import pytest

from cdmpp.errors import FieldError, UnsupportedOperatorError
from cdmpp.plan.base.solve import read_request
from cdmpp.predict.requests.request import MAX_NAME
from cdmpp.programs.frontends.graph import GraphBuilder, GraphNode, ProgramGraph
from cdmpp.programs.program import TensorProgram
from cdmpp.simulate.replay.from_model import request_of
from cdmpp.simulate.replay.schema import ReplayRequest


def builder() -> GraphBuilder:
    made = GraphBuilder("model.onnx")
    program = TensorProgram.from_operator("softmax:rows=8,cols=8")
    long = "layer." * 100
    made.launch(long + "a", "Softmax", program, reads=("x",), writes=("y",))
    made.launch(long + "b", "Softmax", program, reads=("y",), writes=("z",))
    return made


def test_long_names_are_shortened_and_stay_different() -> None:
    request = read_request(ReplayRequest, request_of(builder().build(), "t4", launch_s=1e-6))
    ids = [node.id for node in request.nodes]
    assert len(set(ids)) == 4
    assert max(map(len, ids)) <= MAX_NAME
    kernels = [node for node in request.nodes if node.device == "t4"]
    assert kernels[1].deps[0] == kernels[0].id
    assert len(request.price_requests()) == 1


def test_a_device_of_ones_own_keeps_its_figures() -> None:
    figures = {"name": "mine", "clock_hz": 1e9}
    made = request_of(builder().build(), figures, gap_s=1e-6, protocol="eager", framework="pytorch")
    assert made["devices"] == {"mine": {"gap_s": 1e-6, "device": figures}}
    assert {one.device["name"] for one in read_request(ReplayRequest, made).price_requests()} == {"mine"}  # type: ignore[index]
    assert (made["protocol"], made["framework"], made["backend"]) == ("eager", "pytorch", "library")


def test_programs_travel_as_what_they_are() -> None:
    def one(program: TensorProgram) -> ProgramGraph:
        return ProgramGraph((program,), (1,), (GraphNode("n", "f", 0),))

    text = TensorProgram("f", "tvm", tvm_json="{}")
    assert request_of(one(text), "t4")["nodes"][0]["program"] == {"tvm_json": "{}"}
    part = TensorProgram("f", "tvm", tvm_json="{}", function="f")
    with pytest.raises(FieldError, match="one function of a module with several"):
        request_of(one(part), "t4")


def test_a_model_without_programs_is_refused() -> None:
    made = GraphBuilder("empty.onnx")
    made.unsupported("n", "Det", "no such operator", reads=(), writes=())
    with pytest.raises(UnsupportedOperatorError, match=r"empty.onnx: nothing to predict") as error:
        request_of(made.build(), "t4")
    assert "Det: no such operator" in error.value.hint
