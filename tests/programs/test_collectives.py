"""Specifications of collectives and of the links that they cross."""

import pytest

from cdmpp.devices import lookup
from cdmpp.devices.links import LINKS, canonical_link, link_of_name
from cdmpp.devices.paths import link_of_device, path_of
from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError
from cdmpp.programs.collectives import COLLECTIVES, link_seconds, traffic_factor
from cdmpp.programs.operators import lowered_operators, make_operator, operator_family, operator_types, parse_operator
from cdmpp.programs.program import TensorProgram


def test_text_is_read_back():
    text = "all_reduce:dtype=bfloat16,bytes=67108864,ranks=8,ranks_per_node=4,library=nccl,mode=graph,link=nvlink4"
    spec = parse_operator(text)
    assert spec.text() == text
    assert (
        parse_operator("all_reduce:bytes=67108864,ranks=8").text() == "all_reduce:dtype=float16,bytes=67108864,ranks=8"
    )


def test_fields_that_are_not_stated_are_no_part_of_the_identity():
    spec = parse_operator("all_gather:bytes=1024,ranks=4")
    assert spec.canonical() == {"operator": "all_gather", "dtype": "float16", "bytes": 1024, "ranks": 4}


def test_every_collective_is_an_operator_without_a_structure():
    for name in COLLECTIVES:
        assert operator_family(name) == "collective"
        assert name in operator_types()
        assert name not in lowered_operators()
        with pytest.raises(UnsupportedOperatorError, match="collective"):
            parse_operator(f"{name}:bytes=8,ranks=2").structural_class()


def test_spellings_of_a_link_are_one_program():
    hashes = {
        TensorProgram.from_operator({"operator": "all_reduce", "bytes": 64, "ranks": 2, "link": link}).hash
        for link in ("64GB/s", "64 GB/s", 64e9, "64000 MB/s")
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("all_reduce:bytes=0,ranks=2", "bytes"),
        ("all_reduce:bytes=8,ranks=1", "ranks"),
        ("send_recv:bytes=8,ranks=4", "ranks"),
        ("all_reduce:bytes=8", "ranks"),
        ("all_reduce:bytes=8,ranks=2,library=mpi", "library"),
        ("all_reduce:bytes=8,ranks=2,mode=fast", "mode"),
        ("all_reduce:bytes=8,ranks=2,link=carrier-pigeon", "nvlink4"),
        ("all_reduce:bytes=8,ranks=2,link=5", "bandwidth"),
        ("all_reduce:bytes=8,ranks=2,link=400Gbps", "write 400GB/s or 400Gbit/s"),
        ("all_reduce:bytes=8,ranks=2,dtype=float64", "float64"),
    ],
)
def test_bad_fields_are_refused_with_what_is_allowed(text, word):
    with pytest.raises(InvalidProgramError) as caught:
        parse_operator(text)
    assert word in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVLink5 900 GB/s", "nvlink5"),
        ("NVLink3 NVSwitch (DGX node)", "nvlink3"),
        ("PCIe4 x16 32 GB/s", "pcie4-x16"),
        ("PCIe5 x8 28.4 GB/s", "pcie5-x8"),
        ("NVLink in pairs, slower between pairs", "nvlink-pairs"),
        ("NVLink in pairs by its name; not confirmed", None),
        ("not stated", None),
        ("nvlink 4", "nvlink4"),
        ("400 MB/s", "0.4GB/s"),
        ("400 Gbit/s", "50GB/s"),
        ("6.4e10 bytes/s", "64GB/s"),
        ("PCIe 5.0 x8", "pcie5-x8"),
        ("PCIe Gen4 x16", "pcie4-x16"),
        ("PCIe 4.0", "pcie4-x16"),
        ("ethernet-400g", "ethernet-400g"),
    ],
)
def test_texts_of_the_tables_name_links(text, name):
    assert canonical_link(text) == name


