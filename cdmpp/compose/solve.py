"""The door for Python and the command line: read a request, price its programs, solve it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from cdmpp.compose.places import places
from cdmpp.compose.request import Asked, Request
from cdmpp.compose.watch import Watch
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.frontends.request import program_from_request
from cdmpp.nn.domain import worst
from cdmpp.prediction import Prediction, Predictor, Question
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.question import Backend

_MOST_NAMED = 8
R = TypeVar("R", bound=Request)


def read_request(model: type[R], value: Any) -> R:
    """A request from JSON values.

    Raises
    ------
    FieldError
        The value breaks the request's schema; the message names the first places.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = places(error, value)
        said = "; ".join(f"{path or 'request'}: {what}" for path, what in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise FieldError(
            said + more, path=found[0][0], hint="docs/planning.md and docs/examples have the forms"
        ) from None


def solve(request: Request, predictor: Predictor | None = None, watch: Watch | None = None) -> dict[str, Any]:
    """Price the programs of a request and answer it.

    Parameters
    ----------
    request : Request
    predictor : Predictor, optional
        Prices the programs; may be left out where the request gives all its costs.
    watch : Watch, optional
        Default: one with the request's own budget.

    Returns
    -------
    dict
        JSON values: the fields of ``request.answer_model``.

    Raises
    ------
    FieldError, InfeasibleError
        Parts of the request do not fit together, or a program cannot be priced; ``path`` names the field.
    """
    asked = request.asked()
    if asked and predictor is None:
        raise FieldError(
            f"{asked[0].path}: a program's cost has to be predicted",
            path=asked[0].path,
            hint="pass a predictor",
        )
    prices = price(asked, predictor) if asked and predictor is not None else []
    return finish(request, prices, watch)


def finish(request: Request, prices: Sequence[Prediction], watch: Watch | None = None) -> dict[str, Any]:
    """The answer from prices that are there: what the doors have in common behind their predictors.

    Raises
    ------
    FieldError, InfeasibleError
        As :func:`solve`; also where figures that each may be are too far apart to be computed with.
    """
    try:
        found = request.solve(prices, watch if watch is not None else Watch(request.budget))
    except ArithmeticError as error:
        raise _beyond(str(error)) from error
    if not _finite(found):
        raise _beyond("the answer is not finite")
    return signed(found, prices)


def _beyond(reason: str) -> FieldError:
    return FieldError(
        f"figures of this request are too large, too small or too far apart ({reason})",
        hint="seconds, bytes and counts as they occur",
    )


def _finite(value: Any) -> bool:
    """Whether JSON can say it."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, list | tuple) else True


def signed(found: dict[str, Any], prices: Sequence[Prediction]) -> dict[str, Any]:
    """An answer with the model that priced it and how far to trust it; also a search's best so far."""
    found["model_id"] = prices[0].model_id if prices else None
    found["domain"] = worst(price.domain for price in prices)
    return found


def price(asked: Sequence[Asked], predictor: Predictor) -> list[Prediction]:
    """Predict each program; equal ones are asked for once.

    Raises
    ------
    FieldError
        A program or device cannot be read, or has no prediction.
    """
    # Read once, however often a request names it: whole models repeat their layers.
    programs: dict[str, TensorProgram] = {}
    devices: dict[str, DeviceSpec | str] = {}
    keys: dict[tuple[Any, ...], int] = {}
    questions: list[Question] = []
    places: list[int] = []
    for one in asked:
        program = _once(programs, (one.program, one.backend), one.path, partial(_program, one))
        device = _once(devices, one.device, one.path, partial(_device, one.device))
        key = (id(program), id(device), one.protocol, one.framework)
        if key not in keys:
            keys[key] = len(questions)
            questions.append(Question(program, device, one.protocol, one.framework))
        places.append(keys[key])
    answers = predictor.predict_questions(questions)
    return [check_price(one, answers[place]) for one, place in zip(asked, places, strict=True)]


def check_price(asked: Asked, answer: Prediction) -> Prediction:
    """The answer, if it is one.

    Raises
    ------
    FieldError
        It is an error; this one names the field.
    """
    if answer.error is not None:
        raise FieldError(f"{asked.path}: {answer.error.message}", path=asked.path, hint=answer.error.hint)
    return answer


def _program(asked: Asked) -> TensorProgram:
    if set(asked.program) == {"hash"}:
        raise FieldError(
            f"{asked.path}: a hash names a program that a service knows",
            path=asked.path,
            hint="give the program itself",
        )
    backend: Backend | None = asked.backend
    return program_from_request(asked.program, backend)


def _device(device: str | Mapping[str, Any]) -> DeviceSpec | str:
    return device if isinstance(device, str) else from_mapping(device)


V = TypeVar("V")


def _once(known: dict[str, V], named: Any, path: str, make: Callable[[], V]) -> V:
    words = repr(named)
    if words not in known:
        try:
            known[words] = make()
        except FieldError:
            raise
        except CdmppError as error:
            raise FieldError(f"{path}: {error.message}", path=path, hint=error.hint) from None
    return known[words]
