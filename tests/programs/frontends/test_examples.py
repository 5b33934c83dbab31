"""The shipped example models: valid ONNX, and the programs of the networks that they stand for."""

import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.frontends.load import load_programs

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ["transformer_block", "small_resnet"]


def counted(graph: ProgramGraph) -> dict[str, int]:
    """Operator type -> number of launches."""
    result: dict[str, int] = {}
    for program, count in zip(graph.programs, graph.counts, strict=True):
        result[program.operator.operator] = result.get(program.operator.operator, 0) + count
    return result


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_and_valid(name: str) -> None:
    path = EXAMPLES / f"{name}.onnx"
    assert path.stat().st_size < 50_000
    onnx.checker.check_model(str(path), full_check=True)


@pytest.mark.slow
def test_transformer_block_runs() -> None:
    evaluator = ReferenceEvaluator(str(EXAMPLES / "transformer_block.onnx"))
    (y,) = evaluator.run(None, {"x": np.ones((8, 128, 768), np.float32)})
    assert y.shape == (8, 128, 768) and np.isfinite(y).all()


def test_transformer_block() -> None:
    graph = load_programs(EXAMPLES / "transformer_block.onnx")
    assert graph.unsupported == ()
    assert counted(graph) == {"linear": 6, "attention_encoder": 1, "add": 2, "layernorm": 2, "gelu": 1}
    names = {n.id: n.program for n in graph.nodes}
    texts = [p.name for p in graph.programs]
    edges = [(texts[names[a] or 0].split(":")[0], texts[names[b] or 0].split(":")[0]) for a, b in graph.edges]
    # q, k and v feed the attention; the norms feed a linear layer and the residual addition.
    assert edges.count(("linear", "attention_encoder")) == 3
    assert edges.count(("attention_encoder", "linear")) == 1
    assert edges.count(("layernorm", "add")) == 1 and edges.count(("linear", "add")) == 2
    assert len(edges) == 12


def test_small_resnet() -> None:
    graph = load_programs(EXAMPLES / "small_resnet.onnx")
    assert graph.unsupported == ()
    assert counted(graph) == {"conv2d": 20, "relu": 17, "max_pool2d": 1, "add": 8, "reduce_mean": 1, "linear": 1}
    assert len(graph.edges) == 47 + 8  # a chain of 48 kernels, and a shortcut into each addition
    order = {n.id: i for i, n in enumerate(graph.nodes)}
    assert all(order[a] < order[b] for a, b in graph.edges)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_example_files_equal_the_script_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("sys.argv", ["make_models.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "make_models.py"), run_name="__main__")
    for name in NAMES:
        made, shipped = load_programs(tmp_path / f"{name}.onnx"), load_programs(EXAMPLES / f"{name}.onnx")
        assert [p.hash for p in made.programs] == [p.hash for p in shipped.programs]
        assert made.counts == shipped.counts
