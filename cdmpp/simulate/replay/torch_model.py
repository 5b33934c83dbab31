"""Layers of data-parallel training from a torch module, with programs to predict or measured times."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.torch_eager import EagerTrace, eager_trace
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.query_options import Protocol
from cdmpp.simulate.replay.data_parallel import GradientLayer


def data_parallel_request(
    module: nn.Module,
    inputs: Sequence[Tensor],
    device: str | Mapping[str, Any],
    *,
    ranks: int,
    link: Mapping[str, Any],
    protocol: Protocol = "eager",
    framework: str | None = "pytorch",
    autocast: torch.dtype | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A request for ``cdmpp plan data-parallel`` whose costs are predicted, as JSON values.

    ``module``: returns a loss, or tensors from which the backward pass starts. ``inputs``: of one rank; only shapes and
    types count. ``link``: as in the request: ``{"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e10}``. ``autocast``: as in
    :func:`cdmpp.programs.frontends.torch_eager.eager_trace`. ``more``: other fields of the request: ``bucket_bytes``,
    ``update``, ``algorithm``.
    Raises InvalidProgramError: the module does not run without data, has no parameters that are trained, or launches
    kernels for which there is no operator (all are named).
    """
    trace = eager_trace(module, inputs, backward=True, autocast=autocast)
    if trace.unsupported:
        named = "; ".join(f"{kernel.operator} ({kernel.count} x): {kernel.reason}" for kernel in trace.unsupported)
        raise InvalidProgramError(f"{type(module).__name__}: kernels without an operator: {named}")
    priced = {"device": device, "protocol": protocol, "framework": framework}

    def cost(specs: Counter[OperatorSpec]) -> Any:
        programs = [{"program": spec.canonical(), "count": count} for spec, count in specs.items()]
        return {"programs": programs, **priced} if programs else 0.0

    layers = [
        {
            "name": kernel.name,
            "forward": cost(kernel.forward),
            "backward": cost(kernel.backward),
            "gradient_bytes": list(kernel.gradient_bytes),
        }
        for kernel in layers_of(module, trace)
    ]
    return {"layers": layers, "ranks": ranks, "link": dict(link), **more}


@dataclass(frozen=True)
class TracedLayer:
    """A layer with its kernels, before anything is priced."""

    name: str  # of the module that has the parameters; of the root its class
    # Kernels and how often each runs.
    forward: Counter[OperatorSpec]
    backward: Counter[OperatorSpec]
    gradient_bytes: tuple[float, ...]  # of each parameter; the last becomes ready first


def layers_of(module: nn.Module, trace: EagerTrace) -> list[TracedLayer]:
    """Divide a trace into layers: modules with parameters, in the reverse order of their last gradients.

    Backward, a layer has what runs between the layer before it and its own last gradient. Forward, kernels of
    no layer (activations, attention, a loss) belong to the layer before them.

    Raises InvalidProgramError: no parameter gets a gradient.
    """
    sizes = {name: float(p.numel() * p.element_size()) for name, p in module.named_parameters()}
    arrived: dict[str, list[str]] = {}
    ends: dict[str, int] = {}
    for parameter, launches in trace.gradients:
        layer = parameter.rpartition(".")[0]
        arrived.setdefault(layer, []).append(parameter)
        ends[layer] = launches
    if not ends:
        raise InvalidProgramError("no parameter gets a gradient", hint="requires_grad_(True)")
    finished = sorted(ends, key=lambda layer: ends[layer])
    backward: dict[str, Counter[OperatorSpec]] = {}
    forward: dict[str, Counter[OperatorSpec]] = {layer: Counter() for layer in finished}
    begin = 0
    for layer in finished:
        end = len(trace.launches) if layer == finished[-1] else ends[layer]
        backward[layer] = Counter()
        for launch in trace.launches[begin:end]:
            if launch.phase == "backward":
                backward[layer][launch.spec] += launch.runs
        begin = end
    at = finished[-1]
    for launch in trace.of("forward"):
        at = launch.module if launch.module in forward else at
        forward[at][launch.spec] += launch.runs
    return [
        TracedLayer(
            layer or type(module).__name__,
            forward[layer],
            backward[layer],
            tuple(sizes[parameter] for parameter in reversed(arrived[layer])),
        )
        for layer in reversed(finished)
    ]


@dataclass
class _Stamps:
    """Seconds on one clock, of one iteration."""

    start: float = 0.0
    forward: dict[str, float] = field(default_factory=dict)
    turned: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    end: float = 0.0
    updated: float = 0.0


@dataclass(frozen=True)
class MeasuredModule:
    """Measured layers, and the measured iteration."""

    layers: list[GradientLayer]  # in the order in which their gradients become ready, reversed
    iteration_s: float  # of forward and backward together
    update_s: float  # of the optimizer's step


