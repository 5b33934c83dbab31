"""Read, price and solve a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError, InfeasibleError, violation_text
from cdmpp.model.domain.score import worst as worst_domain
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.fields import PriceRequest
from cdmpp.predict.requests.reliability import Choice, Ends, summarise
from cdmpp.predict.requests.request import CLOSE, Answer, Plan, Request
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.program import TensorProgram

_MOST_NAMED = 8
#: Violations of a schema that are compared with each other.
MAX_COMPARED = 1000
#: Faults of a plan that a check lists.
MAX_FAULTS = 20
V = TypeVar("V")
R = TypeVar("R", bound=BaseModel)
A = TypeVar("A", bound=Answer)


def read_request(model: type[R], value: Any) -> R:
    """A request from JSON values.

    Raises FieldError: the value violates the request's schema; the message names the first violations.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        violations = places(error, value)
        message = "; ".join(f"{path or 'request'}: {text}" for path, text in violations[:_MOST_NAMED])
        if len(violations) > _MOST_NAMED:
            message += f"; and {len(violations) - _MOST_NAMED} more"
        raise FieldError(
            message, path=violations[0][0], hint="docs/planning.md describes requests, docs/examples has some"
        ) from None


def check_unique(names: Sequence[str], where: str, field: str = "name") -> None:
    """Raise FieldError for a name that an earlier item of a list has; ``where``, ``field``: the list, and its field."""
    for i, name in enumerate(names):
        if names.index(name) != i:
            raise FieldError.at(f"{where}.{i}.{field}", f"{name!r} occurs twice")


def solve_request(request: Request[A], predictor: Predictor | None = None, control: SearchControl | None = None) -> A:
    """Price the programs of a request and solve it; ``predictor`` is not needed where the request gives all its costs.

    Raises FieldError or InfeasibleError: parts of the request do not fit together, or a program cannot be priced.
    """
    programs = request.price_requests()
    if not programs:
        return solve_priced(request, [], control)
    if predictor is None:
        raise FieldError.at(programs[0].path, "the cost of a program must be predicted", hint="pass a predictor")
    prices = predict_prices(programs, predictor)
    if control is not None:
        control.restart()  # the budget is that of the search
    return solve_priced(request, prices, control)


def solve_priced(request: Request[A], prices: Sequence[Prediction], control: SearchControl | None = None) -> A:
    """Solve a request whose programs are priced already.

    Raises FieldError or InfeasibleError: as :func:`solve_request`; also where the answer is not finite.
    """
    control = control if control is not None else SearchControl(request.budget)
    try:
        answer = request.with_prices(prices).solve(control)
    except ArithmeticError as error:
        raise _out_of_range(str(error)) from error
    except ValidationError as error:
        if any(problem["type"] != "finite_number" for problem in error.errors()):
            raise
        raise _out_of_range("the answer is not finite") from error
    return signed(request, answer, prices, control)


def _out_of_range(reason: str) -> FieldError:
    return FieldError(
        f"figures of this request are too large, too small or too far apart ({reason})",
        hint="give realistic seconds, bytes and counts",
    )


def signed(request: Request[A], answer: A, prices: Sequence[Prediction], control: SearchControl | None = None) -> A:
    """A copy of the answer with its model, the worst domain of its prices, its reliability, and unchecked memory.

    ``control``: limits a search with the prices at the ends of their intervals; None: no such search.
    """
    ended = control is not None and control.expired  # asked here: the search at the ends takes time, too
    used = request.used_prices(answer, prices)
    reliability = summarise(used, request.given_costs())
    marks: dict[str, Any] = {
        "model_id": prices[0].model_id if prices else None,
        "domain": worst_domain(price.domain for price in used),
        "reliability": reliability.model_copy(update={"ends": _ends(request, answer, prices, control)}),
    }
    reasons = ["ignore_memory is true"] if request.ignore_memory else request.unchecked_memory()
    if reasons and isinstance(answer, Plan):
        marks["explanation"] = [*answer.explanation, f"memory was not checked: {'; '.join(reasons)}"]
    if isinstance(answer, Plan) and request.budget is not None and control is not None and answer.gap > CLOSE:
        text = ""
        if getattr(answer, "steps", None) == 0:
            text = f"the search did not begin within budget_s {request.budget:g}: the plan is its best starting point"
        elif ended:
            text = f"the search ended with budget_s {request.budget:g}: a larger one may find a better plan"
        marks["explanation"] = [*marks.get("explanation", answer.explanation), *([text] if text else [])]
    return answer.model_copy(update=marks)


def _ends(request: Request[A], answer: A, prices: Sequence[Prediction], control: SearchControl | None) -> Ends | None:
    """The answer with all prices at their lower, and at their upper bounds; None where nothing was predicted."""
    if not prices or not isinstance(answer, Plan):
        return None
    at_ends = [request.with_prices(_at(prices, figure)) for figure in ("lower_s", "upper_s")]
    values = answer.ends or tuple(end.figure_of(answer) for end in at_ends)
    if None in values:
        return None
    best = [_best(end, answer, control) for end in at_ends]
    if None in best:
        best = [None, None]
    lower, upper = values
    return Ends(figure=answer.interval_figure, lower=lower, upper=upper, best_at_lower=best[0], best_at_upper=best[1])


