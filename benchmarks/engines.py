"""Inference engines compared: torch eager, torch.compile, torch.export, ONNX Runtime.

``python -m benchmarks.engines [--repeats 20] [--skip-compile] [--skip-predictor] [--skip-tvm]``: one thread
each, the shipped network, all engines in turn on the same batches; then the predictor in this process, and
operators encoded without TVM beside lowering them. torch.compile needs a C++ compiler and some time.
"""

from __future__ import annotations

import os

# Before numpy, torch or TVM are there to read them.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "TVM_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import argparse
import itertools
import shutil
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.features import OPERATORS
from benchmarks.timing import interleaved, median_ratio
from cdmpp.devices.registry import lookup
from cdmpp.features.encode import encode_operator, encode_operators, encode_tvm_json, pad_leaves
from cdmpp.model.artifact.folder import default_model
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.inference.engine import engine_of
from cdmpp.model.nn.inputs import query_inputs, stack_devices, summarise
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.nn.positional_encoding_np import encode_places
from cdmpp.model.nn.weights import Weights
from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.programs.operators import OperatorSpec, parse_operator
from cdmpp.programs.program import TensorProgram

DEVICES = ("t4", "l4", "a100-pcie-40gb", "h100-sxm5-80gb")
ROWS = (1, 32, 256, 1024)
#: Padded leaf counts, and operators that are padded to them.
LEAVES = {
    1: "add:rows={m},cols={n}",
    4: "linear:m={m},n={n},k=1024,bias=true,dtype=float16",
    8: "softmax:rows={m},cols={n}",
}
#: Items of one call of the predictor, and all of a run.
CALL, ITEMS = 256, 4096
Says = Callable[[], list[Any]]


