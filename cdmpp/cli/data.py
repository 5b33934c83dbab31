"""``cdmpp data import`` and ``cdmpp data info``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cdmpp.cli.output import JsonOption, percent, print_json, unknown_device_advice
from cdmpp.utils.units import format_latency

data = typer.Typer(help="Measurement tables.", no_args_is_help=True, rich_markup_mode=None)

_COUNTED = (
    "source",
    "op",
    "operator",
    "dtype",
    "device",
    "backend",
    "protocol",
    "framework",
    "splits",
    "excluded",
    "unsupported",
)

#: Reasons without a program that are printed.
_SHOWN_REASONS = 8
#: Labels that are not the keys of the JSON.
_LABELS = {"op": "name in the source"}

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE|DIR",
        help="Project records, a folder that cdmpp collect filled, or a public operator table "
        "(Parquet, CSV, gzipped CSV) or a CSV with the columns program and latency_us, recognised by its columns.",
    ),
]


@data.command("import", epilog="example: cdmpp data import ansor.json --device v100-pcie-16gb --out records.parquet")
def import_file(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG|FILE|DIR...",
            help="Tuning logs (JSON lines of Ansor, a folder of MetaSchedule), or tables as of data info.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="OUT", help="Parquet file to write.")],
    device: Annotated[
        str | None, typer.Option("--device", "-d", help="Device that was measured; replaces that of a file.")
    ] = None,
    epilogue: Annotated[
        Literal["", "add", "add_relu"],
        typer.Option(metavar="add|add_relu", help="Fused behind the workloads of a log of Ansor."),
    ] = "",
    workloads: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py",
            help="Ansor's workload functions: te functions that return [*inputs, result]. The file is executed.",
        ),
    ] = None,
    share: Annotated[float, typer.Option(help="Share of the configurations of a public table of Kernel Tuner.")] = 1.0,
    per_task: Annotated[
        int | None,
        typer.Option(
            "--schedules-per-task",
            min=1,
            metavar="N",
            help="Of a tuning log, keep N measured schedules of each task and device: the two fastest, others by hash.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write any known tables as project records; every row is kept, unusable ones with the reason.

    Programs of tuning logs are built once, 30 to 50 ms each, and cached in $CDMPP_CACHE or ~/.cache/cdmpp.
    """
    from cdmpp.data.importers.ansor import register_workloads
    from cdmpp.data.load import import_tables
    from cdmpp.data.summary import summarise
    from cdmpp.devices import load_device

    if workloads is not None:
        register_workloads(workloads)
    spec = None if device is None else load_device(device)
    table = import_tables(files, out, share, device=spec, per_task=per_task, epilogue=epilogue)
    _show(summarise(table), json, out)


@data.command("info", epilog="example: cdmpp data info ops_neusight.parquet")
def info_of(file: FileArgument, json: JsonOption = False) -> None:
    """Summarise a table: rows, sources, devices and operators."""
    from cdmpp.data.summary import info

    _show(info(file), json)


@data.command("merge", epilog="example: cdmpp data merge data/my-cpu data/other-cpu --out data/both")
def merge_folders(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Dataset folders.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder.")],
    json: JsonOption = False,
) -> None:
    """Put records and second measurements of several folders into a new one, with a card.

    A program that several folders measured is stored once. `cdmpp data split` writes the splits.
    """
    from cdmpp.data.card import merge_folders as merge
    from cdmpp.data.summary import info

    merge(folders, out)
    _show(info(out), json, out)


@data.command("split", epilog="example: cdmpp data split data/my-cpu --test-network bert-tiny")
def split_folder(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that cdmpp collect filled.")],
    test_network: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Network to hold out; repeatable.")
    ] = None,
    seal: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seal N networks, chosen by a hash, for a final test.")
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Write splits.parquet beside the records: by task, by network, by device.

    Whole tasks fall into one part; no task of a test network is trained on. data info names the networks.
    No training reads a program of a sealed network. Sealed networks stay sealed when the command is repeated.
    """
    from cdmpp.data.folder import SPLITS, records_file
    from cdmpp.data.load import load_table
    from cdmpp.data.split_file import renew_splits, write_splits

    out = records_file(folder).with_name(SPLITS)
    splits = renew_splits(load_table(folder), out, test_networks=test_network or (), sealed=seal)
    write_splits(splits, out)
    if json:
        print_json({"path": str(out), **splits.about, "splits": splits.counts()})
        return
    print(f"wrote {out}")
    for name, parts in splits.counts().items():
        unit = "programs" if name in splits.programs else "devices"
        print(f"{name}: " + ", ".join(f"{part} {n:,}" for part, n in parts.items() if n) + f" {unit}")


def _show(summary: dict[str, Any], json: bool, out: Path | None = None) -> None:
    """Print a summary, that of a table that was written with its path."""
    if json:
        return print_json(summary if out is None else {"path": str(out), **summary})
    if out is not None:
        print(f"wrote {out}")
    _print(summary)


def _print(summary: dict[str, Any]) -> None:
    rows = f"{summary['rows']:,} rows, {summary['trainable_rows']:,} of them for training"
    print(f"{rows}; {summary['programs']:,} programs ({summary['tvm_programs']:,} as TIR)")
    counts = ", ".join(f"{summary[name]:,} {name}" for name in ("flagged", "duplicates", "failed"))
    print(f"{summary['records']:,} records; {counts}; {summary['tasks']:,} tasks")
    if summary["networks"]:
        print(f"networks ({len(summary['networks'])}): {', '.join(summary['networks'])}")
    for device, floor in summary["noise_floor_by_device"].items():
        median, p90 = percent(floor["median"]), percent(floor["p90"])
        print(f"noise floor on {device}: median {median}, 90 % below {p90} (measured twice: {floor['n']:,})")
    latency = summary["latency_s"]
    if latency["median"] is not None and latency["min"] >= 0:
        low, middle, high = (format_latency(latency[name]) for name in ("min", "median", "max"))
        print(f"latency: {low} to {high}, median {middle}")
    for name in _COUNTED:
        counts = summary[name]
        if any(counts):  # no line for a framework that no row names
            shown = sorted(counts.items(), key=lambda item: -item[1])
            print(f"{_LABELS.get(name, name)}: " + ", ".join(f"{key or '(not given)'} {n:,}" for key, n in shown))
    for reason, n in sorted(summary["inexpressible"].items(), key=lambda item: -item[1])[:_SHOWN_REASONS]:
        print(f"no program ({n:,}): {reason}")
    advice = unknown_device_advice(summary["device"]) if "unknown_device" in summary["unsupported"] else ""
    if advice:
        print(f"unknown_device: {advice}")
    print(f"fingerprint: {summary['fingerprint']}")
