"""The parts of a run: whole tasks, whole networks, nothing of a test network in training."""

import numpy as np
import pytest

from cdmpp.data.splits import networks_of
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.train.config import DataConfig
from cdmpp.train.dataset import choose_parts
from tests.train.schedules import PER_TASK, measured


@pytest.fixture(scope="module")
def table() -> MeasurementTable:
    return measured(40)


def tasks_in(table: MeasurementTable, parts: np.ndarray, part: int) -> set[str]:
    return {task for task, p in zip(table.tvm.tasks, parts, strict=True) if p == part}


def test_tasks_stay_whole_and_shares_are_kept(table: MeasurementTable) -> None:
    parts = choose_parts(table, DataConfig(test_share=0.3, validation_share=0.2))
    found = [tasks_in(table, parts, part) for part in (0, 1, 2)]
    assert sum(map(len, found)) == len(set(table.tvm.tasks)) == 40
    assert 6 <= len(found[2]) <= 20
    assert 3 <= len(found[1]) <= 15
    default = choose_parts(table, DataConfig())
    assert len(tasks_in(table, default, 2)) < len(found[2])
    # What a smaller share tests on, a larger one does, too.
    assert tasks_in(table, default, 2) <= found[2]


def test_a_test_network_takes_all_its_tasks_along(table: MeasurementTable) -> None:
    data = DataConfig(split="network", test_networks=("net0",), validation_share=0.2)
    parts = choose_parts(table, data)
    networks = networks_of(table)
    for names, part in zip(networks, parts, strict=True):
        assert (part == 2) == ("net0" in names)
    assert any(names == {"net0", "net1"} for names in networks)
    assert tasks_in(table, parts, 2).isdisjoint(tasks_in(table, parts, 0) | tasks_in(table, parts, 1))
    # On hashes, not on names of ours.
    hashes = {part: {h for h, p in zip(table.tvm.hashes, parts, strict=True) if p == part} for part in (0, 2)}
    assert hashes[0].isdisjoint(hashes[2])
    assert len(hashes[2]) == PER_TASK * len(tasks_in(table, parts, 2))
    assert tasks_in(table, parts, 1)


def test_one_record_of_a_network_takes_the_task(table: MeasurementTable) -> None:
    column = table.provenance["networks"].array()
    lone = np.flatnonzero(np.array([table.tvm.tasks[k] for k in table.program_key]) == "task7")
    column[lone[1:]] = ""
    column[lone[0]] = "net3;rare"
    labels = type(table.device).of(column.tolist())
    changed = type(table)(**{**vars_of(table), "provenance": {"networks": labels}})
    parts = choose_parts(changed, DataConfig(split="network", test_networks=("rare",)))
    assert tasks_in(changed, parts, 2) == {"task7"}


def test_programs_of_no_network_are_in_no_part(table: MeasurementTable) -> None:
    bare = type(table)(**{**vars_of(table), "provenance": {}})
    with pytest.raises(DataError, match="no record is of network net0"):
        choose_parts(bare, DataConfig(split="network", test_networks=("net0",)))
    with pytest.raises(DataError, match=r"network nosuch") as raised:
        choose_parts(table, DataConfig(split="network", test_networks=("net1", "nosuch")))
    assert "net0, net1, net2, net3" in str(raised.value.hint)
    column = table.provenance["networks"].map(lambda name: "" if name == "net2" else name)
    some = type(table)(**{**vars_of(table), "provenance": {"networks": column}})
    parts = choose_parts(some, DataConfig(split="network", test_networks=("net0",)))
    unnamed = np.array([not names for names in networks_of(some)])
    assert unnamed.any()
    assert (parts[unnamed] == -1).all()


def test_the_fields_go_together() -> None:
    for fields in ({"split": "network"}, {"test_networks": ("a",)}):
        with pytest.raises(ValueError, match="test_networks go with split"):
            DataConfig(**fields)  # type: ignore[arg-type]


def vars_of(table: MeasurementTable) -> dict[str, object]:
    return {name: getattr(table, name) for name in table.__dataclass_fields__}
