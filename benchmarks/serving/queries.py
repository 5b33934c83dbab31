"""Queries of the load tests: repeated ones, as a scheduler sends them, and new ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

#: Two that the model was trained on and two that ask their peers, which is more work.
DEVICES = ("t4", "l4", "a100-pcie-40gb", "h100-sxm5-80gb")


def program(kind: int, size: int, width: int, batch: int = 1) -> dict[str, Any]:
    """One of four operators."""
    return (
        {"operator": "linear", "m": size, "n": width, "k": 1024, "dtype": "float16"},
        {"operator": "softmax", "rows": size, "cols": width},
        {"operator": "add", "rows": size, "cols": width},
        {"operator": "attention_encoder", "batch": batch, "q_len": size, "heads": 16, "kv_heads": 4, "head_dim": 64},
    )[kind]


def repeated(count: int = 256) -> list[dict[str, Any]]:
    """Different queries, always the same ones: four operators in many sizes on four devices."""
    return [
        {"id": str(i), "program": program(i % 4, 64 * (i // 16 + 1), 4096), "device": DEVICES[i // 4 % 4]}
        for i in range(count)
    ]


def distinct(start: int = 0) -> Iterator[dict[str, Any]]:
    """Queries of which no two have the same program, without end; ``start`` keeps callers apart."""
    for i in itertools.count(start):
        number, more = i // 4 % 2048, i // 8192
        sizes = (1 + number, 1024 + 8 * more, 1 + more)
        yield {"program": program(i % 4, *sizes), "device": DEVICES[number % 4]}


def bodies(queries: Iterator[dict[str, Any]], items: int) -> Iterator[bytes]:
    """Request bodies of so many items each."""
    while batch := list(itertools.islice(queries, items)):
        yield json.dumps({"items": batch}).encode()
