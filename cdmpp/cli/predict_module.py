"""``cdmpp predict`` for torch modules: ``package.module:factory``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cdmpp.cli.errors import FAILED, INCOMPLETE, report
from cdmpp.cli.output import device_of, print_json, print_table
from cdmpp.errors import CdmppError, DataError
from cdmpp.programs.query_options import Framework, Implementation, Protocol

if TYPE_CHECKING:
    from cdmpp.devices.spec import DeviceSpec
    from cdmpp.predict.interface import Predictor
    from cdmpp.predict.modules.prediction import ModulePrediction

ModeOption = Annotated[
    Literal["inference", "training", "forward"] | None,
    typer.Option(
        help="Forward pass of a torch module in eval(), forward and backward pass in train(), or forward pass as the "
        "module is. Default: inference."
    ),
]
ExecutionOption = Annotated[
    Literal["eager", "compiled", "cuda-graph", "compiled-graph"] | None,
    typer.Option(
        help="Who launches a torch module's kernels: PyTorch's calls one by one, torch.compile, a captured graph, or "
        "both (reduce-overhead). Default: eager, or as torch.compile made the module; with --protocol the kernels are "
        "summed."
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option("--host", help="Host profile of a torch module: a name or a .toml file. Default: by device."),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="[NAME=]SHAPE[:TYPE]",
        help="Example input of a torch module, such as 8,3,224,224 or input_ids=1,128:int64; repeatable. Default: "
        "those that the factory returns.",
    ),
]
DtypeOption = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option("--dtype", help="Cast a torch module and its inputs to this type."),
]
AutocastOption = Annotated[
    Literal["float16", "bfloat16"] | None,
    typer.Option("--autocast", help="Run products of a torch module in this type."),
]
OptimizerOption = Annotated[
    Literal["sgd", "adam", "adamw"] | None,
    typer.Option("--optimizer", help="Add the update of the parameters to a training step."),
]


@dataclass(frozen=True)
class ModuleArguments:
    """Options of ``cdmpp predict`` that concern torch modules."""

    devices: Sequence[str]
    #: None stands for the execution, by PyTorch.
    protocol: Protocol | None
    framework: Framework | None
    levels: Sequence[float] | None
    model: Path | None
    strict: bool
    url: str | None
    json: bool
    mode: Literal["inference", "training", "forward"] | None
    inputs: Sequence[str] | None
    dtype: str | None
    autocast: str | None
    optimizer: str | None
    implementation: Implementation | None = None
    execution: Literal["eager", "compiled", "cuda-graph", "compiled-graph"] | None = None
    host: str | None = None
    verbose: bool = False

    @property
    def for_modules(self) -> dict[str, Any]:
        """Options that only modules have, by name."""
        names = ("mode", "execution", "host", "dtype", "autocast", "optimizer")
        return {"--input": self.inputs, **{f"--{name}": getattr(self, name) for name in names}}


def module_of(programs: Sequence[str], given: ModuleArguments, for_programs: dict[str, Any]) -> str | None:
    """The factory among the arguments of the command; None where there is none.

    Parameters
    ----------
    for_programs : dict
        Options that torch modules do not have, by name.

    Raises
    ------
    DataError
        A module with other arguments, or an option of modules without one.
    """
    # Imported late: the help of a command loads no operators.
    from cdmpp.programs.frontends.torch_module import is_factory

    modules = [program for program in programs if is_factory(program)]
    if modules and len(programs) > 1:
        raise DataError(
            f"{modules[0]} is a torch module, which is predicted alone", hint="give one torch module, or other programs"
        )
    wrong = [name for name, value in (for_programs if modules else given.for_modules).items() if value]
    if not wrong:
        return modules[0] if modules else None
    if modules:
        raise DataError(f"{wrong[0]} is not for torch modules", hint="leave it out")
    raise DataError(f"{wrong[0]} is for torch modules only", hint="name a factory: package.module:factory")


def predict_module(source: str, given: ModuleArguments) -> None:
    """Predict the module that a factory makes on every device."""
    from cdmpp.predict.prediction import DEFAULT_QUANTILES, check_quantiles
    from cdmpp.programs.frontends.torch_module import load_factory, parse_inputs

    levels = check_quantiles(given.levels or DEFAULT_QUANTILES)
    module, inputs = load_factory(source)
    inputs = parse_inputs(list(given.inputs)) if given.inputs else inputs
    if inputs is None and not hasattr(module, "example_inputs"):
        raise DataError(
            f"{source} needs example inputs",
            hint="return (module, example_inputs) from the factory, or pass --input 8,3,224,224",
        )
    wrong: list[CdmppError] = []
    if given.url is not None:
        from cdmpp.client import PredictorClient

        with PredictorClient(given.url, api_key=os.environ.get("CDMPP_API_KEY"), timeout_s=600) as client:
            answers = _predict(client, module, inputs, given, levels, list(dict.fromkeys(given.devices)))
    else:
        from cdmpp.predict.predictor import LatencyPredictor

        predictor = LatencyPredictor.load(given.model)
        devices: list[DeviceSpec | str] = []
        for name in dict.fromkeys(given.devices):
            try:
                devices.append(device_of(predictor.artifact, name))
            except CdmppError as error:
                wrong.append(error)
        answers = _predict(predictor, module, inputs, given, levels, devices)
    if given.json:
        print_json(_json(source, answers))
    elif answers:
        _print(source, answers, given.verbose)
    for fault in wrong:
        report(fault.message, fault.hint)
    if wrong or any(answer.total.latency_s is None for answer in answers):
        raise typer.Exit(FAILED)
    if given.strict and any(answer.total.lower_bound for answer in answers):
        report("a total is a lower bound: something is left out of it", "leave --strict out to accept lower bounds")
        raise typer.Exit(INCOMPLETE)


def _predict(
    predictor: Predictor,
    module: Any,
    inputs: Any,
    given: ModuleArguments,
    levels: Sequence[float],
    devices: Sequence[DeviceSpec | str],
) -> list[ModulePrediction]:
    """One answer per device; none without a device."""
    from cdmpp.devices import local_device
    from cdmpp.predict.modules.prediction import DEFAULT_FRAMEWORK

    if not devices:
        return []
    # The service knows the names of devices, but not this machine and its files.
    read = [local_device(d) if isinstance(d, str) else d for d in devices]
    answers = predictor.predict_module(
        module,
        inputs,
        read,
        mode=given.mode or "inference",
        execution=given.execution,
        host=given.host,
        protocol=given.protocol,
        framework=given.framework or DEFAULT_FRAMEWORK,
        dtype=given.dtype,
        autocast=given.autocast,
        optimizer=given.optimizer,
        quantiles=levels,
        implementation=given.implementation,
    )
    return list(answers) if isinstance(answers, list) else [answers]


def _json(source: str, answers: Sequence[ModulePrediction]) -> dict[str, Any]:
    """The document of ``cdmpp predict --json`` with the phases of each total and the module of each program."""
    left_out = answers[0].left_out if answers else ()
    return {
        "model_id": answers[0].model_id if answers else None,
        "results": [{**program.to_dict(), "source": source} for answer in answers for program in answer.programs],
        "totals": [
            {
                "device": answer.device,
                **asdict(answer.total),
                "execution": answer.execution,
                "timeline": None if answer.timeline is None else asdict(answer.timeline),
                "phases": {phase: asdict(total) for phase, total in answer.phases.items()},
            }
            for answer in answers
        ],
        "unsupported": [{"source": source, **asdict(entry)} for entry in left_out],
    }


def _print(source: str, answers: Sequence[ModulePrediction], verbose: bool) -> None:
    """Several devices share a table of programs; a single device, or each with ``verbose``, has one of its own."""
    from cdmpp.predict.modules.prediction import (
        PROGRAM_HEADER,
        PROGRAM_RIGHT,
        by_time,
        left_out_lines,
        module_matrix,
        program_cells,
        settings_text,
        timeline_text,
    )
    from cdmpp.predict.prediction_total import total_line

    alone = len(answers) == 1
    if not alone:
        print(f"{module_matrix(answers)}\n")
    for answer in answers:
        print(f"total of {source} on {answer.device}: {total_line(answer.total)}{_launches(answer)}")
        if not (alone or verbose):
            continue
        if answer.timeline is not None:
            print(f"  {timeline_text(answer.timeline)}")
        if len(answer.phases) > 1:
            for phase, total in answer.phases.items():
                print(f"  {phase}: {total_line(total)}")
        print()
        rows = [program_cells(program, answer.name) for program in by_time(answer)]
        print_table(PROGRAM_HEADER, rows, right=PROGRAM_RIGHT)
        print()
    remarks = Counter(_kind(program.remark) for program in answers[0].programs if program.remark)
    for line in dict.fromkeys(line for answer in answers for line in left_out_lines(answer)):
        print(line)
    if remarks:
        print("programs in place of other kernels: " + "; ".join(f"{text} ({n})" for text, n in remarks.items()))
    print(f"latency: {settings_text(answers[0])}")


def _kind(remark: str) -> str:
    """A remark without the name of its call."""
    return "element-wise kernels as relu that moves the same bytes" if " as relu" in remark else remark


def _launches(answer: ModulePrediction) -> str:
    total = answer.total
    failed = f", {total.failed} not predicted" if total.failed else ""
    nodes = sum(entry.count for entry in answer.left_out)
    left_out = f", a lower bound: {nodes} {'call is' if nodes == 1 else 'calls are'} left out" if nodes else ""
    return f" ({total.launches} launches of {len(answer.programs)} programs{failed}{left_out})"
