"""``cdmpp inspect``: what the model sees of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.output import JsonOption, print_json
from cdmpp.utils.units import format_si

if TYPE_CHECKING:
    from cdmpp.features.ast import CompactAST
    from cdmpp.programs.program import TensorProgram


def inspect(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="As for cdmpp predict; shows each distinct program.")
    ],
    json: JsonOption = False,
) -> None:
    """Show the compact AST of a program and the computation vectors of its leaves.

    A leaf is a computation (a store) with its path of loops; its position is 2 * rank - depth. Vectors are
    shown by group, without the columns that are 0: magnitudes as the model reads them, which is
    log2(1 + x), then x itself. Programs given as TIR also have columns of their schedule, those for a GPU the
    threads, memory and requests of each launch.
    """
    from cdmpp.programs.frontends.load import load_programs

    described = [describe(p) for p in load_programs(program).programs]
    if json:
        from cdmpp.features.schema import SCHEMA_HASH

        print_json({"feature_schema": SCHEMA_HASH, "programs": described})
        return
    for i, fields in enumerate(described):
        if i:
            print()
        _print(fields)


def describe(program: TensorProgram) -> dict[str, Any]:
    """Tree, vectors and totals of a program, ready for JSON."""
    from cdmpp.features.class_features import PROGRAM_COLUMNS
    from cdmpp.features.encode import encode_ast, encode_operator, operator_ast
    from cdmpp.features.launch import launch_summary
    from cdmpp.features.launch_columns import recorded_ast
    from cdmpp.features.leaf import ast_matrix, leaf_values
    from cdmpp.features.schedule import SCHEDULE_COLUMNS, SCHEDULE_FLAGS
    from cdmpp.features.schema import GROUPS, LINEAR, WIDTH
    from cdmpp.programs.tvm_json import load

    if program.operator is not None:
        ast, encoded = operator_ast(program.operator), encode_operator(program.operator)
    else:
        ast = recorded_ast(*load(program.tvm_json or ""), function=program.function)
        encoded = encode_ast(ast, schedule=True)
    scaled = ast_matrix(ast)
    # Nothing for an operator: it has no schedule.
    schedules = [row[WIDTH:] for row in encoded.leaves[0].tolist()]
    leaves = []
    for leaf, row, schedule in zip(ast.leaves, scaled, schedules, strict=True):
        raw = iter(float(v) for v in leaf_values(ast, leaf))
        vector: dict[str, dict[str, dict[str, float]]] = {}
        column = 0
        for group, names in GROUPS.items():
            for name in names:
                value, plain = float(row[column]), next(raw)
                column += 1
                if value:
                    shown = {"scaled": value} if name in LINEAR else {"scaled": value, "value": plain}
                    vector.setdefault(group, {})[name] = shown
        for name, value in zip(SCHEDULE_COLUMNS, schedule, strict=False):
            if value:
                plainly = {} if name in SCHEDULE_FLAGS else {"value": 2**value - 1}
                vector.setdefault("schedule", {})[name] = {"scaled": value, **plainly}
        leaves.append(
            {
                "name": leaf.name,
                "position": leaf.position,
                "rank": leaf.rank,
                "depth": leaf.depth,
                "loops": [ast.loops[p].name for p in leaf.path],
                "reduces": leaf.is_init is False and bool(leaf.reduce_loops),
                "init": leaf.is_init,
                "vector": vector,
            }
        )
    totals = dict(zip(PROGRAM_COLUMNS, encoded.totals[0].tolist(), strict=True))
    return {
        "name": program.name,
        "hash": program.hash,
        "backend": program.backend,
        "family": encoded.family,
        "dtype": encoded.dtype,
        "flops": totals.pop("flops"),
        "bytes": totals.pop("bytes"),
        "totals": totals,
        "launch": [] if program.operator is not None else launch_summary(program),
        "tree": _tree(ast),
        "leaves": leaves,
    }


def _tree(ast: CompactAST) -> list[dict[str, Any]]:
    """Loops and leaves in pre-order, with their depth."""
    nodes: list[dict[str, Any]] = []
    for rank, depth, loop, leaf in ast.outline:
        node: dict[str, Any] = {"rank": rank, "depth": depth}
        if loop is not None:
            info = ast.loops[loop]
            node |= {"loop": info.name, "extent": int(info.extent), "kind": info.kind}
            if info.unroll_step:
                node["unroll_step"] = info.unroll_step
        elif leaf is not None:
            node |= {"leaf": leaf, "name": ast.leaves[leaf].name}
        nodes.append(node)
    return nodes


def _print(program: dict[str, Any]) -> None:
    intensity = program["flops"] / program["bytes"]
    print(f"{program['name']}")
    print(", ".join(f"{name} {program[name]}" for name in ("hash", "backend", "family", "dtype")))
    print(
        f"{format_si(program['flops'], 'flop')}, {format_si(program['bytes'], 'B')} of arguments, "
        f"{intensity:.3g} flop/B"
    )
    for node in program["tree"]:
        indent = "  " * node["depth"]
        if "loop" in node:
            unroll = f", unroll up to {node['unroll_step']}" if "unroll_step" in node else ""
            print(f"{indent}for {node['loop']} in {node['extent']}  [{node['kind']}{unroll}]")
        else:
            leaf = program["leaves"][node["leaf"]]
            kind = " (initial value)" if leaf["init"] else " (reduces)" if leaf["reduces"] else ""
            print(f"{indent}leaf {node['leaf']}: {leaf['name']}{kind}, position {leaf['position']}")
    for number, launch in enumerate(program["launch"]):
        print(f"launch {number}: " + ", ".join(f"{name} {value:,.6g}" for name, value in launch.items()))
    for i, leaf in enumerate(program["leaves"]):
        print(f"leaf {i}: {leaf['name']}")
        for group, columns in leaf["vector"].items():
            print(f"  {group}: " + ", ".join(_column(group, *column) for column in columns.items()))


def _column(group: str, name: str, about: dict[str, float]) -> str:
    name = name.removeprefix(f"{group}_")
    if "value" not in about:
        return f"{name} {about['scaled']:.4g}"
    value = about["value"]
    magnitude = abs(value)
    plain = f"{magnitude:,.6g}" if magnitude < 1e6 else format_si(magnitude, "")
    return f"{name} {about['scaled']:.4g} ({'-' if value < 0 else ''}{plain}{_unit(name, magnitude)})"


def _unit(name: str, magnitude: float) -> str:
    """Bytes and operations say so; everything else is a count."""
    sizes = ("bytes", "stride", "traffic", "working_set")
    unit = "B" if name.rstrip("_0123456789").endswith(sizes) else "flop" if name == "flops" else ""
    return unit if magnitude >= 1e6 or not unit else f" {unit}"
