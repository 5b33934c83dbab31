"""Cost tables of each device: seconds, bytes and errors of every operator in every type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.registry import lookup
from cdmpp.errors import CdmppError, FieldError
from cdmpp.plan.precision.casts import MEASURED, CastCost, scaled
from cdmpp.plan.precision.exchange import buckets, limits
from cdmpp.plan.precision.network import Network
from cdmpp.plan.precision.pricing import DeviceCosts, Edge, Kept
from cdmpp.plan.precision.programs import OperatorCosts, backward_dtype, operator_costs
from cdmpp.plan.precision.schema import CastSource, DeviceLine, PrecisionRequest
from cdmpp.predict.requests.memory import memory_limit
from cdmpp.predict.requests.pricing import Cost
from cdmpp.programs.elements import DTYPE_BYTES

#: Bytes of a float32 master weight and its gradient.
_MASTER_BYTES = 8.0


@dataclass(frozen=True)
class DeviceTables:
    """One device's tables at the predicted costs and at their bounds.

    Attributes
    ----------
    costs, lower, upper : DeviceCosts
    operators : OperatorCosts
        The costs that they are made of.
    cast_source : str
    """

    costs: DeviceCosts
    lower: DeviceCosts
    upper: DeviceCosts
    operators: OperatorCosts
    cast_source: CastSource


def build_tables(request: PrecisionRequest, network: Network) -> list[DeviceTables]:
    """Tables of every device of a priced request.

    Raises
    ------
    FieldError
        A cost of an operator, a cast or an exchange is missing, or a device is unknown.
    """
    costs = operator_costs(network, request.prices)
    workers = sum(line.workers for line in network.devices)
    exchanges = buckets(request.communication, network.operators, network.index, workers)
    slowest_s = max(line.update_s for line in network.devices)
    tables = []
    for d, line in enumerate(network.devices):
        after, tail_s = limits(exchanges, len(network.operators), line.update_s, slowest_s)
        device = _Device(network, d)
        tables.append(device.tables(costs[d], request.optimizer_bytes_per_weight, after, tail_s))
    return tables


class _Device:
    """Builds the tables of one device."""

    def __init__(self, network: Network, d: int) -> None:
        self.network, self.line, self.path = network, network.devices[d], f"devices.{d}"
        self.levels = [network.dtypes(self.line, i) for i in range(len(network.operators))]
        self.casts, self.cast_source = _casts(self.line, self.path)

    def tables(
        self, costs: OperatorCosts, optimizer_bytes: float, after: np.ndarray, tail_s: np.ndarray
    ) -> DeviceTables:
        operators, levels, line = self.network.operators, self.levels, self.line
        element_bytes = [np.array([float(DTYPE_BYTES[name]) for name in names]) for names in levels]
        own_bytes = [
            np.where(size < DTYPE_BYTES["float32"], size, 0.0) * operator.weight_elements
            + size * operator.kept_elements
            for operator, size in zip(operators, element_bytes, strict=True)
        ]
        # Master weights are float32: the forward pass copies them, and the backward pass casts gradients back.
        copy_s = [
            np.array([self._cast_s("float32", name, operator.weight_elements) for name in names])
            for names, operator in zip(levels, operators, strict=True)
        ]
        gradient_s = [
            np.array([self._cast_s(backward_dtype(name, line), "float32", operator.weight_elements) for name in names])
            for names, operator in zip(levels, operators, strict=True)
        ]
        edges, kept = self._edges()
        weights = sum(operator.weight_elements for operator in operators)
        predicted = DeviceCosts(
            name=line.name,
            workers=line.workers,
            dtypes=levels,
            element_bytes=element_bytes,
            forward_s=_seconds(costs.forward, copy_s, "latency_s"),
            backward_s=_seconds(costs.backward, gradient_s, "latency_s"),
            sensitivity=[
                np.array([errors[name] for name in names])
                for errors, names in zip(self.network.sensitivity, levels, strict=True)
            ],
            own_bytes=own_bytes,
            edges=edges,
            kept=kept,
            fixed_bytes=line.base_bytes + weights * (_MASTER_BYTES + optimizer_bytes),
            memory_bytes=memory_limit(line.memory_bytes, [line.device], self.network.ignore_memory),
            after=after,
            tail_s=tail_s,
        )
        lower, upper = (
            replace(
                predicted,
                forward_s=_seconds(costs.forward, copy_s, figure),
                backward_s=_seconds(costs.backward, gradient_s, figure),
            )
            for figure in ("lower_s", "upper_s")
        )
        return DeviceTables(predicted, lower, upper, costs, self.cast_source)

    def _edges(self) -> tuple[tuple[Edge, ...], tuple[Kept, ...]]:
        """Tensors between operators with their casts, and tensors that are kept for the backward pass."""
        operators, levels, line = self.network.operators, self.levels, self.line
        edges: list[Edge] = []
        # Tensors of one size between operators with the same levels share one table.
        tables: dict[tuple[tuple[str, ...], tuple[str, ...], int], tuple[np.ndarray, np.ndarray]] = {}
        readers: list[list[int]] = [[] for _ in operators]
        for i, operator in enumerate(operators):
            for name in operator.deps:
                producer = self.network.index[name]
                readers[producer].append(i)
                size = operators[producer].output_elements
                key = levels[producer], levels[i], size
                if key not in tables:
                    forward = [[self._cast_s(a, b, size) for b in levels[i]] for a in levels[producer]]
                    backward = [
                        [self._cast_s(backward_dtype(b, line), backward_dtype(a, line), size) for b in levels[i]]
                        for a in levels[producer]
                    ]
                    tables[key] = np.array(forward), np.array(backward)
                edges.append(Edge(producer, i, *tables[key]))
        kept = tuple(
            Kept(tuple(sorted(consumers)), operators[producer].output_elements)
            for producer, consumers in enumerate(readers)
            if consumers and operators[producer].output_elements
        )
        return tuple(edges), kept

    def _cast_s(self, source: str, target: str, elements: int) -> float:
        if source == target or not elements:
            return 0.0
        if (source, target) not in self.casts:
            path = f"{self.path}.casts"
            raise FieldError(
                f"{path}: none from {source} to {target}",
                path=path,
                hint="give each pair of types that can meet, those of float32 and of the backward pass included",
            )
        return self.casts[source, target].seconds(elements)


def _seconds(costs: list[list[Cost]], casts: list[np.ndarray], figure: str) -> list[np.ndarray]:
    """One figure of the costs plus the casts of the operator's weights, by operator and level."""
    return [np.array([getattr(cost, figure) for cost in row]) + extra for row, extra in zip(costs, casts, strict=True)]


def _casts(line: DeviceLine, path: str) -> tuple[Mapping[tuple[str, str], CastCost], CastSource]:
    """Cost of each cast on a device, and its source."""
    if line.casts is not None:
        given: dict[tuple[str, str], CastCost] = {}
        for k, cast in enumerate(line.casts):
            pair = (cast.source, cast.target)
            if cast.source == cast.target or pair in given:
                problem = "source and target are the same type" if cast.source == cast.target else "a pair twice"
                raise FieldError(f"{path}.casts.{k}: {problem}", path=f"{path}.casts.{k}")
            given[pair] = CastCost(cast.s_per_element, cast.overhead_s)
        return given, "given"
    if line.device is None:
        return MEASURED, "measured on a CPU"
    try:
        spec = resolve_device(line.device, lookup)
    except CdmppError as error:
        raise FieldError(f"{path}.device: {error.message}", path=f"{path}.device", hint=error.hint) from None
    return scaled(spec, line.protocol), "measured on a CPU, scaled by memory bandwidth"
