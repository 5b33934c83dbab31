"""Orders of published schedules: their published bubbles, and PyTorch's orders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import FieldError
from cdmpp.simulate.emulator import SCHEDULES, Pass, Stage
from cdmpp.simulate.emulator.orders import gpipe, interleaved, one_f_one_b
from tests.simulate.emulator.as_graph import simulate


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (4, 2), (4, 4), (4, 8), (8, 16)])
def test_equal_stages_take_m_plus_p_minus_1(name, stages, micro_batches):
    step = simulate([Stage(5.0, 10.0)] * stages, micro_batches, name)
    assert step.makespan_s == (micro_batches + stages - 1) * 15.0
    assert step.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [(4, 2, 8), (4, 3, 8), (2, 4, 6), (8, 2, 16)])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(ranks, virtual, micro_batches):
    # Narayanan et al. (SC '21), section 2.2: bubble time (p - 1)(t_f + t_b) / v.
    step = simulate([Stage(1.0, 2.0)] * (ranks * virtual), micro_batches, "interleaved", ranks=ranks)
    assert step.makespan_s == micro_batches * virtual * 3.0 + (ranks - 1) * 3.0


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (3.0, 3.0, 2.0)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (8, 16), (4, 4)])
def test_zero_bubble_h1(f, b, w, stages, micro_batches):
    # Qi et al. (ICLR '24), table 2: bubble (p - 1)(T_F + T_B - T_W), activations of p micro-batches.
    step = simulate([Stage(f, b + w, w, activation_bytes=1.0)] * stages, micro_batches, "zero_bubble")
    assert step.makespan_s == micro_batches * (f + b + w) + (stages - 1) * (f + b - w)
    assert step.peak_bytes.tolist() == [stages] * stages


@settings(max_examples=60)
@given(*[st.integers(1, 12)] * 3, st.integers(2, 6), st.integers(0, 6))
def test_bubble_of_zero_bubble_h1_needs_weight_gradients_no_longer_than_the_other_passes(f, b, w, stages, more):
    micro_batches = 2 * stages + more
    step = simulate([Stage(float(f), float(b + w), float(w))] * stages, micro_batches, "zero_bubble")
    bubble = step.makespan_s - micro_batches * (f + b + w)
    published = (stages - 1) * (f + b - w)
    assert bubble == published if w <= min(f, b) else bubble > published


def test_weight_gradients_default_to_half_of_the_backward_pass():
    given = simulate([Stage(1.0, 2.0, 1.0)] * 4, 8, "zero_bubble")
    assert simulate([Stage(1.0, 2.0)] * 4, 8, "zero_bubble").makespan_s == given.makespan_s


def test_activations_held():
    stages = [Stage(1.0, 2.0, activation_bytes=7.0, weight_bytes=100.0)] * 4
    assert simulate(stages, 8, "gpipe").peak_bytes.tolist() == [100.0 + 8 * 7.0] * 4
    assert simulate(stages, 8, "1f1b").peak_bytes.tolist() == [100.0 + n * 7.0 for n in (4, 3, 2, 1)]
    assert simulate(stages, 2, "1f1b").peak_bytes.tolist() == [100.0 + n * 7.0 for n in (2, 2, 2, 1)]


def test_interleaving_holds_more_than_1f1b():
    # The first rank runs (v - 1) p + 2 (p - 1) forward passes ahead, and one more in the steady state.
    stages = [Stage(1.0, 2.0, activation_bytes=1.0)] * 8
    assert simulate(stages, 8, "interleaved", ranks=4).peak_bytes[0] == (2 - 1) * 4 + 2 * 3 + 1


def test_orders_are_those_of_pytorch():
    pytest.importorskip("torch.distributed.pipelining")
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"}

    def theirs(name, ranks, micro_batches, virtual=None):
        return [
            [
                Pass(kinds[op.computation_type.name], op.stage_index, op.microbatch_index)
                for op in row
                if op is not None and op.computation_type.name in kinds
            ]
            for row in get_schedule_ops(name, ranks, micro_batches, virtual)
        ]

    assert theirs("GPipe", 4, 8) == gpipe(4, 4, 8)
    # The last rank's order is off by one there (PyTorch 2.13): it begins with micro-batch 1 and ends with 8.
    assert theirs("1F1B", 4, 8)[:3] == one_f_one_b(4, 4, 8)[:3]
    for ranks, virtual, micro_batches in [(4, 2, 8), (2, 3, 4), (4, 2, 10), (4, 2, 3)]:
        found = interleaved(ranks, ranks * virtual, micro_batches)
        assert theirs("Interleaved1F1B", ranks, micro_batches, virtual) == found


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "micro_batches", "path"),
    [
        ("1f1b", 8, 4, 8, "schedule"),
        ("zero_bubble", 8, 4, 8, "schedule"),
        ("gpipe", 6, 4, 8, "ranks"),
        ("interleaved", 8, 4, 11, "micro_batches"),
    ],
)
def test_what_does_not_fit(name, stages, ranks, micro_batches, path):
    with pytest.raises(FieldError) as error:
        simulate([Stage(1.0, 2.0)] * stages, micro_batches, name, ranks=ranks)
    assert error.value.path == path


def test_all_schedules_have_all_passes():
    for name, make in SCHEDULES.items():
        orders = make(4, 8 if name in ("interleaved", "gpipe") else 4, 8)
        assert len({one for row in orders for one in row}) == sum(map(len, orders))
