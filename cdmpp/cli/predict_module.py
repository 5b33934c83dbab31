"""``cdmpp predict`` for torch modules: ``package.module:factory``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from cdmpp.cli.errors import FAILED, INCOMPLETE, report
from cdmpp.cli.output import device_of, print_json, print_table
from cdmpp.cli.predict_options import PredictOptions
from cdmpp.errors import CdmppError, DataError

if TYPE_CHECKING:
    from cdmpp.devices.spec import DeviceSpec
    from cdmpp.predict.interface import Predictor
    from cdmpp.predict.modules.prediction import ModulePrediction


def module_of(programs: Sequence[str], given: PredictOptions) -> str | None:
    """The factory among the arguments of the command; None where there is none.

    Raises DataError: a module with other arguments or options of programs, or an option of modules without one.
    """
    # Imported late: the help of a command loads no operators.
    from cdmpp.programs.frontends.torch_module import is_factory

    modules = [program for program in programs if is_factory(program)]
    if modules and len(programs) > 1:
        raise DataError(
            f"{modules[0]} is a torch module, which is predicted alone", hint="give one torch module, or other programs"
        )
    of_modules = ("example", "mode", "execution", "host", "dtype", "autocast", "optimizer")
    wrong = given.flags(*(("backend", "dim", "out", "ray") if modules else of_modules))
    if not wrong:
        return modules[0] if modules else None
    if modules:
        raise DataError(f"{wrong[0]} is not for torch modules", hint="leave it out")
    raise DataError(f"{wrong[0]} is for torch modules only", hint="name a factory: package.module:factory")


def predict_module(source: str, given: PredictOptions) -> None:
    """Predict the module that a factory makes on every device."""
    from cdmpp.predict.prediction import DEFAULT_QUANTILES, check_quantiles
    from cdmpp.programs.frontends.torch_module import load_factory, parse_inputs

    levels = check_quantiles(given.quantile or DEFAULT_QUANTILES)
    module, inputs = load_factory(source)
    inputs = parse_inputs(given.example) if given.example else inputs
    if inputs is None and not hasattr(module, "example_inputs"):
        raise DataError(
            f"{source} needs example inputs",
            hint="return (module, example_inputs) from the factory, or pass --input 8,3,224,224",
        )
    wrong: list[CdmppError] = []
    if given.url is not None:
        from cdmpp.client import PredictorClient

        with PredictorClient(given.url, api_key=os.environ.get("CDMPP_API_KEY"), timeout_s=600) as client:
            answers = _predict(client, module, inputs, given, levels, list(dict.fromkeys(given.device or ())))
    else:
        from cdmpp.predict.predictor import LatencyPredictor

        predictor = LatencyPredictor.load(given.model)
        devices: list[DeviceSpec | str] = []
        for name in dict.fromkeys(given.device or ()):
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
    given: PredictOptions,
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
    relu = "element-wise kernels as relu that moves the same bytes"
    remarks = Counter(relu if " as relu" in p.remark else p.remark for p in answers[0].programs if p.remark)
    for line in dict.fromkeys(line for answer in answers for line in left_out_lines(answer)):
        print(line)
    if remarks:
        print("programs in place of other kernels: " + "; ".join(f"{text} ({n})" for text, n in remarks.items()))
    print(f"latency: {settings_text(answers[0])}")


def _launches(answer: ModulePrediction) -> str:
    total = answer.total
    failed = f", {total.failed} not predicted" if total.failed else ""
    nodes = sum(entry.count for entry in answer.left_out)
    left_out = f", a lower bound: {nodes} {'call is' if nodes == 1 else 'calls are'} left out" if nodes else ""
    return f" ({total.launches} launches of {len(answer.programs)} programs{failed}{left_out})"
