"""Identification of the measuring machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cdmpp.data.measure import timers
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timers import named, on_this_machine
from cdmpp.devices.registry import family, lookup
from cdmpp.errors import InvalidDeviceError


def gpu(*names: str) -> Configuration:
    return Configuration({"kind": "cuda", "arch": "sm_80"}, 1, (), lookup(names[0]), names)


def test_driver_identifies_the_board_of_a_family() -> None:
    found = named(gpu(*family("a100")), "NVIDIA A100-SXM4-80GB")
    assert found.name == "a100-sxm4-80gb" and found.device == lookup("a100-sxm4-80gb")


def test_named_board_is_accepted() -> None:
    board = gpu("a100-pcie-40gb")
    assert named(board, "NVIDIA A100-PCIE-40GB") is board


@pytest.mark.parametrize(
    ("names", "seen", "reason"),
    [
        (("a100-pcie-40gb",), "NVIDIA A100-SXM4-80GB", "this machine has a100-sxm4-80gb"),
        (("a100-pcie-40gb", "a100-sxm4-40gb"), "Tesla T4", "names a100-pcie-40gb or a100-sxm4-40gb"),
        # A slice of a board is another device.
        (("a100-sxm4-40gb",), "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "MIG 3g.20gb"),
    ],
)
def test_other_board_is_refused(names: tuple[str, ...], seen: str, reason: str) -> None:
    with pytest.raises(InvalidDeviceError, match=reason) as caught:
        named(gpu(*names), seen)
    assert "--device" in caught.value.hint


def on_cpu(monkeypatch: pytest.MonkeyPatch, name: str, named_as: str, one_thread: Configuration) -> Configuration:
    """A CPU of a name, of which a configuration thinks that it is another; no worker is started."""

    def host_device(threads: int, isa: str, bandwidth: float, **_: Any) -> SimpleNamespace:
        assert (threads, isa) == (1, "sse4.2") and bandwidth > 0  # given: none is measured
        return SimpleNamespace(name=name)

    class NoPool:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> NoPool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, *_: Any) -> None: ...

    monkeypatch.setattr(timers, "host_device", host_device)
    monkeypatch.setattr(timers, "WorkerPool", NoPool)
    target, cores, device = one_thread.target, one_thread.cores, one_thread.device
    return on_this_machine(Configuration(target, 1, cores, device, (named_as,)), CollectSettings())


def test_cpu_of_another_machine_must_match(monkeypatch: pytest.MonkeyPatch, one_thread: Configuration) -> None:
    name = "some-cpu-9000-1t-sse42"
    assert on_cpu(monkeypatch, name, name, one_thread).device is one_thread.device
    with pytest.raises(InvalidDeviceError, match="this machine has 'some-cpu-9000-1t-sse42'"):
        on_cpu(monkeypatch, name, "other-cpu-1-1t-sse42", one_thread)
