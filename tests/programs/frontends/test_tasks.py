"""Networks, files and objects as tuning tasks."""

import logging
from pathlib import Path

import pytest

from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.frontends.tasks import network_tasks
from cdmpp.programs.program import TensorProgram

pytestmark = [pytest.mark.slow, pytest.mark.tvm]

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_resnet18_has_the_fused_programs_that_one_expects() -> None:
    task_list = network_tasks("resnet18:image=64")
    assert (task_list.network, task_list.source, task_list.unsupported) == ("resnet18", "resnet18:image=64", ())
    # 20 convolutions, the pooling, the mean and the classifier; ReLU and additions are fused into them.
    assert sum(task.calls for task in task_list.tasks) == 23
    assert sum(task.calls for task in task_list.tasks if "conv2d" in task.name) == 20
    assert not any("multiply" in task.name or "sqrt" in task.name for task in task_list.tasks)


def test_bert_tiny_fuses_bias_activation_and_residual_into_its_products() -> None:
    counts = {task.name: task.calls for task in network_tasks("bert-tiny:seq=16").tasks}
    assert counts["fused_matmul3_add3_gelu"] == 2
    assert sum(n for name, n in counts.items() if "matmul" in name) == 2 * (4 + 2 + 2) + 1
    assert not any(name.startswith("reshape") for name in counts)


def test_tasks_are_distinct_and_their_hashes_stable() -> None:
    first, second = network_tasks("bert-tiny:seq=16").tasks, network_tasks("bert-tiny:seq=16").tasks
    assert [task.hash for task in first] == [task.hash for task in second]
    assert len({task.hash for task in first}) == len(first)
    longer = {task.hash for task in network_tasks("bert-tiny:seq=24").tasks}
    assert len(longer & {task.hash for task in first}) < len(first) / 2


def test_network_in_half_precision_has_half_products() -> None:
    import tvm

    task_list = network_tasks("bert-tiny:seq=16@float16")
    assert (task_list.network, task_list.source) == ("bert-tiny", "bert-tiny:seq=16@float16")
    products = [tvm.ir.load_json(task.tvm_json) for task in task_list.tasks if "matmul" in task.name]
    assert products
    for function in products:  # the first arguments are the factors; a residual may be float32
        assert ["float16" in str(parameter.ty.dtype) for parameter in function.params[:2]] == [True, True]
    with pytest.raises(InvalidProgramError, match="unknown type 'int3'"):
        network_tasks("bert-tiny@int3")


def test_a_task_is_one_function_called_main() -> None:
    import tvm

    task = network_tasks("bert-tiny:seq=16").tasks[0]
    function = tvm.ir.load_json(task.tvm_json)
    assert isinstance(function, tvm.tirx.PrimFunc) and function.attrs["global_symbol"] == "main"
    assert TensorProgram.from_tvm_json(task.tvm_json).hash == task.hash


def test_onnx_files() -> None:
    task_list = network_tasks(EXAMPLES / "small_resnet.onnx")
    assert (task_list.network, task_list.source) == ("small_resnet", "small_resnet.onnx")
    assert sum(task.calls for task in task_list.tasks if "conv2d" in task.name) == 20
    assert network_tasks(str(EXAMPLES / "small_resnet.onnx")) == task_list


def test_exported_programs_and_relax_modules_give_the_tasks_of_their_network(tmp_path: Path) -> None:
    import torch
    import tvm

    from cdmpp.programs.frontends.load import load_programs
    from cdmpp.programs.frontends.relax_programs import relax_module
    from cdmpp.programs.zoo import make_network

    network = make_network("bert-tiny", seq=8, layers=1)
    exported = torch.export.export(network.module, network.inputs)
    module, _ = relax_module(exported)
    torch.export.save(exported, tmp_path / "saved.pt2")
    (tmp_path / "module.json").write_text(str(tvm.ir.save_json(module)), encoding="utf-8")
    expected = network_tasks(network).tasks
    for source in (exported, module, tmp_path / "saved.pt2", str(tmp_path / "module.json")):
        assert network_tasks(source).tasks == expected
    graph = load_programs(tmp_path / "saved.pt2", backend="tvm")
    assert graph.launches == sum(task.calls for task in expected) and len(graph.edges) >= len(expected)
    library = load_programs(tmp_path / "saved.pt2")
    assert {program.backend for program in library.programs} == {"library"}
    with pytest.raises(InvalidProgramError, match="those that TVM makes"):
        load_programs(tmp_path / "module.json", backend="library")


def test_dynamic_shapes_are_unsupported_by_name() -> None:
    import torch

    exported = torch.export.export(
        torch.nn.Linear(8, 4).eval(), (torch.randn(3, 8),), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    task_list = network_tasks(exported)
    assert task_list.tasks == () and task_list.unsupported == (("fused_matmul_add", "its shapes are dynamic"),)


def test_normalisation_is_folded_and_refused_in_training_mode() -> None:
    import torch

    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4))
    inputs = (torch.randn(1, 3, 8, 8),)
    folded = network_tasks(torch.export.export(module.eval(), inputs))
    assert [task.name for task in folded.tasks] == ["fused_conv2d_add"]
    with pytest.raises(UnsupportedOperatorError, match=r"training mode is not supported: .*eval"):
        network_tasks(torch.export.export(module.train(), inputs))


def test_files_that_are_no_networks(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("resnet18")
    with pytest.raises(InvalidProgramError, match="no networks"):
        network_tasks(tmp_path / "model.txt")


def test_errors_name_the_argument_to_pass(tmp_path: Path) -> None:
    with pytest.raises(InvalidProgramError, match="near it: resnet18") as error:
        network_tasks("resnet81")
    assert "bert-tiny" in error.value.hint
    with pytest.raises(InvalidProgramError, match="no parameter 'sequence'") as error:
        network_tasks("bert-tiny:sequence=4")
    assert "seq (default 128)" in error.value.hint
    with pytest.raises(InvalidProgramError, match="not a whole number"):
        network_tasks("bert-tiny:seq=0")
    with pytest.raises(InvalidProgramError, match="no such file"):
        network_tasks(tmp_path / "missing.onnx")
    with pytest.raises(InvalidProgramError, match="is no network"):
        network_tasks(7)


def test_a_damaged_torch_file_is_refused_without_torchs_own_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch", reason="needs torch")
    (tmp_path / "torn.pt2").write_bytes(b"PK\x03\x04 and no more")
    logger = logging.getLogger("torch.export")  # torch's loggers do not propagate
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(InvalidProgramError, match="not an exported torch program"):
            network_tasks(tmp_path / "torn.pt2")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []
