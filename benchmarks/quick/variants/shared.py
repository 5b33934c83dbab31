"""Leaves are encoded without the device, once per program; device and program meet in the head."""

from typing import Any, ClassVar

from benchmarks.quick.variant import Variant


class Shared(Variant):
    """Programs encoded once."""

    network: ClassVar[dict[str, Any]] = {"shared": True}
    optimiser: ClassVar[dict[str, Any]] = {"group_programs": 8}


VARIANT = Shared()
