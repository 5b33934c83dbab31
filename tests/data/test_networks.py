"""Networks as units of a split: whole tasks, in all sizes of a network, and nothing of it in training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cdmpp.data.networks import assert_tasks_apart, network_names, network_parts, networks_of, without_sizes
from cdmpp.data.records import Measurement, from_measurements
from cdmpp.data.split_file import make_splits
from cdmpp.data.splits import TEST, TRAIN, UNUSED, VALIDATION
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from tests.data.test_folder import schedule

#: Of task n: the networks that use it.
USED_BY = ("bert", "bert;vit", "vit:image=32", "vit:image=32;vgg11", "vgg11", "net.onnx:batch=1", "")


@pytest.fixture(scope="module")
def table() -> MeasurementTable:
    """70 tasks of 2 schedules, a seventh of them for each of the cells, and an operator."""
    rows = [
        schedule(100 * task + n, task=f"task{task}", provenance={"networks": USED_BY[task % len(USED_BY)]})
        for task in range(70)
        for n in range(2)
    ]
    return from_measurements([*rows, Measurement("softmax:rows=8,cols=8", "operator", "t4", 1e-3)])


def cells_in(table: MeasurementTable, parts: np.ndarray, *wanted: int) -> set[str]:
    """Network names of the programs in some parts."""
    found = [";".join(sorted(names)) for names in networks_of(table)]
    return {cell for cell, part in zip(found, parts.tolist(), strict=True) if part in wanted}


def test_names(table: MeasurementTable) -> None:
    assert network_names(table) == ["bert", "net.onnx:batch=1", "vgg11", "vit", "vit:image=32"]
    assert [without_sizes(name) for name in ("vit", "vit:image=32,batch=2", "net.onnx:n=1")] == [
        "vit",
        "vit",
        "net.onnx",
    ]


def test_a_network_is_held_out_whole(table: MeasurementTable) -> None:
    parts = network_parts(table, ["vgg11"], validation=0.3)
    assert cells_in(table, parts, TEST) == {"vgg11", "vgg11;vit:image=32"}
    left = {"bert", "bert;vit", "vit:image=32", "net.onnx:batch=1"}
    assert cells_in(table, parts, TRAIN, VALIDATION) == left
    assert cells_in(table, parts, VALIDATION)
    assert cells_in(table, parts, UNUSED) == {""}
    assert (parts == UNUSED).sum() == 10 * 2 + 1
    assert_tasks_apart(table, parts)


@pytest.mark.parametrize("network", ["vit", "vit:image=32", "vit:image=64"])
def test_a_network_is_held_out_in_all_its_sizes(table: MeasurementTable, network: str) -> None:
    parts = network_parts(table, [network])
    assert cells_in(table, parts, TEST) == {"bert;vit", "vit:image=32", "vgg11;vit:image=32"}
    assert cells_in(table, parts, TRAIN, VALIDATION) == {"bert", "vgg11", "net.onnx:batch=1"}


def test_a_split_file_is_checked_for_other_sizes(table: MeasurementTable) -> None:
    splits = make_splits(table, test_networks=["vit"])
    assert splits.about["test_networks"] == ["vit"]
    moved = {
        digest: TRAIN if splits.networks[digest] == "vit:image=32" else part
        for digest, part in splits.programs["network"].items()
    }
    with pytest.raises(DataError, match="of test network vit is in train"):
        replace(splits, programs={"network": moved}).check()


def test_a_network_that_no_record_names(table: MeasurementTable) -> None:
    with pytest.raises(DataError, match="no record is of network resnet18") as caught:
        network_parts(table, ["vit", "resnet18:image=32"])
    assert "vit:image=32" in caught.value.hint


def test_a_divided_task_is_refused(table: MeasurementTable) -> None:
    parts = network_parts(table, ["vgg11"])
    row = int(np.flatnonzero(parts == TRAIN)[0])
    parts[row] = TEST
    with pytest.raises(DataError, match=r"is in test and in train|is in train and in test"):
        assert_tasks_apart(table, parts)