def measure_layers(
    module: nn.Module,
    step: Callable[[], Tensor],
    update: Callable[[], None],
    *,
    repeats: int = 20,
    warm: int = 5,
    fastest: float = 0.5,
) -> MeasuredModule:
    """Time the layers of a module, or of a wrapper of it, on the CPU, as they run; the results are means.

    Forward, a layer ends with its module's call; backward, with its last gradient. What lies between belongs to the one
    that ends next, the loss to the last layer's forward pass: the layers add up to the iteration. Clocks are read where
    Python is: on a device that works asynchronously the times would be of the calls.

    ``step``: runs the forward pass and returns the loss. ``update``: the optimizer's step; gradients are cleared after
    it, to None. ``repeats``, ``warm``: iterations that count, and others before them. ``fastest``: share of the
    iterations that count: the fastest, because other work on the machine only makes them longer.
    """
    timed: list[_Stamps] = []
    with _watching(module) as (stamps, names):
        for index in range(warm + repeats):
            module.zero_grad(set_to_none=True)
            stamps.forward.clear()
            stamps.gradients.clear()
            stamps.start = time.perf_counter()
            loss = step()
            stamps.turned = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            stamps.end = time.perf_counter()
            update()
            done = time.perf_counter()
            if index >= warm:
                forward, gradients = dict(stamps.forward), dict(stamps.gradients)
                timed.append(replace(stamps, forward=forward, gradients=gradients, updated=done))
    timed.sort(key=lambda stamp: stamp.updated - stamp.start)
    return _summary(module, names, timed[: max(round(fastest * repeats), 1)])


@contextmanager
def _watching(module: nn.Module) -> Iterator[tuple[_Stamps, dict[str, list[str]]]]:
    """Record the time when the call of a layer ends, and when a gradient is ready."""
    stamps = _Stamps()
    names: dict[str, list[str]] = {}
    hooks = []
    seen: set[int] = set()

    def called(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stamps.forward[name] = time.perf_counter()

        return hook

    def ready(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            stamps.gradients[name] = time.perf_counter()

        return hook

    for name, part in module.named_modules():
        parameters = [(n, p) for n, p in part.named_parameters(prefix=name, recurse=False) if id(p) not in seen]
        parameters = [(n, p) for n, p in parameters if p.requires_grad]
        if not parameters:
            continue
        names[name] = [n for n, _ in parameters]
        seen |= {id(p) for _, p in parameters}
        hooks.append(part.register_forward_hook(called(name)))
        hooks += [p.register_post_accumulate_grad_hook(ready(n)) for n, p in parameters]
    try:
        yield stamps, names
    finally:
        for hook in hooks:
            hook.remove()


def _summary(module: nn.Module, names: Mapping[str, list[str]], stamps: Sequence[_Stamps]) -> MeasuredModule:
    sizes = {n: float(p.numel() * p.element_size()) for n, p in module.named_parameters()}
    # Modules that did not run have no gradient and are not layers.
    ran = set.intersection(*({*stamp.gradients} for stamp in stamps))
    names = {name: of_part for name, of_part in names.items() if ran.issuperset(of_part)}
    if not names:
        raise InvalidProgramError("no layer had gradients", hint="the loss depends on no trained parameter")

    def order(times: Callable[[_Stamps], Mapping[str, float]], keys: Sequence[str]) -> list[str]:
        return sorted(keys, key=lambda key: statistics.median(times(stamp)[key] - stamp.start for stamp in stamps))

    called = order(lambda stamp: stamp.forward, list(names))
    arrived = order(lambda stamp: stamp.gradients, [n for of_part in names.values() for n in of_part])
    last = {name: max(of_part, key=arrived.index) for name, of_part in names.items()}
    finished = sorted(names, key=lambda name: arrived.index(last[name]))

    def spans(ends: Callable[[_Stamps], Sequence[float]], begin: Callable[[_Stamps], float]) -> list[float]:
        """Times between one end and the next."""
        rows = [[b - a for a, b in pairwise([begin(stamp), *ends(stamp)])] for stamp in stamps]
        return [max(statistics.fmean(column), 0.0) for column in zip(*rows, strict=True)]

    forward = spans(lambda stamp: [*(stamp.forward[n] for n in called), stamp.turned], lambda stamp: stamp.start)
    forward[-2:] = [sum(forward[-2:])]
    backward = spans(lambda stamp: [stamp.gradients[last[n]] for n in finished], lambda stamp: stamp.turned)
    backward[-1] += statistics.fmean(stamp.end - stamp.gradients[last[finished[-1]]] for stamp in stamps)
    forward_s, backward_s = (dict(zip(called, forward, strict=True)), dict(zip(finished, backward, strict=True)))
    reverse = {name: sorted(names[name], key=arrived.index, reverse=True) for name in reversed(finished)}
    layers = [
        GradientLayer(name, forward_s[name], backward_s[name], tuple(sizes[n] for n in parameters))
        for name, parameters in reverse.items()
    ]
    iteration_s = statistics.fmean(stamp.end - stamp.start for stamp in stamps)
    return MeasuredModule(layers, iteration_s, statistics.fmean(stamp.updated - stamp.end for stamp in stamps))
