"""The host's CPU, from what operating systems say of real ones: nothing made up, names that stay."""

import os
import sys
import threading
from pathlib import Path

import pytest

from cdmpp.devices import host
from cdmpp.devices.cpuinfo import NEEDED_FLAGS, USUAL_LANES, CpuInfo, find_core, read_linux, read_macos
from cdmpp.devices.host import describe, host_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InvalidDeviceError

AVX2 = "sse4_1 sse4_2 avx f16c fma avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"


def x86(vendor: str, family: int, model: int, name: str, flags: str, mhz: str = "2600.0", stepping: int = 1):
    return (
        f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\n"
        f"stepping\t: {stepping}\ncpu MHz\t\t: {mhz}\ncache size\t: 36864 KB\n"
        f"flags\t\t: fpu vme {flags} hypervisor"
    )


def arm(part: str, implementer: str = "0x41") -> str:
    return (
        "BogoMIPS\t: 243.75\nFeatures\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp\n"
        f"CPU implementer\t: {implementer}\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: {part}\n"
        "CPU revision\t: 1"
    )


#: cpuinfo of one core, max frequency in kHz where there is a driver, instruction set, name, lanes, clock.
CPUS = {
    "masked number on a virtual machine": (
        x86("GenuineIntel", 6, 167, "Intel(R) Xeon(R) Processor", f"{AVX512} amx_bf16 avx512_fp16 amx_tile"),
        *(None, "avx512", "intel-xeon-amx", 32, 2.6e9),
    ),
    "sapphire rapids in a cloud": (
        x86("GenuineIntel", 6, 143, "Intel(R) Xeon(R) Processor @ 2.70GHz", f"{AVX512} amx_tile", "2699.998"),
        *(None, "avx512", "intel-xeon-sapphire-rapids", 32, 2.7e9),
    ),
    "skylake or later in a cloud": (
        x86("GenuineIntel", 6, 85, "Intel(R) Xeon(R) CPU @ 2.00GHz", AVX512, "2000.178", stepping=3),
        *(None, "avx2", "intel-xeon-skylake", 16, 2.0e9),
    ),
    "cascade lake by stepping": (
        x86("GenuineIntel", 6, 85, "Intel(R) Xeon(R) CPU", AVX512, "2800.2", stepping=7),
        *(None, "avx512", "intel-xeon-cascade-lake", 32, 2.8e9),
    ),
    "notebook with a frequency driver": (
        x86("GenuineIntel", 6, 142, "Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", AVX2, "800.1"),
        *(4_000_000, "avx2", "intel-core-i7-8550u", 16, 4.0e9),
    ),
    "zen 4 server": (
        x86("AuthenticAMD", 25, 17, "AMD EPYC 9654 96-Core Processor", AVX512, "2396.5"),
        *(3_707_812, "avx512", "amd-epyc-9654", 16, 3.707812e9),
    ),
    "zen 3 without a number": (
        x86("AuthenticAMD", 25, 1, "AMD EPYC-Milan Processor", AVX2, "2445.404"),
        *(None, "avx2", "amd-zen3", 16, 2.45e9),
    ),
    "zen 1 has half the lanes": (
        x86("AuthenticAMD", 23, 1, "AMD Ryzen 7 1800X Eight-Core Processor", AVX2, "3600.0"),
        *(3_600_000, "avx2", "amd-ryzen-7-1800x-eight-core", 8, 3.6e9),
    ),
    "neoverse n1": (arm("0xd0c"), 3_000_000, "neon", "arm-neoverse-n1", 8, 3.0e9),
    "raspberry pi 4": (arm("0xd08"), 1_800_000, "neon", "arm-cortex-a72", 4, 1.8e9),
    "an arm core of later days": (arm("0xd99"), 2_000_000, "neon", "arm-d99", 8, 2.0e9),
}


def machine(root: Path, text: str, khz: int | None = None, cores: int = 2) -> Path:
    (root / "proc").mkdir()
    blocks = [f"processor\t: {core}\n{text}\n" for core in range(cores)]
    (root / "proc/cpuinfo").write_text("\n".join(blocks))
    for core in range(cores):
        folder = root / f"sys/devices/system/cpu/cpu{core}"
        if khz is not None:
            (folder / "cpufreq").mkdir(parents=True)
            (folder / "cpufreq/cpuinfo_max_freq").write_text(f"{khz}\n")
    return root


