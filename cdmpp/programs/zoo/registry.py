"""Networks by name: how one is registered, and made from ``"bert-tiny:batch=4,seq=128"``.

A network is a function that takes sizes and returns a module and its inputs; its keyword parameters with
their defaults are what a user may set. torch is imported when a network is first listed or made.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from cdmpp.errors import InvalidProgramError, MissingDependencyError, install_hint

if TYPE_CHECKING:
    import torch

    Build: TypeAlias = Callable[..., tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]

#: A parameter of a network: a size, a share (density) or a choice (a routing).
Value = int | float | str

#: Modules that register networks, in the order of :func:`network_names`.
_MODULES = ("vision", "transformers", "sequences", "others")

#: No size of a network is larger; a mistyped one would fill the memory.
MAX_SIZE = 1 << 20

_SEED = 0


@dataclass(frozen=True)
class ZooNetwork:
    """A network with random weights and inputs."""

    name: str  # its name in the zoo, e.g. ``"bert-tiny"``
    module: torch.nn.Module  # in evaluation mode, weights seeded
    inputs: tuple[torch.Tensor, ...]  # what ``module(*inputs)`` takes
    parameters: dict[str, Value]  # every parameter with its value, defaults included
    changed: dict[str, Value] = field(default_factory=dict)  # those that differ from the default

    @property
    def text(self) -> str:
        """The name with the parameters that are not the default: what :func:`parse_network` reads."""
        parts = [f"{key}={value}" for key, value in sorted(self.changed.items())]
        return f"{self.name}:{','.join(parts)}" if parts else self.name


_BUILDERS: dict[str, Build] = {}


def network(name: str) -> Callable[[Build], Build]:
    """Register a function ``(*, batch=1, ...) -> (module, inputs)`` under a name."""

    def register(build: Build) -> Build:
        if name in _BUILDERS:
            raise ValueError(f"two networks are called {name!r}")
        _BUILDERS[name] = build
        return build

    return register


def network_names() -> tuple[str, ...]:
    """Names of all networks."""
    return tuple(_builders())


def network_parameters(name: str) -> dict[str, Value]:
    """Parameters of a network with their defaults.

    Raises InvalidProgramError: no network of this name; the message lists the nearest names.
    """
    return {key: parameter.default for key, parameter in inspect.signature(_find(name)).parameters.items()}


def describe_network(name: str) -> str:
    """Description of a network, in one line."""
    return (inspect.getdoc(_find(name)) or name).split("\n\n")[0].replace("\n", " ")


def make_network(name: str, **parameters: Value) -> ZooNetwork:
    """A network with seeded random weights and inputs.

    ``name``: one of :func:`network_names`.
    ``**parameters``: sizes such as ``batch``, ``image`` or ``seq``; see :func:`network_parameters`.
    Raises InvalidProgramError: unknown name, unknown parameter or bad value; the hint lists what is allowed.
    Raises MissingDependencyError: torch is not installed.
    """
    build, defaults = _find(name), network_parameters(name)
    given = {key: _checked(name, key, value, defaults) for key, value in parameters.items()}
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        module, inputs = build(**given)
    changed = {key: value for key, value in given.items() if value != defaults[key]}
    return ZooNetwork(name, module.eval().requires_grad_(False), inputs, defaults | given, changed)


def parse_network(text: str) -> ZooNetwork:
    """The network that a text such as ``"resnet18"`` or ``"bert-tiny:batch=4,seq=128"`` names.

    Raises InvalidProgramError: as :func:`make_network`, or the text is not ``name:key=value,...``.
    """
    name, colon, rest = text.partition(":")
    name, parameters = name.strip(), {}
    defaults = network_parameters(name)
    for part in rest.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or key in parameters:
            raise InvalidProgramError(f"{text!r}: {part!r} is not key=value, once each", hint=_allowed(name))
        parameters[key] = _read(value, defaults.get(key))
    return make_network(name, **parameters)


def _read(value: str, default: Value | None) -> Value:
    """A number where the parameter is one; else the text, which the check then refuses by name."""
    for kind in (int, float):
        if isinstance(default, kind | float) and not isinstance(default, str):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _checked(name: str, key: str, value: Any, defaults: Mapping[str, Value]) -> Value:
    if key not in defaults:
        raise InvalidProgramError(f"{name}: no parameter {key!r}", hint=_allowed(name))
    default = defaults[key]
    if isinstance(default, str):
        if isinstance(value, str) and value:
            return value
        what = "text"
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
        what = "a number above 0, at most 1"
    else:
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE:
            return value
        what = f"a whole number from 1 to {MAX_SIZE}"
    raise InvalidProgramError(f"{name}: {key}={value!r} is not {what}", hint=_allowed(name))


def _allowed(name: str) -> str:
    items = network_parameters(name).items()
    return f"{name} takes " + ", ".join(f"{key} (default {value})" for key, value in items)


def _find(name: str) -> Build:
    builders = _builders()
    if name not in builders:
        near = difflib.get_close_matches(name, builders, n=3, cutoff=0.4)
        message = f"no network is called {name!r}" + (f"; near it: {', '.join(near)}" if near else "")
        raise InvalidProgramError(message, hint="the networks: " + ", ".join(builders))
    return builders[name]


def _builders() -> dict[str, Build]:
    try:
        for module in _MODULES:
            import_module(f"cdmpp.programs.zoo.{module}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError("the networks are written in torch", hint=install_hint("predict")) from error
    # In the order of the modules, whichever of them somebody imported first.
    place = {f"cdmpp.programs.zoo.{module}": i for i, module in enumerate(_MODULES)}
    return dict(sorted(_BUILDERS.items(), key=lambda item: place[item[1].__module__]))