def _at(prices: Sequence[Prediction], figure: str) -> list[Prediction]:
    """Predictions whose latency is one of their bounds."""
    seconds = [getattr(price, figure) for price in prices]
    return [replace(price, latency_s=s, lower_s=s, upper_s=s) for price, s in zip(prices, seconds, strict=True)]


def _best(request: Request[A], plan: Plan, control: SearchControl | None) -> Choice | None:
    """Whether the same plan is chosen with the costs of this request; None where that is not searched."""
    if plan.choice is None or control is None or control.expired:
        return None
    part = control.part()
    try:
        again = request.solve(part)
    except InfeasibleError:
        return None if part.expired else "no plan"
    if part.expired or not isinstance(again, Plan):
        return None
    return "same plan" if again.choice == plan.choice else "another plan"


def predict_prices(requests: Sequence[PriceRequest], predictor: Predictor) -> list[Prediction]:
    """Predict each program; equal ones are predicted once, and read once: whole models repeat their layers.

    Raises FieldError: a program or device cannot be read, or has no prediction.
    """
    programs: dict[str, TensorProgram] = {}
    devices: dict[str, DeviceSpec | str] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    queries: list[Query] = []
    positions: list[int] = []
    for request in requests:
        program = _read_once(programs, (request.program, request.backend), request.path, partial(_program, request))
        device = _read_once(devices, request.device, request.path, partial(resolve_device, request.device, str))
        key = (id(program), id(device), request.protocol, request.framework)
        if key not in numbers:
            numbers[key] = len(queries)
            queries.append(Query(program, device, request.protocol, request.framework))
        positions.append(numbers[key])
    predictions = predictor.predict_queries(queries)
    return [check_price(request, predictions[i]) for request, i in zip(requests, positions, strict=True)]


def check_price(request: PriceRequest, prediction: Prediction) -> Prediction:
    """The prediction, which has a latency. Raises FieldError with the field of the request: it is an error."""
    if prediction.error is not None:
        raise FieldError.at(request.path, prediction.error.message, hint=prediction.error.hint)
    return prediction


def _program(request: PriceRequest) -> TensorProgram:
    if set(request.program) == {"hash"}:
        raise FieldError.at(
            request.path, "a hash names a program that a service has stored", hint="give the program itself"
        )
    return program_from_request(request.program, request.backend)


def _read_once(read: dict[str, V], form: Any, path: str, make: Callable[[], V]) -> V:
    key = repr(form)
    if key not in read:
        try:
            read[key] = make()
        except FieldError:
            raise
        except CdmppError as error:
            raise FieldError.at(path, error.message, hint=error.hint) from None
    return read[key]


def places(error: ValidationError, value: Any) -> list[tuple[str, str]]:
    """Path and message of each violation of a JSON value.

    Paths are ``stages.0.forward_s``: without the union branches that pydantic inserts. Violations that only exclude
    other branches of a union are left out.
    """
    violations = [
        (_path(problem["loc"], problem["type"], value), problem["type"], problem["msg"])
        for problem in islice(error.errors(include_url=False, include_input=False, include_context=False), MAX_COMPARED)
    ]
    return [
        (".".join(path), violation_text(kind, message))
        for path, kind, message in violations
        if not _beside(path, kind, violations)
    ]


def schema_faults(error: ValidationError) -> list[str]:
    """The first violations of an answer's schema as lines of text, with the path of each."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)[:MAX_FAULTS]
    return [f"{'.'.join(map(str, p['loc'])) or 'answer'}: {violation_text(p['type'], p['msg'])}" for p in problems]


def first_faults(faults: Sequence[str]) -> list[str]:
    """The first faults of a plan, and how many there are more."""
    more = len(faults) - MAX_FAULTS
    return [*faults[:MAX_FAULTS], f"and {more} more"] if more > 0 else list(faults)


def _path(loc: tuple[int | str, ...], kind: str, value: Any) -> list[str]:
    parts: list[str] = []
    at = value
    for number, part in enumerate(loc):
        inside = isinstance(at, Mapping) and part in at
        if isinstance(at, list) and isinstance(part, int):
            inside = part < len(at)
        if inside:
            at = at[part]
        elif not (kind == "missing" and number == len(loc) - 1):
            continue  # a branch of a union
        parts.append(str(part)[:80])
    return parts


def _beside(path: list[str], kind: str, violations: list[tuple[list[str], str, str]]) -> bool:
    """Whether a violation belongs to another branch of a union than the value's."""
    for other, other_kind, _ in violations:
        deeper = len(other) > len(path) and other[: len(path)] == path
        if deeper and (kind.endswith("_type") or kind == "literal_error"):
            return True
        if other == path and kind.endswith("_type") and not other_kind.endswith("_type"):
            return True
    return False
