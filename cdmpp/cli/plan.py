"""``cdmpp plan``: requests from files; plans as JSON, tables or figures."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.options import RayCommand, with_fields
from cdmpp.cli.output import on_terminal, print_json
from cdmpp.cli.plan_files import PlanFiles, PlanOptions
from cdmpp.cli.progress import progress_display
from cdmpp.errors import DataError, FieldError
from cdmpp.plan.registry import PLANNERS, PlannerSpec
from cdmpp.utils.writing import check_output, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cdmpp.predict.prediction import Prediction
    from cdmpp.predict.requests.budget import Progress, SearchControl

plan = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Plans based on predicted latencies, with baselines and a lower bound (docs/planning.md).",
)
#: Seconds between two requests for progress, and to wait for the best plan of a cancelled job.
_POLL_S, _CANCEL_S = 0.5, 3.0
FileArgument = Annotated[Path, typer.Argument(metavar="FILE.json", help="The request; - for stdin.")]


def prefix_with_file(file: Path | str, error: FieldError) -> None:
    """Prefix the message of an error with the file, and with the field unless the message begins with it."""
    field = f"{error.path}: " if error.path and not error.message.startswith(error.path) else ""
    error.message = f"{file}: {field}{error.message}"


def solve(
    spec: PlannerSpec,
    value: Any,
    model: Path | None = None,
    url: str | None = None,
    remote: bool = False,
    ray: str | None = None,
    seeds: int | None = None,
) -> tuple[Any, Any]:
    """Read and solve a request, with a progress bar on a terminal; return the request and its answer.

    ``model`` is a model folder, ``url`` a service that predicts instead of it; with ``remote`` the service also
    searches. ``ray`` is the address of a Ray cluster that searches from ``seeds`` seeds ("" for the default one).
    """
    from cdmpp.llm.read import with_configs
    from cdmpp.plan.base.solve import solve_priced
    from cdmpp.predict.requests.budget import SearchControl

    if remote and url is None:
        raise DataError("--remote needs an address", hint="give --url, such as http://127.0.0.1:8000")
    if ray is not None and remote:
        raise DataError("--ray and --remote exclude each other", hint="leave one of them out")
    if seeds is not None and ray is None:
        raise DataError("--seeds is for searches with Ray", hint='give --ray, or "seed" in the request')
    value = with_configs(value)
    request = spec.read(value)
    searches = request.budget is not None
    with _bar(spec.name) if on_terminal() and searches else nullcontext(None) as listener:
        if remote and url is not None:
            answer = solve_remotely(spec, value, url, listener or (lambda _: None))
            return request, request.answer_model().model_validate(answer)
        prices = predict(request, model, url)
        control = SearchControl(request.budget if ray is None else None, listener)
        with interruptible(control) if searches else nullcontext():
            if ray is None:
                return request, solve_priced(request, prices, control)
            from cdmpp.plan.distributed import ray_cluster, solve_on_ray

            with ray_cluster(ray) as connected:
                return request, solve_on_ray(connected, spec.name, value, prices, seeds, control)


def solve_remotely(
    spec: PlannerSpec, value: dict[str, Any], url: str, listener: Callable[[Progress], None]
) -> dict[str, Any]:
    """Make a plan by a job of a service. Ctrl-C cancels the job and returns its best plan so far.

    Raises CdmppError: the service refuses the request, or the job fails; typer.Abort: the job was cancelled before it
    had a plan.
    """
    from cdmpp.client import PredictorClient
    from cdmpp.client.operations import FINAL, answer_of
    from cdmpp.predict.requests.budget import Progress

    with PredictorClient(url) as client:
        started = time.monotonic()
        id = client.submit(spec.name, value)
        try:
            while (job := client.job(id))["state"] not in FINAL:
                listener(Progress(time.monotonic() - started, job["progress"], job["best"], job["bound"]))
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            client.cancel(id)
            print("cancelled: this is the best plan so far", file=sys.stderr)
            until = time.monotonic() + _CANCEL_S
            while (job := client.job(id))["answer"] is None and time.monotonic() < until:
                time.sleep(_POLL_S)
            if job["answer"] is None:
                raise typer.Abort from None
            best: dict[str, Any] = job["answer"]
            return best
        return answer_of(job)


def predict(request: Any, model: Path | None, url: str | None) -> list[Prediction]:
    """Predictions for the programs of a request, by the service at ``url`` or by a local model."""
    from cdmpp.plan.base.solve import predict_prices

    programs = request.price_requests()
    if not programs:
        return []
    if url is None:
        from cdmpp.predict.predictor import LatencyPredictor

        return predict_prices(programs, LatencyPredictor.load(model))
    from cdmpp.client import PredictorClient

    with PredictorClient(url) as client:
        return predict_prices(programs, client)


@contextmanager
def interruptible(control: SearchControl) -> Iterator[None]:
    """In this context, the first Ctrl-C ends the search with its best plan so far, a second one ends the command."""
    if threading.current_thread() is not threading.main_thread():  # other threads receive no signals
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        control.stop()
        print("cancelled: this is the best plan so far", file=sys.stderr)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """A progress listener that draws a bar on stderr."""
    with progress_display() as show_progress:

        def listen(progress: Progress) -> None:
            best, bound = progress.best, progress.bound
            text = "" if best is None else f"best {best:.6g}" + ("" if bound is None else f", bound {bound:.6g}")
            show_progress(name, progress.done, 1.0, text)

        yield listen


def show(request: Any, plan: Any, as_json: bool, figure: Path | None, *, indent: int | None = 1) -> None:
    """Print a plan, and draw it where a figure is wanted. JSON is on one line where ``indent`` is None."""
    from cdmpp.predict.rendering import render

    try:
        if figure is not None:
            draw_to(figure, request, plan)
    finally:  # the plan is printed although it cannot be drawn, and drawn although the output is closed
        if as_json:
            print_json(plan.to_json(), indent)
        else:
            print(render(plan.report()))
            if getattr(plan, "seed", None) is not None:
                print(f"seed {plan.seed}")


def check_figure(path: Path | None) -> None:
    """Check the path of a figure before the search starts.

    Raises DataError: the file cannot be written, or its extension is not an image format; ModuleNotFoundError:
    matplotlib is not installed.
    """
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise DataError(f"{path}: the extension is no image format", hint="name a file that ends in .png, .svg or .pdf")
    check_output(path)


def draw_to(path: Path, request: Any, plan: Any) -> None:
    """Write the figure of a plan.

    Raises DataError: the file cannot be written.
    """
    from cdmpp.predict.requests.plot import write_figure

    with replacing(path) as aside:
        write_figure(lambda: request.sibling("solver").draw(request, plan), aside, dpi=120, format=path.suffix[1:])


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; raises the DataError of :func:`draw_to`."""
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120, bbox_inches="tight", format=path.suffix[1:])


