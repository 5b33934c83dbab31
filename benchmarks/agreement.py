"""Random predictions that must agree: ``python -m benchmarks.agreement [--programs 4000] [--seed 0] [--model DIR]``.

Operators, sizes, devices, protocols and frameworks are drawn at random. For each program on a device:

- ``engines``: predictions under the serving engines are at most :data:`APART` times apart;
- ``unmeasured``: those of them where the slowest or the fastest engine has no training rows of the operator and type on
  the device;
- ``monotone``: with twice the rows (or twice the batch), it is not faster beyond both intervals;
- ``roofline``: no prediction is below :data:`BELOW` of the physical bound;
- ``siblings``: on a device whose figures are all at least those of its sibling, it is not slower by more than 5 %
  (unless both were measured: in the tables an H200 is slower than an H100 in 2 to 10 % of the programs);
- ``fused``: a pass over memory of more than 16 MB takes at most ten times what its bytes need.

The rates are printed by operator and written to ``benchmarks/results/agreement.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp import LatencyPredictor
from cdmpp.data.physics import uses_matrix_units, work
from cdmpp.devices.registry import known, lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import element_types
from cdmpp.model.domain.evidence import Evidence, QueryKind
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.programs.operators import OperatorSpec, make_operator, parse_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import SERVING_ENGINES
from cdmpp.programs.templates import size_names

BELOW, APART, SLOWER, LARGE_BYTES, TIMES_BOUND = 0.9, 3.0, 1.05, 16e6, 10.0
KINDS = ("engines", "unmeasured", "monotone", "roofline", "siblings", "fused")
RESULT = Path(__file__).parent / "results" / "agreement.json"
#: (device, device of which no figure is less).
SIBLINGS = {"h100-sxm": "h200", "a100-pcie-80gb": "a100-sxm4-80gb", "b200": "gb200", "b300": "gb300", "l40": "l40s"}
ENGINES = (None, *SERVING_ENGINES)


def bound_s(query: Query) -> tuple[float, bool, float]:
    """Physical bound in seconds, whether it is a pass over memory, and its bytes; from the operator's definition."""
    spec, device = query.program.operator, query.device
    assert isinstance(spec, OperatorSpec) and isinstance(device, DeviceSpec)
    fields = spec.model_dump(exclude={"operator", "dtype"})
    sizes = {name: np.array([fields.pop(name)]) for name in size_names(spec.operator)}
    flops, moved = (float(x[0]) for x in work(spec.operator, spec.dtype, fields, sizes))
    matrix = uses_matrix_units(spec.operator)
    fits = moved <= (device.l2_bytes or 0)
    memory_s = moved / device.mem_bandwidth_bytes_per_s / (5.0 if fits else 1.0)
    compute_s = flops / device.peak(spec.dtype, matrix=matrix)
    return max(memory_s, compute_s), memory_s >= compute_s and not matrix, moved


