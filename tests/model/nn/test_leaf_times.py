"""Times of leaves: they add up, and operators without a schedule have none."""

import math
from dataclasses import replace

import pytest
import torch

from cdmpp.features.schedule import SCHEDULE_COLUMNS, SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.config import ADD, CALL_CYCLES, CYCLE_S, OVERLAP, UNITS_LOG
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH
from cdmpp.model.nn.network import LatencyNetwork
from tests.model.nn.synthetic import TINY, network, random_inputs

SCHEDULED = replace(TINY, schedule=True)


def leaf(**counts: float) -> torch.Tensor:
    row = torch.zeros(WIDTH + SCHEDULE_WIDTH)
    for name, count in counts.items():
        row[WIDTH + SCHEDULE_COLUMNS.index(name)] = math.log2(1 + count)
    return row


@torch.inference_mode()
def seconds(*leaves: torch.Tensor, mask: torch.Tensor | None = None, units: int = 1) -> torch.Tensor:
    """Of an untrained module: one program on units of 2^20 flop/s together."""
    untrained = LatencyNetwork(SCHEDULED, 1).eval()
    rows, tokens = torch.stack(leaves)[None], torch.ones(1, len(leaves), SCHEDULED.width)
    logs = torch.zeros(1, len(DEVICE_LOGS))
    logs[:, UNITS_LOG] = math.log2(units)
    log_seconds = untrained.leaf_seconds(rows, tokens, mask, torch.zeros(1, INPUT_WIDTH), logs)
    assert log_seconds.shape == (1, 2)
    return log_seconds[0]


@pytest.mark.parametrize("name", [*OVERLAP, *ADD])
def test_every_count_costs_what_the_table_says(name: str) -> None:
    none, some = leaf(vector_ops=1e-3), leaf(vector_ops=1e-3, **({name: 1e9} if name != "vector_ops" else {}))
    if name == "vector_ops":
        # At peak, which is 16 operations of 2^-20 s.
        some = leaf(vector_ops=1e4)
        assert seconds(some)[0].exp().item() == pytest.approx(1e4 * OVERLAP[name] * 16 / 2**20, rel=1e-3)
        return
    cost = (OVERLAP | ADD)[name]
    grown = seconds(some)[0].exp().item() - seconds(none)[0].exp().item()
    assert grown == pytest.approx(1e9 * cost * CYCLE_S, rel=1e-2)


@pytest.mark.parametrize(("units", "region_s"), [(1, 20e-9), (2, 1e-6), (8, 1.75e-6)])
def test_parallel_region_waits_for_its_threads(units: int, region_s: float) -> None:
    without, with_regions = (seconds(leaf(vector_ops=1e-3, regions=n), units=units)[0].exp() for n in (0, 1000))
    assert (with_regions - without).item() == pytest.approx(1000 * region_s, rel=0.02)


def test_leaves_add_up_and_what_overlaps_does_not() -> None:
    work = leaf(vector_ops=1.0, lines_32768=1e6)
    single, double = (seconds(*[work] * n)[0].exp().item() for n in (1, 2))
    assert double - CALL_CYCLES * CYCLE_S == pytest.approx(2 * (single - CALL_CYCLES * CYCLE_S), rel=1e-4)
    both = seconds(leaf(vector_ops=1.0, vector_loads=1e9, vector_stores=1e9))[0].exp().item()
    assert both < 0.8 * 1e9 * CYCLE_S * (OVERLAP["vector_loads"] + OVERLAP["vector_stores"])


def test_a_program_without_schedule_has_no_time() -> None:
    assert seconds(torch.zeros(WIDTH + SCHEDULE_WIDTH)).tolist() == [0, 0]
    # The counts are of a CPU: a program with thread bindings has none.
    assert seconds(leaf(gpu_threads=256, gpu_float_ops=1e6)).tolist() == [0, 0]


def test_padding_is_not_read() -> None:
    work, junk = leaf(vector_ops=1e6), torch.full((WIDTH + SCHEDULE_WIDTH,), 1e3)
    mask = torch.tensor([[True, False]])
    torch.testing.assert_close(seconds(work, junk, mask=mask), seconds(work))


@pytest.mark.parametrize("head", ["ratio", "structured"])
@torch.inference_mode()
def test_the_network_answers_scheduled_programs_by_their_leaves(head: str) -> None:
    config = replace(SCHEDULED, head=head)
    net, inputs = network(config=config), random_inputs(rows=5, leaves=3)
    narrow = inputs["leaves"][:, :, :WIDTH]
    columns = torch.zeros(5, 3, SCHEDULED.leaf_width - WIDTH)
    column = SCHEDULE_COLUMNS.index("vector_ops")
    columns[2:, :, column] = 5.0
    slow = columns.clone()
    slow[2:, :, column] = 15.0
    first, second = (net(mask=None, **inputs | {"leaves": torch.cat((narrow, c), dim=2)})[0] for c in (columns, slow))
    moved = (second - first).abs()
    assert (moved[:2] < 1e-6).all()  # operators
    assert (moved[2:] > 1.0).all()  # 2^10 times the work, as far as tokens do not undo it
