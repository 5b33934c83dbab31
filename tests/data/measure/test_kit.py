"""The measuring kit from the export to the records, over a stand-in for the CUDA driver."""

import ast
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from cdmpp.cli.main import app
from cdmpp.data.measure import runtime
from cdmpp.data.measure.building import compile_source, nvcc_flags
from cdmpp.data.measure.kit import content
from cdmpp.data.measure.kit.content import BlockChooser, ansor_task, best_of_ansor, blocks, choose_tasks
from cdmpp.data.measure.kit.export_programs import export_programs, launches, work
from cdmpp.data.measure.kit.import_results import import_results
from cdmpp.data.measure.kit.parts import HOME, Entry, Limits, read_part, read_results, write_parts
from cdmpp.data.measure.runtime import driver, host
from cdmpp.data.measure.runtime.programs import TOLERANCES, compare, pieces, random_bytes
from cdmpp.data.measure.runtime.run import COMPLETE, FAILED, INTERRUPTED, MAX_RESULTS, UNFINISHED, PartFile
from cdmpp.data.measure.runtime.stand_in import STAND_IN_S
from cdmpp.data.measure.sampling import SampledProgram, default_program, scheduled_program
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.store import Store
from cdmpp.data.measure.targets import Configuration, configurations
from cdmpp.data.records import read_records
from cdmpp.errors import DataError, InvalidDeviceError, MeasurementError
from cdmpp.programs.frontends.tasks import TaskList, TuningTask
from cdmpp.programs.zoo import network_parameters
from tests.data.measure.stand_in_driver import GPU, H100

pytestmark = pytest.mark.tvm
_ROOT = Path(__file__).parents[3]
_RUN = (
    "import sys; from cdmpp.data.measure.runtime.run import main; "
    "sys.exit(main(sys.argv[1:], dict.fromkeys(('programs', 'host'), 'tests.data.measure.stand_in_driver')))"
)
#: A compiler that copies its input.
_COPY = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\ncp "$1" "$out"\n'


@dataclass(frozen=True)
class Job:
    """An exported job: two tasks, each with two schedules."""

    folder: Path
    #: Hashes of the programs, by task, in the order of measurement.
    programs: list[list[str]]

    @property
    def part(self) -> Path:
        return self.folder / "part-000.zip"


@pytest.fixture(scope="session")
def h100() -> Configuration:
    return configurations(("cuda:h100-sxm",))[0]


@pytest.fixture(scope="session")
def schedules(tiny_programs: list[str], h100: Configuration) -> list[list[SampledProgram]]:
    """The default and one more schedule of a softmax and a relu."""
    import tvm

    groups = []
    for text in tiny_programs[:2]:
        default = default_program(text, "", dict(h100.target))
        schedule = tvm.s_tir.Schedule(tvm.ir.load_json(text).with_attr("global_symbol", "main"))
        for block in schedule.get_child_blocks(schedule.get_sblock("root")):
            rows = schedule.get_loops(block)[0]
            schedule.bind(rows, "blockIdx.x")
            schedule.bind(schedule.add_unit_loop(block), "threadIdx.x")
        groups.append([default, scheduled_program(schedule.mod, "sampled")])
    return groups


