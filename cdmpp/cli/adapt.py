"""``cdmpp adapt``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cdmpp.cli.options import option, with_fields
from cdmpp.cli.output import (
    ERROR_HEADER,
    JsonOption,
    ModelOption,
    device_of,
    error_cells,
    percent,
    print_json,
    print_table,
)
from cdmpp.cli.progress import steps

if TYPE_CHECKING:
    from cdmpp.devices import DeviceSpec
    from cdmpp.model.artifact.model import Artifact
    from cdmpp.train.adaptation.observed import ObservedRecords
    from cdmpp.train.adaptation.records import DeviceRecords


#: cdmpp.train.adaptation.samplers.SAMPLERS, without its imports.
Sampler = Literal["kmeans", "random", "variance"]


@dataclass(frozen=True)
class AdaptOptions:
    """Options of records and of the adaptation."""

    records: Path | None = option(
        None,
        "Measurements: project records, a folder of cdmpp collect or measure, a public operator "
        "table, or a CSV with the columns program and latency_us (or latency_ms, latency_s).",
        metavar="FILE|DIR",
    )
    observations: str | None = option(
        None,
        "Instead of --records: the measurements that this service has collected (POST /observe) of --device, "
        "since the last change of the device.",
        metavar="URL",
    )
    last: int = option(1000, "Read so many of the newest --observations.", min=1)
    api_key: str | None = option(None, "Key of the service.", metavar="KEY", envvar="CDMPP_API_KEY")
    device: str | None = option(
        None,
        "A known device, a .toml/.json specification, or native: this CPU. Default: the device named in the records.",
        metavar="NAME|FILE",
    )
    k: int | None = option(
        None,
        "Use so many records, chosen without their latencies, and report the error on the others. Default: use all.",
        min=1,
    )
    sampler: Sampler = option("variance", "How the k records are chosen.")
    seed: int = option(0, "Seed of the choice.", min=0)
    model: ModelOption = None
    json: JsonOption = False


@with_fields(AdaptOptions)
def adapt(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the adapted model.")], **options: Any
) -> None:
    """Adapt a model to a device by measurements of it.

    Writes a small folder that refers to the model and that every --model option accepts. Predictions for other
    devices do not change. Prints the errors on held-out measurements before and after. The correction is shrunk
    until it reduces that error. If no part of it does, the model's predictions are kept, with a warning.
    """
    given = AdaptOptions(**options)
    from cdmpp.model.artifact.folder import default_model
    from cdmpp.model.artifact.load import check_target, load_artifact, save_adapted, save_corrected
    from cdmpp.train.adaptation.adapt import adapt as adapt_model
    from cdmpp.train.adaptation.records import device_records

    if (given.records is None) == (given.observations is None):
        raise typer.BadParameter("give one of --records and --observations")
    artifact = load_artifact(given.model or default_model())
    check_target(out, artifact)
    collected: dict[str, Any] | None = None
    if given.observations is None:
        assert given.records is not None
        rows = _records(given.records, given.device, artifact)
    else:
        spec, observed = _observed(given.observations, given, artifact)
        rows = device_records(observed.records, spec, artifact)
        collected = {
            "read": observed.count,
            "before_change": observed.before_change,
            "unusable": dict(observed.unusable),
            "since": observed.since,
        }
    with steps("records", len(rows.usable)) as done:
        made = adapt_model(artifact, rows, k=given.k, sampler=given.sampler, seed=given.seed, progress=done)
    if "collectives" in made.artifact.manifest:
        save_corrected(out, made.artifact)
    else:
        save_adapted(out, made.artifact)
    result = made.report if collected is None else {**made.report, "observations": collected}
    if given.json:
        print_json(result)
    else:
        _print(result, out)
    for entry in result["warnings"]:
        print(f"warning: {entry['code']}: {entry['message']}", file=sys.stderr)


def _observed(url: str, given: AdaptOptions, artifact: Artifact) -> tuple[DeviceSpec, ObservedRecords]:
    """The device, and what the service has collected of it."""
    from cdmpp.client import PredictorClient
    from cdmpp.train.adaptation.observed import observed_records

    if given.device is None:
        raise typer.BadParameter("--observations needs --device")
    spec = device_of(artifact, given.device)
    with PredictorClient(url, api_key=given.api_key) as client:
        rows = client.observations(spec.name, digest=spec.digest(), most=given.last)
    return spec, observed_records(rows)


def _records(path: Path, device: str | None, artifact: Artifact) -> DeviceRecords:
    """Records of a device; its specification in the records precedes what can be found out about this machine."""
    from cdmpp.devices.host import is_native, native_name
    from cdmpp.devices.loading import is_local
    from cdmpp.errors import UnknownDeviceError
    from cdmpp.train.adaptation.records import device_records

    if device is not None and is_native(device):
        try:
            return device_records(path, native_name(device), artifact)
        except UnknownDeviceError:
            pass
    known_device = device_of(artifact, device) if device is not None and is_local(device) else device
    return device_records(path, known_device, artifact)


def _print(result: dict[str, Any], out: Path) -> None:
    checked = result["cross_validated"]
    families = ", ".join(f"{name} {count}" for name, count in result["families"].items())
    if "observations" in result:
        collected = result["observations"]
        print(
            f"{collected['read']:,} observations read, {collected['before_change']:,} of them from before the last "
            f"change and {sum(collected['unusable'].values()):,} without a usable program: not used"
        )
    print(f"{result['model_id']}: {result['programs']} programs of {result['device']} ({families})")
    if result["weight"]:
        share = "" if result["weight"] == 1.0 else f", {100 * result['weight']:.0f} % of the correction is applied"
        after = f"{percent(checked['before'])} before, {percent(checked['after'])} after{share}"
        print(f"mean error on measurements left out: {after}")
    else:
        print(f"the base model's predictions are kept; mean error on the measurements: {percent(checked['before'])}")
    if result["after"] is not None:
        rows = [(name, *error_cells(result[name]["overall"])) for name in ("before", "after")]
        print_table(("other rows", *ERROR_HEADER), rows, right=range(1, len(ERROR_HEADER) + 1))
    for reason, count in result["unsupported"].items():
        print(f"not used: {count:,} rows, {reason}")
    print(f"written to {out}")
