"""Questions above single programs: requests and answers, as JSON gives and takes them.

A request belongs to no door. Python, the command line and the HTTP service read it with the same model,
price its programs with a predictor, and call :meth:`Request.solve`; so they give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cdmpp.compose.watch import Watch
from cdmpp.prediction import Prediction
from cdmpp.programs.question import DEFAULT_PROTOCOL, Backend, Framework, Protocol

#: Limits of what one request may hold: far above an honest one, and below what would fill the memory.
MAX_NAME, MAX_TEXT, MAX_COUNT = 200, 2000, 1_000_000
MAX_SECONDS = 1e9
MAX_BUDGET_S = 600.0


def _whole_number(value: Any) -> Any:
    """5.0 is an integer to JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: Put into ``Annotated[int, Field(...), WholeNumber]``: models are strict, and JSON has one kind of number.
WholeNumber = BeforeValidator(_whole_number)

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Seed = Annotated[int, Field(ge=0, lt=2**32), WholeNumber]
Budget = Annotated[
    float,
    Field(
        gt=0,
        le=MAX_BUDGET_S,
        description="Seconds that the search may take; it ends earlier when proven best.",
    ),
]
MaxSteps = Annotated[
    Annotated[int, Field(ge=1, le=10**9), WholeNumber] | None,
    Field(
        description="Steps after which the search ends, however fast the machine: with a budget that is not "
        "reached, equal requests give equal answers."
    ),
]
ProgramForm = Annotated[
    dict[str, Any],
    Field(
        min_length=1,
        max_length=64,
        description='A program as in POST /predict: an operator object, {"tvm_json": text}, '
        '{"tvmscript": text}, or over HTTP {"hash": text}.',
    ),
]
DeviceForm = Annotated[
    Name | dict[str, Any],
    Field(description="Name of a known device, or an object with the figures of one's own."),
]


class Closed(BaseModel):
    """Base of everything that travels: unknown fields, coercion, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Work(Closed):
    """Programs that run one after the other, where a cost is to be predicted."""

    program: ProgramForm
    count: Annotated[int, Field(ge=1, le=MAX_COUNT, description="How often it runs."), WholeNumber] = 1


@dataclass(frozen=True)
class Asked:
    """One program to price.

    Attributes
    ----------
    path : str
        The field of the request that names it (``nodes.3.program``), for messages.
    program : dict
        Its form.
    device : str or dict
    backend, protocol, framework
        As in an item of ``/predict``.
    """

    path: str
    program: dict[str, Any]
    device: str | dict[str, Any]
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None


class Request(Closed):
    """A question above single programs.

    Subclasses are frozen pydantic models whose fields are the JSON of the request. What no schema can say
    (a cycle, a memory that fits no plan) they raise from :meth:`asked` or :meth:`solve` as
    :class:`cdmpp.errors.FieldError` with the field's path.
    """

    #: The model of :meth:`solve`'s result.
    answer_model: ClassVar[type[BaseModel]]

    @property
    def budget(self) -> float | None:
        """Seconds that the search may take; None where the answer is a computation."""
        return getattr(self, "budget_s", None)

    def asked(self) -> list[Asked]:
        """The programs to price, in a fixed order; none where all costs are given."""
        return []

    def solve(self, prices: Sequence[Prediction], watch: Watch) -> dict[str, Any]:
        """The answer, as JSON values.

        Parameters
        ----------
        prices : sequence of Prediction, length of ``asked()``
            In its order, none with an error.
        watch : Watch
            Budget and progress.

        Raises
        ------
        FieldError, InfeasibleError
        """
        raise NotImplementedError


class Answer(BaseModel):
    """What all answers share."""

    model_config = ConfigDict(extra="forbid")

    model_id: Annotated[
        str | None,
        Field(description="Model that priced the programs; null where no program was to be priced."),
    ] = None
    domain: Annotated[
        Literal["in", "near", "out"] | None,
        Field(description="The worst of the predictions' domains: how far to trust the plan. null: none."),
    ] = None


class Explained(Answer):
    """A plan: never without its baselines, a lower bound and the gap to it."""

    baselines: Annotated[
        dict[str, float], Field(description="The objective of simpler plans on the same costs, by name.")
    ]
    gap: Annotated[float, Field(ge=-1e-9, description="Objective over its lower bound, less one.")]
    explanation: Annotated[
        list[str], Field(description="Why the objective is what it is, down to the programs, in words.")
    ]
