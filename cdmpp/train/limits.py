"""Limits of predictions that are derived from measurements (:mod:`cdmpp.model.inference.limits`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.data.physics import bounds_s, by_device, work
from cdmpp.data.table import MeasurementTable
from cdmpp.model.domain.score import Domain
from cdmpp.model.inference.limits import CALL_S, CONVOLUTION_SHARE, FUSED_FACTOR, FUSED_S, SHARE
from cdmpp.programs.collectives import is_collective
from cdmpp.programs.elements import types_label
from cdmpp.programs.operators import operator_family
from cdmpp.programs.query_options import implementation_of

Array = np.ndarray[Any, np.dtype[Any]]
#: Quantile of the rows of a kernel that its factor covers, and the fewest rows that make a factor.
QUANTILE, MIN_ROWS = 0.98, 5
#: Share of the rows of an operator, type, device and framework from which on they count as host time.
HOST_BOUND_SHARE = 0.3


def kernel_limits(table: MeasurementTable) -> tuple[dict[str, float], dict[str, float]]:
    """Operators on devices whose rows go beyond the limits, and how far:
    :attr:`cdmpp.model.domain.score.Domain.fast_kernels` (below 1) and ``slow_kernels`` (above 1). Slow ones are passes
    over memory, without those that a query calls composed by its framework."""
    usable = table.excluded.is_("") & np.isfinite(table.latency_s) & table.backend.is_("library")
    one_kernel = table.implementation.is_in(("fused", "tuned"))
    bound, highest = np.full(len(table), np.nan), np.full(len(table), np.nan)
    operators = np.full(len(table), -1, dtype=np.int64)
    names: list[str] = []
    for block in table.specs:
        if is_collective(block.operator):
            continue
        if block.operator not in names:
            names.append(block.operator)
        for of_device, device in by_device(table, block):
            part = block.take(of_device)
            compute, memory = bounds_s(part, device)
            compute = compute * (CONVOLUTION_SHARE / SHARE if operator_family(block.operator) == "conv" else 1.0)
            bound[part.row_index] = np.maximum(compute, memory)
            operators[part.row_index] = names.index(block.operator)
            if device.kind == "gpu" and operator_family(block.operator) == "vector":
                from_memory = (
                    work(part.operator, part.dtype, part.flags, part.sizes)[1] / device.mem_bandwidth_bytes_per_s
                )
                highest[part.row_index] = FUSED_FACTOR * np.maximum(compute, from_memory) + FUSED_S
    highest += CALL_S * table.protocol.is_("eager")
    # Of an operator that was only measured as several kernels, these are the rows that a query is compared with.
    with_one = np.isin(operators, np.unique(operators[usable & one_kernel]))
    rows = np.flatnonzero(usable & np.isfinite(bound) & (one_kernel | ~with_one))
    codes = np.stack([table.device.codes[rows], operators[rows], table.framework.codes[rows]], axis=1)
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
    fast, slow = dict[str, float](), dict[str, float]()
    for group, (device_code, operator, framework) in enumerate(distinct.tolist()):
        of_group = rows[inverse.reshape(-1) == group]
        launcher = table.framework.names[framework]
        if len(of_group) < MIN_ROWS:
            continue
        key, latency_s = f"{table.device.names[device_code]}|{names[operator]}|{launcher}", table.latency_s[of_group]
        share = float(np.quantile(latency_s / bound[of_group], 1 - QUANTILE)) / SHARE
        if share < 1.0:
            fast[key] = round(share, 3)
        if np.isfinite(highest[of_group]).all() and implementation_of(names[operator], launcher) != "composed":
            factor = float(np.quantile(latency_s / highest[of_group], QUANTILE))
            if factor > 1.0:
                slow[key] = round(factor, 2)
    return fast, slow


def host_bound(table: MeasurementTable) -> frozenset[str]:
    """Operators of a framework that are host time on half of its devices or more, or contradict a sibling on one:
    :attr:`cdmpp.model.domain.score.Domain.host_bound`."""
    host, devices = table.excluded.is_("host_bound"), dict[str, list[bool]]()
    doubtful, on_device = table.excluded.is_("contradicts_sibling"), set[str]()
    for block in table.specs:
        index = block.row_index
        if not (host | doubtful)[index].any():
            continue
        # Devices without such a row count, too: a block has all devices of the operator.
        form = "|module" if block.flags.get("module") else ""
        places = np.stack([table.device.codes[index], table.framework.codes[index]], axis=1)
        distinct, inverse = np.unique(places, axis=0, return_inverse=True)
        for group, (device, framework) in enumerate(distinct.tolist()):
            name = f"{block.operator}|{types_label(block.dtype, block.flags)}|{table.framework.names[framework]}{form}"
            of_group = index[inverse.reshape(-1) == group]
            devices.setdefault(name, []).append(bool(host[of_group].mean() > HOST_BOUND_SHARE))
            if doubtful[of_group].mean() > HOST_BOUND_SHARE:
                on_device.add(f"{table.device.names[device]}|{name}")
    host_names = (name for name, is_host in devices.items() if 2 * sum(is_host) >= len(is_host))
    return frozenset({*host_names, *on_device})


def with_limits(domain: Domain, table: MeasurementTable) -> Domain:
    """The domain with the limits that a table's rows show."""
    fast, slow = kernel_limits(table)
    return replace(domain, host_bound=host_bound(table), fast_kernels=fast, slow_kernels=slow)
