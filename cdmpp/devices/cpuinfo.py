"""CPU properties reported by the operating system. Nothing is guessed: a property that is not reported is None."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdmpp.errors import InvalidDeviceError

HINT = "describe the CPU in a file instead: --device FILE.toml (cdmpp devices shows the fields)"
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "0x41": "ARM", "0x61": "Apple"}


@dataclass(frozen=True)
class CpuInfo:
    """One kind of core as the operating system describes it.

    Attributes
    ----------
    vendor : str
        "Intel", "AMD", "ARM", "Apple", or as reported.
    model_name : str
        As reported, "" if it is not.
    family, model, stepping : int or None
        x86 numbers; for ARM ``model`` is the part number.
    flags : frozenset of str
        Instruction set extensions by their Linux names.
    clock_hz : float or None
    clock_source : str
    cache_bytes : float or None
        Last cache level of the cores in query, all its instances.
    cache_source : str
    """

    vendor: str
    model_name: str
    family: int | None
    model: int | None
    stepping: int | None
    flags: frozenset[str]
    clock_hz: float | None = None
    clock_source: str = ""
    cache_bytes: float | None = None
    cache_source: str = ""


def read_linux(cores: Sequence[int], root: Path = Path("/")) -> CpuInfo:
    """Read ``/proc/cpuinfo`` and sysfs for the cores in query.

    Raises
    ------
    InvalidDeviceError
        There is no such file, or the cores are of different kinds.
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
