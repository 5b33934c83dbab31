"""The network of :mod:`cdmpp.model.nn.network` as an ONNX graph, from its weights alone.

The two forms follow each other line by line, and a test compares them for every option of the configuration.
Numbers of rows and leaves vary in the graph; padded leaves are masked and do not affect the result. Only numpy and onnx
are used, so a model folder can be converted without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cdmpp.features.schedule import SCHEDULE_COLUMNS
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.config import (
    ADD,
    CALL_CYCLES,
    CYCLE_S,
    LEVELS,
    OVERLAP,
    PEAK_CENTRE,
    PEAK_LOG,
    POWER,
    REACH,
    THREAD_START,
    UNITS_LOG,
    VECTOR_FLOPS,
    NetworkConfig,
    member_prefixes,
)
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH, LEAF_DEVICE_RATIOS, QUERY_COLUMNS, SUMMARY_COLUMNS

Array = np.ndarray[Any, np.dtype[Any]]

#: Operator set of the newest operator used (Gelu), and the matching file format.
OPSET, IR_VERSION = 20, 9
#: Name of a value in the graph.
Value = str

_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


class NetworkGraph:
    """A graph under construction. A call adds a node and returns its output.

    Parameters
    ----------
    weights : mapping of str to array
        Arrays by name; those that are used are stored in the graph.

    Examples
    --------
    >>> graph = NetworkGraph({})
    >>> doubled = graph("Mul", graph.input("x", "float32", ["rows"]), 2.0)
    """

    def __init__(self, weights: dict[str, Array]) -> None:
        self._weights = weights
        #: What the names of weights begin with.
        self.prefix = ""
        self._nodes: list[Any] = []
        self._stored: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._count = 0

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> Value:
        """Add an input; texts in its shape are variable sizes."""
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)))
        return name

    def output(self, value: Value, name: str, shape: Sequence[int | str]) -> None:
        """Make a value an output of this name."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def weight(self, name: str) -> Value:
        """A weight, by its name behind the prefix."""
        name = self.prefix + name
        if name not in self._stored:
            self._stored[name] = numpy_helper.from_array(np.ascontiguousarray(self._weights[name]), name)
        return name

    def constant(self, value: Array | Sequence[int] | int | float) -> Value:
        """A constant: floats are float32, integers int64."""
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        # Equal constants are stored once.
        name = f"constant_{array.dtype.kind}{list(array.shape)}_{array.tobytes().hex()[:96]}"
        if array.nbytes > 48:
            name = f"constant_{self._next()}"
        if name not in self._stored:
            self._stored[name] = numpy_helper.from_array(array, name)
        return name

    def __call__(self, kind: str, *inputs: Value | Array | float | int, **attributes: Any) -> Value:
        """Add a node and return its output; numbers and arrays among its inputs become constants."""
        return self.several(kind, 1, *inputs, **attributes)[0]

    def several(self, kind: str, outputs: int, *inputs: Value | Array | float | int, **attributes: Any) -> list[Value]:
        """Add a node with several outputs and return them."""
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        made = [f"v{self._next()}" for _ in range(outputs)]
        self._nodes.append(helper.make_node(kind, names, made, **attributes))
        return made

    def linear(self, x: Value, name: str) -> Value:
        """``torch.nn.Linear`` of two dimensions."""
        return self("Gemm", x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), transB=1)

    def norm(self, x: Value, name: str) -> Value:
        """``torch.nn.LayerNorm`` of the last dimension."""
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)

    def columns(self, x: Value, first: int, last: int) -> Value:
        """Columns ``first`` up to ``last`` of two dimensions."""
        return self("Slice", x, np.array([first]), np.array([last]), np.array([1]))

    def column(self, x: Value, place: int) -> Value:
        """One column of two dimensions, (rows, columns) -> (rows,)."""
        return self("Gather", x, place, axis=1)

    def model(self) -> bytes:
        """The finished and checked graph as an ONNX file."""
        graph = helper.make_graph(self._nodes, "latency", self._inputs, self._outputs, list(self._stored.values()))
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="cdmpp"
        )
        onnx.checker.check_model(model)
        content: bytes = model.SerializeToString()
        return content

    def _next(self) -> int:
        self._count += 1
        return self._count


#: Added to scores of leaves that are padding: their weight becomes exactly 0.
_NEVER = -1e9
_LN2 = math.log(2.0)


