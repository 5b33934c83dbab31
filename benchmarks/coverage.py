"""Coverage of the networks: how many programs each has, and how many are lowered, predicted, measured.

``python -m benchmarks.coverage`` prints the table, ``--write`` puts it into docs/networks.md. It lowers all
networks at their default sizes (half a minute) and predicts each of their programs with the shipped model. What is
measured, at whatever sizes, it counts in the shipped records.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.frontends.tasks import TaskList, network_tasks
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.zoo import describe_network, network_names, network_parameters

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "networks.md"
RECORDS = ROOT / "data" / "cdmpp-measured" / "records.parquet"
BEGIN, END = "<!-- coverage: python -m benchmarks.coverage --write -->", "<!-- end of coverage -->"
#: Device of the predictions: a CPU, because programs without a schedule are refused on a GPU.
DEVICE = "xeon-platinum-8124m"


@dataclass(frozen=True)
class Measured:
    """What a file of records has of one network."""

    #: The network with its parameters, as it was collected.
    sizes: frozenset[str] = frozenset()
    #: Hashes of its tasks with at least one latency.
    tasks: frozenset[str] = frozenset()


def measured(records: Path = RECORDS) -> dict[str, Measured]:
    """The measured tasks of each network of a file of records; none where there is no file."""
    if not records.is_file():
        return {}
    import pyarrow.parquet as pq

    rows = pq.read_table(records, columns=["task", "networks", "latency_s"]).to_pydict()
    pairs_of: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for task, sizes, latency_s in zip(rows["task"], rows["networks"], rows["latency_s"], strict=True):
        if latency_s is not None:
            for size in filter(None, (sizes or "").split(";")):
                pairs_of[size.partition(":")[0]].add((size, task))
    return {
        name: Measured(frozenset(size for size, _ in pairs), frozenset(task for _, task in pairs))
        for name, pairs in pairs_of.items()
    }


def coverage_row(tasks: TaskList, of_network: Measured, predictor: LatencyPredictor) -> str:
    """One row of the table."""
    name = tasks.network
    programs = [TensorProgram.from_tvm_json(task.tvm_json, name=task.name) for task in tasks.tasks]
    answers = predictor.predict(programs, DEVICE)
    parameters = " ".join(f"`{key}={value}`" for key, value in network_parameters(name).items())
    what = describe_network(name).replace("``", "`")
    counts = (
        sum(task.calls for task in tasks.tasks),
        len(programs) + len(tasks.unsupported),
        len(programs),
        sum(answer.error is None for answer in answers),
        len(of_network.sizes),
        len(of_network.tasks),
    )
    return "| " + " | ".join((f"`{name}`", what, parameters, *map(str, counts))) + " |"


def coverage_table(lowered: Callable[[str], TaskList]) -> str:
    """The whole table, one row for each network."""
    predictor, tables = LatencyPredictor.load(), measured()
    head = (
        "| network | what it is | parameters and defaults | launches | programs | lowered | predicted"
        " | measured sizes | measured tasks |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    rows = (coverage_row(lowered(name), tables.get(name, Measured()), predictor) for name in network_names())
    return "\n".join((*head, *rows))


def table_of(text: str) -> str:
    """The table that stands in the document."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS.name}")
    options = parser.parse_args()
    table = coverage_table(network_tasks)
    print(table)
    if options.write:
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
