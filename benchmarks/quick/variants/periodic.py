"""Programs encoded once, and sines and cosines of the numeric inputs in the head."""

from typing import Any, ClassVar

from benchmarks.quick.variant import Variant


class Periodic(Variant):
    """Programs encoded once, periodic inputs."""

    network: ClassVar[dict[str, Any]] = {"shared": True, "frequencies": 6}
    optimiser: ClassVar[dict[str, Any]] = {"group_programs": 8}


VARIANT = Periodic()
