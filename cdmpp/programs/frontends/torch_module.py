"""Programs of a torch module in inference or training, listed without running it. torch is imported on first use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.programs.frontends.module_listing import PHASES, Mode, ModuleListing, ProgramGroups
from cdmpp.programs.frontends.torch_import import import_torch
from cdmpp.programs.program import TensorProgram

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
) -> ModuleListing:
    """List the kernels that eager PyTorch launches for one run of a module.

    Parameters
    ----------
    module : torch.nn.Module or torch.export.ExportedProgram
        Parameters may be on ``meta``. The module is traced as a copy and does not change.
    example_inputs : tuple, mapping, Tensor or None
        Positional arguments, keyword arguments, or the only argument. Only shapes and types count. None for an
        exported program: the inputs that it was exported with.
    mode : {"inference", "training"}
        ``eval()`` and the forward pass; or ``train()``, the forward and the backward pass.
    dtype : torch.dtype or {"float32", "float16", "bfloat16"}, optional
        Type of floating-point parameters, buffers and inputs, as after ``module.to(dtype)``. Default: their own types.
    autocast : torch.dtype or {"float16", "bfloat16"}, optional
        Products run in this type with casts before them, as under ``torch.autocast``.
    optimizer : {"sgd", "adam", "adamw"} or callable, optional
        In training, the update is listed too. A callable makes an optimizer of parameters:
        ``lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)``. Names stand for PyTorch's optimizers with
        ``foreach=True``, as it runs them on GPUs. Default: no update.

    Raises
    ------
    InvalidProgramError
        The module contains itself, does not accept the inputs, or looks at values.
    DataError
        An option is not known, or ``module`` or ``example_inputs`` is something else.
    MissingDependencyError
        torch is not installed.
    """
    torch = import_torch()
    from cdmpp.programs.frontends.torch_eager import eager_trace

    if mode not in MODES:
        raise DataError(f"mode {mode!r} is not known", hint="one of: " + ", ".join(MODES))
    if optimizer is not None and mode != "training":
        raise DataError("an optimizer has no gradients in inference", hint='pass mode="training", or no optimizer')
    exported = isinstance(module, torch.export.ExportedProgram)
    if exported and example_inputs is None and module.example_inputs is not None:
        arguments, keywords = module.example_inputs
    else:
        arguments, keywords = _arguments(torch, example_inputs)
    if not exported and not isinstance(module, torch.nn.Module):
        raise DataError(
            f"a {type(module).__name__} is no torch module", hint="pass a torch.nn.Module or an exported program"
        )
    types = {"dtype": _type(torch, "dtype", dtype), "autocast": _type(torch, "autocast", autocast)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch copies exported programs with its own deprecated calls
        trace = eager_trace(
            module.module() if exported else module,
            arguments,
            keywords=keywords,
            backward=mode == "training",
            # An exported program has the mode that it was exported in.
            train=None if exported else mode == "training",
            optimizer=_optimizer(torch, optimizer),
            **types,
        )
    groups = ProgramGroups()
    for launch in trace.launches:
        groups.add(TensorProgram.from_operator(launch.spec), launch.call, launch.phase, launch.module, launch.remark)
    phases = PHASES[:1] if mode == "inference" else PHASES[: 2 if optimizer is None else 3]
    name = type(module).__name__
    if not trace.launches and not trace.unsupported:
        raise InvalidProgramError(f"{name} launches no kernel", hint="its forward pass computes nothing on tensors")
    names = {key: None if value is None else str(value).removeprefix("torch.") for key, value in types.items()}
    return ModuleListing(
        name,
        mode,
        names["dtype"],
        names["autocast"],
        phases,
        groups.programs(),
        groups.rows(),
        trace.unsupported,
        trace.incomplete,
    )


def _arguments(torch: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise DataError(
        f"example_inputs must be inputs of the module, not {str(inputs)[:60]!r} ({type(inputs).__name__})",
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
