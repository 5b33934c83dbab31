"""``predict_module``: totals, phases, tables, several devices."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdmpp.errors import DataError, InvalidDeviceError, UnknownDeviceError
from cdmpp.predict.modules.prediction import ModulePrediction, ModulePredictions
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.zoo import make_network
from cdmpp.utils.units import format_latency

X = torch.empty(8, 64)
NET = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
PROGRAMS = [
    "linear:dtype=float32,m=8,n=128,k=64,bias=true",
    "relu:dtype=float32,rows=8,cols=128",
    "linear:dtype=float32,m=8,n=32,k=128,bias=true",
]


class Incomplete(nn.Module):
    """Launches a kernel without an operator in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.layer(x))


@pytest.fixture(scope="module")
def trained(predictor: LatencyPredictor) -> ModulePrediction:
    return predictor.predict_module(NET, X, "t4", mode="training", optimizer="adamw")


def test_total_is_the_sum_of_the_programs_as_pytorch_calls_them(predictor: LatencyPredictor) -> None:
    answer = predictor.predict_module(NET, X, "t4", protocol="eager")
    alone = predictor.predict(PROGRAMS, "t4", protocol="eager", framework="pytorch")
    assert [program.prediction for program in answer.programs] == alone
    assert [program.module for program in answer.programs] == ["0", "1", "2"]
    for name in ("latency_s", "lower_s", "upper_s"):
        assert getattr(answer, name) == pytest.approx(sum(getattr(p, name) for p in alone), rel=1e-12)
    assert (answer.total.launches, answer.total.programs, answer.total.lower_bound) == (3, 3, False)
    assert sum(program.share or 0 for program in answer.programs) == pytest.approx(1)
    assert answer.latency_ms == pytest.approx(1e3 * (answer.latency_s or 0))
    assert (answer.device, answer.protocol, answer.framework, answer.mode) == ("t4", "eager", "pytorch", "inference")


def test_device_and_host_overlap(predictor: LatencyPredictor) -> None:
    fast, slow = ({"host": {"kinds": {"kernel": s}, "gap_s": 1e-6, "graph_s": 5e-6}} for s in (0.0, 1e-3))
    quick = predictor.predict_module(NET, X, "t4", host=fast)
    busy = sum(program.seconds or 0 for program in quick.programs)
    assert quick.timeline is not None and quick.timeline.device_busy_s == pytest.approx(busy)
    assert quick.latency_s == pytest.approx(busy + 3e-6)
    waiting = predictor.predict_module(NET, X, "t4", host=slow)
    assert waiting.latency_s == pytest.approx(3e-3 + (quick.programs[-1].seconds or 0))
    graph = predictor.predict_module(NET, X, "t4", host=slow, execution="cuda-graph")
    assert graph.latency_s == pytest.approx(busy + 3e-6 + 5e-6)
    for answer in (quick, waiting, graph):
        assert answer.lower_s < answer.latency_s < answer.upper_s


