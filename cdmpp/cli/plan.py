"""``cdmpp plan``: a request from a file, its answer as JSON, a table or a picture."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.output import JsonOption, ModelOption, on_terminal, print_json
from cdmpp.cli.remote import solve_remotely
from cdmpp.errors import DataError, FieldError
from cdmpp.planning.registry import PLANNERS, PlannerSpec, load

if TYPE_CHECKING:
    from cdmpp.compose.budget import Progress, SearchControl
    from cdmpp.compose.solve import AnyRequest
    from cdmpp.prediction import Prediction

plan = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Plans over predicted latencies, each with its baselines and a lower bound (docs/planning.md).",
)
FigureOption = Annotated[Path | None, typer.Option("--figure", metavar="PNG", help="Draw the answer (extra `plan`).")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Let the service there price programs, instead of a model here.")
]
RemoteOption = Annotated[
    bool, typer.Option("--remote", help="With --url: the service searches too, as a job; Ctrl-C cancels it.")
]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE.json", help="The request; - for stdin.")]


def read_json(path: Path) -> Any:
    """The JSON value of a file, or of standard input for ``-``.

    Raises
    ------
    DataError
        It cannot be read, or is no JSON.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}", hint="give the path of a JSON file") from None
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}", hint="docs/planning.md has examples") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not a number of JSON")


def place_in(file: Path | str, error: FieldError) -> None:
    """Put the file, and the field where the message does not begin with it, before an error's message."""
    field = f"{error.path}: " if error.path and not error.message.startswith(error.path) else ""
    error.message = f"{file}: {field}{error.message}"


def answer(
    kind: PlannerSpec, value: Any, model: Path | None = None, url: str | None = None, remote: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Read a request and solve it here or, ``remote``, at a service; with a progress bar for who looks.

    Returns
    -------
    request, answer
    """
    from cdmpp.compose.budget import SearchControl
    from cdmpp.compose.solve import finish

    if remote and url is None:
        raise DataError("--remote: where?", hint="give --url, such as http://127.0.0.1:8000")
    request = kind.read(value)
    searches = request.budget is not None
    with _bar(kind.name) if on_terminal() and searches else nullcontext(None) as listen:
        if remote and url is not None:
            return request, solve_remotely(kind, value, url, listen or (lambda _: None))
        prices, watch = priced(request, model, url), SearchControl(request.budget, listen)
        with interruptible(watch) if searches else nullcontext():
            return request, finish(request, prices, watch)


def priced(request: AnyRequest, model: Path | None, url: str | None) -> list[Prediction]:
    """The prices of a request's programs, by the service at ``url`` or by a model here."""
    from cdmpp.compose.predict import predict_prices

    asked = request.price_requests()
    if not asked:
        return []
    if url is None:
        from cdmpp.predictor import LatencyPredictor

        return predict_prices(asked, LatencyPredictor.load(model))
    from cdmpp.client import PredictorClient

    with PredictorClient(url) as client:
        return predict_prices(asked, client)


@contextmanager
def interruptible(watch: SearchControl) -> Iterator[None]:
    """Within, the first Ctrl-C ends the search with the best that it has, a second one the command."""
    if threading.current_thread() is not threading.main_thread():  # only that one is given signals
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        watch.stop()
        print("cancelled: the best answer so far", file=sys.stderr)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr, as a listener."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn(name),
        BarColumn(),
        TextColumn("{task.fields[found]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=1.0, found="")

        def listen(progress: Progress) -> None:
            best, bound = progress.best, progress.bound
            found = "" if best is None else f"best {best:.6g}" + ("" if bound is None else f", bound {bound:.6g}")
            bar.update(task, completed=progress.done, found=found)

        yield listen


def present(kind: PlannerSpec, request: Any, found: dict[str, Any], as_json: bool, figure: Path | None) -> None:
    """Print the answer, and write its picture where one is wanted."""
    try:
        if figure is not None:
            draw_to(figure, kind, request, found)
    finally:  # an answer that took minutes is not lost with its picture, nor the picture with a closed pipe
        if as_json:
            print_json(found)
        else:
            _print_answer(kind, request, found)


def _typed(request: Any, found: dict[str, Any]) -> Any:
    from cdmpp.compose.request import Request

    return request.answer_model().model_validate(found) if isinstance(request, Request) else found


def _print_answer(kind: PlannerSpec, request: Any, found: dict[str, Any]) -> None:
    from cdmpp.compose.render import render
    from cdmpp.compose.request import Answer

    answer = _typed(request, found)
    if isinstance(answer, Answer):
        print(render(answer.tables()))
    else:
        load(kind.show)(request, found)


def check_figure(path: Path | None) -> None:
    """Refuse what could not be drawn before anything is searched.

    Raises
    ------
    DataError
        The folder is not there, or the ending names no format.
    ModuleNotFoundError
        matplotlib is not installed.
    """
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known or not path.absolute().parent.is_dir():
        raise DataError(
            f"{path}: no picture can be written there",
            hint="name a file in a folder that exists, ending in .png, .svg or .pdf",
        )


def draw_to(path: Path, kind: PlannerSpec, request: Any, found: dict[str, Any]) -> None:
    """Write the picture of an answer.

    Raises
    ------
    DataError
        The file cannot be written, or its ending names no format.
    """
    drawn = load(kind.draw)(request, _typed(request, found))
    try:
        drawn.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}", hint="name a file that ends in .png, .svg or .pdf") from None


def _command(kind: PlannerSpec) -> None:
    def run(
        file: FileArgument,
        json: JsonOption = False,
        figure: FigureOption = None,
        model: ModelOption = None,
        url: UrlOption = None,
        remote: RemoteOption = False,
    ) -> None:
        check_figure(figure)
        try:
            request, found = answer(kind, read_json(file), model, url, remote)
        except FieldError as error:
            place_in(file, error)
            raise
        present(kind, request, found, json, figure)

    run.__doc__ = kind.summary
    plan.command(kind.name, epilog=f"example: cdmpp plan {kind.name} request.json --json")(run)


for _kind in PLANNERS.values():
    if _kind.path != "/replay":  # a command of its own
        _command(_kind)
