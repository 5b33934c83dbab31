"""Reading, writing and comparing stored answers."""

import gzip
import json
import math
import platform
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.stored_answers.cases import make_answers

FILE = Path(__file__).with_name("answers.json.gz")
#: Relative difference allowed on another machine: matrix kernels differ in their last digits.
OTHER_MACHINE_TOLERANCE = 1e-4
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?")


def machine() -> dict[str, str]:
    """What the last digit of a prediction depends on: instruction set and numeric libraries."""
    flags = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    vectors = sorted(flag for flag in flags.split() if flag.startswith(("avx", "fma", "amx")))
    libraries = {name: version(name) for name in ("numpy", "onnxruntime")}
    return {"machine": platform.machine(), "vector_instructions": " ".join(vectors), **libraries}


def compute() -> dict[str, Any]:
    """Every case with its answer, and the machine that computed them."""
    return {"machine": machine(), "answers": dict(make_answers())}


def write(stored: dict[str, Any]) -> None:
    """Write the file; equal answers give equal bytes."""
    text = json.dumps(stored, indent=0, sort_keys=True)
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def read() -> dict[str, Any]:
    """The stored answers."""
    stored: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return stored


def differences(stored: Any, computed: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Describe each place where two JSON values differ.

    Sentences are compared by the numbers in them: their words may be improved.
    """
    if isinstance(stored, dict) and isinstance(computed, dict):
        for key in sorted(stored.keys() ^ computed.keys()):
            yield f"{path}.{key}: only in {'the stored answer' if key in stored else 'this answer'}"
        for key in sorted(stored.keys() & computed.keys()):
            yield from differences(stored[key], computed[key], tolerance, f"{path}.{key}")
    elif isinstance(stored, list | tuple) and isinstance(computed, list | tuple) and len(stored) == len(computed):
        for index, (before, after) in enumerate(zip(stored, computed, strict=True)):
            yield from differences(before, after, tolerance, f"{path}[{index}]")
    elif isinstance(stored, str) and isinstance(computed, str) and " " in stored:
        if not tolerance and sorted(_NUMBER.findall(stored)) != sorted(_NUMBER.findall(computed)):
            yield f"{path}: {stored!r} became {computed!r}"
    elif type(stored) is float and type(computed) is float:
        if not math.isclose(stored, computed, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{path}: {stored!r} became {computed!r}"
    elif type(stored) is not type(computed) or stored != computed:
        yield f"{path}: {stored!r} became {computed!r}"
