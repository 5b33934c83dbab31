"""Former import paths of documented packages and modules: ``cdmpp.replay`` is :mod:`cdmpp.simulate.replay`.

A former path gives the same module object as the present one. Only paths that the documentation has shown are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

_PRESENT = {
    "artifact": "model.artifact",
    "client": "predict.client",
    "collectives": "model.collectives",
    "curves": "predict.curves",
    "data.measure.timing_devices": "data.measure.library",
    "data.networks": "data.splits",
    "data.public": "data.load",
    "demo": "cli.demo",
    "distributed": "plan.distributed",
    "emulator": "simulate.emulator",
    "exports": "plan.formats",
    "frontends": "programs.frontends",
    "llm": "predict.llm",
    "measure": "data.measure",
    "modules": "predict.modules",
    "planning": "plan",
    "prediction": "predict.prediction",
    "predictor": "predict.predictor",
    "replay": "simulate.replay",
    "tables": "predict.tables",
    "traces": "simulate.traces",
    "training": "train",
    "units": "utils.units",
}


def _present(name: str) -> str | None:
    """Return the present name of a module, or None if the name is not a former one."""
    package, _, rest = name.partition(".")
    head, _, tail = (rest, "", "") if rest in _PRESENT else rest.partition(".")
    if package != "cdmpp" or head not in _PRESENT:
        return None
    return f"cdmpp.{_PRESENT[head]}" + (f".{tail}" if tail else "")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        present = _present(fullname)
        if present is None:
            return None
        spec = find_spec(present)
        if spec is None:
            return None
        alias = ModuleSpec(fullname, _Loader(present, spec), origin=spec.origin, is_package=False)
        alias.submodule_search_locations = spec.submodule_search_locations
        return alias


class _Loader(Loader):
    def __init__(self, present: str, spec: ModuleSpec) -> None:
        self._present, self._spec = present, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._present)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it by the alias

    def get_code(self, fullname: str) -> CodeType | None:  # for ``python -m``
        loader = self._spec.loader
        code: CodeType | None = loader.get_code(self._present)  # type: ignore[union-attr]
        return code


def install() -> None:
    """Let the former paths be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
