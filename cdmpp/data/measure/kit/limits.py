"""Times that a device cannot reach."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cdmpp.errors import DataError


class ImpossibleTimesError(DataError):
    """Times of a result file that are faster than the device's peak.

    Attributes
    ----------
    reasons : dict of str to str
        By item.
    """

    def __init__(self, path: Path, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        name, reason = next(iter(self.reasons.items()))
        others = f", and {len(self.reasons) - 1} more" if len(self.reasons) > 1 else ""
        super().__init__(
            f"{path}: {name} {reason}{others}",
            hint="run the part again; if the other times are right, --drop-impossible makes these failed records",
        )
