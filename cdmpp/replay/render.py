"""A replay in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.replay.schema import ReplayRequest
from cdmpp.units import format_latency

_MOST_ROWS = 15


def show(request: ReplayRequest, answer: dict[str, Any]) -> None:
    """Print the makespan, what it is made of, the streams and the what-ifs."""
    makespan = answer["makespan_s"]
    line = f"makespan {format_latency(makespan)}"
    interval = answer["interval"]
    if interval is not None and interval["samples"]:
        line += f" [{format_latency(interval['lower_s'])} – {format_latency(interval['upper_s'])}]"
    if answer["domain"] is not None:
        line += f"  {answer['domain']}"
    print(line)
    bound = format_latency(answer["lower_bound_s"])
    print(f"lower bound {bound} ({100 * answer['gap']:.1f} % above it); " + _baselines(answer))
    _rows(
        ("critical path", "runs", "time", "share"),
        [
            (_name(one), f"{one['runs']} x", format_latency(one["seconds"]), f"{100 * one['share']:.1f} %")
            for one in answer["by_program"]
        ],
    )
    _rows(
        ("stream", "nodes", "busy", "idle"),
        [
            (
                f"{one['device']} {one['stream']}",
                str(one["nodes"]),
                format_latency(one["busy_s"]),
                format_latency(one["idle_s"]),
            )
            for one in answer["streams"]
        ],
    )
    if any(node["class"] == "comm" for node in answer["timeline"] or []) or answer["exposed_comm_s"]:
        print(f"communication that nothing hides: {format_latency(answer['exposed_comm_s'])}")
    if answer["what_if"]:
        _rows(
            ("what if", "nodes", "makespan", "saving"),
            [
                (_override(one), str(one["nodes"]), format_latency(one["makespan_s"]), _signed(one))
                for one in answer["what_if"]
            ],
        )
    for one in answer["missing"]:
        print(f"not in it: {one['operator']} ({one['count']} x): {one['reason']}")
    for remark in answer["remarks"]:
        print(remark)
    if answer["model_id"] is not None:
        print(f"latency: protocol {request.protocol}; model {answer['model_id']}")


def _baselines(answer: dict[str, Any]) -> str:
    found = answer["baselines"]
    return (
        f"one after the other {format_latency(found['serial'])}, longest path {format_latency(found['longest_path'])}"
    )


def _name(one: dict[str, Any]) -> str:
    return f"{one['program']} on {one['device']}" if one["program"] else f"({one['class']})"


def _override(one: dict[str, Any]) -> str:
    who = ", ".join(f"{key} {one[key]}" for key in ("node", "device", "stream", "class") if key in one)
    delay = one["delay_s"]
    later = f" {'+' if delay > 0 else '-'} {format_latency(abs(delay))}" if delay else ""
    return f"{who}: x {one['ratio']:g}{later}"


def _signed(one: dict[str, Any]) -> str:
    saving = one["saving_s"]
    return ("-" if saving < 0 else "") + format_latency(abs(saving))


def _rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table whose first column is to the left, the others to the right."""
    shown = [header, *rows[:_MOST_ROWS]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(header))]
    print()
    for row in shown:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
    if len(rows) > _MOST_ROWS:
        print(f"... and {len(rows) - _MOST_ROWS} more (--json has all)")
