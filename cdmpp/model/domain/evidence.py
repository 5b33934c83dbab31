"""Training coverage of an operator: protocols, element types, devices and frameworks.

The network predicts every protocol and type, also untrained ones. Predictions of untrained ones are adjusted to
those of trained ones (:mod:`cdmpp.model.inference.consistency`). This module ranks protocols and types by their
coverage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import TIR
from cdmpp.model.domain.score import Context, parse_contexts
from cdmpp.model.nn.inputs import SUMMARY_COLUMNS
from cdmpp.model.nn.rows import QueryBatch, QueryRows, distinct_rows
from cdmpp.programs.elements import base_type
from cdmpp.programs.operators import operator_family
from cdmpp.programs.query_options import (
    BACKENDS,
    COMPOSED_BY_PYTORCH,
    PROTOCOLS,
    SERVING_ENGINES,
    framework_name,
    implementation_of,
)

Array = np.ndarray[Any, np.dtype[Any]]

#: Name of a device that the model was adapted to and that training did not have.
ADAPTED = "(adapted)"
#: Penalty for a framework that launched no such training row; less than that of another device.
OTHER_FRAMEWORK = 0.5
_GRAPH, _MODULE = PROTOCOLS.index("graph"), SUMMARY_COLUMNS.index("module")
HALVES = ("float16", "bfloat16")
#: Operator whose 16-bit predictions follow those of float32 on devices without 16-bit units. The network transfers the
#: 16-bit convolutions of boards with such units: on a TITAN Xp, whole fp16 networks came out 1.7 times too slow.
WIDENED = "conv2d"
#: Types of bare products that are not slower than the 16-bit type where the device's peak is higher.
NARROW = ("int8", "float8_e4m3", "float4_e2m1")


def has_no_units(operator: str, dtype: str, device: DeviceSpec) -> bool:
    """Whether the device has no units for a type of an operator; vector units compute integers anyway."""
    base = base_type(dtype)
    is_emulated = base == "bfloat16" or operator_family(operator) != "vector"
    return is_emulated and operator != TIR and not device.has_units(base)


class QueryKind(NamedTuple):
    """Operator, element type and backend of a query on a device ("" for a device that training did not have).

    ``module``: the operator with its projections (of latent attention).
    """

    device: str
    operator: str
    dtype: str
    backend: str
    module: bool = False


def kinds_of(batch: QueryBatch, names: Sequence[str]) -> tuple[list[tuple[QueryKind, str]], Array]:
    """Distinct kinds of the queries with their frameworks, and each row's index among them.

    ``names``: the devices' names in the evidence, "" where training did not have them.
    """
    rows = batch.rows
    module = batch.store.summary[rows.program, _MODULE] > 0
    columns = [rows.device, batch.kind[rows.program], rows.backend, rows.framework, module.astype(np.int64)]
    first, inverse = distinct_rows(columns)
    kinds = []
    for device, number, backend, framework, is_module in np.stack([c[first] for c in columns], axis=1).tolist():
        operator, dtype = batch.kinds[number]
        kind = QueryKind(names[device], operator, dtype, BACKENDS[backend], bool(is_module))
        kinds.append((kind, framework_name(framework)))
    return kinds, inverse


def contexts_of(
    rows: QueryRows, kind: Array, kinds: Sequence[tuple[str, str]], names: Sequence[str]
) -> tuple[list[Context], Array]:
    """Distinct contexts of queries, and each row's index among them.

    ``kind``: (programs,) int, index into ``kinds`` (operator, dtype) for each program key. ``names``: the devices'
    names, "" where training did not have them.
    """
    columns = [rows.device, kind[rows.program], rows.protocol, rows.backend, rows.framework]
    first, inverse = distinct_rows(columns)
    contexts = []
    for device, number, protocol, backend, framework in np.stack([c[first] for c in columns], axis=1).tolist():
        setting = (PROTOCOLS[protocol], BACKENDS[backend], framework_name(framework))
        operator, dtype = kinds[number]
        contexts.append(Context(names[device], operator, dtype, *setting))
    return contexts, inverse


class Evidence:
    """Contexts of the training rows, and of the records that a model was adapted with.

    ``contexts``, ``host_bound``: fields of :class:`cdmpp.model.domain.score.Domain`. ``adapted``: contexts of the
    adapter's records; they count on that device only.
    """

    def __init__(
        self, contexts: Iterable[str], adapted: Iterable[Context] = (), host_bound: Collection[str] = ()
    ) -> None:
        self._host_bound = frozenset(host_bound)
        self._exact: set[tuple[str, ...]] = set()
        self._on_any_device: set[tuple[str, ...]] = set()
        self._protocols: set[tuple[str, str, str]] = set()
        # Devices by element type, of each operator and backend.
        self._types: dict[tuple[str, str], dict[str, set[str]]] = {}
        self._types_on: set[QueryKind] = set()
        # Frameworks of each context, "" among them where a row names none; also of any device ("").
        self._frameworks: dict[tuple[str, ...], set[str]] = {}
        # Devices by operator, backend and framework, and by dtype as well.
        self._devices: dict[tuple[str, str, str], dict[str, set[str]]] = {}
        trained, launched = parse_contexts(contexts)
        for context in trained:
            self._exact.add(context[:5])
            self._on_any_device.add(context[1:5])
            self._protocols.add((context.operator, context.protocol, context.backend))
            types = self._types.setdefault((context.operator, context.backend), {})
            types.setdefault(context.dtype, set()).add(context.device)
            self._types_on.add(QueryKind(context.device, context.operator, context.dtype, context.backend))
        for context in launched or trained:
            for dtype in (context.dtype, ""):
                frameworks = self._devices.setdefault((context.operator, dtype, context.backend), {})
                frameworks.setdefault(context.framework, set()).add(context.device)
        for context in launched:
            for device in (context.device, ""):
                self._frameworks.setdefault((device, *context[1:5]), set()).add(context.framework)
        # Frameworks of the records of an adaptation.
        self._adapted: dict[QueryKind, set[str]] = {}
        for context in adapted:
            self._exact.add(context[:5])
            kind = QueryKind(context.device, context.operator, context.dtype, context.backend)
            self._adapted.setdefault(kind, set()).add(context.framework)
            self._types_on.add(QueryKind(context.device, context.operator, context.dtype, context.backend))
            self._frameworks.setdefault(context[:5], set()).add(context.framework)

    def rank(self, kind: QueryKind, protocol: str, framework: str) -> float:
        """Distance of a query from the training rows by its protocol; 0 if training had it.

        0: on this device; 1: on another device; 2: with another element type; 3: never. A framework that launched
        no such rows adds :data:`OTHER_FRAMEWORK`.
        """
        device, operator, dtype, backend, _ = kind
        query = (operator, dtype, protocol, backend)
        if (device, *query) in self._exact:
            rank, on = 0.0, device
        elif query in self._on_any_device:
            rank, on = 1.0, ""
        else:
            return 2.0 if (operator, protocol, backend) in self._protocols else 3.0
        other = bool(framework and self._frameworks) and framework not in self._frameworks.get((on, *query), ())
        return rank + OTHER_FRAMEWORK * other

    def protocol_order(self, kind: QueryKind, framework: str) -> tuple[int, ...]:
        """Indices into PROTOCOLS, smallest distance first.

        Ties are in the order ``kernel``, ``eager``, ``graph``, because ``graph`` is between the other two.
        """
        ranks = [self.rank(kind, protocol, framework) for protocol in PROTOCOLS]
        return tuple(sorted(range(len(PROTOCOLS)), key=lambda p: (ranks[p], p == _GRAPH, p)))

    def half_type(self, operator: str, backend: str, dtype: str = "") -> str:
        """The 16-bit type that predictions of type ``dtype`` are derived from: a trained one, else float16.

        Of two trained ones, bfloat16 for float8 and float4, and the type of the activations where only the weights are
        narrow. A wider type that was never trained follows the one of more devices: vLLM's float16 norms of 2023 use
        a third of the bandwidth. The remaining types go with float16, which more devices have units for.
        """
        types = self._types.get((operator, backend), {})
        base = base_type(dtype)
        preferred = "bfloat16" if base.startswith(("float8", "float4")) else base if base != dtype else ""
        devices = {half: 0 if dtype in types or dtype in NARROW else len(types.get(half, ())) for half in HALVES}
        order = sorted(HALVES, key=lambda half: (half != preferred, -devices[half]))
        return next((half for half in order if half in types), HALVES[0])

    def was_trained(self, kind: QueryKind) -> bool:
        """Whether training had this type of this operator on this device."""
        return kind in self._types_on

    def was_trained_as(self, kind: QueryKind, protocol: str, framework: str) -> bool:
        """Whether training had this type on this device with the protocol and the framework ("": not stated).

        Bare products of 8-bit floats count as trained in every protocol under a framework whose kernel was measured on
        the device, or on any where training did not have it: that kernel has one tile
        (:func:`cdmpp.model.nn.inputs.one_tile_s`).
        """
        if not self._frameworks:
            return self.was_trained(kind)
        if kind.dtype == "float8_e4m3" and operator_family(kind.operator) == "gemm":
            measured = self._devices.get((kind.operator, kind.dtype, kind.backend), {}).get(framework, set())
            return bool(framework) and (kind.device in measured if kind.device else bool(measured))
        return self.has_rows(kind, protocol, framework)

    def has_rows(self, kind: QueryKind, protocol: str, framework: str) -> bool:
        """Whether training had rows of this type on this device with the protocol and the framework ("": none)."""
        context = (kind.device, kind.operator, kind.dtype, protocol, kind.backend)
        return bool(kind.device) and framework in self._frameworks.get(context, ())

    def several_frameworks(
        self, names: Sequence[str], kinds: Sequence[tuple[str, str]], columns: Sequence[Array]
    ) -> Array:
        """Whether training had such queries of several frameworks, on the device if it had the device; (n,) bool.

        ``names``: devices, "" for one that training did not have. ``kinds``: (operator, dtype). ``columns``: four (n,)
        int, indices into ``names``, ``kinds``, PROTOCOLS and BACKENDS.
        """
        first, inverse = distinct_rows(columns)
        several = []
        for device, kind, protocol, backend in np.stack([c[first] for c in columns], axis=1).tolist():
            key = (names[device], *kinds[kind], PROTOCOLS[protocol], BACKENDS[backend])
            several.append(len(self._frameworks.get(key, set()) - {""}) > 1)
        return np.array(several, dtype=np.bool_)[inverse]

    def measured_engine(self, kind: QueryKind, framework: str) -> str:
        """The framework whose kernels answer a query that names a serving engine ("": none), or none.

        An engine without training rows of the operator and type is answered as the engine that has them, on this device
        if there is one, else as another framework that runs the operator as one kernel: the network's input for the
        engine was then learned from other operators. A query without a framework is answered so only for what eager
        PyTorch composes, whose rows mean something else.
        """
        composed = kind.operator in COMPOSED_BY_PYTORCH
        if framework not in SERVING_ENGINES and not (composed and not framework):
            return framework
        if not self._frameworks or framework in self._adapted.get(kind._replace(module=False), ()):
            return framework
        # A type without rows is derived from the 16-bit one: of the same engine, so that they stay in order.
        for dtype in (kind.dtype, self.half_type(kind.operator, kind.backend, kind.dtype), ""):
            devices = self._devices.get((kind.operator, dtype, kind.backend), {})
            engines = self.engines_of(kind._replace(dtype=dtype))
            if engines:
                break
        else:
            engines = tuple(name for name in devices if name and not (composed and name == "pytorch"))
        if framework in engines:
            return framework
        return max(engines, key=lambda name: (kind.device in devices[name], len(devices[name])), default="")

    def engines_of(self, kind: QueryKind) -> tuple[str, ...]:
        """Serving engines with training rows of the operator and type on any device."""
        devices = self._devices.get((kind.operator, kind.dtype, kind.backend), {})
        what, form = f"{kind.operator}|{kind.dtype}|", "|module" if kind.module else ""
        names = {e: (f"{what}{e}{form}", f"{kind.device}|{what}{e}{form}") for e in SERVING_ENGINES if e in devices}
        return tuple(e for e, of_engine in names.items() if self._host_bound.isdisjoint(of_engine))

    def was_adapted(self, kind: QueryKind) -> bool:
        """Whether the records of an adaptation had the operator and type on the device."""
        return kind._replace(module=False) in self._adapted

    def was_measured(self, kind: QueryKind, framework: str) -> bool:
        """Whether training had rows of the operator and type on the device under the framework ("": under any)."""
        if self.was_adapted(kind):
            return True
        devices = self._devices.get((kind.operator, kind.dtype, kind.backend), {})
        on = [devices.get(framework, set())] if framework else devices.values()
        return bool(kind.device) and any(kind.device in names for names in on)

    def lacks(self, kind: QueryKind, framework: str) -> bool:
        """Whether training had no row of the operator on the device in the implementation of the query.

        The device counts as unseen for the operator: its embedding and its measured ceilings, if it has some, are of
        other operators. On the RTX 3090 they are of small layers of language models, and made every large pass over
        memory 1.4 times too slow (docs/replay.md). TIR, and an operator that training had on no device, follow the
        device's other rows.
        """
        if not kind.device:
            return True
        devices = self._devices.get((kind.operator, "", kind.backend), {})
        if kind.operator == TIR or not devices:
            return False
        implementation = implementation_of(kind.operator, framework)
        return not any(
            kind.device in on and implementation_of(kind.operator, f) == implementation for f, on in devices.items()
        )

    def follows(self, kind: QueryKind) -> bool:
        """Whether the type was never trained for this operator, so that it is derived from the 16-bit prediction.

        float32 of an operator without any training row is not derived: most training rows are float32.
        """
        _, operator, dtype, backend, _ = kind
        if operator == TIR or dtype == self.half_type(operator, backend, dtype) or self.was_trained(kind):
            return False
        types = self._types.get((operator, backend), {})
        return dtype not in types if types else dtype != "float32"

    def emulated(self, kind: QueryKind, device: DeviceSpec) -> bool:
        """Whether a 16-bit convolution is computed as in float32.

        The device has no faster units for the type, and training did not have the type on it.
        """
        if kind.operator != WIDENED or kind.dtype not in HALVES or self.was_trained(kind):
            return False
        return device.peak(kind.dtype, matrix=True) <= device.peak("float32", matrix=True)

    def lacks_units(self, kind: QueryKind, device: DeviceSpec) -> bool:
        """Whether the device has no units for the type, and nothing of it was measured there.

        Such a type is "out", so that it is not better than one that the device has.
        """
        return has_no_units(kind.operator, kind.dtype, device) and not self.was_measured(kind, "")

    def may_need_half(self, operator: str, dtype: str, backend: str) -> str | None:
        """The type whose features a query may need beside its own on some device; None where it needs none."""
        half = self.half_type(operator, backend, dtype)
        if operator == WIDENED and dtype in HALVES:
            return "float32"
        if operator == TIR or dtype == half:
            return None
        needed = dtype in NARROW or self.follows(QueryKind("", operator, dtype, backend))
        return half if needed else None
