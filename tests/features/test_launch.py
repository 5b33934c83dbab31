"""Launches of GPU programs against a run of each lane, and against what TVM allocates."""

import itertools
import json
import math
import random
import re
from collections import defaultdict
from typing import Any

import pytest

tvm = pytest.importorskip("tvm")

from tvm import s_tir  # noqa: E402

from cdmpp.data.importers.ansor import ansor_program  # noqa: E402
from cdmpp.features import launch_summary  # noqa: E402

PASSES = (
    "LowerInitBlock",
    "PlanAndUpdateBufferAllocationLocation",
    "ConvertBlocksToOpaque",
    "CompactBufferAllocation",
    "LowerOpaqueBlock",
    "FlattenBuffer",
)


def lowered(module: Any) -> Any:
    for name in PASSES:
        where = s_tir.transform if hasattr(s_tir.transform, name) else tvm.tirx.transform
        module = getattr(where, name)()(module)
    return module


class Lanes:
    """Runs a lowered program for every block, thread and iteration, and counts what each warp requests."""

    def __init__(self, module: Any) -> None:
        self.function = module["main"]
        self.loops: list[tuple[Any, int, str]] = []
        self.written: list[set[str]] = []
        self.sums: dict[str, float] = defaultdict(float)
        self.walk(self.function.body, [])

    def walk(self, node: Any, conditions: list[Any]) -> None:
        kind = type(node).__name__
        if kind == "AttrStmt" and str(node.attr_key) in ("thread_extent", "virtual_thread"):
            self.enter(node.node.var, int(node.value), str(node.node.thread_tag), node.body, conditions)
        elif kind == "For":
            names = ("serial", "parallel", "vectorized", "unrolled")
            tag = str(node.thread_binding.thread_tag) if node.thread_binding else names[int(node.kind)]
            self.enter(node.loop_var, int(node.extent), tag, node.body, conditions)
        elif kind == "SeqStmt":
            for child in node.seq:
                self.walk(child, conditions)
        elif kind == "IfThenElse":
            self.walk(node.then_case, [*conditions, node.condition])
        elif kind == "BufferStore":
            self.store(node, conditions)
        elif hasattr(node, "body"):
            self.walk(node.body, conditions)

    def enter(self, var: Any, extent: int, tag: str, body: Any, conditions: list[Any]) -> None:
        self.loops.append((var, extent, tag))
        self.written.append(used_buffers(body))
        self.walk(body, conditions)
        self.loops.pop()
        self.written.pop()

    def store(self, node: Any, conditions: list[Any]) -> None:
        accesses = [(node.buffer, node.indices, "store", conditions)]
        self.loads(node.value, conditions, accesses)
        for buffer, indices, what, held in accesses:
            scope = str(buffer.scope()) or "global"
            if scope in ("global", "shared"):
                unit = "sectors" if scope == "global" else "cycles"
                refilled = [(str(buffer.name), what) in names for names in self.written]
                self.sums[f"{scope}_{what}_{unit}"] += self.requests(node, scope, indices[0], held, refilled)

    def loads(self, node: Any, conditions: list[Any], out: list[Any]) -> None:
        kind = type(node).__name__
        if kind == "TensorLoad" or kind == "BufferLoad":
            out.append((node.source if hasattr(node, "source") else node.buffer, node.indices, "load", conditions))
        elif kind == "Call" and str(node.op.name).endswith("if_then_else"):
            self.loads(node.args[1], [*conditions, node.args[0]], out)
        else:
            for child in (getattr(node, name, None) for name in ("a", "b", "value")):
                if child is not None and hasattr(child, "ty"):
                    self.loads(child, conditions, out)

    def requests(self, node: Any, scope: str, index: Any, conditions: list[Any], refilled: list[bool]) -> float:
        """Mean over warps of the sectors or cycles of all requests; repeated addresses are kept in a register."""
        threads = math.prod(
            e for _, e, t in dict((t, (v, e, t)) for v, e, t in self.loops).values() if "threadIdx" in t
        )
        requests, warps = [], 0
        tags: dict[str, int] = {}
        for _, extent, tag in self.loops:
            if "Idx" in tag:
                tags[tag] = extent
        # A statement that does not depend on a virtual thread runs once.
        runs = ["Idx" not in t and ("vthread" not in t or uses(node, v)) for v, _, t in self.loops]
        inner = [loop for loop, own in zip(self.loops, runs, strict=True) if own]
        fills = [fill for fill, own in zip(refilled, runs, strict=True) if own]
        if inner and inner[-1][2] == "vectorized":
            *inner, vector = inner
        else:
            vector = None
        for block in itertools.product(*(range(e) for t, e in tags.items() if t.startswith("blockIdx"))):
            for warp in range(-(-threads // 32)):
                warps += 1
                before = None
                for at in itertools.product(*(range(e) for _, e, _ in inner)):
                    lanes: list[list[Any]] = []
                    for thread in range(warp * 32, min(threads, warp * 32 + 32)):
                        place = dict(zip((t for t in tags if t.startswith("blockIdx")), block, strict=True))
                        place["threadIdx.x"] = thread
                        env = {v: place[t] for v, _, t in self.loops if "Idx" in t}
                        env |= {v: 0 for v, _, t in self.loops if "vthread" in t}
                        env |= {v: i for (v, _, _), i in zip(inner, at, strict=True)}
                        row = []
                        for element in range(vector[1] if vector else 1):
                            here = env | ({vector[0]: element} if vector else {})
                            held = all(evaluate(c, here) for c in conditions)
                            row.append((4 * evaluate(index, here), held))
                        lanes.append(row)
                    now = lanes, [i for i, fill in zip(at, fills, strict=False) if fill]
                    requests += [lanes] if now != before else []
                    before = now
        return sum(count(scope, addresses) for addresses in split(requests)) / warps


def uses(node: Any, var: Any) -> bool:
    return str(var.name) in str(node)


def used_buffers(node: Any) -> set[tuple[str, str]]:
    """Buffers of a body that have to be loaded, or stored, in each of its runs."""
    text = str(node)
    stores = [
        name for name in ("A_shared", "B_shared") if f"{name}[" in text and re.search(rf"{name}\[[^=]*\] = ", text)
    ]
    loads = [name for name in ("A_shared", "B_shared") if re.search(rf"= .*{name}\[", text)]
    both = set(stores).intersection(loads)
    return {(name, what) for name in both for what in ("load", "store")}


def split(requests: list[list[list[Any]]]) -> list[list[int]]:
    """Addresses of each request: of whole vectors where all of them are contiguous, else of each element."""
    rows = [row for lanes in requests for row in lanes]
    contiguous = all(b[0] - a[0] == 4 for row in rows for a, b in itertools.pairwise(row))
    groups = [
        group
        for lanes in requests
        for group in ([[x for row in lanes for x in row]] if contiguous else list(zip(*lanes, strict=True)))
    ]
    return [[address for address, held in group if held] for group in groups]


def count(scope: str, addresses: list[int]) -> int:
    if scope == "global":
        return len({a // 32 for a in addresses})
    banks: dict[int, set[int]] = defaultdict(set)
    for a in addresses:
        banks[a // 4 % 32].add(a // 4)
    return max(map(len, banks.values()), default=0)


def evaluate(node: Any, env: dict[Any, int]) -> int:
    kind = type(node).__name__
    if kind == "Var":
        return next(value for var, value in env.items() if var.same_as(node))
    if kind == "IntImm":
        return int(node.value)
    if kind == "Cast":
        return evaluate(node.value, env)
    a, b = evaluate(node.a, env), evaluate(node.b, env)
    return {
        "Add": lambda: a + b,
        "Sub": lambda: a - b,
        "Mul": lambda: a * b,
        "FloorDiv": lambda: a // b,
        "FloorMod": lambda: a % b,
        "Min": lambda: min(a, b),
        "Max": lambda: max(a, b),
        "LT": lambda: a < b,
        "LE": lambda: a <= b,
        "GT": lambda: a > b,
        "GE": lambda: a >= b,
        "EQ": lambda: a == b,
        "And": lambda: a and b,
        "Or": lambda: a or b,
    }[kind]()


def tile(rng: random.Random, size: int, parts: int) -> list[int]:
    lengths = []
    for _ in range(parts):
        divisors = [d for d in range(1, size + 1) if size % d == 0 and d <= 4]
        lengths.append(rng.choice(divisors))
        size //= lengths[-1]
    return lengths


def tiled_steps(rng: random.Random, m: int, n: int, k: int) -> list[Any]:
    """Ansor's steps of a small matrix product with random tiles."""
    steps: list[Any] = [["CHW", 2, "local"]]
    for axis, size, parts in ((0, m, 4), (5, n, 4), (10, k, 2)):
        steps.append(["SP", 2, axis, size, tile(rng, size, parts), 1])
    steps += [["RE", 2, [0, 5, 1, 6, 2, 7, 10, 11, 3, 8, 12, 4, 9]], ["CHR", 1, "shared", [2]]]
    for stage in (3, 1):
        steps += [["SP", stage, 0, 1, [rng.choice((1, 2, 3))], 1], ["FFSP", stage, 0, [2, 1], 1, 1]]
    return [*steps, ["PR", 4, 0, "auto_unroll_max_step$16"]]


@pytest.mark.parametrize("seed", range(12))
def test_requests_equal_a_run_of_every_lane(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((4, 6, 8, 12, 16)) for _ in range(3)]
    program = ansor_program(
        json.dumps(["matmul_layer", sizes[0], sizes[2], sizes[1]]), tiled_steps(rng, sizes[0], sizes[1], sizes[2])
    )
    (summary,) = launch_summary(program, points=10**5)
    expected = Lanes(lowered(tvm.ir.load_json(program.tvm_json))).sums
    assert {name: summary[name] for name in expected} == pytest.approx(dict(expected), rel=1e-9)
