"""A few tiny programs as a collection with lowered networks and sampled schedules."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cdmpp.data.measure.building import require_nvcc
from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.store import Store
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import MissingDependencyError
from cdmpp.programs.frontends.tasks import TaskList, TuningTask
from cdmpp.programs.tvm_json import find_prim_func, load, structural_hash

#: The one network of :func:`fill`.
TINY = "tiny"


def _hash(text: str) -> str:
    nodes, root = load(text)
    return structural_hash(nodes, find_prim_func(nodes, root))


Fill = Callable[[Path], list[str]]


@pytest.fixture(scope="session")
def tiny_programs() -> list[str]:
    """TVM JSON of six small PrimFuncs."""
    tvm = pytest.importorskip("tvm")
    from tvm import te, topi

    texts = []
    for size in (64, 96, 128):
        a = te.placeholder((size, 32), name="A")
        for result in (topi.nn.softmax(a), topi.nn.relu(a)):
            function = te.create_prim_func([a, result]).with_attr("global_symbol", "main")
            texts.append(tvm.ir.save_json(function))
    return texts


@pytest.fixture(scope="session")
def fill(tiny_programs: list[str]) -> Fill:
    """Fill a folder's store with the programs, each a task of its own; gives their hashes."""

    def filled(folder: Path) -> list[str]:
        hashes = [_hash(text) for text in tiny_programs]
        tasks = tuple(
            TuningTask(f"fused_{i}", digest, text, 1)
            for i, (digest, text) in enumerate(zip(hashes, tiny_programs, strict=True))
        )
        with Store(folder) as store:
            store.add_network(TINY, TaskList(TINY, tasks))
            for task in tasks:
                store.add_programs(task.hash, [SampledProgram(task.hash, task.tvm_json, "default")], 0)
        return hashes

    return filled


@pytest.fixture
def nvcc() -> None:
    """Skip a test where nvcc is not installed."""
    try:
        require_nvcc()
    except MissingDependencyError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def quick() -> CollectSettings:
    """Settings under which a program is timed within milliseconds."""
    return CollectSettings(
        schedules=0,
        repeat_share=1.0,
        repeat_gap_s=0.0,
        builders=1,  # each imports TVM for seconds
        timing=TimingSettings(repeat_s=1e-4, total_s=1e-3, min_repeats=2, max_repeats=3, max_spread=100.0, passes=1),
    )


@pytest.fixture(scope="session")
def one_thread() -> Configuration:
    """One thread of some CPU with SSE4.2, on a core of this machine."""
    import os

    spec = DeviceSpec(
        name="test-cpu-1t",
        vendor="Intel",
        arch="x86-64",
        kind="cpu",
        compute_units=1,
        cores_per_unit=8,
        clock_hz=3e9,
        peak_flops_fp32=4.8e10,
        mem_bandwidth_bytes_per_s=1e10,
    )
    cores = (max(os.sched_getaffinity(0)),)
    return Configuration({"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}, 1, cores, spec)
