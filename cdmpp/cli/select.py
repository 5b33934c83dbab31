"""``cdmpp select``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cdmpp.cli.output import JsonOption, ModelOption, device_of, print_json, print_table
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from cdmpp.data.measure.store import StoredProgram
    from cdmpp.devices import DeviceSpec
    from cdmpp.model.artifact.model import Artifact
    from cdmpp.train.adaptation.select import Selection

_MOST_SHOWN = 10
#: A value of --pool, and its schedules of a task besides the default.
_NETWORKS, _SCHEDULES = "networks", 4


def select(
    device: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device that will be measured.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder.")],
    model: ModelOption = None,
    k: Annotated[int, typer.Option(min=1, help="How many programs.")] = 40,
    sampler: Annotated[
        Literal["kmeans", "random", "variance"] | None,
        typer.Option(help="How they are chosen.", show_default="variance; TVM programs on a CPU: kmeans"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER|networks",
            help="Programs to choose from: records, a public table, a text file of operators; by default "
            "those that the model carries. With --backend tvm: a folder of TVM JSON or TVMScript, records, a tuning "
            "log, or networks: the default and four schedules of each task of the zoo (default).",
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:K=V,...]",
            help="Of --pool networks: this network only; repeatable.",
            show_default="all but the model's test networks",
        ),
    ] = None,
    protocol: Annotated[
        Literal["kernel", "graph", "eager"] | None,
        typer.Option(help="How they will be timed.", show_default="kernel, on a CPU eager"),
    ] = None,
    framework: Annotated[str, typer.Option(help="Who will launch them; empty: not said.")] = "pytorch",
    backend: Annotated[
        Literal["library", "tvm"], typer.Option(help="Library kernels, or TVM's (cdmpp collect).")
    ] = "library",
    json: JsonOption = False,
) -> None:
    """Choose the programs to measure on a new device, for `cdmpp adapt`.

    Writes DIR/programs.csv and a README: measure them with `cdmpp measure DIR` or fill in the latencies, then run
    `cdmpp adapt`. Prints the expected measuring time. TVM programs (--backend tvm) are built and timed by
    `cdmpp measure DIR` or `cdmpp collect DIR`.
    """
    from cdmpp.data.measure.todo import Todo, write_todo
    from cdmpp.data.pool import model_pool, read_pool
    from cdmpp.errors import DataError
    from cdmpp.model.artifact.load import load_artifact
    from cdmpp.predict.predictor import default_model
    from cdmpp.programs.operators import operator_family
    from cdmpp.programs.query_options import FRAMEWORKS
    from cdmpp.train.adaptation.select import select as choose
    from cdmpp.utils.writing import check_new_folder

    if backend == "tvm" and protocol not in (None, "kernel"):
        raise typer.BadParameter("TVM programs are timed as kernel", param_hint="--protocol")
    if network and (backend != "tvm" or pool not in (None, _NETWORKS)):
        raise typer.BadParameter("it is for --backend tvm --pool networks", param_hint="--network")
    if framework and framework not in FRAMEWORKS:
        raise DataError(f"no framework {framework!r}", hint="one of: " + ", ".join(FRAMEWORKS))
    check_new_folder(out)
    folder = model or default_model()
    artifact = load_artifact(folder)
    spec = device_of(artifact, device)
    sampler = sampler or ("kmeans" if backend == "tvm" and spec.kind != "gpu" else "variance")
    about: dict[str, Any] = {
        "model": str(folder),
        "model_id": artifact.model_id,
        "k": k,
        "sampler": sampler,
        "seed": seed,
    }
    selection: Selection[Any]
    if backend == "tvm":
        selection = _choose_scheduled(artifact, spec, pool or _NETWORKS, network or [], out, about)
        texts = [f"{p.task_name} {p.hash}" for p in selection.programs]
        kinds, timed, what = Counter(p.task_name for p in selection.programs), "kernel", {}
    else:
        programs = read_pool(Path(pool)) if pool is not None else model_pool(folder)
        timed = protocol or ("eager" if spec.kind == "cpu" else "kernel")
        selection = choose(artifact, spec, programs, k, sampler=sampler, seed=seed, protocol=timed, framework=framework)
        about["pool"] = pool or str(folder)
        todo = Todo(
            selection.programs,
            tuple(selection.expected_s.tolist()),
            spec,
            timed,
            framework,
            about,
            selection.estimate_s,
        )
        write_todo(todo, out)
        texts, kinds = [p.text() for p in selection.programs], Counter(p.operator for p in selection.programs)
        families = Counter(operator_family(p.operator) for p in selection.programs)
        what = {"framework": framework, "operators": dict(kinds), "families": dict(families)}
    if json:
        print_json(
            {
                **about,
                "device": spec.name,
                "protocol": timed,
                "path": str(out),
                "estimate_s": round(selection.estimate_s, 2),
                "pool_programs": selection.pool,
                "left_out": dict(selection.left_out),
                **what,
                "programs": [
                    {"program": text, "expected_latency_s": float(f"{s:.6g}")}
                    for text, s in zip(texts, selection.expected_s.tolist(), strict=True)
                ],
            }
        )
        return
    rows = [(text, format_latency(s)) for text, s in zip(texts, selection.expected_s.tolist(), strict=True)]
    print_table(("program", "expected"), rows[:_MOST_SHOWN], right=(1,))
    if len(rows) > _MOST_SHOWN:
        print(f"... and {len(rows) - _MOST_SHOWN} more: " + ", ".join(f"{n} {c}" for n, c in kinds.most_common()))
    left = ", ".join(f"{reason} {count:,}" for reason, count in selection.left_out.items())
    print(f"{len(rows)} of {selection.pool:,} programs" + (f" (left out: {left})" if left else ""))
    print(f"measuring them on {spec.name} ({timed}) takes about {format_latency(selection.estimate_s)}")
    if backend == "tvm":
        print(f"next, on that machine: cdmpp measure {out}; then cdmpp adapt --records {out}")
        return
    on = "cuda:0" if spec.kind == "gpu" else "cpu"
    print(f"next: cdmpp measure {out} --on {on}, or fill {out / 'programs.csv'}; {out / 'README.md'} says more")


def _choose_scheduled(
    artifact: Artifact, spec: DeviceSpec, pool: str, networks: list[str], out: Path, about: dict[str, Any]
) -> Selection[StoredProgram]:
    """Choose TVM programs and write them."""
    from cdmpp.cli.collect import progress_bars
    from cdmpp.data.measure.scheduled_todo import network_programs, read_scheduled_pool, write_scheduled_todo
    from cdmpp.programs.zoo import network_names
    from cdmpp.train.adaptation.select import select_scheduled

    if pool == _NETWORKS:
        test = artifact.part(scheduled=True).manifest.get("data", {}).get("sealed", ())
        about["pool"] = networks or [name for name in network_names() if name not in test]
        with progress_bars() as progress:
            programs = network_programs(spec, about["pool"], _SCHEDULES, about["seed"], progress)
    else:
        about["pool"] = pool
        programs = read_scheduled_pool(Path(pool))
    selection = select_scheduled(artifact, spec, programs, about["k"], sampler=about["sampler"], seed=about["seed"])
    write_scheduled_todo(selection.programs, selection.expected_s.tolist(), spec, about, out)
    return selection
