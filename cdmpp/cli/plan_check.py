"""``cdmpp plan check``: verify a plan of a pipeline or of an RL step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from cdmpp.cli.output import JsonOption, ModelOption, print_json
from cdmpp.cli.plan import predict
from cdmpp.cli.plan_files import UrlOption
from cdmpp.cli.reading import read_json
from cdmpp.errors import FieldError
from cdmpp.plan.registry import PLANNERS, load

#: Field that only this form of a request has, to its planner and ``check(request, answer, prices)``.
CHECKS: dict[str, tuple[str, str]] = {
    "models": ("pipeline", "cdmpp.plan.fused.check:check"),
    "modules": ("pipeline", "cdmpp.plan.multimodal.check:check"),
    "lengths": ("rl", "cdmpp.plan.rl.check:check"),
}


def check(
    request: Annotated[Path, typer.Argument(metavar="REQUEST.json", help="The request.")],
    answer: Annotated[Path, typer.Argument(metavar="ANSWER.json", help="The plan, by any planner; - for stdin.")],
    json: JsonOption = False,
    model: ModelOption = None,
    url: UrlOption = None,
) -> None:
    """Simulate a pipeline schedule or an RL step again and list the plan's faults. Exit code 1: there are some."""
    from cdmpp.llm.read import with_configs

    value = read_json(request)
    form = next((name for name in CHECKS if isinstance(value, Mapping) and name in value), None)
    if form is None:
        raise FieldError(
            f"{request}: not a request of a pipeline or of an RL step",
            hint='it has "models" or "modules" (docs/pipelines.md), or "lengths" (docs/rl.md)',
        )
    planner, home = CHECKS[form]
    read = PLANNERS[planner].read(with_configs(value))
    claimed = read_json(answer)
    check_plan: Callable[..., list[str]] = load(home)
    faults = check_plan(read, claimed, predict(read, model, url))
    names = ("makespan_s", "step_s", "lower_bound_s", "gap", "peak_activations")
    figures = {name: claimed[name] for name in names if isinstance(claimed, Mapping) and name in claimed}
    if json:
        print_json({"ok": not faults, "faults": faults, **({} if faults else figures)})
    elif faults:
        print("\n".join(faults))
    else:
        print("ok", " ".join(f"{name}={value:.9g}" for name, value in figures.items()))
    if faults:
        raise typer.Exit(1)
