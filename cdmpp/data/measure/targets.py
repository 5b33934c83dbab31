"""Measuring configurations: a TVM target, a number of threads, pinned cores and a device."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cdmpp.devices.host import available_cores, host_device
from cdmpp.devices.loading import from_mapping, load_device
from cdmpp.devices.registry import family, lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InvalidDeviceError, MeasurementError, UnknownDeviceError
from cdmpp.utils.files import parse_json

#: Levels of x86-64 that LLVM supports by name; each is a valid target text.
X86_LEVELS = {"x86-64-v2": "sse4.2", "x86-64-v3": "avx2", "x86-64-v4": "avx512"}
HINT = (
    "a target is native, x86-64-v2 (SSE4.2), x86-64-v3 (AVX2), x86-64-v4 (AVX-512), a TVM target tag, "
    'cuda:DEVICE such as cuda:a100, or JSON such as \'{"kind":"llvm","mcpu":"znver3"}\'; @N fixes the '
    "threads, as in native@2"
)
#: LLVM's and this project's names of instruction sets, widest first.
_FEATURES = (("avx512f", "avx512"), ("avx2", "avx2"), ("sse4.2", "sse4.2"), ("neon", "neon"))
#: Placeholder for the bandwidth (bytes per second) where only the name is needed.
_NO_MATTER = 1e9
_THREADS = re.compile(r"^(?P<target>.*)@(?P<threads>[0-9]+)$", re.DOTALL)


@dataclass(frozen=True)
class Configuration:
    """A device and its measuring configuration."""

    # TVM target as JSON; for CPUs with ``num-cores``, which bounds the parallel loops that are sampled
    target: Mapping[str, Any]
    threads: int  # of a program; 1 on a GPU (of the host)
    cores: tuple[int, ...]  # to which the threads are pinned, one each; empty for remote boards
    device: DeviceSpec  # of every record
    # Accepted names of the machine's device; several if a GPU is named by its family. Empty if the user names the
    # device (``--device``).
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wanted = "cpu" if self.kind == "llvm" else "gpu"
        if self.device.kind != wanted:
            raise InvalidDeviceError(
                f"{self.device.name} is a {self.device.kind}, and programs for {self.kind} run on a {wanted}",
                hint="name the device that runs the programs: --device NAME or FILE.toml",
            )

    @property
    def name(self) -> str:
        """Name of the device."""
        return self.device.name

    @property
    def kind(self) -> str:
        """TVM's target kind: "llvm", "cuda", ..."""
        return str(self.target["kind"])

    @property
    def device_kind(self) -> str:
        """Device kind of ``tvm.runtime.device``."""
        return "cpu" if self.kind == "llvm" else self.kind

    @property
    def build_key(self) -> str:
        """Key of libraries that configurations share; the number of cores affects sampling, not compiling."""
        return json.dumps({k: v for k, v in self.target.items() if k != "num-cores"}, sort_keys=True)


def describe(configuration: Configuration) -> dict[str, Any]:
    """Return the description of a configuration for its records."""
    return {
        "device_spec": configuration.device.model_dump(mode="json"),
        "target": json.dumps(configuration.target, sort_keys=True),
        "threads": str(configuration.threads),
        "affinity": ",".join(map(str, configuration.cores)),
    }


def configurations(
    texts: tuple[str, ...],
    *,
    device: str | None = None,
    remote: bool = False,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Configuration, ...]:
    """Parse the targets of a user, as in :data:`HINT`. All must have one kind, because they share their schedules.

    ``device``: name or specification file, only with a single text. Default: this machine's CPU, for the targets that
    name an instruction set of it (native, x86-64-v3), and the GPU of ``cuda:DEVICE``. ``remote``: programs run on other
    machines, so no core of this machine is reserved. ``known``: descriptions (:func:`describe`) of the devices of a
    resumed collection; a CPU of such a name is not inspected again.
    """
    if device is not None and len(texts) > 1:
        raise InvalidDeviceError("--device describes a single --target", hint="collect each target separately")
    configured = tuple(_configuration(text, device, remote, known or {}) for text in texts)
    if len({c.kind for c in configured}) > 1:
        raise InvalidDeviceError(
            f"targets of several kinds: {', '.join(sorted({c.kind for c in configured}))}",
            hint="schedules of one kind do not run on another: collect each kind into a separate folder",
        )
    names = [c.name for c in configured]
    if len(set(names)) < len(names):
        raise InvalidDeviceError(
            f"two targets are one device: {', '.join(sorted({n for n in names if names.count(n) > 1}))}",
            hint="they must differ in threads or instruction set, as in --target native@1 --target native@2",
        )
    return configured


