"""The source's own measurements of single kernels, as a whole network: how far a sum of true latencies
gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.end_to_end.labels import Label, rows
from benchmarks.end_to_end.transformers import SIZES, listed_kernels, make, traced_kernels
from cdmpp.devices.registry import lookup
from cdmpp.programs.frontends.torch_eager import eager_trace

Row = Mapping[str, str]
Key = tuple[str, str, str, int, int]


def read_lists(folder: Path) -> dict[Key, list[Row]]:
    """Kernel lists of one layer with embedding and head, by device, model, mode, batch and tokens."""
    lists: dict[Key, list[Row]] = {}
    for row in rows(folder / "e2e_neusight_model_ops.csv.gz"):
        mode = {"inf": "inference", "train": "training"}[row["mode"]]
        key = (lookup(row["device"]).name, row["model"], mode, int(row["batch"]), int(row["seqlen"]))
        lists.setdefault(key, []).append(row)
    return lists


def check_lists(lists: Mapping[Key, Sequence[Row]]) -> int:
    """Hold the networks built here against the source's lists.

    Returns
    -------
    int
        Number of kernels that were compared.

    Raises
    ------
    AssertionError
        A kernel is in one of both only.
    """
    compared, seen = 0, set()
    for (_, model, mode, batch, tokens), own in lists.items():
        if (model, mode, batch, tokens) in seen:
            continue
        seen.add((model, mode, batch, tokens))
        inputs = [torch.empty(batch, tokens, dtype=torch.int64, device="meta")]
        traced = traced_kernels(eager_trace(make(model, mode == "training", layers=1), inputs).launches)
        listed = listed_kernels(own)
        differ: Counter[object] = (traced - listed) + (listed - traced)
        if differ:
            raise AssertionError(f"{model}, {mode}, batch {batch}: kernels differ from the source's: {dict(differ)}")
        compared += sum(listed.values())
    return compared


def listed_parts(labels: Sequence[Label], lists: Mapping[Key, Sequence[Row]]) -> dict[Label, tuple[float, float]]:
    """Seconds of a whole network, forward and backward, by the source's list: its layer as often as the
    network has it, and the rest once.
    """
    sums = {}
    for label in labels:
        own = lists.get((label.device, label.model, label.mode, label.batch, label.size))
        if label.source != "neusight" or not own:
            continue
        layer = [i for i, row in enumerate(own) if ".layer.0." in row["target"] or ".h.0." in row["target"]]
        last = next((i for i, row in enumerate(own) if row["target"].endswith("ln_f")), layer[-1] + 1)
        forward_s, backward_s = (
            (SIZES[label.model].layers - 1) * sum(times_s[layer[0] : last]) + sum(times_s)
            for times_s in ([float(row[column]) / 1e6 for row in own] for column in ("fw_us", "bw_us"))
        )
        sums[label] = (forward_s, backward_s)
    return sums
