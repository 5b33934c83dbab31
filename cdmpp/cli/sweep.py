"""``cdmpp sweep``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cdmpp.cli.errors import FAILED, report
from cdmpp.cli.options import RayOption
from cdmpp.cli.output import JsonOption, ModelOption, device_of, print_json
from cdmpp.cli.plan import check_figure, save_figure
from cdmpp.cli.progress import progress_bar


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The sweep (docs/tables.md).")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="All points: .csv, .parquet or .json.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the points and the Pareto front (extra `plan`).")
    ] = None,
    ray: RayOption = None,
    model: ModelOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate a language model over devices, parallel layouts, batches and precisions.

    Prints the Pareto front of the points that meet the goals, and the infeasible points with their reasons. The exit
    code is 1 if no point meets the goals.
    """
    from cdmpp.llm import read_config
    from cdmpp.plan.sweep import SweepResult, evaluate_point, read_sweep, sweep_points
    from cdmpp.plan.sweep.points import with_front
    from cdmpp.plan.sweep.report import check_out, draw, tables, to_json, write_results
    from cdmpp.predict.predictor import LatencyPredictor

    check_figure(plot)
    check_out(out)
    request = read_sweep(file)
    config, predictor = read_config(request.config), LatencyPredictor.load(model)
    devices = {name: device_of(predictor.artifact, name) for name in request.devices}
    points = list(sweep_points(request, devices))

    def finish(evaluated: Iterable[SweepResult]) -> list[SweepResult]:
        results = []
        with progress_bar(file.name, "points") as advance:
            for result in evaluated:
                results.append(result)
                advance(len(results) / len(points), 1)
        return with_front(results, request.objectives)

    if ray is None:
        results = finish(evaluate_point(request, config, predictor, point) for point in points)
    else:
        from cdmpp.plan.distributed import evaluate_on_ray, load_predictor, ray_cluster

        load = partial(load_predictor, None if model is None else model.absolute())
        with ray_cluster(ray) as connected:
            results = finish(evaluate_on_ray(connected, request, config, load, points))
    if out is not None:
        write_results(out, request, results)
    if plot is not None and any(result.gpus is not None for result in results):
        save_figure(draw(request, results), plot)
    if json:
        print_json(to_json(request, results))
    else:
        from cdmpp.predict.rendering import render

        print(render(tables(request, results)))
    if not any(result.status == "met" for result in results):
        report("no point meets the goals", "relax the goals, or add devices, layouts, batches or precisions")
        raise typer.Exit(FAILED)
