"""Programs of a torch module, grouped by phase and by the modules that launch them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cdmpp.programs.frontends.graph import Unsupported
from cdmpp.programs.program import TensorProgram

Mode = Literal["inference", "training"]
#: Parts of a run: the forward pass; in training also the backward pass, and the update if it is asked for.
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class ListedProgram:
    """One program of one phase, with the modules that launch it.

    Attributes
    ----------
    program : int
        Index into :attr:`ModuleListing.programs`.
    call : str
        The ATen call that launches it.
    phase : {"forward", "backward", "optimizer"}
    modules : tuple of str
        Qualified names of the modules that launch it, distinct, in order; equal but for their numbers. The root has
        the empty name.
    count : int
        Launches in one run.
    remark : str
        Why the program is not the call's own, where it is not.
    """

    program: int
    call: str
    phase: str
    modules: tuple[str, ...]
    count: int
    remark: str = ""

    @property
    def module(self) -> str:
        """The modules as one text: ``layers.0-31.mlp.up``."""
        return paths_text(self.modules)


@dataclass(frozen=True)
class ModuleListing:
    """The programs of one run of a module.

    Attributes
    ----------
    name : str
        Class of the module.
    mode : {"inference", "training"}
    dtype, autocast : str or None
        Type to which the module was cast, and type of products under autocast.
    phases : tuple of str
        Phases of the run.
    programs : tuple of TensorProgram
        Distinct programs, in the order of their first launch.
    rows : tuple of ListedProgram
        In the order of their first launch.
    left_out : tuple of Unsupported
        Calls that launch something for which there is no operator.
    incomplete : frozenset of str
        Phases with such calls.
    """

    name: str
    mode: Mode
    dtype: str | None
    autocast: str | None
    phases: tuple[str, ...]
    programs: tuple[TensorProgram, ...]
    rows: tuple[ListedProgram, ...]
    left_out: tuple[Unsupported, ...] = ()
    incomplete: frozenset[str] = frozenset()


#: Program, call, phase, pattern of the module's name, remark.
_Key = tuple[int, str, str, tuple[str, ...], str]


@dataclass
class ProgramGroups:
    """Collects launches into rows: equal programs and calls of a phase whose modules differ only in numbers."""

    _programs: dict[str, int] = field(default_factory=dict)
    _listed: list[TensorProgram] = field(default_factory=list)
    _counts: dict[_Key, int] = field(default_factory=dict)
    _modules: dict[_Key, dict[str, None]] = field(default_factory=dict)

    def add(self, program: TensorProgram, call: str, phase: str, module: str, remark: str) -> None:
        """Count one launch."""
        index = self._programs.setdefault(program.hash, len(self._listed))
        if index == len(self._listed):
            self._listed.append(program)
        pattern = tuple("#" if part.isdecimal() else part for part in module.split("."))
        key = (index, call, phase, pattern, remark)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._modules.setdefault(key, {})[module] = None

    def programs(self) -> tuple[TensorProgram, ...]:
        """The distinct programs."""
        return tuple(self._listed)

    def rows(self) -> tuple[ListedProgram, ...]:
        """The rows, in the order of their first launch."""
        rows = []
        for key, count in self._counts.items():
            program, call, phase, _, remark = key
            rows.append(ListedProgram(program, call, phase, tuple(self._modules[key]), count, remark))
        return tuple(rows)


def paths_text(paths: Sequence[str]) -> str:
    """Qualified names that differ only in their numbers as one text; ranges may cover more names than there are.

    Examples
    --------
    >>> paths_text(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"])
    'layers.0-2.mlp'
    >>> paths_text(["0", "2"])
    '0,2'
    """
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(_numbers_text(dict.fromkeys(column)) for column in columns)


def _numbers_text(parts: Iterable[str]) -> str:
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
