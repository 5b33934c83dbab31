"""The model of collectives that ships with the package: physics, options, domain."""

import numpy as np
import pytest

from cdmpp.devices import lookup
from cdmpp.devices.paths import with_network
from cdmpp.devices.registry import table
from cdmpp.errors import ArtifactError
from cdmpp.model.artifact.folder import default_model
from cdmpp.model.collectives.context import context_of
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.collectives.residual import OVER_NOMINAL
from cdmpp.model.collectives.store import model_files, read_model
from cdmpp.model.inference.collectives import CollectiveQuery, explain_collective
from cdmpp.programs.collectives import COLLECTIVES, collective_path, traffic_factor
from cdmpp.programs.operators import make_operator

SIZES = np.unique(np.round(2.0 ** np.arange(0, 41, 0.3)))
RANKS = (2, 3, 4, 8, 16, 72)


@pytest.fixture(scope="module")
def model() -> CollectiveModel:
    found = read_model(default_model())
    assert found is not None
    return found


def seconds(model, device, protocol="kernel", sizes=SIZES, **fields):
    spec = make_operator({"bytes": 1, **fields})
    context = context_of(spec, device, protocol, model.known_as(device))
    output = model.predict([context], np.zeros(len(sizes), dtype=int), sizes)
    return np.exp(output.point), output


def cases(operator):
    for ranks in (2,) if operator == "send_recv" else RANKS:
        yield {"operator": operator, "ranks": ranks}
        yield {"operator": operator, "ranks": ranks, "ranks_per_node": 1}
    yield {"operator": operator, "ranks": 2, "library": "nccl", "mode": "eager", "link": "pcie4-x16"}


@pytest.mark.slow
@pytest.mark.parametrize("operator", COLLECTIVES)
def test_latency_rises_with_bytes_and_bandwidth_stays_below_the_link_on_every_device(model, operator):
    for device in table().values():
        for fields in cases(operator):
            latency, _ = seconds(model, device, **fields)
            assert (latency > 0).all(), (device.name, fields)
            assert (np.diff(latency) >= 0).all(), (device.name, fields)
            ranks, per_node = fields["ranks"], fields.get("ranks_per_node")
            path = collective_path(operator, ranks, per_node, fields.get("link"), device)
            bus = SIZES * traffic_factor(operator, ranks) / latency
            assert bus.max() <= path.bandwidth_bytes_per_s * OVER_NOMINAL * (1 + 1e-9), (device.name, fields)


@pytest.mark.parametrize("protocol", ["kernel", "graph", "eager"])
def test_mode_that_is_not_stated_is_the_protocol(model, protocol):
    h200 = lookup("h200")
    by_protocol, _ = seconds(model, h200, protocol, operator="all_reduce", ranks=8, library="vllm")
    by_mode, _ = seconds(model, h200, operator="all_reduce", ranks=8, library="vllm", mode=protocol)
    assert by_protocol.tolist() == by_mode.tolist()


def test_calls_of_a_framework_cost_more_than_a_graph(model):
    fields = {"operator": "all_reduce", "ranks": 8, "library": "vllm", "sizes": np.array([4096.0])}
    graph, _ = seconds(model, lookup("h200"), mode="graph", **fields)
    eager, _ = seconds(model, lookup("h200"), mode="eager", **fields)
    assert eager[0] > graph[0] + 5e-6


def test_interval_without_a_library_covers_the_libraries(model):
    sizes = np.array([65536.0])
    _, output = seconds(model, lookup("h200"), "graph", sizes=sizes, operator="all_reduce", ranks=8)
    libraries = ("vllm", "sglang", "trtllm")
    points = [
        seconds(model, lookup("h200"), "graph", sizes=sizes, operator="all_reduce", ranks=8, library=name)[1].point[0]
        for name in libraries
    ]
    low, high = output.levels[0, 2], output.levels[0, -3]
    assert low <= min(points)
    assert max(points) <= high


def test_own_link_may_be_stated_or_not(model):
    h200 = lookup("h200")
    stated, _ = seconds(model, h200, "graph", operator="all_reduce", ranks=8, library="vllm", link="nvlink4")
    unstated, _ = seconds(model, h200, "graph", operator="all_reduce", ranks=8, library="vllm")
    assert stated.tolist() == unstated.tolist()


def test_measured_contexts_are_in_and_others_say_what_is_missing(model):
    sizes = np.array([2.0**20])

    def coverage(name, **fields):
        device = lookup(name)
        output = seconds(model, device, sizes=sizes, **fields)[1]
        context = context_of(make_operator({"bytes": 1, **fields}), device, "kernel", model.known_as(device))
        return output.coverage[0], model.explain(context, 2**20)

    reduce8 = {"operator": "all_reduce", "ranks": 8}
    assert coverage("h100-sxm", **reduce8) == (0.0, "")
    unseen, why = coverage("mi300x", **reduce8)
    assert unseen > 1
    assert "no collective was measured on this device" in why
    assert coverage("h100-sxm", **reduce8, link="pcie3-x8")[0] > 1
    many, why = coverage("h100-sxm", operator="all_reduce", ranks=1024)
    assert many > 2
    assert "1024 ranks" in why
    assert coverage("core-i7-12700h", **reduce8)[0] > 2


