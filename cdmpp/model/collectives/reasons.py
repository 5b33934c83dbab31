"""Why a prediction of a collective is not of measured contexts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasons:
    """What of a query training did not have; empty fields say nothing.

    Attributes
    ----------
    device, link : (name, bytes per second)
        No measurements of the device, or of it with this link: the link's specification decides.
    stack : (library, mode)
        No measurements of this library in this mode, or for ``operator`` on this device.
    ranks : (ranks, most measured, where these were measured)
    kind : str
        No measurements of this kind of link.
    libraries : tuple of str
        Libraries that a query without one may mean.
    size : bool
        The message is smaller or larger than the measured ones.
    """

    device: tuple[str, float] | None = None
    link: tuple[str, float] | None = None
    stack: tuple[str, str] | None = None
    operator: str = ""
    ranks: tuple[int, int, str] | None = None
    kind: str = ""
    libraries: tuple[str, ...] = ()
    size: bool = False

    @property
    def any(self) -> bool:
        """Whether there is a reason."""
        return self != Reasons()


def describe(reasons: Reasons) -> str:
    """The reasons as a sentence."""
    texts = []
    if reasons.device:
        name, bandwidth = reasons.device
        texts.append(f"no collective was measured on this device: the figures follow {name}, {bandwidth / 1e9:g} GB/s")
    if reasons.link:
        name, bandwidth = reasons.link
        texts.append(f"the device was not measured with {name}: the figures follow {bandwidth / 1e9:g} GB/s")
    if reasons.stack:
        library, mode = reasons.stack
        what = f" for {reasons.operator} on this device" if reasons.operator else ""
        texts.append(f"{library} was not measured in mode {mode}{what}: the figures follow other modes and libraries")
    if reasons.ranks:
        ranks, most, where = reasons.ranks
        texts.append(f"{ranks} ranks: at most {most} were measured {where}")
    if reasons.kind:
        texts.append(f"no link of kind {reasons.kind} was measured")
    if reasons.libraries:
        texts.append(f"no library is stated: the mean of {', '.join(reasons.libraries)}, and the interval covers them")
    if reasons.size:
        texts.append("the message is outside the measured sizes")
    return "; ".join(texts)
