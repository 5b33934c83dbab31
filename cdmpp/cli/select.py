"""``cdmpp select``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from cdmpp.cli.output import JsonOption, ModelOption, device_of, print_json, print_table
from cdmpp.utils.units import format_latency

_MOST_SHOWN = 10


def select(
    device: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device that will be measured.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder.", show_default=False)],
    model: ModelOption = None,
    k: Annotated[int, typer.Option("--k", min=1, help="How many programs.")] = 40,
    sampler: Annotated[Literal["kmeans", "random", "variance"], typer.Option(help="How they are chosen.")] = "kmeans",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    pool: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Programs to choose from: records, a public table, a text file of operators; by default "
            "those that the model carries.",
            show_default=False,
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
    `cdmpp adapt`. Prints the expected measuring time.
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

    if backend == "tvm":
        raise DataError(
            "programs that TVM schedules are not chosen from a pool",
            hint="cdmpp collect --network NAME measures them, on a board through --tracker or --build-only",
        )
    if framework and framework not in FRAMEWORKS:
        raise DataError(f"no framework {framework!r}", hint="one of: " + ", ".join(FRAMEWORKS))
    check_new_folder(out)
    folder = model or default_model()
    artifact = load_artifact(folder)
    spec = device_of(artifact, device)
    programs = read_pool(pool) if pool is not None else model_pool(folder)
    timed = protocol or ("eager" if spec.kind == "cpu" else "kernel")
    found = choose(artifact, spec, programs, k, sampler=sampler, seed=seed, protocol=timed, framework=framework)
    about = {
        "model": str(folder),
        "model_id": artifact.model_id,
        "k": k,
        "sampler": sampler,
        "seed": seed,
        "pool": str(pool or folder),
    }
    todo = Todo(found.programs, tuple(found.expected_s.tolist()), spec, timed, framework, about, found.estimate_s)
    write_todo(todo, out)
    operators = Counter(program.operator for program in found.programs)
    if json:
        print_json(
            {
                **about,
                "device": spec.name,
                "protocol": timed,
                "framework": framework,
                "path": str(out),
                "estimate_s": round(found.estimate_s, 2),
                "pool_programs": found.pool,
                "left_out": dict(found.left_out),
                "operators": dict(operators),
                "families": dict(Counter(operator_family(p.operator) for p in found.programs)),
                "programs": [
                    {"program": p.text(), "expected_latency_s": float(f"{s:.6g}")}
                    for p, s in zip(found.programs, found.expected_s.tolist(), strict=True)
                ],
            }
        )
        return
    rows = list(zip(found.programs, found.expected_s.tolist(), strict=True))
    print_table(("program", "expected"), [(p.text(), format_latency(s)) for p, s in rows[:_MOST_SHOWN]], right=(1,))
    if len(rows) > _MOST_SHOWN:
        print(f"... and {len(rows) - _MOST_SHOWN} more: " + ", ".join(f"{n} {c}" for n, c in operators.most_common()))
    left = ", ".join(f"{reason} {count:,}" for reason, count in found.left_out.items())
    print(f"{len(rows)} of {found.pool:,} programs" + (f" (left out: {left})" if left else ""))
    print(f"measuring them on {spec.name} ({timed}) takes about {format_latency(found.estimate_s)}")
    on = "cuda:0" if spec.kind == "gpu" else "cpu"
    print(f"next: cdmpp measure {out} --on {on}, or fill {out / 'programs.csv'}; {out / 'README.md'} says more")
