"""TVM's features of scheduled programs (PerStoreFeature): 164 numbers for each written buffer."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cdmpp.errors import InvalidProgramError, MissingDependencyError, install_hint

Array = np.ndarray[Any, np.dtype[Any]]

WIDTH = 164
#: Programs that are handed to TVM at once.
_CHUNK = 256
#: Targets: of a GPU's, no feature reads the architecture.
_CPU, _GPU = {"kind": "llvm", "num-cores": 1}, {"kind": "cuda", "arch": "sm_70"}
_INTRINSICS = "tvm.s_tir.tensor_intrin"


def extract(texts: Sequence[str], *, gpu: bool = False) -> list[Array]:
    """PerStoreFeature of programs given as TVM JSON, some milliseconds each.

    ``gpu``: the programs have thread bindings, whose extents are features.
    Returns for each program float32, (stores, 164), as TVM scales them: log2(1 + x).
    Raises MissingDependencyError: TVM is not installed.
    Raises InvalidProgramError: a text is not a program in TVM's JSON.
    """
    try:
        import tvm
    except ImportError as error:
        raise MissingDependencyError("PerStoreFeature is TVM's", hint=install_hint("tvm")) from error
    with _without_intrinsics():
        return _extract(tvm, texts, _GPU if gpu else _CPU)


@contextmanager
def _without_intrinsics() -> Iterator[None]:
    """TuneContext imports the tensor intrinsics, half a minute of work that no feature needs."""
    stands_in = types.ModuleType(_INTRINSICS)
    used = sys.modules.setdefault(_INTRINSICS, stands_in)
    try:
        yield
    finally:
        if used is stands_in:
            del sys.modules[_INTRINSICS]


def _extract(tvm: Any, texts: Sequence[str], target: dict[str, Any]) -> list[Array]:
    from tvm.s_tir import meta_schedule as ms

    extractor = ms.feature_extractor.PerStoreFeature()
    features: list[Array] = []
    context = None
    for start in range(0, len(texts), _CHUNK):
        candidates = []
        for number, text in enumerate(texts[start : start + _CHUNK], start):
            try:
                module = tvm.ir.load_json(text)
            except (ValueError, RuntimeError, TypeError, AttributeError) as error:
                raise InvalidProgramError(
                    f"program {number} is not TVM JSON: {' '.join(str(error).split())[:200]}",
                    hint="pass programs as cdmpp's records hold them",
                ) from None
            module = module if isinstance(module, tvm.IRModule) else tvm.IRModule({"main": module})
            candidates.append(ms.MeasureCandidate(tvm.s_tir.Schedule(module), []))
        # Of the context the extractor reads the target alone.
        context = context or ms.TuneContext(candidates[0].sch.mod, target=tvm.target.Target(target), num_threads=1)
        features += [rows.numpy().astype(np.float32) for rows in extractor.extract_from(context, candidates)]
    return features