@pytest.mark.parametrize("text", ["pcie5-x4", "nvlink10", "ethernet-40g", "infiniband-qdr", "xgmi5", "1.2.3GB/s"])
def test_text_that_only_begins_like_a_link_is_refused(text):
    with pytest.raises(ValueError, match=f"link '{text}' is not known: pass a name such as nvlink4"):
        canonical_link(text)


@pytest.mark.parametrize("rate", [0, -5.0, 10**400, float("inf"), float("nan")])
def test_number_that_is_no_bandwidth_is_refused(rate):
    with pytest.raises(InvalidProgramError, match=r"is no bandwidth between 1e.06 and 1e.14 bytes per second"):
        make_operator({"operator": "all_reduce", "bytes": 8, "ranks": 2, "link": rate})


def test_devices_have_the_link_of_their_board():
    own = {
        name: link_of_device(lookup(name)).name
        for name in ("h100-sxm", "a100-sxm4-80gb", "b200", "gh200", "gfx950-mi350x-mi355x", "l40s", "t4")
    }
    assert own == {
        "h100-sxm": "nvlink4",
        "a100-sxm4-80gb": "nvlink3",
        "b200": "nvlink5",
        "gh200": "nvlink4",
        "gfx950-mi350x-mi355x": "xgmi4",
        "l40s": "pcie4-x16",
        "t4": "pcie3-x16",
    }
    assert link_of_name("50GB/s").bandwidth_bytes_per_s == 50e9


def test_paths_leave_the_fast_link_between_pairs_and_nodes():
    h100 = lookup("h100-sxm")
    assert path_of(8, None, None, h100).bandwidth_bytes_per_s == LINKS["nvlink4"].bandwidth_bytes_per_s
    assert path_of(4, None, "nvlink-pairs", h100).kind == "pcie"
    assert path_of(2, None, "nvlink-pairs", h100).kind == "switched"
    between = path_of(16, 8, None, h100)
    assert between.crosses
    assert between.bandwidth_bytes_per_s == 8 * LINKS["infiniband-ndr"].bandwidth_bytes_per_s
    assert path_of(16, 8, None, h100, shared=False).bandwidth_bytes_per_s == 50e9


@pytest.mark.parametrize("per_node", [None, 1, 4, 8])
@pytest.mark.parametrize("name", ["gb200", "gb300"])
def test_group_inside_one_nvlink_domain_never_uses_the_network(name, per_node):
    device = lookup(name)
    assert (device.ranks_per_node, device.nvlink_domain) == (4, 72)
    inside = path_of(72, per_node, None, device)
    assert (inside.kind, inside.crosses, inside.bandwidth_bytes_per_s) == ("switched", False, 900e9)
    between = path_of(144, per_node, None, device)
    assert (between.kind, between.per_node) == ("network", 72)
    # On another link only the four devices of a node reach each other.
    assert path_of(8, None, "pcie5-x16", device).per_node == 4


def test_group_that_is_larger_than_a_node_is_on_several_nodes():
    h100 = lookup("h100-sxm")
    assert path_of(16, None, None, h100) == path_of(16, 8, None, h100)
    assert not path_of(8, None, None, h100).crosses
    assert path_of(8, None, None, h100.model_copy(update={"ranks_per_node": 4})).per_node == 4
    assert not path_of(64, None, None, lookup("xeon-platinum-8124m")).crosses


@pytest.mark.parametrize(
    ("ranks", "span", "per_node"), [(8, 8, 0), (4, 8, 0), (8, 16, 4), (16, 128, 1), (2, 9, 1), (12, 12, 8)]
)
def test_span_decides_how_many_ranks_share_a_node(ranks, span, per_node):
    assert path_of(ranks, None, None, lookup("h100-sxm"), span=span).per_node == per_node


def test_traffic_is_that_of_the_bus_bandwidth():
    assert traffic_factor("all_reduce", 8) == 1.75
    assert traffic_factor("all_gather", 8) == traffic_factor("reduce_scatter", 8) == 0.875
    assert traffic_factor("send_recv", 2) == 1.0
    assert link_seconds("all_reduce", 450e9, 2, None, None, lookup("h100-sxm")) == pytest.approx(1.0)
