"""Passes of micro-batches on ranks, as the pipeline planners check and draw them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from cdmpp.predict.requests.plot import PALETTE, Bar, Colour, draw_timeline, shade
from cdmpp.predict.requests.request import Row
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T", bound=Hashable)
Executable = Annotated[
    bool,
    Field(
        description="Search only plans that torch.distributed.pipelining runs: their torch-csv (and, of one module, "
        "megatron-layout) can be exported."
    ),
]
#: Largest difference between a claimed and a computed figure, as a share of the makespan or of the bytes.
TOLERANCE = 1e-9
WAYS = ("forward", "backward")
_BACKWARD_SHADE = 0.65


class Execution(Row):
    """What it costs that a plan is executable."""

    unrestricted_s: float = Field(description="Makespan of the shortest plan found without the restriction.")
    price: float = Field(description="makespan_s over unrestricted_s, less one.")

    @classmethod
    def of(cls, makespan_s: float, unrestricted_s: float) -> Execution:
        """The price of a plan; an executable plan is one of the unrestricted ones."""
        least_s = min(makespan_s, unrestricted_s)
        return cls(unrestricted_s=least_s, price=makespan_s / least_s - 1)

    def __str__(self) -> str:
        return (
            f"that the plan is executable costs {100 * self.price:.1f} %: without this restriction the search found "
            f"{format_latency(self.unrestricted_s)}"
        )


def time_faults(
    orders: Sequence[Sequence[T]],
    times: Mapping[T, tuple[float, float]],
    makespan_s: float,
    duration_s: Callable[[T], float],
    waits_for: Callable[[T], Iterable[tuple[T, float]]],
    name: Callable[[T], str],
    where: str = "",
) -> Iterator[str]:
    """Wrong durations, overlaps, passes that start too early, and a wrong makespan.

    ``orders``: passes of each rank. ``times``: claimed start and end of each pass. ``waits_for``: passes that must end
    before this one starts, each with the seconds of its transfer. ``name``: text of a pass; ``where`` is before its
    path in messages.
    """
    slack_s = TOLERANCE * max(makespan_s, 0.0)
    for rank, order in enumerate(orders):
        free_s = 0.0
        for at, task in enumerate(order):
            start_s, end_s = times[task]
            path, cost_s = f"{where}order.{rank}.{at}: {name(task)}", duration_s(task)
            if abs(end_s - start_s - cost_s) > slack_s:
                yield f"{path} takes {end_s - start_s:.9g} s, its cost is {cost_s:.9g} s"
            if start_s < free_s - slack_s:
                yield f"{path} starts at {start_s:.9g} s, the previous pass ends at {free_s:.9g} s"
            for earlier, transfer_s in waits_for(task):
                if start_s < times[earlier][1] + transfer_s - slack_s:
                    sent = f" and is sent in {transfer_s:.9g} s" if transfer_s else ""
                    yield f"{path} starts at {start_s:.9g} s, {name(earlier)} ends at {times[earlier][1]:.9g} s{sent}"
            free_s = max(free_s, end_s)
    last_s = max(end_s for _, end_s in times.values())
    if abs(last_s - makespan_s) > slack_s:
        yield f"{where}makespan_s: {makespan_s:.9g}, the last pass ends at {last_s:.9g} s"


def pass_colours(names: Sequence[Hashable]) -> dict[tuple[Hashable, str], Colour]:
    """Colour of the forward ("F") and the darker one of the backward passes ("B") of each model or module."""
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    return {(n, way): c if way == "F" else shade(c, _BACKWARD_SHADE) for n, c in colours.items() for way in "FB"}


def draw_passes(
    axes: Axes, order: Sequence[Sequence[Any]], colour: Callable[[Any], Colour], end_s: float, **marks: float
) -> None:
    """One row for each rank with its passes over time; ``marks``: labelled vertical lines, in seconds."""
    bars = [
        Bar(rank, step.start_s, step.end_s, colour(step), height=0.85) for rank, row in enumerate(order) for step in row
    ]
    lines = {name.replace("_", " "): seconds for name, seconds in marks.items()}
    draw_timeline(axes, bars, [f"rank {rank}" for rank in range(len(order))], end_s, marks=lines)
