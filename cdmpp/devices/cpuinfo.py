"""CPU properties reported by the operating system, and cores by the numbers that they report.

Nothing is guessed: a property that is not reported is None.

:func:`find_core` gives name and fp32 multiply-add lanes per instruction set. A lane is one multiply-add a cycle. SSE4.2
has no multiply-add: an add beside a multiply on two ports of four lanes is as much arithmetic as four lanes do. AVX2
with FMA has two ports of eight lanes on all cores but the small and early ones below; AVX-512 two of sixteen on
servers, one (or two halves) on most others.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cdmpp.errors import InvalidDeviceError

HINT = "describe the CPU in a file instead: --device FILE.toml (cdmpp devices shows the fields)"
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "0x41": "ARM", "0x61": "Apple"}


@dataclass(frozen=True)
class CpuInfo:
    """One kind of core as the operating system describes it."""

    #: "Intel", "AMD", "ARM", "Apple", or as reported.
    vendor: str
    #: As reported, "" if it is not.
    model_name: str
    #: x86 numbers; for ARM ``model`` is the part number.
    family: int | None
    model: int | None
    stepping: int | None
    #: Instruction set extensions by their Linux names.
    flags: frozenset[str]
    clock_hz: float | None = None
    clock_source: str = ""
    #: Last cache level of the cores in query, all its instances.
    cache_bytes: float | None = None
    cache_source: str = ""


def read_linux(cores: Sequence[int], root: Path = Path("/")) -> CpuInfo:
    """Read ``/proc/cpuinfo`` and sysfs for the cores in query.

    Raises InvalidDeviceError: there is no such file, or the cores are of different kinds.
    """
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidDeviceError(f"cannot read /proc/cpuinfo: {error.strerror}", hint=HINT) from None
    blocks = [block for block in _blocks(text) if not cores or int(block["processor"]) in cores]
    if not blocks:
        raise InvalidDeviceError(f"/proc/cpuinfo describes none of the cores {list(cores)}", hint=HINT)
    kinds = {_kind(block) for block in blocks}
    if len(kinds) > 1:
        raise InvalidDeviceError(
            "the threads would run on cores of different kinds",
            hint="fewer threads, or keep the process on one kind: taskset -c CORES cdmpp ...",
        )
    vendor, model_name, family, model, stepping = kinds.pop()
    clock_hz, clock_source = _clock(root, cores, blocks, model_name)
    cache_bytes, cache_source = _cache(root, cores, blocks)
    flags = frozenset((blocks[0].get("flags") or blocks[0].get("Features") or "").split())
    return CpuInfo(
        vendor, model_name, family, model, stepping, flags, clock_hz, clock_source, cache_bytes, cache_source
    )


def read_macos() -> CpuInfo:
    """Ask ``sysctl``. Apple's own chips do not say their clock: then a file has to."""
    brand = _sysctl("machdep.cpu.brand_string")
    family, model, stepping = (_int(_sysctl(f"machdep.cpu.{n}")) for n in ("family", "model", "stepping"))
    features = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".lower()
    flags = {name.replace("sse4.", "sse4_") for name in features.split()}
    if _sysctl("hw.optional.arm64") == "1":
        flags.add("asimd")
    clock = _int(_sysctl("hw.cpufrequency_max"))
    cache_names = ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize")
    caches = [(name, _int(_sysctl(name))) for name in cache_names]
    cache = next(((name, size) for name, size in caches if size), ("", None))
    vendor = "Apple" if brand.startswith("Apple") else "Intel"
    return CpuInfo(
        vendor,
        brand,
        family,
        model,
        stepping,
        frozenset(flags),
        clock_hz=float(clock) if clock else None,
        clock_source="sysctl hw.cpufrequency_max",
        cache_bytes=float(cache[1]) if cache[1] else None,
        cache_source=f"sysctl {cache[0]}",
    )


