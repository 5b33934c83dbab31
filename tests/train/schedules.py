"""Schedules of made-up tasks, without TVM: a copy of x in two loops, split and annotated in many ways."""

import json

import numpy as np

from cdmpp.data.records import Measurement, from_measurements
from cdmpp.data.table import MeasurementTable
from cdmpp.programs.tvm_json import find_prim_func, load, structural_hash
from tests.features.builder import Builder

PER_TASK = 10
DEVICES = ("core-i9-10940x", "xeon-platinum-8124m")
#: Serial, vectorized and unrolled (the inner loop's kind in TVM JSON), and how long an element takes.
KINDS = ((0, 4e-9), (2, 1e-9), (3, 3e-9))


def program(outer: int, inner: int, kind: int) -> str:
    """TVM JSON of ``for i in outer: for j in inner: x[i * inner + j] = 0``."""
    b = Builder()
    b.x = b.buffer("x", [outer * inner])
    i, j = b.variable("i"), b.variable("j")
    index = b.binary("Add", b.binary("Mul", i, b.integer(inner)), j)
    body = b.loop(b.integer(inner), b.store(index), j, kind=kind)
    return json.dumps(b.program(b.loop(b.integer(outer), body, i)))


def digest(text: str) -> str:
    """Structural hash of a program."""
    nodes, root = load(text)
    return structural_hash(nodes, find_prim_func(nodes, root))


def measured(tasks: int = 12, seed: int = 0) -> MeasurementTable:
    """Every task with :data:`PER_TASK` schedules on two CPUs.

    Task t is of network ``net{t % 4}``, and every fifth of ``net0`` as well. The latency depends on the
    inner loop's kind and extent.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for task in range(tasks):
        size = 2 ** (10 + task % 8) * (1 + 2 * (task // 8))
        networks = ";".join(sorted({f"net{task % 4}"} | ({"net0"} if task % 5 == 0 else set())))
        ways = [(2**power, kind) for power in range(2, 8) for kind in range(3)]
        for way in rng.permutation(len(ways))[:PER_TASK]:
            inner, kind = ways[way]
            text = program(size // inner, inner, KINDS[kind][0])
            for device, name in enumerate(DEVICES):
                latency_s = 2e-6 + size * KINDS[kind][1] * (1 + device) * (1 + 8 / inner)
                rows.append(
                    Measurement(
                        text,
                        "tvm_json",
                        name,
                        latency_s,
                        program_hash=digest(text),
                        backend="tvm",
                        task=f"task{task}",
                        source="made-up",
                        provenance={"networks": networks},
                    )
                )
    return from_measurements(rows)