def test_forward_keeps_the_flags_of_the_module(predictor: LatencyPredictor) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    image = torch.empty(512, 64)
    calls = {
        flag: [p.call for p in predictor.predict_module(net.train(flag), image, "t4", mode="forward").programs]
        for flag in (True, False)
    }
    assert len(calls[True]) > len(calls[False])
    assert calls[False] == [p.call for p in predictor.predict_module(net.train(True), image, "t4").programs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch in its own calls
def test_modules_of_torch_compile_run_as_they_were_compiled(predictor: LatencyPredictor) -> None:
    inner = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    x = torch.empty(512, 64)
    compiled = predictor.predict_module(torch.compile(inner), x, "t4")
    graph = predictor.predict_module(torch.compile(inner, mode="reduce-overhead"), x, "t4")
    assert (compiled.execution, graph.execution) == ("compiled", "compiled-graph")
    assert compiled.latency_s == predictor.predict_module(inner, x, "t4", execution="compiled").latency_s
    assert predictor.predict_module(torch.compile(inner), x, "t4", execution="eager").execution == "eager"
    nested = predictor.predict_module(nn.Sequential(torch.compile(inner), nn.ReLU()), x, "t4")
    assert nested.execution == "eager" and "torch.compile" in nested.assumptions[0]
    assert [program.module for program in nested.programs] == ["0.0", "0.1", "1"]
    inner.compile(mode="reduce-overhead")
    assert predictor.predict_module(inner, x, "t4").execution == "compiled-graph"


def test_compiled_module_has_fewer_kernels(predictor: LatencyPredictor) -> None:
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 32))
    answer = predictor.predict_module(net, X, "t4", execution="compiled")
    assert [program.call for program in answer.programs] == ["addmm", "gelu+tanh+native_layer_norm", "addmm"]
    block = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    for mode, parts in (("inference", ["relu"]), ("forward", ["native_batch_norm", "normalise+relu"])):
        listed = predictor.predict_module(block, torch.empty(2, 8, 16, 16), "t4", mode=mode, execution="compiled")
        # The input and the weight of a convolution over two axes are copied to channels-last.
        assert [program.count for program in listed.programs if program.call == "channels_last"] == [1, 1]
        library = ("channels_last", "convolution", "add")
        calls = [program.call for program in listed.programs if program.call not in library]
        assert [call.endswith(part) for call, part in zip(calls, parts, strict=True)] == [True] * len(parts)
    deep = predictor.predict_module(nn.Conv3d(8, 8, 3), torch.empty(1, 8, 8, 8, 8), "t4", execution="compiled")
    assert "channels_last" not in [program.call for program in deep.programs]
    assert answer.total.launches == 3 and predictor.predict_module(net, X, "t4").total.launches == 5


def test_printed_answer_has_total_parts_and_programs(trained: ModulePrediction) -> None:
    lines = str(trained).splitlines()
    assert lines[0].startswith("Sequential on t4: ") and "device busy" in lines[1]
    assert any("addmm" in line and PROGRAMS[0] in line for line in lines)
    both = str(ModulePredictions([trained, replace(trained, device="l4")])).splitlines()
    assert both[0].split()[:2] == ["call", "program"] and both[0].endswith("l4")
    total = next(line for line in both if line.startswith("total "))
    assert total.count(format_latency(trained.latency_s or 0.0)) == 2 and "Sequential on l4: " in "".join(both)
    other = ModulePredictions([trained, replace(trained, name="Other", programs=trained.programs[:1])])
    assert str(other).startswith("Sequential on t4: ") and other._repr_html_().count("<tr>") == 3


def test_phases_add_up_to_the_total(trained: ModulePrediction) -> None:
    assert list(trained.phases) == ["forward", "backward", "optimizer"]
    for name in ("latency_s", "lower_s", "upper_s", "launches"):
        parts = [getattr(total, name) for total in trained.phases.values()]
        assert getattr(trained.total, name) == pytest.approx(sum(parts), rel=1e-12)
    assert trained.phases["forward"].launches == 3


def test_several_devices_equal_single_calls(predictor: LatencyPredictor) -> None:
    several = predictor.predict_module(NET, X, ["t4", "a100-pcie-40gb"], mode="training", dtype="float16")
    devices = ("t4", "a100-pcie-40gb")
    single = [predictor.predict_module(NET, X, device, mode="training", dtype="float16") for device in devices]
    assert isinstance(several, ModulePredictions) and several == single
    assert several.latency_ms == [answer.latency_ms for answer in single]
    assert predictor.predict_module(NET, X, ["t4"], mode="training", dtype="float16") == single[:1]


def test_options_are_those_of_the_call(predictor: LatencyPredictor) -> None:
    options: dict[str, Any] = {"quantiles": (0.25, 0.75), "implementation": "tuned"}
    answer = predictor.predict_module(NET, X, "t4", protocol="kernel", framework=None, **options)
    assert [p.prediction for p in answer.programs] == predictor.predict(PROGRAMS, "t4", **options)