def _blocks(text: str) -> list[dict[str, str]]:
    """The paragraphs of ``/proc/cpuinfo`` that describe a core."""
    result = []
    for paragraph in re.split(r"\n\s*\n", text):
        pairs = (line.split(":", 1) for line in paragraph.splitlines() if ":" in line)
        block = {key.strip(): value.strip() for key, value in pairs}
        if block.get("processor", "").isdigit():
            result.append(block)
    return result


def _kind(block: dict[str, str]) -> tuple[str, str, int | None, int | None, int | None]:
    vendor = block.get("vendor_id") or block.get("CPU implementer", "")
    numbers = ("cpu family", "model", "stepping") if "vendor_id" in block else ("", "CPU part", "CPU variant")
    family, model, stepping = (_int(block.get(name, "")) for name in numbers)
    return _VENDORS.get(vendor, vendor or "unknown"), block.get("model name", ""), family, model, stepping


def _clock(
    root: Path, cores: Iterable[int], blocks: Sequence[dict[str, str]], model_name: str
) -> tuple[float | None, str]:
    """The highest clock of the cores: what the frequency driver allows, else what the names say."""
    paths = [root / f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq" for core in cores]
    khz = [value for value in (_int(_read(path)) for path in paths) if value]
    if khz:
        return 1e3 * max(khz), "the highest that the frequency driver states"
    named = re.search(r"@\s*([0-9.]+)\s*GHz", model_name)
    if named:
        return float(f"{1e9 * float(named[1]):.6g}"), "the CPU's model name"
    mhz = [float(block["cpu MHz"]) for block in blocks if _is_number(block.get("cpu MHz", ""))]
    if mhz:
        # To 10 MHz: where this is the momentary clock, two readings differ.
        return 1e7 * round(max(mhz) / 10), "/proc/cpuinfo, no frequency driver"
    return None, ""


def _cache(root: Path, cores: Sequence[int], blocks: Sequence[dict[str, str]]) -> tuple[float | None, str]:
    """Last cache level over all instances that serve the cores."""
    instances: dict[tuple[int, str], float] = {}
    for core in cores:
        for index in sorted((root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*")):
            level, size = _int(_read(index / "level")), _size(_read(index / "size"))
            if level and size and _read(index / "type") != "Instruction":
                instances[level, _read(index / "shared_cpu_list") or str(core)] = size
    if instances:
        last = max(level for level, _ in instances)
        return sum(size for (level, _), size in instances.items() if level == last), f"sysfs, level {last}"
    size = _size(blocks[0].get("cache size", ""))
    return size, "/proc/cpuinfo" if size else ""


def _size(text: str) -> float | None:
    match = re.fullmatch(r"([0-9]+)\s*([KMG]?)B?", text)
    return float(match[1]) * 2.0 ** {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _int(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _sysctl(name: str) -> str:
    try:
        command = ["sysctl", "-n", name]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


#: Lanes by instruction set, for cores that are not in the table; AVX-512 does not determine them.
USUAL_LANES: Final = {"sse4.2": 4, "avx2": 16, "neon": 8}
#: Flags (Linux names) that an instruction set needs.
NEEDED_FLAGS: Final = {
    "sse4.2": ("sse4_2",),
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl"),
    "neon": ("asimd",),
}


@dataclass(frozen=True)
class Core:
    """A microarchitecture."""

    #: For identifiers, for people.
    slug: str
    name: str
    #: Where they differ from :data:`USUAL_LANES`.
    lanes: dict[str, int] = field(default_factory=dict)
    #: Whether it has AMX: what a hypervisor reports as the CPU's number need not be true.
    amx: bool = False

    def fits(self, flags: frozenset[str]) -> bool:
        """Whether the flags that are reported can be this core's; a hypervisor may hide some, never add."""
        return (self.amx or "amx_tile" not in flags) and ("avx512" in self.lanes or "avx512f" not in flags)


_TWO, _ONE = {"avx512": 32}, {"avx512": 16}
#: Intel, family 6: model number -> core.
_INTEL: Final = {
    **dict.fromkeys((0x3C, 0x45, 0x46), Core("haswell", "Haswell")),
    0x3F: Core("xeon-haswell", "Haswell-EP"),
    **dict.fromkeys((0x3D, 0x47), Core("broadwell", "Broadwell")),
    **dict.fromkeys((0x4F, 0x56), Core("xeon-broadwell", "Broadwell-EP")),
    **dict.fromkeys((0x4E, 0x5E), Core("skylake", "Skylake")),
    **dict.fromkeys((0x8E, 0x9E), Core("kaby-lake", "Kaby Lake or Coffee Lake")),
    **dict.fromkeys((0xA5, 0xA6), Core("comet-lake", "Comet Lake")),
    **dict.fromkeys((0x7D, 0x7E), Core("ice-lake", "Ice Lake", _ONE)),
    **dict.fromkeys((0x8C, 0x8D), Core("tiger-lake", "Tiger Lake", _ONE)),
    0xA7: Core("rocket-lake", "Rocket Lake", _ONE),
    **dict.fromkeys((0x97, 0x9A), Core("alder-lake", "Alder Lake")),
    **dict.fromkeys((0xB7, 0xBA, 0xBF), Core("raptor-lake", "Raptor Lake")),
    **dict.fromkeys((0xAA, 0xAC), Core("meteor-lake", "Meteor Lake")),
    **dict.fromkeys((0x6A, 0x6C), Core("xeon-ice-lake", "Ice Lake-SP", _TWO)),
    0x8F: Core("xeon-sapphire-rapids", "Sapphire Rapids", _TWO, amx=True),
    0xCF: Core("xeon-emerald-rapids", "Emerald Rapids", _TWO, amx=True),
    **dict.fromkeys((0xAD, 0xAE), Core("xeon-granite-rapids", "Granite Rapids", _TWO, amx=True)),
}
#: AMD: (family, first model, last model, core).
_ZEN1: Final = Core("zen", "Zen", {"avx2": 8})
_AMD: Final = (
    (0x17, 0x00, 0x2F, _ZEN1),
    (0x17, 0x30, 0xFF, Core("zen2", "Zen 2")),
    (0x19, 0x00, 0x0F, Core("zen3", "Zen 3")),
    (0x19, 0x10, 0x1F, Core("zen4", "Zen 4", _ONE)),
    (0x19, 0x20, 0x5F, Core("zen3", "Zen 3")),
    (0x19, 0x60, 0xAF, Core("zen4", "Zen 4", _ONE)),
    (0x1A, 0x00, 0x1F, Core("zen5", "Zen 5", _TWO)),
    (0x1A, 0x40, 0x4F, Core("zen5", "Zen 5", _TWO)),
)
#: ARM (implementer 0x41): part number -> core.
_ARM: Final = {
    0xD03: Core("cortex-a53", "Cortex-A53", {"neon": 4}),
    0xD05: Core("cortex-a55", "Cortex-A55", {"neon": 4}),
    0xD08: Core("cortex-a72", "Cortex-A72", {"neon": 4}),
    0xD0B: Core("cortex-a76", "Cortex-A76"),
    0xD0C: Core("neoverse-n1", "Neoverse N1"),
    0xD49: Core("neoverse-n2", "Neoverse N2"),
    0xD40: Core("neoverse-v1", "Neoverse V1", {"neon": 16}),
    0xD4F: Core("neoverse-v2", "Neoverse V2", {"neon": 16}),
}


def find_core(vendor: str, family: int | None, model: int | None, stepping: int | None) -> Core | None:
    """The core of these numbers, if it is one of the known ones; for ARM ``model`` is the part number."""
    if model is None:
        return None
    if vendor == "Intel" and family == 6:
        if model == 0x55:  # three generations under one number
            if (stepping or 0) < 5:
                return Core("xeon-skylake", "Skylake-SP", _TWO)
            return Core("xeon-cascade-lake", "Cascade Lake or Cooper Lake", _TWO)
        return _INTEL.get(model)
    if vendor == "AMD":
        return next((core for f, low, high, core in _AMD if f == family and low <= model <= high), None)
    return _ARM.get(model) if vendor == "ARM" else None
