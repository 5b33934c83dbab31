"""Export of library operators and of the host part as part files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.measure.kit.library_variants import Variant
from cdmpp.data.measure.kit.parts import HOME, JOB, Entry, write_parts
from cdmpp.data.measure.kit.runtime import host
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError

#: Seconds for each item: allocating, choosing kernels, capturing and tracing; and compiling it. Estimates.
_ITEM_S, _COMPILED_S = 0.4, 2.0
#: Runs of an item in three protocols, and their least duration in seconds.
_RUNS, _RUN_S = 21, 2e-3
#: Estimated seconds of a host part.
HOST_S = 120.0


def export_library(
    variants: Sequence[Variant],
    expected_s: Sequence[float],
    device: DeviceSpec,
    folder: Path,
    *,
    part_mib: float = 18.0,
    seed: int = 0,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a job of kinds "library" and "host".

    The order is random, so that an incomplete run has a fair sample.

    Parameters
    ----------
    variants : sequence of Variant
    expected_s : sequence of float
        Predicted latency of each in seconds; NaN: not known.
    device : DeviceSpec
        A GPU.
    folder : Path
        A new folder.
    part_mib : float
        Largest size of a part file in MiB.
    seed : int
    about : dict, optional
        Facts for the import.

    Returns
    -------
    dict
        Content of ``home/job.json``.

    Raises
    ------
    DataError
        The folder has a job or other files, or cannot be written.
    InvalidDeviceError
        The device is not a GPU.
    """
    check_target(device, folder)
    order = np.random.default_rng(seed).permutation(len(variants)).tolist()
    facts = {"estimate_s": round(estimated_s(variants, expected_s), 1), **(about or {})}
    entries = {"library": [Entry(variants[i].item()) for i in order], "host": [Entry(item) for item in host.items()]}
    try:
        return write_parts(folder, entries, device=device.name, part_mib=part_mib, about={"library": facts})
    except OSError as error:
        raise DataError(f"cannot write {folder / HOME / JOB}: {error.strerror}", hint="choose another --out") from None


def check_target(device: DeviceSpec, folder: Path) -> None:
    """Raise an error unless the device is a GPU and the folder is new; errors as of :func:`export_library`."""
    if device.kind != "gpu":
        raise InvalidDeviceError(f"{device.name} is a {device.kind}, not a GPU", hint="cdmpp select measures a CPU")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} already exists and is not empty", hint="choose a new folder for --out")


def estimated_s(variants: Sequence[Variant], expected_s: Sequence[float]) -> float:
    """Estimate the seconds that the library parts take on the GPU machine."""
    return math.fsum(_seconds(variants, expected_s))


def _seconds(variants: Sequence[Variant], expected_s: Sequence[float]) -> Iterator[float]:
    for variant, latency_s in zip(variants, expected_s, strict=True):
        run_s = _RUN_S if math.isnan(latency_s) else max(_RUN_S, latency_s)
        yield _ITEM_S + _RUNS * run_s + (_COMPILED_S if variant.implementation == "compiled" else 0.0)
