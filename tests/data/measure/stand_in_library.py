"""Test doubles of the GPU for library and host parts: they run on the CPU. Their times are no measurements."""

from __future__ import annotations

from typing import Any

from cdmpp.data.measure.runtime import host, library

#: Constant time of the stand-in.
STAND_IN_S = 1e-3


class Kind(library.Kind):
    """Runs operators on the CPU; an operator with 13 rows crashes."""

    def open(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H100 80GB HBM3"}

    def measure(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["operator"].get("rows") == 13:
            raise SystemExit(13)
        return _constant(super().measure(item))


class HostKind(host.Kind):
    """Runs the cases on the CPU."""

    def open(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H100 80GB HBM3"}

    def prepare(self, deadline: float) -> None:
        pass

    def measure(self, item: dict[str, Any]) -> dict[str, Any]:
        skipped = item["nodes"] > 1 or "compiled" in item["case"]
        return {"repeats_s": {}, "failure": "not part of the test"} if skipped else _constant(super().measure(item))


def _constant(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "repeats_s": {name: [STAND_IN_S] * len(times) for name, times in result["repeats_s"].items()}}