def _copy_with_nvcc(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put a compiler that copies its input into PATH."""
    (folder / "nvcc").write_text(_COPY)
    (folder / "nvcc").chmod(0o755)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def copying_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _copy_with_nvcc(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def job(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_programs: list[str],
    schedules: list[list[SampledProgram]],
    h100: Configuration,
    quick: CollectSettings,
) -> Job:
    folder = tmp_path_factory.mktemp("kit") / "job"
    tasks = tuple(TuningTask(f"fused_{i}", f"{i}" * 64, text, 1) for i, text in enumerate(tiny_programs[:2]))
    with Store(folder / HOME) as store:
        store.add_network("tiny", TaskList("tiny", tasks))
        for task, programs in zip(tasks, schedules, strict=True):
            store.add_programs(task.hash, programs, 0)
    settings = quick.model_copy(update={"schedules": 0})
    with pytest.MonkeyPatch.context() as patch:
        _copy_with_nvcc(tmp_path_factory.mktemp("nvcc"), patch)
        patch.setattr(content, "_LEAST_FLOPS", 0.0)  # tasks of any size are GPU size
        patch.setattr(content, "_LEAST_OUTPUTS", 0)
        export_programs([], h100, folder, settings, command="cdmpp collect ...")
    return Job(folder, [[program.hash for program in programs] for programs in schedules])


def _marked(job: Job, folder: Path, marks: dict[str, str]) -> Path:
    """Copy the part with marks in the code of programs; see the stand-in driver."""
    part = read_part(job.part)
    members = {item["cubin"]: marks[item["id"]] for item in part.items if item["id"] in marks}
    copy = folder / "part-000.zip"
    with zipfile.ZipFile(job.part) as source, zipfile.ZipFile(copy, "w") as target:
        for name in source.namelist():
            mark = members.get(name, "")
            target.writestr(name, source.read(name) + mark.encode())
    return copy


def _run(
    part: Path, out: Path, *options: str, gpu: str = H100, kill_when: Callable[[], bool] | None = None, sent: int = 0
) -> Any:
    """Run a part on the stand-in, without nvcc and nvidia-smi; the work folder is beside ``out``."""
    path = os.pathsep.join(str(p) for p in (_ROOT, _ROOT / "server"))
    command = [sys.executable, "-c", _RUN, str(part), "--out", str(out), "--work", str(_work(out)), *options]
    environment = {**os.environ, "PYTHONPATH": path, "PATH": str(out.parent), GPU: gpu}
    with subprocess.Popen(
        command, cwd=_ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        if kill_when is not None:
            end = time.monotonic() + 60
            while not kill_when() and time.monotonic() < end:
                time.sleep(0.02)
            process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=90)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _work(out: Path) -> Path:
    return out.with_name(f"{out.name}-work")


def _results(out: Path) -> dict[str, str]:
    """Return the failures of the finished items by program."""
    return {item["id"]: item["failure"] for item in read_results(out / "part-000.npz").items}


@pytest.fixture(scope="session")
def results(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result file of the whole job."""
    out = tmp_path_factory.mktemp("results") / "out"
    done = _run(job.part, out)
    assert done.returncode == COMPLETE, done.stderr
    return out / "part-000.npz"


@pytest.mark.usefixtures("copying_nvcc")
def test_launches_come_from_the_lowered_host_function(schedules: list[list[SampledProgram]], h100: Any) -> None:
    lowered = launches(schedules[0][0].tvm_json, h100.target)
    assert lowered["arguments"] == [[[64, 32], "float32", False], [[64, 32], "float32", True]]
    # The default softmax keeps maxima and sums of 64 rows in memory between its kernels.
    assert lowered["workspaces"] == [256, 256]
    assert [kernel["name"] for kernel in lowered["kernels"]] == ["main_kernel", "main_kernel_1", "main_kernel_2"]
    assert lowered["kernels"][2]["arguments"] == [["argument", 0], ["workspace", 1], ["workspace", 0], ["argument", 1]]
    assert all(f" {kernel['name']}(" in lowered["code"].decode() for kernel in lowered["kernels"])
    bound = launches(schedules[1][1].tvm_json, h100.target)["kernels"]
    assert (bound[0]["grid"], bound[0]["block"], bound[0]["shared"]) == ([64, 1, 1], [1, 1, 1], 0)


def test_work_counts_operations_and_needed_input_bytes(tiny_programs: list[str]) -> None:
    relu = work(tiny_programs[1])
    assert relu["read_bytes"] == 64 * 32 * 4
    assert relu["flops"] == relu["outputs"] == 64 * 32
    assert relu["bytes"] == 2 * 64 * 32 * 4


def test_part_has_no_tir_and_its_items_all_that_a_launch_needs(job: Job) -> None:
    part = read_part(job.part)
    assert {item["id"] for item in part.items} == {name for group in job.programs for name in group}
    assert part.about["arch"] == "sm_90"
    with zipfile.ZipFile(job.part) as archive:
        assert all(name == "part.json" or name.endswith(".cubin") for name in archive.namelist())
        assert b"tirx" not in archive.read("part.json")


def test_nvcc_gets_the_flags_of_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm
    from tvm.support import nvcc as tvm_nvcc

    commands: list[list[str]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            commands.append(command)
            super().__init__([sys.executable, "-c", "raise SystemExit(1)"], **options)

    monkeypatch.setattr(tvm_nvcc.subprocess, "Popen", Recorded)
    arch = ["-gencode", "arch=compute_90,code=sm_90"]
    with tvm.target.Target({"kind": "cuda", "arch": "sm_90"}), pytest.raises(RuntimeError, match="Compilation"):
        tvm_nvcc.compile_cuda("", "cubin", arch, compiler="nvcc")
    assert commands[0][1 : commands[0].index("-o")] == nvcc_flags("sm_90")


@pytest.mark.slow
@pytest.mark.native
def test_compiling_has_a_limit_of_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvcc").write_text("#!/bin/sh\nwhile :; do :; done\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(MeasurementError, match="may take 1 s of CPU time"):
        compile_source("", "sm_90", cpu_s=1)


_FAKE_LIBCUDA = r"""
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int *d, int n) { *d = 3; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strcpy(s, d == 3 ? "fake" : "wrong"); return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : 1024; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuStreamCreate(void **s, unsigned f) { *s = (void *)77; return 0; }
int cuStreamSynchronize(void *s) { return 0; }
int cuGetErrorName(int c, const char **t) { *t = "FAKE_ERROR"; return 0; }
int cuMemAlloc_v2(u64 *p, size_t n) { if (n > 1 << 20) return 2; *p = (u64)malloc(n); return 0; }
int cuMemFree_v2(u64 p) { free((void *)p); return 0; }
int cuMemcpyHtoD_v2(u64 p, const void *s, size_t n) { memcpy((void *)p, s, n); return 0; }
int cuMemcpyDtoH_v2(void *d, u64 p, size_t n) { memcpy(d, (void *)p, n); return 0; }
int cuMemcpyDtoDAsync_v2(u64 d, u64 p, size_t n, void *s) { memcpy((void *)d, (void *)p, n); return s != (void *)77; }
int cuMemsetD8Async(u64 p, unsigned char c, size_t n, void *s) { memset((void *)p, c, n); return 0; }
int cuModuleLoadData(void **m, const void *c) { *m = strdup(c); return 0; }
int cuModuleUnload(void *m) { free(m); return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = (void *)5; return strcmp(n, "k") ? 500 : 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return !(a == 8 && v > 49152); }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned sh,
                   void *s, void **p, void **x) {
    int *out = *(int **)p[0], values[] = {a, b, c, d, e, g, sh, *(int *)p[1], 10 * *(float *)p[2]};
    memcpy(out, values, sizeof values);
    return s != (void *)77 || x != 0 || f != (void *)5;
}
"""


@pytest.mark.native
def test_driver_passes_geometry_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    source, library = tmp_path / "fake.c", tmp_path / "libfake.so"
    source.write_text(_FAKE_LIBCUDA)
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(driver, "_LIBRARY", str(library))
    cuda = driver.Cuda()
    assert (cuda.name, cuda.capability, cuda.l2_bytes) == ("fake", (9, 0), 1024)
    memory = cuda.allocate(36)
    cuda.upload(memory, b"a" * 36)
    cuda.fill(memory, 0x62, 4)
    assert cuda.download(memory, 8) == b"bbbbaaaa"
    cuda.copy(memory + 8, memory, 6)
    assert cuda.download(memory + 8, 8) == b"bbbbaaaa"
    module = cuda.load(b"code")
    values = [("pointer", memory), ("int32", -7), ("float32", 2.5)]
    cuda.launch(cuda.prepare(module, "k", (1, 2, 3), (4, 5, 6), 65536, values))
    assert np.frombuffer(cuda.download(memory, 36), np.int32).tolist() == [1, 2, 3, 4, 5, 6, 65536, -7, 25]
    with pytest.raises(driver.OutOfMemoryError, match="cuMemAlloc_v2: FAKE_ERROR"):
        cuda.allocate(2**21)
    with pytest.raises(driver.CudaError, match="cuModuleGetFunction"):
        cuda.prepare(module, "other", (1, 1, 1), (1, 1, 1), 0, [])
    cuda.unload(module)
    cuda.free(memory)


@pytest.mark.native
@pytest.mark.usefixtures("nvcc")
@pytest.mark.parametrize("family", ["dense", "dense_fp16", "conv2d", "softmax", "take", "max_pool"])
def test_default_of_a_task_family_compiles_with_nvcc(family: str, h100: Configuration) -> None:
    import tvm
    from tvm import te, topi

    x, w = te.placeholder((16, 32), name="X"), te.placeholder((8, 32), name="W")
    x16, w16 = te.placeholder((16, 32), name="X", dtype="float16"), te.placeholder((8, 32), name="W", dtype="float16")
    image, filters = te.placeholder((1, 4, 8, 8), name="X"), te.placeholder((4, 4, 3, 3), name="W")
    index = te.placeholder((5,), name="I", dtype="int32")
    tensors = {
        "dense": lambda: [x, w, topi.nn.dense(x, w)],
        "dense_fp16": lambda: [x16, w16, topi.nn.dense(x16, w16)],
        "conv2d": lambda: [image, filters, topi.nn.conv2d_nchw(image, filters, 1, 1, 1)],
        "softmax": lambda: [x, topi.nn.softmax(x)],
        "take": lambda: [x, index, topi.take(x, index, axis=0, mode="clip")],
        "max_pool": lambda: [image, topi.nn.pool2d(image, (2, 2), (2, 2), (1, 1), (0, 0, 0, 0), "max")],
    }[family]()
    text = tvm.ir.save_json(te.create_prim_func(tensors).with_attr("global_symbol", "main"))
    lowered = launches(default_program(text, "", dict(h100.target)).tvm_json, h100.target)
    assert lowered["code"].startswith(b"\x7fELF")
    assert all(kernel["name"].encode() in lowered["code"] for kernel in lowered["kernels"])


def test_job_runs_without_cdmpp_up_to_the_driver(job: Job, tmp_path: Path) -> None:
    travelled = tmp_path / "travelled"
    shutil.copytree(job.folder, travelled, ignore=shutil.ignore_patterns(HOME))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", "import sys; sys.path.insert(0, '.'); sys.modules['cdmpp'] = None; "]
    command[-1] += "import runtime.stand_in; from runtime.run import main; sys.exit(main(['--help']))"
    done = subprocess.run(
        command, cwd=travelled, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--minutes" in done.stdout


def test_dry_run_prints_a_plan_and_its_results_fit_the_way_home(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = sorted(str(path) for path in job.folder.glob("part-*.zip"))
    command = [sys.executable, str(job.folder / "run.py"), *parts, "--dry-run", "--out", str(out)]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == COMPLETE, done.stderr
    assert "plan of 540 s" in done.stdout
    assert "part-000 (programs): 4 items" in done.stdout
    assert "part-001 (host): 86 items, 40 of 40 s" in done.stdout
    files = list(out.iterdir())
    assert sorted(path.name for path in files) == ["part-000.npz", "part-001.npz"]
    assert len(files) <= MAX_RESULTS
    assert all(path.is_file() and path.stat().st_size < 16 * 2**20 for path in files)
    with pytest.raises(InvalidDeviceError, match="unknown GPU 'stand-in'"):
        import_results(job.folder, [out / "part-000.npz"], tmp_path / "records")


def test_runtime_is_python_3_10() -> None:
    for path in Path(runtime.__file__).parent.glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_results_become_records(job: Job, results: Path, tmp_path: Path) -> None:
    out = import_results(job.folder, [results], tmp_path / "records")
    table = read_records(out / "records.parquet")
    assert len(table) == 4
    assert not table.failed.any()
    assert set(table.device.used()) == {"h100-sxm"}
    assert sorted(set(table.provenance["origin"].used())) == ["default", "sampled"]
    card = (out / "README.md").read_text()
    assert "Part 0" in card
    assert "cdmpp collect ..." in card
    shown = CliRunner().invoke(app, ["eval", "--records", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "h100-sxm" in shown.output
    for item in read_results(results).items:
        assert set(item["repeats_s"]) == {"flushed", "warm"}
        assert max(map(max, item["repeats_s"].values())) == STAND_IN_S


@pytest.mark.slow
def test_failures_are_failed_records_and_the_run_goes_on(job: Job, tmp_path: Path) -> None:
    (first, second), (third, fourth) = job.programs
    part = _marked(job, tmp_path, {first: "// crash", second: "// error", third: "// hang", fourth: "// large"})
    out = tmp_path / "out"
    done = _run(part, out, "--limit-s", "1")
    assert done.returncode == COMPLETE, done.stderr
    failures = _results(out)
    assert "exit code 7" in failures[first]
    assert failures[second] == "cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert failures[third] == "exceeded 1 s"
    assert failures[fourth].startswith("out of memory")
    table = read_records(import_results(job.folder, [out / "part-000.npz"], tmp_path / "records") / "records.parquet")
    assert table.failed.all()


def test_wrong_result_is_a_failure(job: Job, tmp_path: Path) -> None:
    order = [item["id"] for item in read_part(job.part).items]
    first, second = sorted(job.programs[0], key=order.index)
    out = tmp_path / "out"
    assert _run(_marked(job, tmp_path, {second: "// wrong"}), out).returncode == COMPLETE
    failures = _results(out)
    assert failures.pop(second).startswith(f"differs from {first}: relative difference")
    assert set(failures.values()) == {""}  # the first that runs is the reference of its task


def test_job_for_another_architecture_ends_at_once(job: Job, tmp_path: Path) -> None:
    done = _run(job.part, tmp_path / "out", gpu="NVIDIA A100-SXM4-80GB")
    assert done.returncode == FAILED
    assert "for sm_90, and NVIDIA A100-SXM4-80GB has compute capability 8.0" in done.stderr


def test_h100_and_h200_share_a_job(job: Job, results: Path, tmp_path: Path) -> None:
    assert _run(job.part, tmp_path / "out", gpu="NVIDIA H200").returncode == COMPLETE
    out = import_results(job.folder, [results, tmp_path / "out" / "part-000.npz"], tmp_path / "records")
    table = read_records(out / "records.parquet")
    assert (len(table), set(table.device.used())) == (8, {"h100-sxm", "h200"})
    card = (out / "README.md").read_text()
    assert "Not finished on h200: 86 of 86 items of part 1 (host)" in card


def test_host_part_is_measured_and_may_fail(job: Job, results: Path, tmp_path: Path) -> None:
    host = job.folder / "part-001.zip"
    assert _run(host, tmp_path / "out").returncode == COMPLETE
    out = import_results(job.folder, [results, tmp_path / "out" / "part-001.npz"], tmp_path / "records")
    rows = json.loads((out / "host.json").read_text())["rows"]
    assert len(rows) == 86
    assert {row["host_s"] for row in rows} == {STAND_IN_S}
    done = _run(host, tmp_path / "failed", gpu="no torch")
    assert done.returncode == COMPLETE
    assert "PyTorch finds no CUDA device" in done.stderr


def test_host_cases_run_on_a_cpu(tmp_path: Path) -> None:
    kind = host.Kind(None, tmp_path)
    for item in host.items():
        if item["nodes"] == 1 and "compiled" not in item["case"]:
            result = kind.measure(item)
            on_gpu = item["queue"] == "full" or item["case"] == host.GRAPH_LAUNCH
            assert bool(result["failure"]) == on_gpu, (item, result)
            assert on_gpu or min(result["repeats_s"]["host"]) > 0


def test_results_of_an_earlier_machine_are_left_out(job: Job, results: Path, tmp_path: Path) -> None:
    done = _run(job.part, tmp_path / "out", "--done", str(results))
    assert done.returncode == COMPLETE
    assert _results(tmp_path / "out") == {}


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, INTERRUPTED)])
def test_run_goes_on_after_it_is_stopped(job: Job, tmp_path: Path, sent: int, code: int) -> None:
    third = read_part(job.part).items[2]["id"]
    out = tmp_path / "out"
    hanging = _marked(job, tmp_path, {third: "// hang"})
    log = _work(out) / "part-000.jsonl"

    def two_are_done() -> bool:
        return log.exists() and log.read_text().count('"id"') == 2

    done = _run(hanging, out, kill_when=two_are_done, sent=sent)
    assert done.returncode == code, done.stderr
    if code == INTERRUPTED:
        assert len(_results(out)) == 2
    with log.open("a") as file:
        file.write('{"id": "incompl')
    before = [line for line in log.read_text().splitlines() if '"id"' in line][:2]
    assert _run(job.part, out).returncode == COMPLETE
    assert set(_results(out).values()) == {""}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [json.loads(line) for line in before] == [line for line in lines if "id" in line][:2]
    assert len(read_results(out / "part-000.npz").machines) == 2  # one description for each call


def test_run_that_has_no_time_left_says_how_to_go_on(job: Job, tmp_path: Path) -> None:
    done = _run(job.part, tmp_path / "out", "--minutes", "0.01")
    assert done.returncode == UNFINISHED
    assert "repeat the same command" in done.stdout
    assert _results(tmp_path / "out") == {}


def test_results_of_another_job_are_not_mixed(job: Job, results: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _work(out).mkdir()
    (_work(out) / "part-000.jsonl").write_text('{"format": 1, "job": "another", "part": 0}\n')
    done = _run(job.part, out)
    assert done.returncode == FAILED
    assert "another job" in done.stderr


def _changed(results: Path, folder: Path, **content: Any) -> Path:
    with np.load(results) as packed:
        arrays = {name: packed[name] for name in packed.files}
    path = folder / "part-000.npz"
    np.savez_compressed(path, **{**arrays, **{name: np.array(json.dumps(value)) for name, value in content.items()}})
    return path


@pytest.mark.parametrize(
    ("entries", "message"),
    [({"job": "other"}, "of job other"), ({"unit": "ms"}, "in 'ms'"), ({"part": 7}, "no part 7"), ({"format": 9}, "9")],
)
def test_import_refuses_a_wrong_head(
    job: Job, results: Path, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    file = _changed(results, tmp_path, head={**read_results(results).head, **entries})
    with pytest.raises(DataError, match=message):
        import_results(job.folder, [file], tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_import_refuses_other_programs_and_impossible_times(job: Job, results: Path, tmp_path: Path) -> None:
    first, *others = read_results(results).items

    def scaled(item: dict[str, Any], factor: float) -> dict[str, Any]:
        times = {protocol: [factor * s for s in repeats] for protocol, repeats in item["repeats_s"].items()}
        return {**item, "repeats_s": times}

    for items, message in [
        ([{**first, "id": "f" * 64}, *others], "no item ffff"),
        ([scaled(item, 1e-9) for item in (first, *others)], f"{first['id']} took .* operations.*, and 3 more"),
        ([scaled(item, -1) for item in (first, *others)], "positive seconds"),
    ]:
        file = _changed(results, tmp_path, items=items)
        with pytest.raises(DataError, match=message):
            import_results(job.folder, [file], tmp_path / "records")
    file = _changed(results, tmp_path, items=[scaled(first, 1e-10), *others])
    out = import_results(job.folder, [file], tmp_path / "dropped", drop_impossible=True)
    assert read_records(out / "records.parquet").failed.sum() == 1
    with pytest.raises(DataError, match="given twice"):
        import_results(job.folder, [results, results], tmp_path / "records")
    truncated = tmp_path / "part-000.npz"
    truncated.write_bytes(results.read_bytes()[:200])
    with pytest.raises(DataError, match="damaged"):
        import_results(job.folder, [truncated], tmp_path / "records")


def test_second_run_in_the_same_folder_is_refused(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _work(out).mkdir()
    with (_work(out) / "run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = _run(job.part, out)
    assert done.returncode == FAILED
    assert "another run.py uses" in done.stderr


def test_import_refuses_another_gpu(job: Job, results: Path, tmp_path: Path) -> None:
    file = _changed(results, tmp_path, machines=[{"device": {"gpu": "NVIDIA A100-SXM4-80GB"}}])
    with pytest.raises(InvalidDeviceError, match=r"for sm_90, and .* a100-sxm4-80gb"):
        import_results(job.folder, [file], tmp_path / "records")


def test_command_imports_results_and_names_wrong_options(job: Job, results: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments])

    done = run("measure", "--import", job.folder, results, "--out", tmp_path / "records")
    assert "4 records of 4 programs, 0 failed" in done.stdout
    for arguments, message in [
        (("measure", job.folder, results), "one job or selection"),
        (("measure", "--import", job.folder, results), "--out DIR"),
        (("collect", "--network", "vit", "--out", tmp_path, "--standalone"), "--build-only"),
        (("collect", "--network", "vit", "--out", tmp_path, "--minutes", "3"), "--standalone"),
    ]:
        done = run(*arguments)
        assert (done.exit_code, message in done.output) == (2, True), done.output


def test_export_is_for_cuda_only(tmp_path: Path, one_thread: Configuration) -> None:
    with pytest.raises(InvalidDeviceError, match="for CUDA, not for llvm"):
        export_programs(["vit"], one_thread, tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_parts_stay_below_the_limit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    entries = [Entry({"id": f"{i}"}, {f"code/{i}.cubin": rng.bytes(30_000)}) for i in range(9)]
    limits = Limits(part_mib=0.2)
    job = write_parts(tmp_path, {"programs": entries}, device="h100-sxm", limits=limits, about={})
    assert [part["items"] for part in job["parts"]] == [["0", "1", "2", "3", "4", "5"], ["6", "7", "8"]]
    again = write_parts(tmp_path, {"programs": entries}, device="h100-sxm", limits=limits, about={})
    assert again["job"] == job["job"]
    part = PartFile(tmp_path / "part-001.zip")
    assert (part.number, part.count, part.kind) == (1, 2, "programs")
    assert part.about["limits"] == {"minutes": 9.0, "result_mib": 16.0}
    for part_mib, message in ((0.02, "more than 0.02 MiB"), (0.035, "9 parts of 0.035 MiB, and 8 result files")):
        with pytest.raises(DataError, match=message):
            write_parts(
                tmp_path,
                {"programs": entries[:8] if part_mib == 0.02 else entries},
                device="h100-sxm",
                limits=Limits(part_mib=part_mib),
                about={},
            )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "bool"])
def test_results_are_compared_by_type(dtype: str) -> None:
    content = random_bytes([100], dtype, 50, np.random.default_rng(0))
    tolerance = TOLERANCES.get(dtype, 0.0)
    assert compare([content], [content], [dtype], tolerance) == (0.0, "")
    other = random_bytes([100], dtype, 50, np.random.default_rng(1))
    assert compare([other], [content], [dtype], tolerance)[1]
    assert compare([b"\xff" * len(content)], [content], [dtype], tolerance)[1]  # nothing was written


def test_pieces_of_a_result_lie_in_it() -> None:
    assert pieces(100) == [(0, 100)]
    for size in (600_001, 10**9):
        found = pieces(size)
        assert found[0][0] == 0
        assert size - 16 < sum(found[-1]) <= size


def test_tasks_are_chosen_from_the_networks_in_turn() -> None:
    networks = {
        "a": [("3", "fused_conv2d_add"), ("1", "fused_conv2d1"), ("4", "softmax"), ("5", "transpose")],
        "b": [("2", "matmul")],
        "c": [("1", "fused_conv2d1"), ("6", "mean")],
    }
    assert choose_tasks(networks, 2) == ["1", "2"]
    assert set(choose_tasks(networks, 0)) == set("123456")
    assert choose_tasks({"a": networks["a"]}, 0) == ["1", "3", "4", "5"]


def test_networks_of_the_standard_job_exist() -> None:
    for text in content.NETWORKS:
        name, _, sizes = text.partition("@")[0].partition(":")
        given = {part.partition("=")[0] for part in sizes.split(",") if part}
        assert given <= network_parameters(name).keys(), text
    half = sum(text.endswith("@float16") for text in content.NETWORKS)
    assert 2 * half > 0.9 * len(content.NETWORKS)


def test_four_of_five_schedules_have_enough_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "blocks", int)
    default, many, few = (SampledProgram("", str(n), "sampled") for n in (100, 70, 3))
    chooser = BlockChooser(66)
    chosen = chooser([default, *[many] * 20, *[few] * 20], 13)
    assert (len(chosen), chosen.count(few)) == (14, 2)
    assert chooser([few, *[many] * 20], 13).count(few) == 1
    chosen = chooser([few, *[many] * 4, *[few] * 20], 13)
    assert (len(chosen), chosen.count(few)) == (5, 1)
    assert chooser([few, few, few], 13) == [few]


@pytest.mark.usefixtures("copying_nvcc")
def test_blocks_are_those_of_the_largest_launch(schedules: list[list[SampledProgram]], h100: Configuration) -> None:
    for program in (schedules[0][0], schedules[1][1]):
        kernels = launches(program.tvm_json, h100.target)["kernels"]
        assert blocks(program.tvm_json) == max(int(np.prod(kernel["grid"])) for kernel in kernels)


def test_best_schedules_of_ansor_become_programs_of_a_task(tmp_path: Path) -> None:
    workload = '["relu_layer", 64, 128]'
    split = '[["FU",1,[0,1]],["SP",1,0,8192,[SIZE],1],["AN",1,0,5],["AN",1,1,6]]'
    steps = [split.replace("SIZE", str(n)) for n in (32, 64, 128)]
    columns = {
        "device": ["Tesla V100", "Tesla V100", "AMD MI50", "Tesla V100"],
        "workload": [workload] * 4,
        "epilogue": [""] * 4,
        "steps": [*steps, "[]"],
        "latency_us": [2.0, 1.0, 0.5, None],
    }
    pq.write_table(pa.table(columns), tmp_path / "logs.parquet")
    found = best_of_ansor(tmp_path / "logs.parquet", 1)
    assert found == {"ansor-relu_layer": {(workload, ""): [steps[1]]}}
    task, programs = ansor_task(workload, "", [steps[1]])
    assert (task.name, [blocks(program.tvm_json) for program in programs]) == ("fused_relu", [128])
    with pytest.raises(DataError, match="not a table of search logs"):
        best_of_ansor(tmp_path / "none.parquet", 1)
