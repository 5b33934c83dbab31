"""Work of a kernel that the program in its place does not have: arithmetic, few thread blocks, dependent steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelWork:
    """Bounds of a kernel besides those of its program.

    Attributes
    ----------
    kind : str
        Which rates apply: a key of :data:`cdmpp.predict.modules.work.RATES`.
    operations : float
        Arithmetic of the kernel; a multiply-add is two.
    moved_bytes : float
        Bytes that all blocks read and write.
    blocks : float
        Thread blocks, where they may be too few for the device; 0: enough.
    steps : float
        Steps that follow one another.
    replaces : bool
        The program's latency does not count: it only names the kernel.
    """

    kind: str
    operations: float = 0.0
    moved_bytes: float = 0.0
    blocks: float = 0.0
    steps: float = 0.0
    replaces: bool = False
