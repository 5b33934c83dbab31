"""Coverage of the networks: how many programs each has, and how many are lowered, measured, predicted.

``python -m benchmarks.coverage`` prints the table, ``--write`` puts it into docs/networks.md. It lowers all
networks (half a minute) and, for each of their programs, looks for its task in the shipped measurements and
predicts it with the shipped model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cdmpp.frontends.tasks import TaskList, network_tasks
from cdmpp.predictor import LatencyPredictor
from cdmpp.programs.program import TensorProgram
from cdmpp.zoo import describe_network, network_names, network_parameters

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "networks.md"
RECORDS = ROOT / "data" / "cdmpp-measured" / "records.parquet"
BEGIN, END = "<!-- coverage: python -m benchmarks.coverage --write -->", "<!-- end of coverage -->"
#: Device of the predictions: a CPU, because programs without a schedule are refused on a GPU.
DEVICE = "xeon-platinum-8124m"


@dataclass(frozen=True)
class Measured:
    """Networks and tasks in a file of records.

    Attributes
    ----------
    tasks : frozenset of str
        Hashes of tasks with at least one measured latency.
    networks : frozenset of str
        Networks as they were collected, with parameters.
    """

    tasks: frozenset[str] = frozenset()
    networks: frozenset[str] = frozenset()


def measured(records: Path = RECORDS) -> Measured:
    """The tasks of a file of records; none where there is no file."""
    if not records.is_file():
        return Measured()
    import pyarrow.parquet as pq

    rows = pq.read_table(records, columns=["task", "networks", "latency_s"]).to_pydict()
    timed = [
        (task, names)
        for task, names, latency_s in zip(rows["task"], rows["networks"], rows["latency_s"], strict=True)
        if latency_s is not None
    ]
    tasks = frozenset(task for task, _ in timed)
    return Measured(tasks, frozenset(name for _, names in timed for name in (names or "").split(";") if name))


def sources(name: str, networks: Iterable[str]) -> list[str]:
    """The network as it was collected, or with its default sizes if it was not."""
    return sorted(text for text in networks if text.partition(":")[0] == name) or [name]


def coverage_row(name: str, lists: Iterable[TaskList], found: Measured, predictor: LatencyPredictor) -> str:
    """One row of the table. A program that several sizes of the network share counts once."""
    lists = list(lists)
    tasks = {task.hash: task for tasks in lists for task in tasks.tasks}
    unsupported = {item for tasks in lists for item in tasks.unsupported}
    programs = [TensorProgram.from_tvm_json(task.tvm_json, name=task.name) for task in tasks.values()]
    answers = predictor.predict(programs, DEVICE)
    sizes = " ".join(f"`{key}={value}`" for key, value in network_parameters(name).items())
    launches = sum(task.calls for tasks in lists for task in tasks.tasks)
    what = describe_network(name).replace("``", "`")
    counts = (
        launches,
        len(tasks) + len(unsupported),
        len(tasks),
        len(tasks.keys() & found.tasks),
        sum(answer.error is None for answer in answers),
    )
    cells = (f"`{name}`", what, sizes, *map(str, counts))
    return "| " + " | ".join(cells) + " |"


def coverage_table(lists: Mapping[str, Iterable[TaskList]], found: Measured) -> str:
    """The whole table, one row for each network."""
    predictor = LatencyPredictor.load()
    head = (
        "| network | what it is | parameters and defaults | launches | programs | lowered | measured | predicted |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    )
    return "\n".join((*head, *(coverage_row(name, own, found, predictor) for name, own in lists.items())))


def table_of(text: str) -> str:
    """The table that stands in the document."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCS.name}")
    options = parser.parse_args()
    measurements = measured()
    table = coverage_table(
        {name: [network_tasks(text) for text in sources(name, measurements.networks)] for name in network_names()},
        measurements,
    )
    print(table)
    if options.write:
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
