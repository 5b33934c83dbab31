"""Packaging: every dependency is pinned, and the pin that keeps TVM alive is still needed and obeyed."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_every_dependency_is_pinned() -> None:
    wanted = [*PROJECT["dependencies"], *chain.from_iterable(PROJECT["optional-dependencies"].values())]
    names = {re.split(r"[\[=<>; ]", text)[0].lower() for text in wanted} - {"cdmpp"}
    assert names - set(pins()) == set()


@pytest.mark.parametrize("name", ["torch", "apache-tvm", "apache-tvm-ffi"])
def test_the_named_pins_are_installed(name: str) -> None:
    assert importlib.metadata.version(name).partition("+")[0] == pins()[name]


def test_all_has_every_extra() -> None:
    extras = set(PROJECT["optional-dependencies"]) - {"all"}
    assert PROJECT["optional-dependencies"]["all"] == [f"cdmpp[{','.join(sorted(extras))}]"]


@pytest.mark.slow
@pytest.mark.tvm
def test_tune_context_survives_with_the_pinned_ffi() -> None:
    """With apache-tvm-ffi 0.1.15.post2 this process dies of a segmentation fault.

    When it passes with a newer one, the pin in constraints.txt and pyproject.toml can go.
    """
    program = """
from tvm import te
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target
a = te.placeholder((64, 64), name="a")
k = te.reduce_axis((0, 64), name="k")
c = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * a[k, j], axis=k), name="c")
context = ms.TuneContext(mod=te.create_prim_func([a, c]), target=Target({"kind": "llvm", "num-cores": 2}),
                         space_generator="post-order-apply", search_strategy="replay-trace", rand_state=1)
print(len(context.generate_design_space()))
"""
    # A process of its own: the crash must not take the test run with it.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 1