def test_faster_link_is_not_slower_on_a_device_without_measurements(model):
    device = lookup("mi300x")
    slow, _ = seconds(model, device, operator="all_reduce", ranks=8, link="200GB/s")
    fast, _ = seconds(model, device, operator="all_reduce", ranks=8, link="400GB/s")
    large = SIZES > 2**26
    assert (fast[large] < slow[large]).all()


def test_files_are_read_back(model, tmp_path):
    for name, content in model_files(model).items():
        (tmp_path / name).write_bytes(content)
    again = read_model(tmp_path)
    for device in map(lookup, ("h100-sxm", "l40s", "mi300x")):
        for fields in ({"operator": "all_reduce", "ranks": 8}, {"operator": "all_to_all", "ranks": 2}):
            assert seconds(again, device, **fields)[0].tolist() == seconds(model, device, **fields)[0].tolist()
    assert sum(len(content) for content in model_files(model).values()) < 700_000


def test_damaged_files_are_refused(model, tmp_path):
    files = model_files(model)
    (tmp_path / "collectives.json").write_bytes(files["collectives.json"])
    with pytest.raises(ArtifactError, match="lacks"):
        read_model(tmp_path)
    (tmp_path / "collectives.safetensors").write_bytes(files["collectives.safetensors"][:-100])
    with pytest.raises(ArtifactError, match="damaged"):
        read_model(tmp_path)


@pytest.mark.parametrize("operator", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("name", ["l40s", "rtx-4090", "h100-sxm", "mi300x"])
def test_more_nodes_are_never_faster_than_one_node_with_fewer_ranks(model, name, operator):
    device = lookup(name)
    one_node, _ = seconds(model, device, operator=operator, ranks=8)
    for fields in ({"ranks": 16}, {"ranks": 16, "ranks_per_node": 4}, {"ranks": 64, "span": 128}):
        several, _ = seconds(model, device, operator=operator, **fields)
        assert (several >= one_node).all(), fields


@pytest.mark.parametrize("operator", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(
    ("name", "protocol"), [("gb300", "kernel"), ("mi210", "graph"), ("l4", "eager"), ("tpu-v6e", "kernel")]
)
def test_larger_group_that_was_not_measured_is_never_faster(model, name, protocol, operator):
    device = lookup(name)
    assert not any(c.device == name and c.mode == protocol for c in model.known)
    before = np.zeros(len(SIZES))
    for ranks in (2, 3, 4, 6, 8):
        latency, _ = seconds(model, device, protocol, operator=operator, ranks=ranks, library="nccl")
        assert (latency >= before * (1 - 1e-9)).all(), ranks
        before = latency


@pytest.mark.parametrize("operator", COLLECTIVES)
@pytest.mark.parametrize("name", ["t4", "l40s", "h100-sxm", "tpu-v6e"])
def test_network_is_never_faster_than_the_link_inside_a_node(model, name, operator):
    device = with_network(lookup(name), 1e14)
    inside, _ = seconds(model, device, operator=operator, ranks=2)
    across, _ = seconds(model, device, operator=operator, ranks=2, ranks_per_node=1, span=2)
    assert (across >= inside * (1 - 1e-9)).all()


def test_assumed_link_and_network_are_said(model):
    def reason(name, **fields):
        operator = make_operator({"operator": "all_reduce", "bytes": 1 << 20, **fields})
        return explain_collective(model, CollectiveQuery(operator, lookup(name), "kernel", None))

    assert "the link of mi210 is not known: pcie4-x16 of 32 GB/s assumed" in reason("mi210", ranks=4)
    assert "not known" not in reason("mi210", ranks=4, link="xgmi2")
    assert "not known" not in reason("tpu-v6e", ranks=4)
    assert "network of 400 Gbit/s for each h100-sxm assumed" in reason("h100-sxm", ranks=16)
    assert "assumed" not in reason("h100-sxm", ranks=8)


def test_more_ranks_than_a_node_holds_are_priced_as_several_nodes(model):
    fields = {"operator": "all_reduce", "ranks": 16, "sizes": np.array([2.0**27])}
    unstated, _ = seconds(model, lookup("h100-sxm"), **fields)
    two_nodes, _ = seconds(model, lookup("h100-sxm"), ranks_per_node=8, **fields)
    assert unstated == two_nodes
    in_domain, _ = seconds(model, lookup("gb200"), ranks_per_node=8, **fields)
    assert in_domain < 1e-3
