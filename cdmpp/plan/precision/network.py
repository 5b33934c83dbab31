"""Operators of a precision request in topological order, validated, with their sensitivities by QSync's indicator.

The indicator tells how much a lower precision of one operator disturbs training.

With stochastic rounding to a grid of step S an element gets an error of variance S^2 / 6 on average.
Through a product with weights w the errors of the input v reach the output with at most
||w||^2 S_v^2 D_v / 6 (D: number of elements, Cauchy-Schwarz), and those of the weights with
||v||^2 S_w^2 D_w / 6. An error of the forward pass meets every operator after this one, an error of the
backward pass every operator before it, so

    indicator = gamma (depth_total - depth) forward + depth backward.

For int8, S is the largest magnitude over 127. For a floating type S = 2^(e - k), e the exponent of the
tensor's root mean square and k the bits of the mantissa. QSync takes k = 9 for float16, one less than the
type stores; likewise k = 6 for bfloat16 here. As in QSync, gradients of an int8 operator are float16.

QSync's code differs from its derivation in two places: it multiplies the float16 terms by the exponent instead
of raising two to its power, and it does not square the norm of a gradient. This module follows the derivation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdmpp.errors import FieldError
from cdmpp.plan.base.task_graph import sort_topologically
from cdmpp.plan.precision.schema import DeviceLine, OperatorForm, PrecisionRequest, StatisticsForm
from cdmpp.programs.elements import BASIC_DTYPES, DTYPE_BYTES


def gradient_dtype(dtype: str) -> str:
    """Type of an operator's backward pass: float16 for int8, else the same type."""
    return "float16" if dtype == "int8" else dtype


def variances(tensors: StatisticsForm, dtype: str) -> tuple[float, float]:
    """Variance that a type adds in the forward and in the backward pass of an operator."""
    v, w, g = tensors.input, tensors.weight, tensors.gradient
    of_input = v.step(dtype) ** 2 * v.elements / 6.0
    if w is None:
        return of_input, 0.0
    forward = w.norm2 * of_input + v.norm2 * w.step(dtype) ** 2 * w.elements / 6.0
    if g is None:
        return forward, 0.0
    of_gradient = g.step(gradient_dtype(dtype)) ** 2 * g.elements / 6.0
    return forward, g.norm2 * of_input + v.norm2 * of_gradient


def indicator(
    tensors: Mapping[str, StatisticsForm],
    depths: Mapping[str, int],
    dtypes: tuple[str, ...] = ("int8", "float16", "float32"),
    gamma: float = 1.0,
) -> dict[str, dict[str, float]]:
    """Sensitivity of each operator to each type: operator -> type -> indicator; 0 for float32.

    ``depths``: operators on the longest path that ends with this one: 1 for the first. ``gamma``: weight of forward
    errors.
    """
    total = max(depths.values(), default=0)

    def error(name: str, dtype: str) -> float:
        forward, backward = variances(tensors[name], dtype)
        return gamma * (total - depths[name]) * forward + depths[name] * backward

    return {name: {dtype: error(name, dtype) for dtype in dtypes} for name in tensors}


@dataclass(frozen=True)
class Network:
    """The operators of a request, in the order of computation."""

    devices: Sequence[DeviceLine]
    operators: list[OperatorForm]  # in topological order
    positions: list[int]  # position of each operator in the request, for messages
    index: dict[str, int]  # index in ``operators`` by id
    sensitivity: list[dict[str, float]]  # error that each type adds, by operator
    ignore_memory: bool = False  # whether the devices have unlimited memory

    def dtypes(self, device: DeviceLine, i: int) -> tuple[str, ...]:
        """Levels of operator ``i`` on a device: fewest bits first; of equal bits, the larger error first."""
        allowed = self.operators[i].dtypes
        names = {name for name in device.dtypes if allowed is None or name in allowed}
        errors = self.sensitivity[i]
        return tuple(sorted(names, key=lambda name: (DTYPE_BYTES[name], -errors.get(name, 0.0), name)))


