"""``cdmpp measure --export-library``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import typer

from cdmpp.cli.output import device_of, print_json
from cdmpp.utils.units import format_latency


@dataclass(frozen=True)
class ExportRequest:
    """Options of an export; ``pool`` and ``model`` have defaults where they are None."""

    device: str | None
    out: Path | None
    count: int
    part_mib: float
    seed: int
    pool: Path | None
    model: Path | None


def run_export(request: ExportRequest, json: bool) -> None:
    """Choose operators and write their part files."""
    from cdmpp.data.measure.kit.export_library import HOST_S, check_target, export_library
    from cdmpp.data.pool import model_pool, read_pool
    from cdmpp.model.artifact.load import load_artifact
    from cdmpp.predict.predictor import default_model
    from cdmpp.train.adaptation.library_job import choose_variants

    if request.device is None:
        raise typer.BadParameter("name the GPU: --device NAME", param_hint="--device")
    if request.out is None:
        raise typer.BadParameter("say where to: --out DIR", param_hint="--out")
    folder = request.model or default_model()
    artifact = load_artifact(folder)
    device = device_of(artifact, request.device)
    check_target(device, request.out)
    pool = model_pool(folder) if request.pool is None else read_pool(request.pool)
    choice = choose_variants(artifact, device, pool, request.count, seed=request.seed)
    about = {
        "command": f"cdmpp measure --export-library --device {device.name} --count {request.count} "
        f"--seed {request.seed}",
        "model_id": artifact.model_id,
        "pool": str(request.pool or "of the model"),
    }
    job = export_library(
        choice.variants,
        choice.expected_s,
        device,
        request.out,
        part_mib=request.part_mib,
        seed=request.seed,
        about=about,
    )
    sizes = sum(part["bytes"] for part in job["parts"])
    estimate_s = job["library"]["estimate_s"]
    kinds = Counter(variant.kind for variant in choice.variants)
    if json:
        print_json(
            {
                "path": str(request.out),
                "device": device.name,
                "operators": len(choice.variants),
                "new": sum(variant.origin == "new" for variant in choice.variants),
                "implementations": dict(kinds),
                "parts": len(job["parts"]),
                "bytes": sizes,
                "estimate_s": estimate_s,
            }
        )
        return
    print(f"{len(choice.variants):,} operators: " + ", ".join(f"{name} {n:,}" for name, n in kinds.most_common()))
    print(f"{len(job['parts'])} parts, {sizes / 2**20:.2f} MiB, in {request.out}")
    print(
        f"estimate on {device.name}: {format_latency(estimate_s)} for the operators, "
        f"{format_latency(HOST_S)} for the host part"
    )
    print(f"next, there: cd {request.out} && python run.py part-*.zip --minutes 9 --out results")