class Exportable(torch.nn.Module):
    """The network without what cannot be exported: a choice by the largest position, torch's own names."""

    def __init__(self, network: LatencyNetwork) -> None:
        super().__init__()
        self.network = network
        assert network.encoding is not None
        network.encoding = _Table(network.encoding._table)  # type: ignore[assignment]

    def forward(
        self, leaves: Tensor, positions: Tensor, mask: Tensor, inputs: Tensor, logs: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Forward pass of the network."""
        outputs: tuple[Tensor, Tensor] = self.network(leaves, positions, mask, inputs, logs, index)
        return outputs


class _Table(torch.nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]  # type: ignore[index]


def batch(rows: int, leaves: int) -> dict[str, Any]:
    """Operators of one kind in many sizes on four devices."""
    sizes = ({"m": 16 + 37 * i % 4001, "n": 64 * (1 + 13 * i % 127)} for i in range(rows))
    specs = [parse_operator(LEAVES[leaves].format(**size)) for size in sizes]
    encoded = [encode_operator(spec) for spec in specs]
    features, positions, mask = pad_leaves(encoded, leaves)
    codes = np.zeros(rows, dtype=np.int64)
    device = np.arange(rows) % len(DEVICES)
    matrix = stack_devices([lookup(name) for name in DEVICES])[device]
    summary = np.concatenate([summarise(programs) for programs in encoded])
    inputs, logs, _ = query_inputs(summary, matrix, codes, codes, codes)
    return {
        "leaves": features,
        "positions": positions,
        "mask": mask,
        "inputs": inputs,
        "logs": logs,
        "device": device + 1,
    }


def engines(weights: Weights, exportable: Exportable, data: dict[str, Any], compiled: bool) -> dict[str, Says]:
    """Each engine on a batch: point and levels of its rows."""
    network = weights.network
    width = weights.config.leaf_width
    missing = width - data["leaves"].shape[2]
    data = data | {"leaves": np.pad(data["leaves"], ((0, 0), (0, 0), (0, missing)))}
    arguments = tuple(torch.from_numpy(np.ascontiguousarray(value)) for value in data.values())

    def torch_says(call: Callable[..., Any]) -> Says:
        def calls() -> list[Any]:
            with torch.inference_mode():
                return [value.numpy() for value in call(*arguments)]

        return calls

    feed = {name: value for name, value in data.items() if name != "positions"}
    session = engine_of(weights)._session

    def onnx_says() -> list[Any]:
        # Includes the work of the predictor per batch: positional encodings are looked up in a table.
        places = encode_places(weights.config.positions, data["positions"], weights.config.width)
        outputs: list[Any] = session.run(["point", "levels"], feed | {"places": places})
        return outputs

    exported = torch.export.export(exportable, arguments, strict=False).module()
    calls = {"torch eager": torch_says(network), "torch.export": torch_says(exported)}
    if compiled:
        torch.compiler.reset()
        calls["torch.compile"] = torch_says(torch.compile(exportable, dynamic=False))
    return calls | {"ONNX Runtime": onnx_says}


def compare_engines(repeats: int, compiled: bool, leaf_counts: list[int], row_counts: list[int]) -> None:
    """Print the rates of all engines and their largest difference from torch eager."""
    weights = load_artifact(default_model()).weights
    exportable = Exportable(load_artifact(default_model()).network)
    print(f"torch {torch.__version__}, onnxruntime {version('onnxruntime')}, one thread\n")
    names = ["torch eager", "torch.export", *(["torch.compile"] if compiled else []), "ONNX Runtime"]
    print("| leaves | rows |", " | ".join(f"{name}, items/s" for name in names), end="")
    print(" | ONNX Runtime over eager | largest difference of a log latency |")
    print("| ---: | ---: |", " | ".join("---:" for _ in names), "| ---: | ---: |")
    for leaves, rows in itertools.product(leaf_counts, row_counts):
        calls = engines(weights, exportable, batch(rows, leaves), compiled)
        expected = calls["torch eager"]()
        apart = max(
            float(np.abs(value - other).max())
            for name in names[1:]
            for value, other in zip(expected, calls[name](), strict=True)
        )
        seconds = interleaved({name: calls[name] for name in names}, repeats)
        rates = " | ".join(f"{rows / statistics.median(seconds[name]):,.0f}" for name in names)
        ratio = median_ratio(seconds["torch eager"], seconds["ONNX Runtime"])
        print(f"| {leaves} | {rows} | {rates} | **{ratio:.1f}x** | {apart:.1e} |", flush=True)


def items(first: int) -> list[Query]:
    """Distinct queries: the kinds of :data:`OPERATORS` in sizes that are not cached."""
    made = []
    for i in range(first, first + ITEMS):
        size = {"m": 1 + i % 8191, "n": 64 * (1 + i // 8191 + i % 127)}
        text = tuple(LEAVES.values())[i % len(LEAVES)].format(**size)
        made.append(Query(TensorProgram.from_operator(text), DEVICES[i // len(LEAVES) % len(DEVICES)]))
    return made


def in_process(repeats: int) -> None:
    """Print what the predictor answers in a second, in calls of :data:`CALL` items and in calls of one."""
    artifact = load_artifact(default_model())
    rates: dict[str, list[float]] = {}
    for turn in range(repeats):
        predictor, queries = LatencyPredictor(artifact), items(turn * ITEMS)
        calls = [queries[i : i + CALL] for i in range(0, ITEMS, CALL)]
        alone = [[query] for query in items((turn + repeats) * ITEMS)[:CALL]]
        for name, parts in (("new", calls), ("cached", calls), ("new, alone", alone)):
            started = time.perf_counter()
            for part in parts:
                predictor.predict_queries(part)
            rate = sum(map(len, parts)) / (time.perf_counter() - started)
            rates.setdefault(name, []).append(rate)
    print("\n| predictor in this process | items/s |\n| --- | ---: |")
    for name, found in rates.items():
        size = 1 if name.endswith("alone") else CALL
        print(f"| {name}, {size} to a call | **{statistics.median(found):,.0f}** |")


def without_tvm(repeats: int) -> None:
    """Print milliseconds from an operator to its features, by template and by lowering it with TVM."""
    from cdmpp.programs.lowering import lower, to_json

    def lowered(spec: OperatorSpec) -> Callable[[], object]:
        return lambda: encode_tvm_json(to_json(lower(spec)))

    def template(spec: OperatorSpec) -> Callable[[], object]:
        return lambda: encode_operator(spec)

    def together(specs: list[OperatorSpec]) -> Callable[[], object]:
        return lambda: encode_operators(specs)

    print("\n| operator | template, ms | 256 together, ms each | lowered with TVM, ms | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, text in OPERATORS.items():
        spec = parse_operator(text)
        axis = next(field for field in ("m", "rows", "n", "batch") if field in spec.sizes())
        many = [spec.model_copy(update={axis: 8 * (i + 1)}) for i in range(256)]
        functions = {"one": template(spec), "many": together(many), "tvm": lowered(spec)}
        seconds = interleaved(functions, repeats)
        one, all_, tvm = (1e3 * statistics.median(seconds[key]) for key in functions)
        ratio = median_ratio(seconds["tvm"], seconds["one"])
        print(f"| {name} | {one:.2f} | {all_ / len(many):.3f} | {tvm:.1f} | **{ratio:.0f}x** |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--skip-compile", action="store_true")
    parser.add_argument("--skip-predictor", action="store_true")
    parser.add_argument("--skip-tvm", action="store_true")
    parser.add_argument("--leaves", type=int, nargs="+", choices=list(LEAVES), default=list(LEAVES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    compiled = not options.skip_compile and any(map(shutil.which, ("c++", "g++", "clang++")))
    compare_engines(options.repeats, compiled, options.leaves, options.rows)
    if not options.skip_predictor:
        in_process(5)
    if not options.skip_tvm:
        without_tvm(min(options.repeats, 10))


if __name__ == "__main__":
    main()
