"""``cdmpp devices``: the devices that can be named, and what kernels sustain on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.output import JsonOption, ModelOption, percent, print_json
from cdmpp.errors import InvalidProgramError
from cdmpp.predict.rendering import Table
from cdmpp.utils.units import format_latency, format_si

if TYPE_CHECKING:
    from cdmpp.devices.spec import DeviceSpec
    from cdmpp.predict.predictor import LatencyPredictor

#: Large kernels of one family each, and one so small that it takes as long as any launch.
_KERNELS = {
    "product": "linear:m=8192,n=8192,k=8192",
    "product of few rows": "linear:m=16,n=8192,k=8192",
    "attention": "attention_prefill:batch=8,q_len=4096,heads=32,kv_heads=32,head_dim=128",
    "pass over memory": "add:rows=16384,cols=16384",
    "norm": "rmsnorm:rows=16384,cols=8192",
    "launch": "add:rows=1,cols=1024",
}


def devices(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Print these devices as .toml: every figure, with sources.", metavar="NAME|FILE"),
    ] = None,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="Print what share of their data sheet kernels reach, as predicted.")
    ] = False,
    model: ModelOption = None,
    json: JsonOption = False,
) -> None:
    """List the known devices. Any other can be given as a .json or .toml specification; `native` is this CPU."""
    from cdmpp.devices import known, load_device
    from cdmpp.devices.loading import specification_toml

    specs = [load_device(name) for name in names] if names else known()
    if sustained:
        _print_sustained(specs, model, json)
        return
    if json:
        print_json({"devices": [spec.model_dump(mode="json") for spec in specs]})
        return
    if names:
        print("\n".join(specification_toml(spec) for spec in specs), end="")
        return

    def shown(value: float | None, unit: str) -> str:
        return "-" if value is None else format_si(value, unit)

    columns: dict[str, Callable[[DeviceSpec], str]] = {
        "name": lambda spec: spec.name,
        "vendor": lambda spec: spec.vendor,
        "architecture": lambda spec: spec.arch,
        "units": lambda spec: str(spec.compute_units),
        "fp32": lambda spec: shown(spec.peak_flops_fp32, "flop/s"),
        "fp16 matrix": lambda spec: shown(spec.peak_flops_fp16_matrix, "flop/s"),
        "fp8 matrix": lambda spec: shown(spec.peak_flops_fp8_matrix, "flop/s"),
        "memory": lambda spec: shown(spec.memory_bytes, "B"),
        "bandwidth": lambda spec: shown(spec.mem_bandwidth_bytes_per_s, "B/s"),
        "link": lambda spec: spec.link or "-",
        "status": lambda spec: spec.status,
    }
    print(Table.of(specs, columns, right=(3, 4, 5, 6, 7, 8)))


def _print_sustained(devices: Sequence[DeviceSpec], model: Path | None, json: bool) -> None:
    from cdmpp.predict.predictor import LatencyPredictor

    predictor = LatencyPredictor.load(model)
    rows = [row for device in devices for row in _sustained(predictor, device)]
    if json:
        print_json({"sustained": rows})
        return
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "device": itemgetter("device"),
        "kernel": itemgetter("kernel"),
        "type": itemgetter("dtype"),
        "latency": lambda row: format_latency(row["latency_s"]),
        "sustained": lambda row: percent(row["share"]),
        "interval": lambda row: f"{percent(row['lower_share'])} - {percent(row['upper_share'])}",
        "domain": itemgetter("domain"),
        "why": lambda row: row["domain_reason"] or "-",
    }
    print(Table.of(rows, columns, right=(3, 4, 5)))
    print("sustained: the seconds of the data sheet (operations at peak or bytes at full bandwidth) over the latency")


def _sustained(predictor: LatencyPredictor, device: DeviceSpec) -> Iterator[dict[str, Any]]:
    """Rows of one device: predictions of :data:`_KERNELS` in the types that its data sheet names."""
    types = ["float32", "bfloat16" if device.peak_flops_fp16_matrix else "float16"]
    narrow = "float8_e4m3" if device.peak_flops_fp8_matrix else "int8" if device.peak_ops_int8 else None
    kernels = [(name, dtype) for name in _KERNELS for dtype in types]
    if narrow is not None:
        kernels.append(("product", narrow))
    answers = predictor.predict([f"{_KERNELS[name]},dtype={dtype}" for name, dtype in kernels], device)
    for (name, dtype), answer in zip(kernels, answers, strict=True):
        if answer.error is not None:
            raise InvalidProgramError(answer.error.message, hint=answer.error.hint or "")
        sheet, *seconds = (s or 0.0 for s in (answer.roofline_s, answer.latency_s, answer.upper_s, answer.lower_s))
        shares = zip(("share", "lower_share", "upper_share"), (sheet / s for s in seconds), strict=True)
        about: dict[str, Any] = {"device": device.name, "kernel": name, "dtype": dtype, "latency_s": answer.latency_s}
        yield about | dict(shares) | {"domain": answer.domain, "domain_reason": answer.domain_reason}