def cache(root: Path, core: int, index: int, level: int, kind: str, size: str, shared: str) -> None:
    folder = root / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
    folder.mkdir(parents=True)
    values = {"level": str(level), "type": kind, "size": size, "shared_cpu_list": shared}
    for name, text in values.items():
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize("cpu", CPUS)
def test_cpus(cpu: str, tmp_path: Path) -> None:
    text, khz, isa, slug, lanes, clock_hz = CPUS[cpu]
    info = read_linux((0, 1), machine(tmp_path, text, khz))
    fields = describe(info, 2, isa)
    assert fields["name"] == f"{slug}-2t-{isa.replace('.', '')}"
    assert (fields["cores_per_unit"], fields["compute_units"]) == (lanes, 2)
    assert fields["clock_hz"] == pytest.approx(clock_hz, rel=1e-9)
    spec = DeviceSpec.model_validate(fields | {"mem_bandwidth_bytes_per_s": 1e10})
    assert spec.peak_flops_fp32 == 2 * 2 * lanes * spec.clock_hz
    assert spec.kind == "cpu"
    words = spec.source
    assert "clock from" in words
    assert "lanes" in words
    again = DeviceSpec.model_validate(describe(info, 2, isa) | {"mem_bandwidth_bytes_per_s": 1e10})
    assert again == spec
    assert again.digest() == spec.digest()


def test_a_narrower_target_is_another_device(tmp_path: Path) -> None:
    info = read_linux((0, 1), machine(tmp_path, CPUS["sapphire rapids in a cloud"][0]))
    fields = [describe(info, threads, isa) for threads, isa in ((1, "sse4.2"), (1, "avx2"), (2, "avx2"))]
    assert [f["name"] for f in fields] == [
        f"intel-xeon-sapphire-rapids-{suffix}" for suffix in ("1t-sse42", "1t-avx2", "2t-avx2")
    ]
    peaks = [f["peak_flops_fp32"] for f in fields]
    assert peaks == [8 * 2.7e9, 32 * 2.7e9, 64 * 2.7e9]


def test_the_reported_number_is_not_believed_against_the_instructions(tmp_path: Path) -> None:
    info = read_linux((0,), machine(tmp_path, CPUS["masked number on a virtual machine"][0]))
    assert find_core(info.vendor, info.family, info.model, info.stepping).name == "Rocket Lake"
    arch = describe(info, 1, "avx2")["arch"]
    assert arch == "Intel(R) Xeon(R) Processor with AMX, reported under the number of Rocket Lake"


def test_caches(tmp_path: Path) -> None:
    root = machine(tmp_path, CPUS["zen 3 without a number"][0], cores=4)
    assert read_linux((0, 1), root).cache_bytes == 36 * 2**20  # cpuinfo, without sysfs
    for core in range(4):
        cache(root, core, 0, 1, "Data", "32K", str(core))
        cache(root, core, 1, 1, "Instruction", "64K", str(core))
        cache(root, core, 2, 2, "Unified", "512K", str(core))
        cache(root, core, 3, 3, "Unified", "16384K", "0-1" if core < 2 else "2-3")
    assert read_linux((0, 1), root).cache_bytes == 2**24
    assert read_linux((0, 1, 2), root).cache_bytes == 2**25  # two instances serve them
    assert "level 3" in read_linux((2,), root).cache_source


@pytest.mark.parametrize(
    ("text", "isa", "message"),
    [
        (x86("GenuineIntel", 6, 142, "Intel(R) Core(TM) i7-8550U", AVX2), "avx512", "avx512f"),
        (x86("AuthenticAMD", 21, 2, "AMD Opteron(tm) Processor 6376", "sse4_2 avx fma4"), "avx2", "avx2 fma"),
        (x86("GenuineIntel", 6, 250, "Genuine Intel(R) CPU 0000", AVX512), "avx512", "how many avx512 units"),
        (arm("0xd0c"), "neon", "clock"),
        (x86("GenuineIntel", 6, 142, "Intel(R) Core(TM)", AVX2, "unknown"), "avx2", "clock"),
        (arm("0xd0c"), "avx2", "avx2 fma"),
    ],
)
def test_missing_properties_are_an_error(text: str, isa: str, message: str, tmp_path: Path) -> None:
    info = read_linux((0,), machine(tmp_path, text))
    with pytest.raises(InvalidDeviceError, match=message) as caught:
        describe(info, 1, isa)
    assert caught.value.hint


