"""Programs of the operators, in each type of each device, and the costs that their prices give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.plan.precision.indicator import gradient_dtype
from cdmpp.plan.precision.network import Network
from cdmpp.plan.precision.schema import DeviceLine, OperatorForm
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.pricing import Cost
from cdmpp.predict.requests.request import PriceRequest, Work


@dataclass(frozen=True)
class OperatorCosts:
    """Costs on one device, by operator and level.

    Attributes
    ----------
    forward, backward : list of list of Cost
    """

    forward: list[list[Cost]] = field(default_factory=list)
    backward: list[list[Cost]] = field(default_factory=list)


def backward_dtype(dtype: str, device: DeviceLine) -> str:
    """Type in which the backward pass of an operator runs on a device."""
    if dtype == "int8" and "float16" not in device.dtypes and "bfloat16" in device.dtypes:
        return "bfloat16"
    return gradient_dtype(dtype)


def price_requests(network: Network) -> list[PriceRequest]:
    """Programs of all operators whose costs are not given: by operator, device, type, and pass.

    Raises
    ------
    FieldError
        A device is missing, a program has no type to change, or there are too many programs.
    """
    out: list[PriceRequest] = []
    for position, operator in zip(network.positions, network.operators, strict=True):
        if operator.forward is None:
            continue
        i = network.index[operator.id]
        for d, line in enumerate(network.devices):
            if line.device is None:
                path = f"devices.{d}.device"
                raise FieldError(f"{path}: needed to price the programs of {operator.id!r}", path=path)
            for dtype in network.dtypes(line, i):
                for name, works, used in _works(operator, line, dtype):
                    for k, work in enumerate(works):
                        path = f"operators.{position}.{name}.{k}.program"
                        program = _with_dtype(work.program, used, path)
                        out.append(
                            PriceRequest(path, program, line.device, line.backend, line.protocol, line.framework)
                        )
    return out


def operator_costs(network: Network, prices: Sequence[Prediction]) -> list[OperatorCosts]:
    """Costs by device.

    Parameters
    ----------
    network : Network
    prices : sequence of Prediction
        Prices of :func:`price_requests`, in its order.

    Raises
    ------
    FieldError
        A given cost is missing.
    """
    by_device = [OperatorCosts() for _ in network.devices]
    remaining = iter(prices)
    # The loops are nested as in price_requests().
    for i, operator in enumerate(network.operators):
        for line, costs in zip(network.devices, by_device, strict=True):
            path = f"operators.{network.positions[i]}.costs"
            pairs = [_costs(operator, path, line, dtype, remaining) for dtype in network.dtypes(line, i)]
            costs.forward.append([forward for forward, _ in pairs])
            costs.backward.append([backward for _, backward in pairs])
    return by_device


def _works(operator: OperatorForm, line: DeviceLine, dtype: str) -> list[tuple[str, list[Work], str]]:
    """Field, programs and type of the forward and of the backward pass."""
    assert operator.forward is not None
    return [("forward", operator.forward, dtype), ("backward", operator.backward or [], backward_dtype(dtype, line))]


def _with_dtype(program: Mapping[str, Any], dtype: str, path: str) -> dict[str, Any]:
    if "operator" not in program:
        raise FieldError(
            f"{path}: the type of this program cannot be changed",
            path=path,
            hint='give an operator object, such as {"operator": "linear", "m": 64, "n": 64, "k": 64}',
        )
    return {**program, "dtype": dtype}


def _costs(
    operator: OperatorForm, path: str, line: DeviceLine, dtype: str, prices: Iterator[Prediction]
) -> tuple[Cost, Cost]:
    """Forward and backward cost of an operator in one type on one device."""
    if operator.costs is not None:
        matching = [given for given in operator.costs if given.dtype == dtype and given.device in (None, line.name)]
        if not matching:
            raise FieldError(
                f"{path}: none for {dtype} on {line.name!r}",
                path=path,
                hint="give its seconds, or narrow the operator's dtypes",
            )
        # A cost for this device comes before one for all devices.
        cost = next((given for given in matching if given.device is not None), matching[0])
        return Cost.given(cost.forward_s), Cost.given(cost.backward_s)
    sums = []
    for _, works, _ in _works(operator, line, dtype):
        counts = [work.count for work in works]
        sums.append(Cost.of(counts, [next(prices) for _ in counts]))
    forward, backward = sums
    if operator.backward_factor is not None:
        backward = _scaled(forward, operator.backward_factor)
    return forward, backward


def _scaled(cost: Cost, factor: float) -> Cost:
    return Cost(
        factor * cost.latency_s,
        factor * cost.lower_s,
        factor * cost.upper_s,
        tuple(replace(part, latency_s=factor * part.latency_s) for part in cost.parts),
    )
