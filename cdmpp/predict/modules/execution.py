"""How a module is executed: kernels on one stream, and the host that launches them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from os import PathLike
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError
from cdmpp.predict.profiles import Host, Profile, Seconds
from cdmpp.programs.frontends.torch_module import ListedCall
from cdmpp.utils.files import read_toml

Execution = Literal["eager", "compiled", "cuda-graph", "compiled-graph"]
EXECUTIONS: tuple[str, ...] = get_args(Execution)


def is_compiled(execution: Execution | None) -> bool:
    """Whether the kernels are those of ``torch.compile``."""
    return execution in ("compiled", "compiled-graph")


#: Calls after which the host waits for the device.
SYNCHRONISING = frozenset(("_local_scalar_dense", "nonzero"))


class ModuleHost(Host):
    """Host time of PyTorch's calls, in seconds."""

    #: This host's time over that of ``calls`` and ``kinds``. A launch by a library is ``launch_s`` on every host.
    factor: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    #: The device idles between two kernels.
    gap_s: Seconds = 0.0
    #: Once a replay of a graph.
    graph_s: Seconds = 0.0
    #: Of a call by its ATen name.
    calls: dict[str, Seconds] = Field(default_factory=dict)
    #: Of other calls: "view" launches nothing, "kernel" launches a kernel, "module" is the call of a module, "autograd"
    #: is added to each kernel in training, "compiled" launches a kernel of ``torch.compile``, "guards" is once a
    #: compiled call.
    kinds: dict[str, Seconds] = Field(default_factory=dict)

    def call_s(self, call: ListedCall, execution: Execution = "eager") -> float:
        """Seconds of a call; the steps of a recurrent network are launched by cuDNN, two kernels each."""
        if call.times > 1:
            return 2 * call.times * self.launch_s
        seconds = self.calls.get(call.name, self.kinds.get(call.name))
        if seconds is None:
            launches = len(call.rows)
            seconds = launches * self.kinds.get("kernel", self.launch_s) if launches else self.kinds.get("view", 0.0)
        # A compiled module is one node of autograd.
        if call.phase == "backward" and (call.name == "guards" if is_compiled(execution) else call.rows):
            seconds += self.kinds.get("autograd", 0.0)
        return self.factor * seconds


class HostProfile(Profile):
    """Profile of a host that runs PyTorch."""

    DOCUMENT: ClassVar[str] = "docs/modules.md"

    host: ModuleHost = ModuleHost()
    #: Architectures of the devices that this class of machines has.
    archs: tuple[str, ...] = ()


@cache
def shipped_hosts() -> dict[str, HostProfile]:
    """Profiles by name: classes of machines, each with the calls of the first."""
    tables = tomllib.loads((resources.files(__package__) / "hosts.toml").read_text(encoding="utf-8"))
    base = tables.pop("pytorch")
    profiles = {"pytorch": HostProfile.of({"name": "pytorch", **base}, "pytorch")}
    for name, fields in tables.items():
        host = {**base["host"], **fields.pop("host", {})}
        profiles[name] = HostProfile.of({**base, "name": name, **fields, "host": host}, name)
    return profiles


def host_profile(
    device: DeviceSpec | None, host: HostProfile | Mapping[str, Any] | str | PathLike[str] | None = None
) -> HostProfile:
    """The profile of a request, or that of the machines that usually have the device.

    Raises DataError: the profile is not known, or its file cannot be read; FieldError: a field is wrong.
    """
    profiles = shipped_hosts()
    if host is None and device is not None and device.kind == "cpu":
        return profiles["cpu"]
    if host is None:
        arch = "" if device is None else device.arch
        return next((p for p in profiles.values() if arch in p.archs), profiles["pytorch"])
    if isinstance(host, HostProfile):
        return host
    if isinstance(host, Mapping):
        return HostProfile.of({"name": "host", **host}, "host")
    if isinstance(host, str) and host in profiles:
        return profiles[host]
    if not isinstance(host, str | PathLike):
        raise DataError(
            f"host must be a name, a path, a dictionary or a HostProfile, not {type(host).__name__}",
            hint="one of: " + ", ".join(profiles),
        )
    hint = f"a .toml file with the fields of docs/modules.md, or {', '.join(profiles)}"
    if not os.path.lexists(host):
        raise DataError(f"no host profile {str(host)[:100]!r}", hint=hint)
    return HostProfile.of(read_toml(host, hint), str(host))


@dataclass(frozen=True)
class ModuleTimeline:
    """Seconds of one run; their sum is its latency."""

    #: Kernels.
    device_busy_s: float
    #: The device waits for the host, or for the next kernel.
    waiting_s: float
    #: Once a run: the first launch reaches the device, or a graph is started.
    first_call_s: float
    #: Seconds from the start to the end of each phase on the device, without ``first_call_s``.
    phase_ends_s: dict[str, float]

    @property
    def latency_s(self) -> float:
        """Seconds of the run."""
        return self.device_busy_s + self.waiting_s + self.first_call_s


def run(
    calls: Sequence[ListedCall],
    seconds: Sequence[float],
    profile: HostProfile,
    execution: Execution,
    *,
    device_factor: float = 1.0,
    host_factor: float = 1.0,
) -> ModuleTimeline:
    """A host that calls one kernel after another, and one stream.

    A kernel starts when the host has launched it and the kernel before it has ended. In a graph nothing waits for the
    host.

    ``seconds``: device time of each row of the listing. ``device_factor``, ``host_factor``: scale of all kernels, and
    of all host time.
    """
    host = stream = busy = 0.0
    ends: dict[str, float] = {}
    graph = execution in ("cuda-graph", "compiled-graph")
    device_factor *= profile.kernel_factor
    for call in calls:
        if not graph or call.name == "guards":
            host += host_factor * profile.host.call_s(call, execution)
            if call.name in SYNCHRONISING:
                host = max(host, stream)
        for row in call.rows:
            duration = device_factor * seconds[row]
            stream = max(stream + profile.host.gap_s, host) + duration
            busy += duration
        ends[call.phase] = stream
    first_s = profile.host.graph_s if graph else host_factor * profile.host.step_s
    return ModuleTimeline(busy, stream - busy, first_s, ends)
