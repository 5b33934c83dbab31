"""The importer of the table of collectives."""

import numpy as np
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.splits import program_parts
from tests.data.layouts import layout_of

NEEDED, OPTIONAL = layout_of("comm_collectives")


def rows(table):
    return [table.program_fields(int(key)) for key in table.program_key]


def test_rows_become_collectives(save):
    table = load_table(save(NEEDED))
    assert table.source.used() == ("comm_collectives",)
    assert table.unsupported.counts() == {"": 7}
    assert table.protocol.array().tolist() == ["graph", "eager", "eager", "eager", "kernel", "eager", "eager"]
    read = rows(table)
    assert read[0] == {
        "operator": "all_reduce",
        "dtype": "bfloat16",
        "bytes": 65536,
        "ranks": 8,
        "library": "vllm",
        "mode": "graph",
        "link": "nvlink4",
    }
    assert read[1]["bytes"] == 2**30
    assert read[4] == {
        "operator": "send_recv",
        "dtype": "float16",
        "bytes": 2**20,
        "ranks": 2,
        "ranks_per_node": 1,
        "library": "nccl",
        "mode": "kernel",
        "link": "nvlink-pairs",
    }
    # A link that is not stated is the device's own.
    assert "link" not in read[5]
    assert read[6]["link"] == "pcie5-x8"


@pytest.mark.parametrize("left_out", ["library", "ranks_per_node", "dtype", "mode", "link"])
def test_inputs_that_a_table_lacks_are_not_stated(save, left_out):
    table = load_table(save({name: values for name, values in NEEDED.items() if name != left_out}))
    assert table.unsupported.counts() == {"": 7}


def test_rows_that_cannot_be_read_have_their_reason(save):
    changed = NEEDED | {
        "op": ["all_reduce", "broadcast", *NEEDED["op"][2:]],
        "ranks": [1, *NEEDED["ranks"][1:]],
        "dtype": [*NEEDED["dtype"][:2], "float8", *NEEDED["dtype"][3:]],
        "message_bytes": [*NEEDED["message_bytes"][:3], None, *NEEDED["message_bytes"][4:]],
    }
    reasons = load_table(save(changed)).unsupported.array().tolist()
    assert reasons == ["invalid_size", "unknown_operator", "unknown_dtype", "missing_size", "", "", ""]


def test_one_size_of_an_operator_is_in_one_part_on_every_device(save):
    count = 400
    sizes = [2 * (7 + i * i) for i in range(count)]
    both = {name: [values[0], values[5]] * count for name, values in NEEDED.items()}
    both["message_bytes"] = [size for size in sizes for _ in range(2)]
    table = load_table(save(both))
    parts = program_parts(table)[table.program_key].reshape(count, 2)
    assert (parts[:, 0] == parts[:, 1]).all()
    assert 0.05 < np.mean(parts[:, 0] == 2) < 0.15
