"""``cdmpp devices``: the devices that can be named."""

from __future__ import annotations

from typing import Annotated

import typer

from cdmpp.cli.output import JsonOption, print_json, print_table
from cdmpp.utils.units import format_si


def devices(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Print these devices as .toml: every figure, with sources.", metavar="NAME|FILE"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the known devices. Any other can be given as a .json or .toml specification; `native` is this CPU."""
    from cdmpp.devices import known, load_device
    from cdmpp.devices.loading import specification_toml

    found = [load_device(name) for name in names] if names else known()
    if json:
        print_json({"devices": [spec.model_dump(mode="json") for spec in found]})
        return
    if names:
        print("\n".join(specification_toml(spec) for spec in found), end="")
        return

    def shown(value: float | None, unit: str) -> str:
        return "-" if value is None else format_si(value, unit)

    header = (
        "name",
        "vendor",
        "architecture",
        "units",
        "fp32",
        "fp16 matrix",
        "fp8 matrix",
        "memory",
        "bandwidth",
        "link",
        "status",
    )
    rows = [
        (
            spec.name,
            spec.vendor,
            spec.arch,
            str(spec.compute_units),
            shown(spec.peak_flops_fp32, "flop/s"),
            shown(spec.peak_flops_fp16_matrix, "flop/s"),
            shown(spec.peak_flops_fp8_matrix, "flop/s"),
            shown(spec.memory_bytes, "B"),
            shown(spec.mem_bandwidth_bytes_per_s, "B/s"),
            spec.link or "-",
            spec.status,
        )
        for spec in found
    ]
    print_table(header, rows, right=(3, 4, 5, 6, 7, 8))