def read_network(request: PrecisionRequest) -> Network:
    """Validate the operators and order them.

    Raises FieldError: names are used twice, dependencies are unknown or cyclic, or an operator has no type or no
    sensitivity.
    """
    devices, operators = request.devices, request.operators
    _index_of([device.name for device in devices], "devices", "name")
    index = _index_of([operator.id for operator in operators], "operators", "id")
    for position, operator in enumerate(operators):
        _check_sources(position, operator)
    positions = _topological_order(operators, index)
    ordered = [operators[position] for position in positions]
    by_id, errors = {operator.id: i for i, operator in enumerate(ordered)}, _sensitivities(ordered, request.gamma)
    network = Network(devices, ordered, positions, by_id, errors, request.ignore_memory)
    _check_levels(network)
    return network


def _sensitivities(operators: Sequence[OperatorForm], gamma: float) -> list[dict[str, float]]:
    """Error of each type by operator: given, or computed by the indicator."""
    depths: dict[str, int] = {}
    for operator in operators:
        depths[operator.id] = 1 + max((depths[name] for name in operator.deps), default=0)
    statistics = {op.id: op.statistics for op in operators if op.statistics is not None}
    # Operators without statistics count in the depths too.
    computed = indicator(statistics, depths, BASIC_DTYPES, gamma)
    given = [op.sensitivity.model_dump(exclude_none=True) if op.sensitivity is not None else {} for op in operators]
    return [computed.get(op.id, {"float32": 0.0, **errors}) for op, errors in zip(operators, given, strict=True)]


def _check_levels(network: Network) -> None:
    """Each operator has a type on each device, and a sensitivity for each of its types."""
    for d, device in enumerate(network.devices):
        if len(set(device.dtypes)) < len(device.dtypes):
            raise FieldError.at(f"devices.{d}.dtypes", "a type twice")
        for i, position in enumerate(network.positions):
            levels = network.dtypes(device, i)
            if not levels:
                raise FieldError.at(f"operators.{position}.dtypes", f"{device.name!r} has none of these types")
            missing = [name for name in levels if name not in network.sensitivity[i]]
            if missing:
                raise FieldError.at(
                    f"operators.{position}.sensitivity",
                    f"no value for {', '.join(missing)}",
                    hint="give the error that each allowed type adds, or statistics",
                )


def _index_of(names: Sequence[str], where: str, field: str) -> dict[str, int]:
    """Index by name; names are distinct."""
    index: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in index:
            raise FieldError.at(f"{where}.{i}.{field}", f"{name!r} is already the {field} of {where}.{index[name]}")
        index[name] = i
    return index


def _check_sources(position: int, operator: OperatorForm) -> None:
    """Costs come from one source, and so do sensitivities."""
    path = f"operators.{position}"
    if (operator.costs is None) == (operator.forward is None):
        raise FieldError(f"{path}: give either costs or forward", path=f"{path}.costs")
    backwards = (operator.backward is not None) + (operator.backward_factor is not None)
    if backwards != (operator.forward is not None):
        raise FieldError(
            f"{path}: give exactly one of backward and backward_factor with forward, and neither without it",
            path=f"{path}.backward",
        )
    if operator.sensitivity is not None and operator.statistics is not None:
        raise FieldError(f"{path}: give either sensitivity or statistics", path=f"{path}.sensitivity")


def _topological_order(operators: Sequence[OperatorForm], index: Mapping[str, int]) -> list[int]:
    """Positions in topological order; of the operators that are ready, the first in the request comes first."""
    for i, operator in enumerate(operators):
        for k, name in enumerate(operator.deps):
            path = f"operators.{i}.deps.{k}"
            if name not in index:
                raise FieldError.at(path, f"no operator is called {name!r}")
            if name in operator.deps[:k]:
                raise FieldError.at(path, f"{name!r} is listed twice")
    order, cycle = sort_topologically([[index[name] for name in operator.deps] for operator in operators])
    if cycle:
        names = " -> ".join(operators[i].id for i in cycle[:9])
        raise FieldError.at(f"operators.{cycle[0]}.deps", f"a cycle: {names}")
    return order
