"""Limits of predictions that are derived from measurement tables."""

from dataclasses import replace

import numpy as np

from cdmpp.data.labels import Labels
from cdmpp.data.records import Measurement, from_measurements
from cdmpp.train.limits import host_bound, kernel_limits


def rows(text: str, latency_s: float, framework: str = "pytorch") -> list[Measurement]:
    return [
        Measurement(text.format(size), "operator", "t4", latency_s * size, framework=framework) for size in range(1, 9)
    ]


def test_rows_beyond_the_limits_are_listed_with_their_factor() -> None:
    slow = rows("gelu:dtype=float32,rows={},cols=1048576", 1e-3)
    usual = rows("tanh:dtype=float32,rows={},cols=1048576", 3e-5)
    fast = rows("linear:dtype=float16,m={},n=8192,k=8192", 5e-5)
    composed = rows("rmsnorm:dtype=float16,rows={},cols=1048576", 1e-3)
    fast_kernels, slow_kernels = kernel_limits(from_measurements([*slow, *usual, *fast, *composed]))
    assert slow_kernels.keys() == {"t4|gelu|pytorch"} and slow_kernels["t4|gelu|pytorch"] > 10
    assert fast_kernels.keys() == {"t4|linear|pytorch"} and 0 < fast_kernels["t4|linear|pytorch"] < 0.5


def test_operator_is_host_time_where_most_of_its_rows_are() -> None:
    text = "linear:dtype=float16,m={},n=64,k=64"
    table = from_measurements([*rows(text, 1e-4, "vllm"), *rows(text, 1e-5, "sglang")])
    is_host = np.array([name == "vllm" for name in table.framework.array()])
    marked = replace(table, excluded=Labels(is_host.astype(np.int32), ("", "host_bound")))
    assert host_bound(table) == frozenset()
    assert host_bound(marked) == {"linear|float16|vllm"}
