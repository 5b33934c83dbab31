"""``cdmpp llm``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.errors import FAILED, report
from cdmpp.cli.options import option, taken, with_fields
from cdmpp.cli.output import (
    DevicesOption,
    JsonOption,
    ModelOption,
    NetworkOption,
    device_of,
    only_device,
    percent,
    print_json,
)
from cdmpp.cli.plan import check_figure, save_figure
from cdmpp.errors import CdmppError, DataError
from cdmpp.llm import defaults
from cdmpp.llm.options import BATCH, LAYOUT, MAX_REQUESTS, MODEL, OUTPUT, SERVING, TYPES
from cdmpp.predict.rendering import render
from cdmpp.utils.files import parse_file, parse_table
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from cdmpp.llm import Goodput, LLMConfig, LLMEstimate, ServingResult

MAX_TRACE_BYTES = 64 * 2**20
GoalOption = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Find the largest rate at which 90 % of the requests keep it.")
]


_OUTPUT = replace(
    OUTPUT, default=None, unset=f"{defaults.OUTPUT:,}, or {defaults.SERVED_OUTPUT:,} of simulated serving"
)


@dataclass(frozen=True)
class LlmOptions:
    """Options beside those of a batch and of simulated serving."""

    family: str | None = option(
        None,
        "Read the configuration as this architecture, such as llama, in place of its model_type.",
        "--as",
        metavar="MODEL_TYPE",
    )
    requests: Path | None = option(
        None, "Simulate serving these: columns arrival_s, input, output.", metavar="TRACE.csv"
    )
    prefill_pool: str | None = option(
        None,
        "Simulate serving with further devices that compute the prompts: tp, pp, ep, dp, device, bytes_per_s.",
        metavar="tp=N,dp=N,...",
    )
    ttft_goal: GoalOption = None
    tpot_goal: GoalOption = None
    plot: Path | None = option(
        None,
        "Draw latency against throughput for 1, 2, 4, ... up to --concurrency requests (extra `plan`).",
        metavar="PNG",
    )
    engine: str | None = option(
        None,
        "What the serving engine adds to its kernels: vllm (default), vllm-0.12, vllm-0.9, vllm-2024, "
        "sglang, trtllm, trtllm-2024, kernels-only, or a file of cdmpp llm calibrate.",
        metavar="NAME|FILE",
    )
    network: NetworkOption = None
    parts: int | None = option(
        None,
        "Show the N most expensive parts of each device. Default: 8 for one device, else none.",
        metavar="N",
        min=0,
    )
    model: ModelOption = None
    json: JsonOption = False


@with_fields(LlmOptions, options=BATCH | SERVING | {"output": _OUTPUT})
def llm(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.json",
            help="config.json of a language model on Hugging Face (Llama, Qwen, Mistral, Gemma, DeepSeek, GLM, Kimi, "
            "MiniMax, Nemotron, gpt-oss and others); examples/llm has eight.",
        ),
    ],
    device: DevicesOption,
    **options: Any,
) -> None:
    """Estimate latency, throughput and memory of a language model on devices.

    Prints prefill, median decode step and total of one batch for each device. With --concurrency, --rate or --requests
    it simulates serving: times to first token and between tokens; with goals, the largest rate that keeps them. A
    device on which the model does not fit stops no others. The exit code is 1 if a device is unknown, or if nothing can
    be estimated. cdmpp llm calibrate fits an engine profile to your own server.
    """
    given = taken(LlmOptions, options)
    from cdmpp.llm import estimate, read_config
    from cdmpp.llm.engines import load_engine
    from cdmpp.llm.estimate_result import SHOWN_PARTS, estimate_tables
    from cdmpp.predict.predictor import LatencyPredictor

    dimensions = read_config(config, family=given.family)
    profile = load_engine(given.engine, options["framework"])
    predictor = LatencyPredictor.load(given.model)
    common: dict[str, Any] = {name: options[name] for name in MODEL if name != "framework"}
    common |= {"engine": profile, "network": given.network, "predictor": predictor}
    goals: dict[str, Any] = {
        name: goal for name, goal in (("ttft_s", given.ttft_goal), ("tpot_s", given.tpot_goal)) if goal is not None
    }
    if given.plot is not None and options["concurrency"] is None:
        raise DataError("--plot draws curves up to a concurrency", hint="add --concurrency 64")
    output = options["output"]
    load = {name: options[name] for name in ("concurrency", "rate") if options[name] is not None}
    if given.requests is not None:
        load["requests"] = _trace(given.requests)
    of_batch = {name: options[name] for name in BATCH if name not in (*MODEL, "output")}
    of_load = {name: options[name] for name in SERVING if name not in (*MODEL, "concurrency", "rate", "output")}
    if load or goals or given.prefill_pool is not None:
        if options["batch"] != defaults.BATCH:
            raise DataError("--batch beside a load", hint="leave it out: the engine decides its batches")
        settings = common | of_load | {"output": defaults.SERVED_OUTPUT if output is None else output}
        settings["prefill_pool"] = None if given.prefill_pool is None else _pool(given.prefill_pool)
        _serve(dimensions, device, given, settings, load, goals)
        return
    if any(value != SERVING[name].default for name, value in of_load.items()):
        raise DataError(
            "--count, --warmup, --spread, --seed and --prefix-hit are of a load",
            hint="add --concurrency, --rate, --requests, --ttft-goal or --tpot-goal",
        )
    results: list[LLMEstimate | tuple[str, CdmppError]] = []
    for name in dict.fromkeys(device):
        try:
            spec = device_of(predictor.artifact, name)
            tokens = defaults.OUTPUT if output is None else output
            results.append(estimate(dimensions, spec, output=tokens, **of_batch, **common))
        except CdmppError as error:
            results.append((name, error))
    estimates = [result for result in results if not isinstance(result, tuple)]
    errors = [result for result in results if isinstance(result, tuple)]
    if given.json and (estimates or len(results) > 1):
        values = [_json(result) for result in results]
        print_json(values[0] if len(values) == 1 else values)
    elif estimates:
        print(
            render(
                estimate_tables(
                    estimates, SHOWN_PARTS if given.parts is None and len(results) == 1 else given.parts or 0
                )
            )
        )
    for fault in {fault.message: fault for _, fault in errors}.values():
        report(fault.message, fault.hint)
    if not estimates or any("device" in fault.code for _, fault in errors):
        raise typer.Exit(FAILED)


#: Settings of a server, of rows that do not state them.
_OF_ROWS = {
    name: replace(MODEL[name], help="Of rows that do not say.", default=None, unset="", choices=())
    for name in LAYOUT | TYPES
}


@dataclass(frozen=True)
class CalibrateOptions:
    """Options beside the settings of rows."""

    engine: str = option(defaults.ENGINE, "Profile to start from.", metavar="NAME|FILE")
    model: ModelOption = None
    json: JsonOption = False


@with_fields(CalibrateOptions, options=_OF_ROWS)
def calibrate(
    measured: Annotated[
        Path,
        typer.Argument(
            metavar="MEASURED.csv",
            help="Columns batch (or rate), input, output, and total_s, ttft_s or tpot_s; optionally "
            f"{', '.join(_OF_ROWS)}, config, device, closed_loop, prefix_hit. "
            "Or a JSON result of vLLM's or SGLang's serving benchmark.",
        ),
    ],
    config: Annotated[Path, typer.Option(metavar="CONFIG.json", help="The model's config.json.")],
    device: Annotated[list[str], typer.Option("--device", "-d", help="A known device, or a specification.")],
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="Profile to write.")],
    **options: Any,
) -> None:
    """Fit an engine profile to a few timings of your own server, for --engine of cdmpp llm.

    From two rows on; four bring most servers near 10 %. The kernels come from the model, so what is fitted is the
    engine: one factor on its kernels, and host time of a step, a sequence and tensor parallelism.
    """
    given = taken(CalibrateOptions, options)
    from cdmpp.llm.read import read_config
    from cdmpp.llm.serving.calibrate import fit_engine, read_measurements
    from cdmpp.predict.predictor import LatencyPredictor

    if out.suffix.lower() != ".toml":
        raise DataError(f"{out}: a profile is a .toml file", hint=f"--out {out.with_suffix('.toml')}")
    rows = [
        {**row, **{name: value for name, value in options.items() if row.get(name) in (None, "")}}
        for row in read_measurements(measured)
    ]
    dimensions = read_config(config)
    predictor = LatencyPredictor.load(given.model)
    result = fit_engine(dimensions, device_of(predictor.artifact, only_device(device)), rows, given.engine, predictor)
    result.profile.write(out)
    if given.json:
        print_json({**result.to_dict(), "out": str(out)})
        return
    host = result.profile.host
    print(
        f"{result.rows} rows; mean error {percent(result.before)} with {given.engine}, {percent(result.after)} fitted"
        + ("" if result.left_out is None else f", {percent(result.left_out)} on rows left out of the fit")
    )
    print(
        f"kernels x {result.profile.kernel_factor:.3f}; host {format_latency(host.step_s)} a step, "
        f"{format_latency(host.sequence_s)} a sequence, {format_latency(host.ranks_s)} with several ranks"
    )
    for text in result.undetermined:
        print(f"note: {text}")
    print(f"wrote {out}: use it with --engine {out}")


def _trace(path: Path) -> list[tuple[float, int, int]]:
    """Requests of a CSV file.

    Raises DataError: the file cannot be read, or a row is no request.
    """
    hint = "a CSV file with arrival_s, input, output"
    rows = parse_file(path, lambda text: parse_table(text, MAX_REQUESTS), "CSV", hint, max_bytes=MAX_TRACE_BYTES)
    requests = []
    for number, row in enumerate(rows, 1):
        try:
            requests.append((float(row["arrival_s"]), int(row["input"]), int(row["output"])))
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{path}: row {number} is no request", hint=hint) from None
    return requests


def _pool(text: str) -> dict[str, Any]:
    """Fields of a prefill pool, as "tp=4,dp=2".

    Raises DataError: a part has no value, or a number is none.
    """
    pool: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            pool[name] = value if name == "device" else float(value) if name == "bytes_per_s" else int(value)
        except ValueError:
            raise DataError(f"--prefill-pool: {part[:40]!r} is not allowed", hint="such as tp=4,dp=2") from None
    return pool


def _serve(
    config: LLMConfig,
    devices: list[str],
    given: LlmOptions,
    settings: dict[str, Any],
    load: dict[str, Any],
    goals: dict[str, Any],
) -> None:
    """Simulate each device under the load, and find the largest rate that keeps the goals."""
    from cdmpp.llm import goodput, load_curve, simulate
    from cdmpp.llm.serving.load import goodput_table, powers_to
    from cdmpp.llm.serving.simulate import serving_tables
    from cdmpp.predict.prediction import ErrorInfo

    check_figure(given.plot)
    results: list[ServingResult] = []
    limits: list[tuple[str, Goodput]] = []
    curves: dict[str, list[ServingResult]] = {}
    values: list[dict[str, Any]] = []
    unknown = False
    for name in dict.fromkeys(devices):
        value: dict[str, Any] = {"device": name}
        try:
            device = device_of(settings["predictor"].artifact, name)
            value["device"] = device.name
            if load:
                result = simulate(config, device, **settings, **load)
                results.append(result)
                value = result.to_dict()
            if given.plot is not None:
                several = powers_to(load["concurrency"])[:-1]
                curve = load_curve(config, device, several, **settings)
                curves[device.name] = [*curve, results[-1]]
                value["curve"] = [point.to_dict() for point in curves[device.name]]
            if goals:
                limit = goodput(config, device, **settings, **goals)
                limits.append((device.name, limit))
                value["goodput"] = limit.to_dict()
        except CdmppError as error:
            unknown = unknown or "device" in error.code
            value["error"] = asdict(ErrorInfo.of(error))
            if not given.json or len(devices) == 1:
                report(error.message, error.hint)
        values.append(value)
    answered = bool(results or limits)
    if given.plot is not None and curves:
        from cdmpp.llm.serving.load import draw_load

        save_figure(draw_load(curves, goals), given.plot)
    if given.json and (answered or len(values) > 1):
        print_json(values[0] if len(values) == 1 else values)
    elif answered:
        tables = serving_tables(results) if results else []
        print(render(tables + ([goodput_table(dict(limits))] if limits else [])))
    if not answered or unknown:
        raise typer.Exit(FAILED)


def _json(result: LLMEstimate | tuple[str, CdmppError]) -> dict[str, Any]:
    from cdmpp.predict.prediction import ErrorInfo

    if isinstance(result, tuple):
        return {"device": result[0], "error": asdict(ErrorInfo.of(result[1]))}
    return result.to_dict()