def test_cores_of_two_kinds(tmp_path: Path) -> None:
    root = machine(tmp_path, arm("0xd05"), cores=1)
    with (root / "proc/cpuinfo").open("a") as file:
        file.write(f"\nprocessor\t: 1\n{arm('0xd0b')}\n")
    assert read_linux((1,), root).model == 0xD0B
    with pytest.raises(InvalidDeviceError, match="different kinds"):
        read_linux((0, 1), root)


def test_no_cpuinfo(tmp_path: Path) -> None:
    with pytest.raises(InvalidDeviceError, match="cannot read"):
        read_linux((0,), tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("nothing : here\n")
    with pytest.raises(InvalidDeviceError, match="describes none"):
        read_linux((0,), tmp_path)


def test_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    sysctl = {
        "machdep.cpu.brand_string": "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz",
        "machdep.cpu.family": "6",
        "machdep.cpu.model": "158",
        "machdep.cpu.stepping": "10",
        "machdep.cpu.features": "FPU SSE4.2 FMA",
        "machdep.cpu.leaf7_features": "AVX2 BMI2",
        "hw.cpufrequency_max": "2600000000",
        "hw.l3cachesize": "12582912",
    }
    monkeypatch.setattr("cdmpp.devices.cpuinfo._sysctl", lambda name: sysctl.get(name, ""))
    fields = describe(read_macos(), 1, "avx2")
    assert (fields["name"], fields["l2_bytes"]) == ("intel-core-i7-9750h-1t-avx2", 12 * 2**20)
    sysctl = {"machdep.cpu.brand_string": "Apple M2 Pro", "hw.optional.arm64": "1"}
    with pytest.raises(InvalidDeviceError, match="clock"):
        describe(read_macos(), 1, "neon")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and pins threads")
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = read_linux(()).flags
    isa = next(name for name in ("avx2", "sse4.2", "neon") if flags.issuperset(NEEDED_FLAGS[name]))
    try:
        spec = host_device(1, isa, 12.5e9)
    except InvalidDeviceError as error:
        pytest.skip(f"this CPU does not tell: {error}")
    assert spec.mem_bandwidth_bytes_per_s == 12.5e9
    assert "bandwidth given" in spec.source
    assert host_device(1, isa, 12.5e9).digest() == spec.digest()
    monkeypatch.setattr(host, "LEAST_BYTES", 2**22)
    monkeypatch.setattr(host, "copy_bytes", lambda _: 2**22)
    affinity = os.sched_getaffinity(0)
    measured = host_device(1, isa)
    assert os.sched_getaffinity(0) == affinity
    assert measured.name == spec.name
    assert measured.mem_bandwidth_bytes_per_s > 1e8
    assert "a copy of 4 MiB, pinned threads: 1" in measured.source
    with pytest.raises(InvalidDeviceError, match="threads on a machine"):
        host_device(10**4, isa)
    with pytest.raises(InvalidDeviceError, match="no instruction set"):
        host_device(1, "mmx")


def test_the_copy_is_larger_than_the_cache_and_smaller_than_the_memory(monkeypatch) -> None:
    pages = {"SC_AVPHYS_PAGES": 2**21, "SC_PAGE_SIZE": 4096}  # 8 GiB free
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(sys, "platform", "linux")
    assert host.copy_bytes(2.0**28) == 2**30
    assert host.copy_bytes(2.0**20) == host.copy_bytes(None) == 2**28
    assert host.copy_bytes(2.0**30) == 2**31
    pages["SC_AVPHYS_PAGES"] = 0
    assert host.copy_bytes(2.0**30) == 2**26


def test_a_failing_thread_is_an_error_not_a_wait() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("threads are not pinned here")
    with pytest.raises(OSError):
        host.measure_copy([99_999], 2**20)


@pytest.mark.timeout(60)
def test_ctrl_c_ends_a_bandwidth_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Barrier):
        """Ctrl-C in the calling thread, while the copying thread waits."""

        def wait(self, timeout: float | None = None) -> int:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Barrier", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.measure_copy([min(os.sched_getaffinity(0))], 2**20)


def test_every_instruction_set_has_lanes() -> None:
    assert {*USUAL_LANES, "avx512"} == set(NEEDED_FLAGS)
    info = CpuInfo("Intel", "", 6, 0x8F, 1, frozenset(), 1e9, "test")
    assert find_core(info.vendor, info.family, info.model, info.stepping).lanes == {"avx512": 32}
