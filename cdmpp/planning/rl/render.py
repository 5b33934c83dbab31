"""An RL plan in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.rl.schema import RlRequest
from cdmpp.units import format_latency, format_si


def show(request: RlRequest, answer: dict[str, Any]) -> None:
    """Print the step, the stages, what simpler plans take, and the elastic table."""
    line = f"step {format_latency(answer['step_s'])} (simulated)"
    if answer["step_lower_s"] is not None:
        line += f" [{format_latency(answer['step_lower_s'])} – {format_latency(answer['step_upper_s'])}]"
    if any(pool.price_per_hour for pool in request.pools):
        line += f", price {answer['price_per_step']:.4g}"
    if answer["domain"] is not None:
        line += f"  {answer['domain']}"
    print(line)
    bound = format_latency(answer["lower_bound_s"])
    print(f"lower bound {bound}; {answer['objective']['name']} {100 * answer['gap']:.1f} % above its bound")
    _stages(answer)
    unit = format_latency if answer["objective"]["name"] == "time" else "{:.4g}".format
    print("instead: " + ", ".join(f"{name} {unit(value)}" for name, value in answer["baselines"].items()))
    if answer["elastic"]:
        _rows(
            ("responses", "generation", "training", "one more saves", "do"),
            [
                (
                    f"{one['growth']:g} x",
                    format_latency(one["generation_s"]),
                    format_latency(one["training_s"]),
                    format_latency(one["saving_s"]),
                    one["action"],
                )
                for one in answer["elastic"]
            ],
        )
    for remark in answer["explanation"]:
        print(remark)
    for name, why in answer["left_out"].items():
        print(f"pool {name!r} cannot generate: {why}")
    if answer["model_id"] is not None:
        print(f"model {answer['model_id']}")


def _stages(answer: dict[str, Any]) -> None:
    stage, split = answer["generation"], answer["tail_split"]
    print(f"generation: {stage['instances']} of {stage['pool']}, {format_latency(stage['stage_s'])}")
    if split["used"]:
        for name in ("tail", "regular"):
            group = split[name]
            print(f"  {name}: {group['samples']} samples on {group['instances']} instances, batch {group['batch']}")
    moved = answer["migration"]
    if moved is not None:
        print(
            f"  migration{'' if moved['applied'] else ' (on offer)'}: at {moved['threshold']} unfinished "
            f"samples keep {moved['remaining_instances']} instances, move "
            f"{format_si(moved['moved_bytes'], 'B')}"
        )
    training, streaming = answer["training"], answer["streaming"]
    if training is not None and streaming is None:
        print(f"training: the same units, {format_latency(training['time_s'])}")
    elif training is not None:
        print(
            f"training: {training['units']} of {training['pool']}, {format_latency(training['time_s'])}; "
            f"{answer['mode']}, {streaming['batches']} batches, waits {format_latency(training['idle_s'])}"
        )


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
