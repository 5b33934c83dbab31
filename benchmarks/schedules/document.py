"""Result file of ``python -m benchmarks.schedules``, and its printed tables."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import number, percent
from benchmarks.report.results import rounded, write_result
from cdmpp.errors import DataError
from cdmpp.model.nn.network import LatencyNetwork

_RANKS = ("task_kendall_tau", "top1_score", "top5_score")


def line(split: str, name: str, m: Mapping[str, Any]) -> str:
    """One row of the table."""
    cells = (f"{m['n']:,}", percent(m["mape"]), percent(m["median_ape"]), percent(m["within_20"]))
    return (
        f"| {split} | {name} | " + " | ".join((*cells, *(number(m[k]) for k in _RANKS), str(m["ranked_groups"]))) + " |"
    )


def header() -> str:
    """Header of the table."""
    names = ("split", "method", "n", "MAPE", "median", "within 20 %", "tau in task", "top-1", "top-5", "groups")
    return "| " + " | ".join(names) + " |\n| --- | --- |" + " ---: |" * (len(names) - 2)


def read(out: Path) -> dict[str, Any]:
    """The result file, or an empty result."""
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    return content


def add(out: Path, part: str, name: str, entry: Any, **about: Any) -> None:
    """Put one entry into a part of the result file; the others stay."""
    old = read(out)
    old[part] = old.get(part, {}) | {name: rounded(entry)}
    # The command first, for the reader of the file.
    write_result(
        out, {"command": "python -m benchmarks.schedules", **about, **{k: v for k, v in old.items() if k not in about}}
    )


def check_unread(out: Path, label: str) -> None:
    """Refuse a second evaluation of the sealed networks under the same label.

    Raises DataError: the result file records one.
    """
    earlier = read(out).get("sealed_reads", {}).get(label)
    if earlier:
        raise DataError(
            f"the sealed networks were evaluated for {label!r} on {earlier['date']}, with model {earlier['model']}",
            hint="they are evaluated once per issue; evaluate the split network instead",
        )


def sealed_read(network: LatencyNetwork, sealed: Sequence[str], fingerprint: str) -> dict[str, Any]:
    """Record of an evaluation of the sealed networks: date, model, commit and data."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": weights_id(network),
        "commit": _commit(),
        "data": fingerprint,
        "networks": list(sealed),
    }


def weights_id(network: LatencyNetwork) -> str:
    """First 12 digits of a hash of the network's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
