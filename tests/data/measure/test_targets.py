"""Parsing of targets to device, threads, cores and TVM's JSON."""

import json

import pytest

from cdmpp.data.measure import targets
from cdmpp.data.measure.targets import configurations, describe
from cdmpp.devices.host import available_cores
from cdmpp.errors import InvalidDeviceError

pytest.importorskip("tvm")


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU of the table, so that no test measures this machine's bandwidth."""
    from cdmpp.devices.registry import lookup

    names = {
        (1, "avx2"): "intel-xeon-amx-1t-avx2",
        (2, "avx2"): "intel-xeon-amx-2t-avx2",
        (1, "sse4.2"): "intel-xeon-amx-1t-sse42",
    }
    monkeypatch.setattr(targets, "this_cpu", lambda threads, isa, known: lookup(names[threads, isa]))
    monkeypatch.setattr(targets, "host_isa", lambda: "avx2")
    monkeypatch.setattr(targets, "available_cores", lambda: (0, 1))


def test_threads_and_level_determine_the_device() -> None:
    one, two, old = configurations(("x86-64-v3@1", "x86-64-v3@2", "x86-64-v2@1"))
    assert [c.name for c in (one, two, old)] == [
        "intel-xeon-amx-1t-avx2",
        "intel-xeon-amx-2t-avx2",
        "intel-xeon-amx-1t-sse42",
    ]
    assert (one.cores, two.cores) == ((1,), (0, 1))
    assert two.target == {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
    # Threads steer sampling, not compiling: the library is shared.
    assert one.build_key == two.build_key != old.build_key
    assert json.loads(describe(one)["target"]) == one.target


def test_native_is_this_cpu_with_all_cores() -> None:
    (found,) = configurations(("native",))
    assert found.threads == 2 and found.kind == "llvm" and found.target["mcpu"]


def test_remote_cpu_reserves_no_local_core() -> None:
    (found,) = configurations(("native",), remote=True)
    assert found.cores == () and found.threads == 1


def test_json_target_needs_a_device() -> None:
    text = '{"kind":"llvm","mtriple":"aarch64-linux-gnu","mcpu":"cortex-a72"}@4'
    with pytest.raises(InvalidDeviceError, match="the CPU of"):
        configurations((text,), remote=True)
    (found,) = configurations((text,), device="raspberry-pi-3", remote=True)
    assert found.threads == 4 and found.name == "raspberry-pi-3"
    assert found.target["mtriple"] == "aarch64-linux-gnu" and found.target["num-cores"] == 4


@pytest.mark.parametrize(("name", "arch"), [("a100", "sm_80"), ("t4", "sm_75"), ("h100-sxm", "sm_90")])
def test_gpu_target_has_its_architecture(name: str, arch: str) -> None:
    (found,) = configurations((f"cuda:{name}",))
    assert found.kind == "cuda" and str(found.target["arch"]).startswith(arch)
    assert found.name.startswith(name.partition("-")[0]) and found.target["host"]["kind"] == "llvm"


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("x86-64-v3@9",), "9 threads, but this process may use 2 cores"),
        (("no-such-target",), "TVM does not accept"),
        (('{"kind":',), "not JSON"),
        (("cuda:xeon-platinum-8124m",), "not an NVIDIA GPU"),
        (("native@1", "x86-64-v3@1"), "two targets are one device"),
        (("native@1", "cuda:t4"), "several kinds"),
    ],
)
def test_invalid_targets_are_refused(texts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InvalidDeviceError, match=reason):
        configurations(texts)


def test_device_with_several_targets_is_refused() -> None:
    with pytest.raises(InvalidDeviceError, match="a single --target"):
        configurations(("native@1", "native@2"), device="t4")


def test_cores_respect_the_affinity_of_the_process() -> None:
    import os

    assert set(available_cores()) <= set(range(os.cpu_count() or 1)) and available_cores()
