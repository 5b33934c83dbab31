"""Reading, pricing and solving a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import price
from cdmpp.compose.request import Answer, OldRequest, Request
from cdmpp.compose.validation_errors import places
from cdmpp.errors import FieldError
from cdmpp.nn.domain import worst as worst_domain
from cdmpp.prediction import Prediction, Predictor

_MOST_NAMED = 8
R = TypeVar("R", bound=BaseModel)
AnyRequest = Request[Any] | OldRequest


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


def solve_request(request: AnyRequest, predictor: Predictor | None = None, control: SearchControl | None = None) -> Any:
    """Price the programs of a request and solve it.

    Parameters
    ----------
    request : Request
    predictor : Predictor, optional
        Prices the programs; may be left out where the request gives all its costs.
    control : SearchControl, optional
        Default: one with the request's own budget.

    Returns
    -------
    Answer
        Of the request's type.

    Raises
    ------
    FieldError, InfeasibleError
        Parts of the request do not fit together, or a program cannot be priced; ``path`` names the field.
    """
    programs = request.price_requests()
    if programs and predictor is None:
        raise FieldError(
            f"{programs[0].path}: a program's cost has to be predicted", path=programs[0].path, hint="pass a predictor"
        )
    prices = price(programs, predictor) if programs and predictor is not None else []
    return solve_priced(request, prices, control)


def solve(
    request: AnyRequest, predictor: Predictor | None = None, control: SearchControl | None = None
) -> dict[str, Any]:
    """:func:`solve_request` as JSON values."""
    return to_json(solve_request(request, predictor, control))


def solve_priced(request: AnyRequest, prices: Sequence[Prediction], control: SearchControl | None = None) -> Any:
    """Solve a request whose programs are priced already.

    Raises
    ------
    FieldError, InfeasibleError
        As :func:`solve_request`; also where valid figures are too far apart to be computed with.
    """
    control = control if control is not None else SearchControl(request.budget)
    try:
        if isinstance(request, OldRequest):
            answer: Any = request.solve(prices, control)
        else:
            answer = request.with_prices(prices).solve(control)
    except ArithmeticError as error:
        raise _out_of_range(str(error)) from error
    answer = signed(answer, prices)
    if not _finite(to_json(answer)):
        raise _out_of_range("the answer is not finite")
    return answer


def finish(request: AnyRequest, prices: Sequence[Prediction], control: SearchControl | None = None) -> dict[str, Any]:
    """:func:`solve_priced` as JSON values."""
    return to_json(solve_priced(request, prices, control))


def to_json(answer: Answer | dict[str, Any]) -> dict[str, Any]:
    """An answer as JSON values."""
    return answer.model_dump() if isinstance(answer, Answer) else answer


def _out_of_range(reason: str) -> FieldError:
    return FieldError(
        f"figures of this request are too large, too small or too far apart ({reason})",
        hint="seconds, bytes and counts as they occur",
    )


def _finite(value: Any) -> bool:
    """Whether all numbers in JSON values are finite."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, list | tuple) else True


def signed(answer: Any, prices: Sequence[Prediction]) -> Any:
    """The answer with the model that priced it and the worst domain of its prices."""
    marks = {
        "model_id": prices[0].model_id if prices else None,
        "domain": worst_domain(price.domain for price in prices),
    }
    return answer.model_copy(update=marks) if isinstance(answer, Answer) else {**answer, **marks}
