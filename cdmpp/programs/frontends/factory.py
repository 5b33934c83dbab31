"""Torch modules by the name of a factory: ``package.module:factory``."""

from __future__ import annotations

import difflib
import os
import re
import sys
from importlib import import_module
from typing import Any

from cdmpp.errors import CdmppError, DataError
from cdmpp.programs.frontends.torch_import import import_torch

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

    Parameters
    ----------
    text : str
        ``package.module:factory``. The factory returns a torch module, or a tuple of a module and example inputs. It
        may also be a module class, or a module itself.

    Returns
    -------
    module, example_inputs
        The inputs are None where the factory returns none.

    Raises
    ------
    DataError
        The Python module cannot be imported, it has no such name, the factory raises an exception, or it returns
        something else.
    MissingDependencyError
        torch is not installed.
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

    Returns
    -------
    tuple of Tensor, or dict of str to Tensor
        On ``meta``; a dictionary where the texts have names.

    Raises
    ------
    DataError
        A text has another form, or only some of several texts have names.
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
