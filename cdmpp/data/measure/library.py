"""Timing of library kernels: an operator as a PyTorch call.

:func:`cdmpp.data.measure.timing.time_program` chooses the number of runs and the label, as for TVM programs. The
protocol defines one run (:mod:`cdmpp.data.measure.kit.runtime.library_calls`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cdmpp.data.measure.kit.runtime.library_calls import EVALUATORS, CallError, Tensors, make_call, precision
from cdmpp.data.measure.timing import Timing, TimingSettings, time_program
from cdmpp.data.measure.timing_devices import TimingDevice, free_bytes
from cdmpp.data.physics import UNSTABLE, needed_bytes
from cdmpp.data.records import Measurement
from cdmpp.errors import CdmppError, MeasurementError
from cdmpp.programs.operators import OperatorSpec

#: Share of the free memory that a program's tensors may use.
MEMORY_SHARE = 0.8
_HINT = "choose other programs, or measure it with another tool and enter the latency into the CSV file"


class LibraryTimer:
    """Times operators on one device with one protocol, inside :meth:`ready`.

    Parameters
    ----------
    place : TimingDevice
    protocol : {"eager", "graph", "kernel"}
    settings : TimingSettings
    memory_bytes : float, optional
        Memory limit of a program. Default: :data:`MEMORY_SHARE` of the free memory.

    Raises
    ------
    MeasurementError
        The device does not support the protocol.
    """

    def __init__(
        self,
        place: TimingDevice,
        protocol: str,
        settings: TimingSettings | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        if protocol not in EVALUATORS:
            raise MeasurementError(f"unknown protocol {protocol!r}", hint="one of: " + ", ".join(EVALUATORS))
        if protocol != "eager" and place.torch_device.type != "cuda":
            raise MeasurementError(
                f"a CPU does not support the protocol {protocol!r} for library calls",
                hint="use --protocol eager; on a CPU it adds about a microsecond to the kernel",
            )
        self.place, self.protocol = place, protocol
        self.settings = settings or TimingSettings()
        self._memory_bytes = memory_bytes

    @contextmanager
    def ready(self) -> Iterator[LibraryTimer]:
        """Set up PyTorch for measuring, and restore it afterwards."""
        threads = torch.get_num_threads()
        if self.place.torch_device.type == "cpu":
            torch.set_num_threads(self.place.threads)
        try:
            with torch.inference_mode():
                yield self
        finally:
            torch.set_num_threads(threads)

    def time(self, spec: OperatorSpec) -> Timing:
        """Time one operator.

        Raises
        ------
        MeasurementError
            The operator does not fit into memory, or PyTorch cannot run it.
        """
        limit = MEMORY_SHARE * free_bytes(self.place)
        limit = limit if self._memory_bytes is None else min(limit, self._memory_bytes)
        needed = needed_bytes(spec, gpu=self.place.torch_device.type == "cuda")
        if needed > limit:
            raise MeasurementError(
                f"{spec.text()} needs {needed / 2**30:.2f} GiB, and {limit / 2**30:.2f} GiB may be used",
                hint="choose smaller programs",
            )
        fields = spec.canonical()
        try:
            with precision(fields):
                call = make_call(fields, Tensors(self.place.torch_device))
                call()  # the first call selects a kernel and allocates workspaces, which is not timed
                return time_program(EVALUATORS[self.protocol](call, self.place.torch_device), self.settings)
        except CallError as error:
            raise MeasurementError(str(error), hint=_HINT) from None
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, CdmppError):
                raise
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise MeasurementError(
                f"PyTorch cannot run {spec.text()}: {line[:200]}", hint="choose other programs"
            ) from None

    def record(self, spec: OperatorSpec, source: str) -> Measurement:
        """Time one operator and return a record; a failure is part of the record."""
        place = self.place
        provenance = {
            "measured_with": f"torch {torch.__version__}",
            "measured_on": str(place.torch_device),
            "threads": str(place.threads) if place.torch_device.type == "cpu" else "",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        timing: Timing | None = None
        failure = ""
        try:
            timing = self.time(spec)
        except MeasurementError as error:
            failure = error.message
        noisy = timing is not None and timing.spread > self.settings.max_spread
        return Measurement(
            program=spec.text(),
            program_kind="operator",
            program_hash=spec.hash(),
            device=place.device.name,
            device_spec=place.device,
            latency_s=None if timing is None else timing.latency_s,
            repeats_s=() if timing is None else timing.repeats_s,
            backend="library",
            protocol=self.protocol,
            framework="pytorch",
            source=source,
            excluded_reason=UNSTABLE if noisy else "",
            failure=failure,
            provenance=provenance,
        )