def network_graph(config: NetworkConfig, weights: dict[str, Array], view: Array) -> bytes:
    """An ONNX file of a network.

    Inputs are ``leaves`` (rows, leaves, config.leaf_width), ``mask`` (rows, leaves) bool, ``inputs`` (rows,
    INPUT_WIDTH) as :func:`cdmpp.model.nn.inputs.query_inputs` gives them, ``logs`` (rows, len(DEVICE_LOGS)), ``device``
    (rows,) int64, and ``places`` (rows, leaves, config.width), the positional encoding that is added to the leaves'
    tokens. Outputs are ``point`` (rows,), ``levels`` (rows, len(LEVELS)) and ``view``, (rows, columns).

    ``weights``: the network's state by name. ``view``: (config.head_width, columns) float32, projection of the last
    hidden layer.
    """
    graph = NetworkGraph(weights)
    return _GraphWriter(graph, config).write(view)


class _GraphWriter:
    def __init__(self, graph: NetworkGraph, config: NetworkConfig) -> None:
        self._graph, self._config = graph, config
        g = graph
        self._leaves = g.input("leaves", "float32", ["rows", "leaves", config.leaf_width])
        self._mask = g.input("mask", "bool", ["rows", "leaves"])
        self._raw = g.input("inputs", "float32", ["rows", INPUT_WIDTH])
        self._logs = g.input("logs", "float32", ["rows", len(DEVICE_LOGS)])
        self._device = g.input("device", "int64", ["rows"])
        self._shape = g("Shape", self._mask)
        self._real = g("Cast", self._mask, to=1)
        self._pad = g("Mul", g("Sub", 1.0, self._real), _NEVER)
        self._places = g.input("places", "float32", ["rows", "leaves", config.width])

    def write(self, view: Array) -> bytes:
        """The whole network."""
        g = self._graph
        mean, scale = g.weight("input_mean"), g.weight("input_scale")
        inputs = g("Clip", g("Mul", g("Sub", self._raw, mean), scale), -6.0, 6.0)
        outputs = []
        for place, g.prefix in enumerate(member_prefixes(self._config)):
            outputs.append(self._member(inputs, place < self._config.timed_members))
        points, levels, hidden = zip(*outputs, strict=True)
        g.output(self._mean(points), "point", ["rows"])
        g.output(self._mean(levels), "levels", ["rows", len(LEVELS)])
        g.output(g("MatMul", hidden[0], view), "view", ["rows", view.shape[1]])
        return g.model()

    def _member(self, inputs: Value, timed: bool) -> tuple[Value, Value, Value]:
        """Point, levels and last hidden layer of the member whose weights the graph finds.

        ``timed``: it sums up the times of leaves.
        """
        g = self._graph
        tokens = self._tokens(inputs)
        bias = g("Unsqueeze", self._pad, np.array([1, 2]))
        for layer in range(self._config.layers):
            tokens = self._layer(tokens, f"layers.{layer}", bias)
        tokens = g.norm(tokens, "pool_norm")
        pooled = list(self._pool(tokens))
        if self._config.schedule and not timed:
            pooled.append(g("Mul", g.columns(pooled[0], 0, 2), 0.0))
        return self._decode(
            pooled, inputs, self._leaf_times(tokens, inputs) if self._config.schedule and timed else None
        )

    def _mean(self, values: Sequence[Value]) -> Value:
        return self._graph("Mean", *values) if len(values) > 1 else values[0]

    def _split(self, x: Value, *sizes: int) -> Value:
        """(rows * leaves, columns) -> (rows, leaves, *sizes)."""
        g = self._graph
        return g("Reshape", x, g("Concat", self._shape, np.array(sizes), axis=0))

    def _flat(self, x: Value, columns: int) -> Value:
        """(rows, leaves, ...) -> (rows * leaves, columns)."""
        return self._graph("Reshape", x, np.array([-1, columns]))

    def _tokens(self, inputs: Value) -> Value:
        """First token of each leaf: (rows * leaves, width)."""
        g, config = self._graph, self._config
        scaled = g("Mul", g("Sub", self._leaves, g.weight("leaf_mean")), g.weight("leaf_scale"))
        logs = g("Unsqueeze", self._logs, np.array([1]))
        meets = g("Sub", g("Gather", self._leaves, np.array(LEAF_DEVICE_RATIOS), axis=2), logs)
        both = g("Concat", scaled, g("Mul", g("Sub", meets, 10.0), 0.1), axis=2)
        columns = self._flat(both, config.leaf_width + len(DEVICE_LOGS))
        token = g.linear(columns, "leaf_in")
        if config.leaf_hidden:
            token = g("Add", token, g.linear(g("Gelu", g.linear(columns, "leaf_hidden.in")), "leaf_hidden.out"))
        place = g("Unsqueeze", g.linear(inputs, "condition"), np.array([1]))
        place = g("Add", place, self._places)
        return self._flat(g("Add", self._split(token, config.width), place), config.width)

    def _layer(self, tokens: Value, name: str, bias: Value) -> Value:
        """Pre-norm self-attention over the leaves of a program, then a feed-forward block."""
        g, width, heads = self._graph, self._config.width, self._config.heads
        head_columns = width // heads
        projected = g.linear(g.norm(tokens, f"{name}.norm_attention"), f"{name}.qkv")
        parts = g.several("Split", 3, projected, np.array([width] * 3), axis=1)
        q, k, v = (
            g("Transpose", self._split(part, heads, head_columns), perm=perm)
            for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        scores = g("Add", g("MatMul", g("Mul", q, 1.0 / math.sqrt(head_columns)), k), bias)
        mixed = g("MatMul", g("Softmax", scores, axis=-1), v)
        mixed = self._flat(g("Transpose", mixed, perm=[0, 2, 1, 3]), width)
        tokens = g("Add", tokens, g.linear(mixed, f"{name}.out"))
        wide = g.linear(g.norm(tokens, f"{name}.norm_feed"), f"{name}.feed.0")
        return g("Add", tokens, g.linear(g("Gelu", wide), f"{name}.feed.2"))

    def _pool(self, tokens: Value) -> tuple[Value, Value]:
        """Attention pooling and mean over the leaves: two of (rows, width)."""
        g, width, heads = self._graph, self._config.width, self._config.heads
        last = np.array([2])
        scores = self._split(g.linear(tokens, "pool_score"), heads)
        weight = g("Softmax", g("Add", scores, g("Unsqueeze", self._pad, last)), axis=1)
        parts = self._split(tokens, heads, width // heads)
        weighed = g("Mul", parts, g("Unsqueeze", weight, np.array([3])))
        pooled = self._flat(g("ReduceSum", weighed, np.array([1]), keepdims=0), width)
        real = g("Mul", self._split(tokens, width), g("Unsqueeze", self._real, last))
        total = g("ReduceSum", real, np.array([1]), keepdims=0)
        return pooled, g("Div", total, g("ReduceSum", self._real, np.array([1]), keepdims=1))

    def _leaf_times(self, tokens: Value, inputs: Value) -> tuple[Value, Value]:
        """:mod:`cdmpp.model.nn.network`: log seconds and whether there is a schedule, (rows,) each."""
        g = self._graph
        names = (*OVERLAP, *ADD)
        places = np.array([WIDTH + SCHEDULE_COLUMNS.index(name) for name in names])
        base = np.log(np.array([*OVERLAP.values(), *ADD.values()]))
        mask = self._mask
        counts = g("Clip", g("Gather", self._leaves, places, axis=2), 0.0, 60.0)
        counts = g("Sub", g("Pow", 2.0, counts), 1.0)
        first = g("Gather", counts, 0, axis=2)
        real = g("And", g("Greater", first, 0.0), mask)
        known = g("ReduceMax", g("Cast", real, to=1), np.array([1]), keepdims=0)
        token = g.norm(tokens, "leaf_times.norm")
        moved = g.linear(g("Add", token, self._silu(g.linear(token, "leaf_times.hidden"))), "leaf_times.costs")
        moved = g("Mul", g("Tanh", g("Div", moved, REACH)), REACH)
        moved = g("Reshape", moved, g("Concat", g("Shape", mask), np.array([len(names) + 1]), axis=0))
        costs, factor = g.several("Split", 2, moved, np.array([len(names), 1]), axis=2)
        leaf_cycles = g("Mul", counts, g("Exp", g("Add", costs, base)))
        # Vector arithmetic goes with the device's peak, everything else with the number of its units.
        cycle = g("Sub", math.log(CYCLE_S), g("Mul", g.column(self._logs, UNITS_LOG), _LN2))
        peak = g("Mul", g("Add", g.column(self._logs, PEAK_LOG), PEAK_CENTRE), _LN2)
        ratio = g("Exp", g("Sub", g("Sub", math.log(VECTOR_FLOPS), peak), cycle))
        vector, others, adding = g.several("Split", 3, leaf_cycles, np.array([1, len(OVERLAP) - 1, len(ADD)]), axis=2)
        overlap = g("Concat", g("Mul", vector, g("Unsqueeze", ratio, np.array([1, 2]))), others, axis=2)
        powers = g("Pow", g("Min", overlap, 1e12), POWER)
        last = np.array([2])
        together = g("Pow", g("Add", g("ReduceSum", powers, last, keepdims=0), 1e-9), 1 / POWER)
        units = g("Exp", g("Mul", g.column(self._logs, UNITS_LOG), _LN2))
        threads = g("Mul", g("Max", g("Sub", units, 1.0), 0.0), THREAD_START)
        regions = g("Gather", leaf_cycles, names.index("regions"), axis=2)
        cycles = g("Add", together, g("ReduceSum", adding, last, keepdims=0))
        cycles = g("Add", cycles, g("Mul", regions, g("Unsqueeze", threads, last - 1)))
        cycles = g("Mul", cycles, g("Exp", g("Squeeze", factor, last)))
        call = g("Clip", g.column(g.linear(inputs, "leaf_times.call"), 0), -REACH, 2 * REACH)
        total = g("ReduceSum", g("Where", real, cycles, 0.0), np.array([1]), keepdims=0)
        seconds = g("Add", g("Log", g("Add", total, g("Mul", g("Exp", call), CALL_CYCLES))), cycle)
        return g("Where", g("Greater", known, 0.0), seconds, 0.0), known

    def _decode(
        self, latent: list[Value], inputs: Value, timed: tuple[Value, Value] | None
    ) -> tuple[Value, Value, Value]:
        """Point, levels and last hidden layer."""
        g, config = self._graph, self._config
        times: Value | None = None
        last = np.array([1])
        if timed is not None:
            times = g("Sub", timed[0], self._log_reference(inputs))
            seen = g("Mul", g("Mul", times, 0.2), timed[1])
            latent = [*latent, g("Unsqueeze", seen, last), g("Unsqueeze", timed[1], last)]
        device = g("Gather", g.weight("device.weight"), self._device, axis=0)
        x = self._silu(g.linear(g("Concat", *latent, inputs, device, axis=1), "head_in"))
        for layer in range(config.head_layers):
            up = self._silu(g.linear(g.norm(x, f"head.{layer}.norm"), f"head.{layer}.up"))
            x = g("Add", x, g.linear(up, f"head.{layer}.down"))
        hidden = g.norm(x, f"head.{config.head_layers}")
        raw = g.linear(hidden, "out")
        point = self._structured(raw, inputs) if config.head == "structured" else g.column(raw, 0)
        if timed is not None and times is not None:
            scheduled_point = g("Add", times, g.column(g.linear(hidden, "timed"), 0))
            point = g("Where", g("Greater", timed[1], 0.0), scheduled_point, point)
        return point, self._levels(raw, point), hidden

    def _levels(self, raw: Value, point: Value) -> Value:
        """Quantiles grow outwards from the median, so they never cross."""
        g, middle, count = self._graph, LEVELS.index(0.5), len(LEVELS)
        first = 4 if self._config.head == "structured" else 1
        steps = g("Softplus", g("Sub", g.columns(raw, first, first + count), 3.0))
        below = g("Neg", g("CumSum", g.columns(steps, 0, middle), 1, reverse=1))
        above = g("CumSum", g.columns(steps, middle + 1, count), 1)
        median = g("Unsqueeze", g("Add", point, g("Mul", g.column(raw, first + middle), 0.1)), np.array([1]))
        return g("Concat", g("Add", below, median), median, g("Add", above, median), axis=1)

    def _column(self, inputs: Value, place: int) -> Value:
        """An input of the query before it was standardised, (rows,)."""
        g = self._graph
        scale = g("Max", g("Gather", g.weight("input_scale"), place, axis=0), 1e-6)
        return g("Add", g("Div", g.column(inputs, place), scale), g("Gather", g.weight("input_mean"), place))

    def _log_reference(self, inputs: Value) -> Value:
        """Natural logarithm of the reference in seconds, recovered from the inputs."""
        place = len(SUMMARY_COLUMNS) + QUERY_COLUMNS.index("log_reference_us")
        return self._graph("Add", self._graph("Mul", self._column(inputs, place), _LN2), math.log(1e-6))

    def _structured(self, raw: Value, inputs: Value) -> Value:
        """Utilisations of arithmetic and memory, their overlap and a floor (docs/accuracy.md)."""
        g, base = self._graph, len(SUMMARY_COLUMNS)
        compute, memory, reference = (g("Mul", self._column(inputs, base + i), _LN2) for i in (0, 1, 3))
        floor = g("Log", g("Max", self._column(inputs, base + 4), 1e-6))
        power = g("Add", 1.0, g("Mul", g("Sigmoid", g("Sub", g.column(raw, 2), 2.0)), 3.0))
        uses = []
        for time, column, limit, start in ((compute, 0, 1.5, 0.7), (memory, 1, 2.5, -0.4)):
            share = g("Sigmoid", g("Add", g.column(raw, column), start))
            uses.append(g("Mul", g("Sub", time, g("Log", g("Mul", share, limit))), power))
        both = g("Div", self._log_sum(*uses), power)
        return self._log_sum(g("Sub", both, reference), g("Add", floor, g.column(raw, 3)))

    def _log_sum(self, a: Value, b: Value) -> Value:
        """log(exp(a) + exp(b))."""
        g = self._graph
        distance = g("Neg", g("Abs", g("Sub", a, b)))
        return g("Add", g("Max", a, b), g("Log", g("Add", g("Exp", distance), 1.0)))

    def _silu(self, x: Value) -> Value:
        return self._graph("Mul", x, self._graph("Sigmoid", x))