def test_calls_without_an_operator_make_the_total_of_their_phase_a_lower_bound(predictor: LatencyPredictor) -> None:
    answer = predictor.predict_module(Incomplete(), torch.empty(64, 64), "t4", mode="training")
    assert [(entry.operator, entry.count) for entry in answer.left_out] == [("aten.linalg_inv_ex", 1)]
    assert answer.total.lower_bound and answer.lower_bound
    assert "a lower bound: 1 call is left out" in str(answer).splitlines()[0]
    assert {phase: total.lower_bound for phase, total in answer.phases.items()} == {"forward": True, "backward": False}
    assert "not predicted: aten.linalg_inv_ex" in answer._repr_html_() and "at least " in answer._repr_html_()
    bare = nn.Module()
    bare.forward = torch.linalg.inv
    with pytest.raises(DataError, match="linalg_inv_ex"):
        predictor.predict_module(bare, torch.empty(4, 4), "t4")


def test_answers_are_json(trained: ModulePrediction) -> None:
    value = json.loads(json.dumps(trained.to_dict()))
    assert value["total"]["latency_s"] == trained.latency_s and value["phases"]["forward"]["launches"] == 3
    entry = value["programs"][0]
    assert entry["name"] == PROGRAMS[0] and entry["seconds"] == entry["count"] * entry["latency_s"]
    assert {"phase", "module", "share", "domain", "lower_s"} <= set(entry)


def test_arrow_has_a_row_per_program_and_device(trained: ModulePrediction) -> None:
    table = ModulePredictions([trained, replace(trained, device="other")]).to_arrow()
    assert table.num_rows == 2 * len(trained.programs) and trained.to_arrow().equals(
        table.slice(0, len(trained.programs))
    )
    for name in ("latency_s", "seconds", "seconds_lower", "seconds_upper"):
        assert table.schema.field(name).metadata == {b"unit": b"s"}
    assert trained.timeline is not None
    assert sum(table["seconds"].to_pylist()) == pytest.approx(2 * trained.timeline.device_busy_s)
    assert sum(table["seconds_upper"].to_pylist()) > sum(table["seconds"].to_pylist())
    frame = table.to_pandas().groupby(["device", "phase"])["share"].sum()
    assert frame.groupby("device").sum().tolist() == pytest.approx([1, 1])


def test_html_has_totals_and_programs_and_escapes_names(trained: ModulePrediction) -> None:
    text = trained._repr_html_()
    assert text.count("<tr>") == (1 + 4) + (1 + len(trained.programs))
    assert all(name in text for name in ("forward", "backward", "optimizer", "domain", " – ", PROGRAMS[0]))
    evil = replace(trained, name="<b>x</b>", device="<i>")
    assert "<b>" not in evil._repr_html_() and "&lt;b&gt;x" in evil._repr_html_()
    both = ModulePredictions([trained, evil])._repr_html_()
    assert both.count("<tr>") == (2 + len(trained.programs)) + 3 and "<i>" not in both
    assert ModulePredictions()._repr_html_().count("<tr>") == 1


def test_wrong_devices_and_options_are_refused(predictor: LatencyPredictor) -> None:
    with pytest.raises(UnknownDeviceError, match="a101"):
        predictor.predict_module(NET, X, ["t4", "a101"])
    with pytest.raises(InvalidDeviceError, match="empty"):
        predictor.predict_module(NET, X, [])
    with pytest.raises(DataError, match="exclude each other"):
        predictor.predict_module(NET, X, "t4", protocol="eager", execution="compiled")
    with pytest.raises(DataError, match="execution 'fast' is not known"):
        predictor.predict_module(NET, X, "t4", execution="fast")
    with pytest.raises(DataError, match="protocol 'slow'"):
        predictor.predict_module(NET, X, "t4", protocol="slow")


@pytest.mark.slow
def test_adaptive_gating_lies_between_one_expert_and_two(predictor: LatencyPredictor) -> None:
    def seconds(name: str, **sizes: int) -> float:
        network = make_network(name, **sizes)
        return (
            predictor.predict_module(network.module, network.inputs, "a100-sxm4-80gb", dtype="float16").latency_s or 0
        )

    sizes = {"tokens": 8192, "width": 2048, "hidden": 4096, "experts": 8}
    one, some, two = (seconds(f"moe-{kind}", **sizes) for kind in ("top1", "adaptive", "top2"))
    # 30 % of the tokens take a second expert.
    assert 0.2 < (some - one) / (two - one) < 0.4
    # On few tokens the host decides, which makes as many calls as for two experts.
    assert seconds("moe-adaptive") == seconds("moe-top2")
