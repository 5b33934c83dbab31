"""Torch modules: loaded by the name of a factory, and the library kernels that PyTorch launches for them.

A module is listed without running it, in inference or training, and its programs are grouped by phase and by the
modules that launch them. torch is imported on first use.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Literal, get_args

from cdmpp.errors import CdmppError, DataError, InvalidProgramError
from cdmpp.programs.frontends.graph import GraphBuilder, ProgramGraph, Unsupported
from cdmpp.programs.frontends.imports import import_torch
from cdmpp.programs.frontends.kernel_work import Work
from cdmpp.programs.program import TensorProgram

if TYPE_CHECKING:
    from cdmpp.programs.frontends.torch_eager import EagerTrace
    from cdmpp.programs.operators import OperatorSpec

Mode = Literal["inference", "training", "forward"]
#: Parts of a run: the forward pass; in training also the backward pass, and the update if it is asked for.
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class ListedProgram:
    """One program of one phase, with the modules that launch it."""

    program: int  # index into :attr:`ModuleListing.programs`
    call: str  # the ATen call that launches it
    phase: str  # {"forward", "backward", "optimizer"}
    # Qualified names of the modules that launch it, distinct, in order; equal but for their numbers. The root has the
    # empty name.
    modules: tuple[str, ...]
    count: int  # launches in one run
    remark: str = ""  # why the program is not the call's own, where it is not
    work: Work | None = None  # bounds of the kernel besides those of the program

    @property
    def module(self) -> str:
        """The modules as one text: ``layers.0-31.mlp.up``."""
        return paths_text(self.modules)


@dataclass(frozen=True)
class ListedCall:
    """A call on the host line, with indices into :attr:`ModuleListing.rows` of the kernels that it launches."""

    name: str
    phase: str
    rows: tuple[int, ...] = ()
    times: int = 1


@dataclass(frozen=True)
class ModuleListing:
    """The programs of one run of a module."""

    name: str  # class of the module
    mode: Mode
    # Type to which the module was cast, and type of products under autocast.
    dtype: str | None
    autocast: str | None
    phases: tuple[str, ...]  # phases of the run
    programs: tuple[TensorProgram, ...]  # distinct programs, in the order of their first launch
    rows: tuple[ListedProgram, ...]  # in the order of their first launch
    calls: tuple[ListedCall, ...]  # every call of the host, in order
    left_out: tuple[Unsupported, ...] = ()  # calls that launch something for which there is no operator
    incomplete: frozenset[str] = frozenset()  # phases with such calls
    assumptions: tuple[str, ...] = ()  # what was assumed of values that the module reads


DTYPES = ("float32", "float16", "bfloat16")
#: Optimizers by name -> their classes in ``torch.optim``.
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
MODES: tuple[str, ...] = get_args(Mode)


def list_module(
    module: Any,
    example_inputs: Any,
    *,
    mode: Mode = "inference",
    dtype: Any = None,
    autocast: Any = None,
    optimizer: str | Callable[..., Any] | None = None,
    compiled: bool = False,
) -> ModuleListing:
    """List the kernels that eager PyTorch launches for one run of a module; ``compiled``: of torch.compile.

    The other parameters are those of :meth:`cdmpp.predict.modules.predictor.ModulePredictor.predict_module`. The module
    is traced as a copy and does not change. Raises InvalidProgramError where the module contains itself, does not
    accept the inputs, or looks at values; and DataError where an option is not known, or ``module`` or
    ``example_inputs`` is something else.
    """
    torch = import_torch()
    from cdmpp.programs.frontends.torch_eager import eager_trace

    if mode not in MODES:
        raise DataError(f"mode {mode!r} is not known", hint="one of: " + ", ".join(MODES))
    if optimizer is not None and mode != "training":
        raise DataError(f"an optimizer has no gradients in mode {mode}", hint='pass mode="training", or no optimizer')
    exported = isinstance(module, torch.export.ExportedProgram)
    if exported and example_inputs is None and module.example_inputs is not None:
        arguments, keywords = module.example_inputs
    else:
        arguments, keywords = _arguments(torch, example_inputs)
    if not exported and not isinstance(module, torch.nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        raise DataError(f"{kind} is not a torch module", hint="pass a torch.nn.Module object or an exported program")
    leaves = torch.utils._pytree.tree_leaves((arguments, keywords))
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InvalidProgramError(f"example_inputs have no elements: {shapes}", hint="pass a batch of at least 1")
    types = {"dtype": _type(torch, "dtype", dtype), "autocast": _type(torch, "autocast", autocast)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch copies exported programs with its own deprecated calls
        trace = eager_trace(
            module.module() if exported else module,
            arguments,
            keywords=keywords,
            backward=mode == "training",
            # An exported program has the mode that it was exported in.
            train=None if exported or mode == "forward" else mode == "training",
            optimizer=_optimizer(torch, optimizer),
            with_graph=compiled,
            **types,
        )
    if compiled:
        from cdmpp.programs.frontends.torch_compiled import compiled_trace

        trace = compiled_trace(trace)
    phases = PHASES[:1] if mode != "training" else PHASES[: 2 if optimizer is None else 3]
    name = type(getattr(module, "_orig_mod", module)).__name__
    if not trace.launches and not trace.unsupported:
        raise InvalidProgramError(f"{name} launches no kernel", hint="its forward pass computes nothing on tensors")
    names = {key: None if value is None else str(value).removeprefix("torch.") for key, value in types.items()}
    assumptions = trace.assumptions
    if not compiled and not exported and any(map(is_compiled_module, list(module.modules())[1:])):
        assumptions += ("parts that torch.compile made run as eager ones",)
    listed = (*_grouped(trace), trace.unsupported, trace.incomplete, assumptions)
    return ModuleListing(name, mode, names["dtype"], names["autocast"], phases, *listed)


def is_compiled_module(module: Any) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def exported_library_graph(exported: Any, name: str) -> ProgramGraph:
    """The kernels of one forward pass, each after the one before, as on a stream.

    ``exported``: with the example inputs that it was exported with; their shapes are those of the kernels.
    ``name``: what to call it in messages.
    Raises InvalidProgramError: not an exported program, one without example inputs, or one that does not run without
    data.
    Raises MissingDependencyError: torch is not installed.
    """
    torch = import_torch()
    from cdmpp.programs.frontends.torch_eager import eager_trace

    if not isinstance(exported, torch.export.ExportedProgram) or exported.example_inputs is None:
        raise InvalidProgramError(
            f"{name}: not an exported program with example inputs",
            hint="write it with torch.export.save(torch.export.export(module.eval(), inputs), path)",
        )
    arguments, keywords = exported.example_inputs
    builder = GraphBuilder(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch copies exported programs with its own old calls
        trace = eager_trace(exported.module(), arguments, keywords=keywords)
    last: tuple[str, ...] = ()
    for number, launch in enumerate(chain.from_iterable([repeated] * repeated.runs for repeated in trace.launches)):
        node = f"{launch.call}_{number}"
        program = TensorProgram.from_operator(launch.spec)
        builder.launch(node, launch.call, program, reads=last, writes=(node,), remark=launch.remark)
        last = (node,)
    for entry in trace.unsupported:
        for copy in range(entry.count):
            node = f"{entry.operator}_unsupported_{copy}"
            builder.unsupported(node, entry.operator, entry.reason, reads=(), writes=())
    return builder.build()


def _arguments(torch: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    names = f" with keys {', '.join(map(repr, inputs))}"[:80] if isinstance(inputs, Mapping) else ""
    raise DataError(
        f"example_inputs must be inputs of the module, not {type(inputs).__name__}{names}",
        hint="pass a tuple of positional arguments, a dictionary of keyword arguments, or one tensor",
    )


def _type(torch: Any, option: str, value: Any) -> Any:
    """A torch.dtype by its name."""
    allowed = DTYPES if option == "dtype" else DTYPES[1:]
    name = str(value).removeprefix("torch.")
    if value is not None and name not in allowed:
        raise DataError(f"{option} {name!r} is not supported", hint="one of: " + ", ".join(allowed))
    return None if value is None else getattr(torch, name)


def _optimizer(torch: Any, optimizer: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    if optimizer is None or callable(optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise DataError(f"optimizer {optimizer!r} is not known", hint=f"a callable, or {', '.join(OPTIMIZERS)}")
    kind = getattr(torch.optim, OPTIMIZERS[optimizer])
    return lambda parameters: kind(parameters, lr=1e-3, foreach=True)


def _grouped(trace: EagerTrace) -> tuple[tuple[TensorProgram, ...], tuple[ListedProgram, ...], tuple[ListedCall, ...]]:
    """Distinct programs and their rows, both in the order of their first launch, and the calls that launch them.

    A row has equal programs and calls of a phase whose modules differ only in numbers.
    """
    programs: dict[str, TensorProgram] = {}
    specs: dict[OperatorSpec, TensorProgram] = {}
    rows: dict[tuple[Any, ...], list[str]] = {}
    row_of: list[int] = []
    index: dict[tuple[Any, ...], int] = {}
    for launch in trace.launches:
        program = specs.get(launch.spec)
        if program is None:
            program = specs[launch.spec] = TensorProgram.from_operator(launch.spec)
        programs.setdefault(program.hash, program)
        pattern = tuple("#" if part.isdecimal() else part for part in launch.module.split("."))
        key = (program.hash, launch.call, launch.phase, pattern, launch.remark, launch.work)
        rows.setdefault(key, []).append(launch.module)
        row_of.append(index.setdefault(key, len(index)))
    place = {digest: i for i, digest in enumerate(programs)}
    listed = tuple(
        ListedProgram(place[digest], call, phase, tuple(dict.fromkeys(modules)), len(modules), remark, work)
        for (digest, call, phase, _, remark, work), modules in rows.items()
    )
    ends = list(accumulate(call.launches for call in trace.calls))
    calls = tuple(
        ListedCall(call.name, call.phase, tuple(row_of[end - call.launches : end]), call.times)
        for call, end in zip(trace.calls, ends, strict=True)
    )
    return tuple(programs.values()), listed, calls


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


#: Element types of ``--input``.
INPUT_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_MODULE = re.compile(rf"{_NAME}:{_NAME}")


def is_factory(text: str) -> bool:
    """Whether a text has the form ``package.module:factory``, and is no operator."""
    if _MODULE.fullmatch(text) is None:
        return False
    from cdmpp.programs.operators import PRODUCT_ALIASES, operator_types

    return text.partition(":")[0] not in (*operator_types(), *PRODUCT_ALIASES)


def load_factory(text: str) -> tuple[Any, Any]:
    """Import a factory and call it; the current directory is importable.

    ``text``: ``package.module:factory``. The factory returns a torch module, or a tuple of a module and example inputs.
    It may also be a module class, or a module itself.
    Returns the module and its inputs, which are None where the factory returns none.
    Raises DataError: the Python module cannot be imported, it has no such name, the factory raises an exception, or it
    returns something else.
    Raises MissingDependencyError: torch is not installed.
    """
    torch = import_torch()
    name, _, attribute = text.partition(":")
    factory = _attribute(_imported(name), attribute, text)
    made = factory
    if not isinstance(factory, torch.nn.Module | tuple):
        if not callable(factory):
            raise DataError(
                f"{text} has type {type(factory).__name__}, which is no factory",
                hint="name a function without arguments that returns a torch module",
            )
        try:
            made = factory()
        except CdmppError:
            raise
        except Exception as error:
            raise DataError(
                f"{text} raised {_described(error)}", hint=f"it is called without arguments: {attribute}()"
            ) from error
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module | torch.export.ExportedProgram):
        raise DataError(
            f"{text} returned {type(made).__name__}, not a torch module",
            hint="return a torch.nn.Module, or a tuple of a module and its example inputs",
        )
    return module, inputs


def parse_inputs(texts: list[str]) -> Any:
    """Example inputs of texts such as ``8,3,224,224``, ``1,128:int64`` or ``input_ids=1,128:int64``.

    The tensors are on ``meta``; a dictionary where the texts have names.
    Raises DataError: a text has another form, or only some of several texts have names.
    """
    torch = import_torch()
    tensors: list[tuple[str, Any]] = []
    for text in texts:
        name, equals, rest = text.rpartition("=")
        shape, colon, dtype = rest.partition(":")
        sizes = [int(size) for size in shape.split(",") if re.fullmatch(r"\s*[0-9]{1,12}\s*", size)]
        known = dtype.strip() in INPUT_DTYPES if colon else True
        if len(sizes) != len(shape.split(",")) or not known or (equals and not name.isidentifier()):
            raise DataError(
                f"input {text!r} is not [NAME=]SHAPE[:TYPE]",
                hint="for example 8,3,224,224 or input_ids=1,128:int64; types: " + ", ".join(INPUT_DTYPES),
            )
        kind = getattr(torch, dtype.strip() or "float32")
        tensors.append((name, torch.empty(sizes, dtype=kind, device="meta")))
    names = {name for name, _ in tensors}
    if "" not in names and len(names) == len(tensors):
        return dict(tensors)
    if names == {""}:
        return tuple(tensor for _, tensor in tensors)
    raise DataError(
        f"inputs {', '.join(texts)}: a name is missing or occurs twice", hint="give all inputs names, or none of them"
    )


def _imported(name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise DataError(
                f"there is no Python module {missing!r}",
                hint="modules of the current directory and of the environment are found; write package.module:factory",
            ) from error
        raise DataError(
            f"importing {name} failed: it needs {missing!r}, which is not installed", hint="install that package"
        ) from error
    except (Exception, SystemExit) as error:
        raise DataError(
            f"importing {name} raised {_described(error)}", hint=f"python -c 'import {name}' shows where"
        ) from error


def _attribute(value: Any, path: str, text: str) -> Any:
    for part in path.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [n for n in dir(value) if not n.startswith("_")], n=3)
            raise DataError(
                f"{text}: {part!r} does not exist" + (f"; did you mean {' or '.join(near)}?" if near else ""),
                hint="name a function that returns a torch module",
            )
        value = getattr(value, part)
    return value


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}".rstrip(": ")