def _configuration(
    text: str, device: str | None, remote: bool, known: Mapping[str, Mapping[str, Any]]
) -> Configuration:
    split = _THREADS.match(text)
    plain = (split["target"] if split else text).strip()
    target, isa, boards = _parse(plain)
    if target["kind"] != "llvm":
        if device is not None:
            return Configuration(target, 1, (), load_device(device))
        if not boards:
            raise InvalidDeviceError(f"the device of {text!r} is unknown", hint="name it: --device NAME or FILE.toml")
        # The machine that measures identifies the board of a family; a file describes one board.
        names = () if plain.endswith((".json", ".toml")) else tuple(board.name for board in boards)
        return Configuration(target, 1, (), boards[0], names)
    available = len(available_cores())
    stated = int(split["threads"]) if split else 0
    threads = stated or target.get("num-cores") or (1 if remote else available)
    cores = () if remote else pinned_cores(threads, f"use @1 to @{available}")
    if device is not None:
        spec = load_device(device)
    elif isa:
        # Without further information, boards behind a tracker are assumed to equal this machine.
        spec = this_cpu(threads, isa, known)
    else:
        raise InvalidDeviceError(f"the CPU of {text!r} is unknown", hint="describe it: --device NAME or FILE.toml")
    names = () if device is not None else (spec.name,)
    return Configuration({**target, "num-cores": threads}, threads, cores, spec, names)


def this_cpu(threads: int, isa: str, known: Mapping[str, Mapping[str, Any]]) -> DeviceSpec:
    """Return this machine's CPU with ``threads`` threads of an instruction set.

    The device table or the resumed collection describes it; otherwise it is inspected, and its bandwidth
    measured.
    """
    specs = {name: from_mapping(about["device_spec"]) for name, about in known.items()}
    try:
        return lookup(host_device(threads, isa, _NO_MATTER).name, specs)  # the name does not depend on the bandwidth
    except UnknownDeviceError:
        return host_device(threads, isa)


def pinned_cores(threads: int, hint: str) -> tuple[int, ...]:
    """Return the last cores that this process may use, because the first one handles interrupts."""
    available = available_cores()
    if not 1 <= threads <= len(available):
        raise InvalidDeviceError(f"{threads} threads, but this process may use {len(available)} cores", hint=hint)
    return available[-threads:]


def _parse(text: str) -> tuple[dict[str, Any], str, list[DeviceSpec]]:
    """Return the target, the instruction set if it is this CPU, and the boards that a GPU's name may denote."""
    if text == "native":
        return {"kind": "llvm", "mcpu": _host_cpu()}, host_isa(), []
    if text in X86_LEVELS:
        return {"kind": "llvm", "mcpu": text}, X86_LEVELS[text], []
    if text.startswith("cuda:"):
        boards = _boards(text.removeprefix("cuda:"))
        return _cuda_target(boards[0]), "", boards
    content: Any = text
    if text.startswith("{"):
        try:
            content = parse_json(text)
        except ValueError as error:
            raise InvalidDeviceError(f"target {text!r} is not JSON: {error}", hint=HINT) from None
    target = _resolved(content)
    return target, _isa_here(target), []


def _resolved(content: Any) -> dict[str, Any]:
    """Resolve a tag or a JSON target with TVM."""
    import tvm

    try:
        target = tvm.target.Target(content)
        fields: dict[str, Any] = json.loads(str(target))
    except Exception as error:  # TVM raises many kinds of errors
        line = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
        raise InvalidDeviceError(f"TVM does not accept the target {content!r}: {line[:200]}", hint=HINT) from None
    return {k: v for k, v in fields.items() if k not in ("keys", "tag") and v not in ("", [])}


def _host_cpu() -> str:
    import tvm

    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


def host_isa() -> str:
    """Return the widest instruction set of this machine, as in :data:`X86_LEVELS`, or "neon"."""
    if isa := _widest(_host_features()):
        return isa
    raise MeasurementError(
        f"no known vector instructions on {_host_cpu()}", hint="describe it: --target JSON --device FILE.toml"
    )


def _widest(features: Collection[str]) -> str:
    return next((isa for feature, isa in _FEATURES if feature in features), "")


def _host_features() -> set[str]:
    import tvm

    return {name for name, present in tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")().items() if present}


def _isa_here(target: Mapping[str, Any]) -> str:
    """Return the widest instruction set of a CPU target on this machine; "" for targets of other machines."""
    if target["kind"] != "llvm" or target.get("mtriple", platform.machine()).split("-")[0] != platform.machine():
        return ""
    import tvm

    isa = _widest(tvm.get_global_func("target.llvm_get_cpu_features")(tvm.target.Target(dict(target))))
    return isa if isa in {name for feature, name in _FEATURES if feature in _host_features()} else ""


def _boards(name: str) -> list[DeviceSpec]:
    # A family such as a100 has several boards of one architecture, which share a target.
    boards = [lookup(board) for board in family(name)]
    if len({board.arch for board in boards}) != 1:
        boards = [load_device(name)]
    if any(board.kind != "gpu" or board.vendor != "NVIDIA" for board in boards):
        raise InvalidDeviceError(f"{name} is not an NVIDIA GPU", hint=HINT)
    return boards


def _cuda_target(spec: DeviceSpec) -> dict[str, Any]:
    """Return the CUDA target of an architecture in the device table, such as "Ampere sm_80"."""
    match = re.search(r"sm_[0-9]+[af]?", spec.arch)
    if match is None:
        raise InvalidDeviceError(f"{spec.name} has no CUDA architecture", hint='add it to arch, as in "Ampere sm_80"')
    return {
        "kind": "cuda",
        "arch": match[0],
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "registers_per_block": 65536,
        "thread_warp_size": 32,
        "max_num_threads": 1024,
        **({"l2_cache_size_bytes": int(spec.l2_bytes)} if spec.l2_bytes else {}),
        "host": {"kind": "llvm", "mcpu": "x86-64-v2"},
    }
