"""Splits: stable, by shape, by device with its twins, by whole networks; never a program in two parts."""

from dataclasses import replace

import numpy as np
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, from_measurements
from cdmpp.data.split_file import make_splits
from cdmpp.data.splits import (
    DEVICE_GROUPS,
    TEST,
    TRAIN,
    UNUSED,
    VALIDATION,
    assert_disjoint,
    assert_tasks_apart,
    device_group,
    network_parts,
    networks_of,
    shape_hash,
    split_by_device,
    split_by_shape,
)
from cdmpp.data.table import MeasurementTable, concat, make_block
from cdmpp.devices import known
from cdmpp.errors import DataError, UnknownDeviceError
from tests.data.test_folder import schedule


def block(operator, dtype="float32", flags=None, **sizes):
    columns = {name: np.atleast_1d(np.asarray(value, dtype=np.int64)) for name, value in sizes.items()}
    return make_block(operator, dtype, flags or {}, columns, np.arange(len(next(iter(columns.values())))))


@pytest.fixture
def many(columns_of, save):
    """A GEMM table of 4000 shapes on two devices."""
    rng = np.random.default_rng(0)
    shapes = {name: rng.integers(1, 4096, 4000) for name in ("m", "n", "k")}
    return load_table(
        save(
            {
                "op": ["linear"] * 8000,
                "device": ["NVIDIA L40S"] * 4000 + ["NVIDIA B200"] * 4000,
                "framework": ["vllm"] * 8000,
                "dtype": ["bfloat16"] * 8000,
                **{name: [*column.tolist(), *column.tolist()] for name, column in shapes.items()},
                "latency_us": [1e4] * 8000,
            }
        )
    )


def test_shares_and_devices(many):
    parts = split_by_shape(many)
    assert np.mean(parts == TEST) == pytest.approx(0.10, abs=0.02)
    assert np.mean(parts == VALIDATION) == pytest.approx(0.05, abs=0.015)
    assert np.array_equal(parts[:4000], parts[4000:])
    assert_disjoint(many, parts)


def test_parts_never_change():
    # A change of these numbers moves rows between train and test in every published figure.
    gemm = block("linear", m=[512, 1], n=[4096, 2], k=[1024, 3])
    assert [f"{h:016x}" for h in shape_hash(gemm).tolist()] == GOLDEN["linear"]
    conv = block("conv2d", n=8, c_in=32, h=28, w=28, c_out=64, kh=3, kw=3, pad_h=1, pad_w=1)
    assert [f"{h:016x}" for h in shape_hash(conv).tolist()] == GOLDEN["conv2d"]
    attention = block("attention_decode", batch=4, past_len=1023, heads=32, kv_heads=8, head_dim=128)
    assert [f"{h:016x}" for h in shape_hash(attention).tolist()] == GOLDEN["attention"]
    assert [f"{h:016x}" for h in shape_hash(block("relu", rows=7, cols=9)).tolist()] == GOLDEN["vector"]


GOLDEN = {
    "linear": ["47414b632a6849c2", "542defe021b99a51"],
    "conv2d": ["203c5aa378796d04"],
    "attention": ["57c089d7164eed93"],
    "vector": ["4ecb63fb89066b85"],
}


def test_operators_that_share_a_shape_share_a_hash():
    gemm = shape_hash(block("linear", m=5, n=6, k=7))
    assert shape_hash(block("linear", "float16", {"bias": True}, m=5, n=6, k=7)) == gemm
    assert shape_hash(block("bmm", batch=9, m=5, n=6, k=7)) == gemm
    assert shape_hash(block("linear", m=6, n=5, k=7)) != gemm
    sizes = {"n": 1, "c_in": 3, "h": 9, "w": 9, "c_out": 4, "kh": 3, "kw": 3}
    assert shape_hash(block("conv2d", **sizes)) == shape_hash(
        block("conv2d", "float16", {"direction": "bwd_weight"}, **sizes)
    )
    assert shape_hash(block("conv2d", **sizes)) != shape_hash(block("conv2d", stride_h=2, **sizes))
    assert shape_hash(block("add", rows=3, cols=4)) == shape_hash(block("add", flags={"inputs": 3}, rows=3, cols=4))
    assert shape_hash(block("relu", rows=3, cols=4)) == shape_hash(block("softmax", rows=3, cols=4))


def test_rows_without_program_are_in_no_part(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    columns["m"] = [None, 64, 128]
    assert split_by_shape(load_table(save(columns)))[0] == UNUSED


def test_device_groups_name_known_devices_once():
    names = {d.name for d in known()}
    members = [member for group in DEVICE_GROUPS.values() for member in group]
    assert set(members) <= names
    assert len(members) == len(set(members))
    # A group may be called like one of its own members only.
    assert all(group in members_ for group, members_ in DEVICE_GROUPS.items() if group in names)


def test_twins_are_held_out_together(many):
    train, test = split_by_device(many, ["GB300"])
    assert many.device.take(test).used() == ("b200",)
    assert many.device.take(train).used() == ("l40s",)
    assert device_group("NVIDIA A100-SXM4-80GB") == device_group("a100-pcie-40gb") == device_group("a100")
    assert device_group("t4") == "t4"
    with pytest.raises(UnknownDeviceError):
        split_by_device(many, ["abacus"])


def test_unknown_devices_are_in_no_part(columns_of, save):
    columns = columns_of("aiconfigurator_gemm")
    columns["device"] = ["Abacus 9000", "NVIDIA B200", "NVIDIA L40S"]
    train, test = split_by_device(load_table(save(columns)), ["l40s"])
    assert train.tolist() == [False, True, False]
    assert test.tolist() == [False, False, True]


def test_a_split_by_row_is_refused(many):
    parts = np.full(len(many), TRAIN, dtype=np.int8)
    parts[-1] = TEST
    with pytest.raises(DataError, match="is in train and in test"):
        assert_disjoint(many, parts)


def test_split_survives_concat(many, columns_of, save):
    other = load_table(save(columns_of("vidur"), "other.parquet"))
    both = concat([other, many])
    assert split_by_shape(both).tolist() == [*split_by_shape(other).tolist(), *split_by_shape(many).tolist()]


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
