"""``cdmpp``: the command line. One module per group of commands; heavy imports inside the commands."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Annotated

import typer

from cdmpp import __version__
from cdmpp.cli.adapt import adapt
from cdmpp.cli.catalogue import devices
from cdmpp.cli.collect import collect
from cdmpp.cli.curve import curve
from cdmpp.cli.data import data
from cdmpp.cli.errors import FAILED, PIPE_CLOSED, CdmppGroup, report, silence_stdout
from cdmpp.cli.evaluate import evaluate
from cdmpp.cli.inspection import inspect
from cdmpp.cli.llm import calibrate, llm
from cdmpp.cli.measure import measure
from cdmpp.cli.options import RayCommand
from cdmpp.cli.plan_check import check
from cdmpp.cli.plan_training import plan
from cdmpp.cli.predict import predict
from cdmpp.cli.probe import probe
from cdmpp.cli.replay import replay
from cdmpp.cli.select import select
from cdmpp.cli.serve import serve
from cdmpp.cli.streams import protect_streams
from cdmpp.cli.support import support
from cdmpp.cli.sweep import sweep
from cdmpp.cli.train import train
from cdmpp.cli.training_step import training_step
from cdmpp.errors import CdmppError

app = typer.Typer(
    name="cdmpp",
    cls=CdmppGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="example: cdmpp predict linear:m=512,n=4096,k=1024,dtype=float16 --device t4",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cdmpp {__version__}")
        raise typer.Exit


class _Stderr(logging.Handler):
    """Writes each record to the current ``sys.stderr``, which a caller in the same process may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log; keep tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Predict the latency of tensor programs on devices you do not have."""
    if verbose:
        logging.basicConfig(level=logging.INFO, handlers=[_Stderr()], format="%(name)s: %(message)s", force=True)
    else:
        warnings.simplefilter("ignore")


app.command(cls=RayCommand, epilog="example: cdmpp predict model.onnx --device a100-pcie-40gb --device t4")(predict)
app.command(epilog="example: cdmpp curve linear:n=4096,k=1024,dtype=float16 --axis m=1,2,4,8 --device t4")(curve)
app.command(epilog="example: cdmpp llm examples/llm/llama-3.1-8b.json --device h100-sxm --batch 8")(llm)
app.command(
    "llm calibrate", epilog="example: cdmpp llm calibrate mine.csv --config config.json -d h100-sxm --out mine.toml"
)(calibrate)
app.command(
    "training-step",
    epilog="example: cdmpp training-step examples/llm/llama-3.1-70b.json -d h100-sxm --gpus 64 --tp 4 --pp 4 "
    "--sharding optimizer --recompute full --global-batch 128 --sequence 8192",
)(training_step)
app.command(epilog="example: cdmpp inspect softmax:rows=4096,cols=1024")(inspect)
app.command("eval", epilog="example: cdmpp eval --records ops_vidur_fp16.parquet --devices a40")(evaluate)
app.command(epilog="example: cdmpp train --config configs/base.toml --public-data DIR --out mymodel")(train)
app.command(epilog="example: cdmpp collect --network resnet18 --schedules 64 --out data/my-cpu")(collect)
app.command(epilog="example: cdmpp measure job/ --out result/")(measure)
app.command(epilog="example: cdmpp select --device my-gpu.toml --k 40 --out todo/")(select)
app.command(epilog="example: cdmpp probe --on cuda:0 --out my-gpu/")(probe)
app.command(epilog="example: cdmpp adapt --records mine.csv --device my-gpu.toml --out my-gpu")(adapt)
app.command(cls=RayCommand, epilog="example: cdmpp sweep examples/sweep.toml --plot front.png")(sweep)
app.command(epilog="example: cdmpp replay model.onnx --device t4 --gap-us 2 --figure timeline.png")(replay)
app.command(epilog="example: cdmpp serve --port 8080")(serve)
app.command(epilog="example: cdmpp devices h20 --json")(devices)
app.command(epilog="example: cdmpp support --operator linear")(support)
app.add_typer(data, name="data")
plan.command(epilog="example: cdmpp plan check request.json answer.json")(check)
app.add_typer(plan, name="plan")


def main() -> None:
    """Entry point of the ``cdmpp`` script."""
    protect_streams()
    try:
        try:
            app(prog_name="cdmpp")
        finally:
            sys.stdout.flush()
    except CdmppError as error:  # help and version are printed before a command runs
        report(error.message, error.hint)
        sys.exit(FAILED)
    except BrokenPipeError:
        silence_stdout()
        sys.exit(PIPE_CLOSED)


if __name__ == "__main__":
    main()
