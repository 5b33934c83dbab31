"""Data-parallel training in the terminal, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.replay.data_parallel_schema import DataParallelRequest
from cdmpp.units import format_latency, format_si

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show(request: DataParallelRequest, answer: dict[str, Any]) -> None:
    """Print the bucket sizes, the baselines and why."""
    from rich.console import Console
    from rich.table import Table

    print(
        f"{format_latency(answer['iteration_s'])} an iteration with buckets of "
        f"{_size(answer)} on {request.ranks} ranks, "
        f"{100 * answer['gap']:.1f} % above the lower bound"
    )
    if answer["interval"]:
        ends = [format_latency(answer["interval"][end]) for end in ("lower_s", "upper_s")]
        print(f"with all predictions at their bounds: {ends[0]} to {ends[1]}")
    sizes = Table("bucket", "all-reduces", "iteration", "exposed", box=None, pad_edge=False)
    for one in answer["choices"]:
        sizes.add_row(
            _size(one), str(one["buckets"]), format_latency(one["iteration_s"]), format_latency(one["exposed_comm_s"])
        )
    others = Table("instead", "iteration", box=None, pad_edge=False)
    for name, seconds in sorted(answer["baselines"].items(), key=lambda item: item[1]):
        others.add_row(name.replace("_", " "), format_latency(seconds))
    others.add_row("lower bound", format_latency(answer["lower_bound_s"]))
    console = Console()
    console.print(sizes)
    console.print(others)
    print("\n".join(answer["explanation"]))


def _size(one: dict[str, Any]) -> str:
    first = one["first_bucket_bytes"]
    later = "" if first is None else f", the first {format_si(first, 'B')}"
    return format_si(one["bucket_bytes"], "B") + later


def draw(request: DataParallelRequest, answer: dict[str, Any]) -> Figure:
    """Iteration time by bucket size, what of it is exposed communication, and the all-reduces of the
    best one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [_size(one).replace(",", "\n") for one in answer["choices"]]
    exposed = [1e3 * one["exposed_comm_s"] for one in answer["choices"]]
    rest = [1e3 * one["iteration_s"] - e for one, e in zip(answer["choices"], exposed, strict=True)]
    left.bar(names, rest, color="#4269d0", label="computation")
    left.bar(names, exposed, bottom=rest, color="#efb118", label="exposed communication")
    left.axhline(1e3 * answer["lower_bound_s"], color="0.3", linestyle="--", label="lower bound")
    left.axhline(1e3 * answer["baselines"]["no_overlap"], color="0.6", linestyle=":", label="no overlap")
    left.set(xlabel="bucket size", ylabel="iteration, ms", title=f"{request.ranks} ranks")
    left.set_ylim(0, 1.35 * left.get_ylim()[1])  # room for the legend above the bars
    left.legend(loc="upper left", ncols=2, fontsize=8)
    for index, one in enumerate(answer["transfers"]):
        start, end, ready = (1e3 * one[key] for key in ("start_s", "end_s", "ready_s"))
        right.barh(index, start - ready, left=ready, color="0.85")
        right.barh(index, end - start, left=start, color="#efb118")
    right.axvline(1e3 * answer["compute_s"], color="#4269d0", label="computation alone")
    right.axvline(1e3 * answer["iteration_s"], color="0.2", label="end of the iteration")
    right.set(
        xlabel="time since the start, ms", ylabel="all-reduce", title="waiting (grey) and travelling", xlim=(0, None)
    )
    right.invert_yaxis()
    right.legend(loc="lower left", fontsize=8)
    return figure