def run_request(
    spec: PlannerSpec, name: Path | str, value_of: Callable[[], Any], files: PlanFiles, options: PlanOptions
) -> None:
    """Solve a request, write its files and print the plan; ``name`` stands in messages."""
    check_figure(options.figure)
    if options.executable and spec.name != "pipeline":
        raise typer.BadParameter(f"it is for pipeline, not for {spec.name}", param_hint="--executable")
    try:
        value = value_of()
        if isinstance(value, dict):
            value |= {"ignore_memory": True} if options.ignore_memory else {}
            value |= {"executable": True} if options.executable else {}
        if options.print_request:
            print_json(value)
            return
        chosen = (options.model, options.url, options.remote, options.ray, options.seeds)
        request, answer = solve(spec, value, *chosen)
    except FieldError as error:
        prefix_with_file(name, error)
        raise
    try:
        files.write(request, answer)
    finally:  # the plan is printed although the format cannot express it
        show(request, answer, options.json, options.figure)


def _command(spec: PlannerSpec) -> None:
    @with_fields(PlanOptions)
    def run(file: FileArgument, **options: Any) -> None:
        chosen = PlanOptions(**options)
        files = PlanFiles(spec.name, chosen)
        run_request(spec, file, lambda: files.request(file), files, chosen)

    run.__doc__ = spec.summary
    plan.command(spec.name, cls=RayCommand, epilog=f"example: cdmpp plan {spec.name} request.json --json")(run)


for _spec in PLANNERS.values():
    if _spec.path != "/replay" and _spec.name not in ("rl", "training"):  # `cdmpp replay`, cdmpp/cli/plan_NAME.py
        _command(_spec)