@dataclass
class Counts:
    """Checks and violations by operator and kind."""

    checked: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, operator: str, kind: str, is_broken: bool, example: str) -> None:
        """Count one check."""
        self.checked[operator, kind] += 1
        if is_broken:
            self.broken[operator, kind] += 1
            self.examples.setdefault(kind, []).append(example)

    def rate(self, kind: str, operator: str | None = None) -> float:
        """Share of the checks that are broken; 0 without a check."""
        keys = [key for key in self.checked if key[1] == kind and operator in (None, key[0])]
        checked = sum(self.checked[key] for key in keys)
        return sum(self.broken[key] for key in keys) / checked if checked else 0.0


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A size between two; half of the time a multiple of 64 where it is large enough."""
    size = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    return max(64, size // 64 * 64) if size > 128 and rng.random() < 0.5 else size


def _attention(rng: random.Random, dtype: str) -> dict[str, Any]:
    kv_heads = rng.choice((1, 2, 4, 8, 16))
    heads = kv_heads * rng.choice((1, 2, 4, 8))
    return {"dtype": dtype, "heads": heads, "kv_heads": kv_heads, "head_dim": rng.choice((64, 128))}


def random_operator(rng: random.Random) -> OperatorSpec:
    """A random operator of a kind that models ask for."""
    name = rng.choice(OPERATORS)
    half, plain = rng.choice(("float16", "bfloat16")), rng.choice(("float32", "float16", "bfloat16"))
    if name == "linear":
        types = rng.choice(({"dtype": half}, {"dtype": "float8_e4m3", "scaling": rng.choice(("channel", "block128"))}))
        sizes = {"m": _log_uniform(rng, 1, 16384), "n": _log_uniform(rng, 64, 28672), "k": _log_uniform(rng, 64, 28672)}
        fields = {**types, **sizes}
    elif name == "bmm":
        sizes = {n: _log_uniform(rng, 16, 2048) for n in ("m", "n", "k")}
        fields = {"dtype": plain, "batch": _log_uniform(rng, 1, 256), **sizes}
    elif name == "attention_decode":
        fields = {"batch": _log_uniform(rng, 1, 256), "q_len": 1, "past_len": _log_uniform(rng, 1, 65536)}
        fields |= _attention(rng, "bfloat16")
    elif name in ("attention_prefill", "attention_encoder"):
        past = 0 if name == "attention_encoder" or rng.random() < 0.5 else _log_uniform(rng, 1, 16384)
        fields = {"batch": _log_uniform(rng, 1, 16), "q_len": _log_uniform(rng, 1, 8192), "past_len": past}
        fields |= _attention(rng, "bfloat16")
    elif name == "moe":
        experts = rng.choice((8, 16, 64, 128, 256))
        fields = {
            "dtype": "bfloat16",
            "tokens": _log_uniform(rng, 1, 16384),
            "hidden": rng.choice((2048, 4096, 7168)),
            "intermediate": rng.choice((768, 1536, 2048, 14336)),
            "experts": experts,
            "topk": rng.choice((1, 2, 8)),
        }
    elif name in ("mla_decode", "mla_prefill"):
        decode = name == "mla_decode"
        fields = {
            "dtype": "bfloat16",
            "batch": _log_uniform(rng, 1, 128 if decode else 8),
            "q_len": 1 if decode else _log_uniform(rng, 1, 4096),
            "past_len": _log_uniform(rng, 1, 32768),
            "heads": rng.choice((8, 16, 32, 64, 128)),
        }
    elif name == "rotary_embedding":
        dim = rng.choice((64, 128))
        fields = {"dtype": half, "rows": _log_uniform(rng, 1, 65536), "cols": dim * rng.randint(2, 64), "head_dim": dim}
    elif name == "embedding":
        fields = {"dtype": half, "rows": _log_uniform(rng, 1, 65536), "cols": _log_uniform(rng, 64, 16384)}
        fields["table_rows"] = _log_uniform(rng, 1000, 200_000)
    else:
        dtype = half if name in ("rmsnorm", "silu_and_mul") else plain
        fields = {"dtype": dtype, "rows": _log_uniform(rng, 1, 65536), "cols": _log_uniform(rng, 64, 16384)}
        if name == "add":
            fields["inputs"] = 2
    return make_operator({"operator": name, **fields})


OPERATORS = (
    *("linear", "linear", "bmm", "attention_decode", "attention_prefill", "attention_encoder", "moe", "mla_decode"),
    *("mla_prefill", "rotary_embedding", "embedding", "rmsnorm", "layernorm", "softmax", "gelu", "silu_and_mul", "add"),
)


def doubled(operator: OperatorSpec) -> OperatorSpec | None:
    """The operator with twice the rows, or twice the batch; None where it would be too large."""
    fields = operator.model_dump()
    name = next(n for n in ("m", "rows", "tokens", "batch") if n in fields and not (n == "batch" and "m" in fields))
    try:
        return make_operator({**fields, name: 2 * fields[name]})
    except ValueError:
        return None


def walk(predictor: LatencyPredictor, programs: int, seed: int) -> tuple[Counts, int]:
    """Check random programs; returns the counts and the number of predictions."""
    rng, counts, predictions = random.Random(seed), Counts(), 0
    devices = [spec.name for spec in known() if spec.kind == "gpu"]
    evidence = Evidence(predictor.artifact.domain.contexts)

    def measured(answer: Prediction) -> bool:
        operator = parse_operator(answer.name)
        kind = QueryKind(
            answer.device, operator.operator, element_types(TensorProgram.from_operator(operator)), answer.backend
        )
        return evidence.was_measured(kind, evidence.measured_engine(kind, answer.framework or ""))

    for start in range(0, programs, 200):
        cases = list(_cases(rng, devices, min(200, programs - start)))
        queries = [query for case in cases for query in case]
        answers = iter(predictor.predict_queries(queries))
        predictions += len(queries)
        for case in cases:
            _check(counts, case, [next(answers) for _ in case], measured)
    return counts, predictions


def _cases(rng: random.Random, devices: list[str], count: int) -> Iterator[list[Query]]:
    """Queries of one program: each framework, then the doubled program, then the sibling device."""
    while count:
        operator = random_operator(rng)
        device = rng.choice(list(SIBLINGS)) if rng.random() < 0.5 else rng.choice(devices)
        spec, protocol = lookup(device), rng.choice(("kernel", "graph"))
        program, twice = TensorProgram.from_operator(operator), doubled(operator)
        if (operator.dtype.startswith("float8") and spec.peak("float8_e4m3", matrix=True) <= 1e9) or twice is None:
            continue
        case = [Query(program, spec, protocol, framework) for framework in ENGINES]  # type: ignore[arg-type]
        case += [replace(query, program=TensorProgram.from_operator(twice)) for query in case]
        if device in SIBLINGS:
            case += [replace(query, device=lookup(SIBLINGS[device])) for query in case[: len(ENGINES)]]
        yield case
        count -= 1


def _latency(answer: Prediction) -> float:
    return answer.latency_s or 0.0


def _check(
    counts: Counts, case: list[Query], answers: list[Prediction], measured: Callable[[Prediction], bool]
) -> None:
    if any(answer.error is not None for answer in answers):
        return
    size = len(ENGINES)
    for query, answer in zip(case, answers, strict=True):
        assert answer.latency_s is not None and isinstance(query.device, DeviceSpec)
        bound, memory, moved = bound_s(query)
        operator, text = answer.name.partition(":")[0], f"{answer.name} {answer.device} {answer.framework}"
        counts.add(operator, "roofline", answer.latency_s < BELOW * bound * 0.999, f"{text} {answer.latency_s:.2e}")
        if memory and moved > LARGE_BYTES:
            times = answer.latency_s / (moved / query.device.mem_bandwidth_bytes_per_s)
            counts.add(operator, "fused", times > TIMES_BOUND, f"{text} {times:.0f} x")
    for rows in (answers[:size], answers[size : 2 * size]):
        latencies = [row.latency_s or 0.0 for row in rows[1:]]
        text = f"{rows[0].name} {rows[0].device} {rows[0].protocol} " + " ".join(f"{x * 1e6:.1f}" for x in latencies)
        ends = min(rows[1:], key=_latency), max(rows[1:], key=_latency)
        apart = max(latencies) > APART * min(latencies)
        counts.add(text.partition(":")[0], "engines", apart, text)
        counts.add(text.partition(":")[0], "unmeasured", apart and not all(map(measured, ends)), text)
    pairs = {"monotone": answers[size : 2 * size], "siblings": answers[2 * size :]}
    for kind, others in pairs.items():
        for first, other in zip(answers, others, strict=False):
            assert first.latency_s and other.latency_s and first.lower_s and other.upper_s
            if kind == "siblings" and measured(first) and measured(other):
                continue
            faster = other.upper_s < first.lower_s if kind == "monotone" else other.latency_s > SLOWER * first.latency_s
            text = (
                f"{first.name} {first.device} {first.framework} {first.latency_s * 1e6:.1f} {other.latency_s * 1e6:.1f}"
            )
            counts.add(first.name.partition(":")[0], kind, faster, text)


def main() -> int:
    """Walk, print and write the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--examples", type=int, default=0, help="print so many violations of each kind")
    options = parser.parse_args()
    predictor = LatencyPredictor.load(options.model)
    counts, predictions = walk(predictor, options.programs, options.seed)
    print(f"{predictions:,} predictions of {predictor.model_id}\n| operator | " + " | ".join(KINDS) + " |")
    print("| --- |" + " ---: |" * len(KINDS))
    for name in (*sorted({operator for operator, _ in counts.checked}), None):
        print(f"| {name or 'all'} | " + " | ".join(f"{100 * counts.rate(k, name):.3f} %" for k in KINDS) + " |")
    for kind, examples in counts.examples.items():
        for example in random.Random(0).sample(examples, min(options.examples, len(examples))):
            print(f"{kind}: {example}")
    rates = {kind: counts.rate(kind) for kind in KINDS}
    command = f"python -m benchmarks.agreement --programs {options.programs} --seed {options.seed}"
    result = {"command": command, "model": predictor.model_id, "predictions": predictions, "rates": rates}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
