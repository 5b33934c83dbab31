"""Transfer times: against the formulae of docs/replay.md, written out."""

import math

import pytest

from cdmpp.errors import FieldError
from cdmpp.simulate.replay import Link, collective_s

LINK = Link(alpha_s=2e-5, beta_s_per_byte=1e-9)


def test_latency_and_rate() -> None:
    assert LINK.seconds(0) == 2e-5
    assert LINK.seconds(1e6) == pytest.approx(1.02e-3)


def test_a_table_is_straight_in_logarithms() -> None:
    table = Link(table=((100.0, 1e-5), (10_000.0, 1e-4), (1_000_000.0, 1e-2)))
    assert table.seconds(100) == 1e-5
    assert table.seconds(10_000) == 1e-4
    assert table.seconds(1000) == pytest.approx(math.sqrt(1e-5 * 1e-4))
    assert table.seconds(100_000) == pytest.approx(1e-3)
    assert table.seconds(1) == 1e-5  # no message is cheaper than the smallest one
    assert table.seconds(100_000_000) == pytest.approx(1.0)  # ten times the bytes, ten times the time
    falling = Link(table=((1.0, 2.0), (2.0, 1.0)))
    assert falling.seconds(4) == 1.0  # what falls by noise does not go on to fall
    assert [table.measured(size) for size in (1, 100, 5000, 1e6, 1e7)] == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("op", "algorithm", "ranks", "seconds"),
    [
        ("all_reduce", "ring", 4, 6 * (2e-5 + 1e-9 * 2e6)),
        ("all_reduce", "tree", 5, 2 * 3 * (2e-5 + 1e-9 * 8e6)),
        ("reduce_scatter", "ring", 4, 3 * (2e-5 + 1e-9 * 2e6)),
        ("all_gather", "ring", 8, 7 * (2e-5 + 1e-9 * 1e6)),
        ("all_to_all", "ring", 8, 7 * (2e-5 + 1e-9 * 1e6)),
        ("send", "ring", 2, 2e-5 + 1e-9 * 8e6),
        ("all_reduce", "ring", 1, 0.0),
        ("all_reduce", "measured", 16, 2e-5 + 1e-9 * 8e6),
    ],
)
def test_collectives(op: str, algorithm: str, ranks: int, seconds: float) -> None:
    assert collective_s(op, ranks, 8e6, LINK, algorithm) == pytest.approx(seconds, rel=1e-12)  # type: ignore[arg-type]


def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    halves = collective_s("reduce_scatter", 7, 1e7, LINK) + collective_s("all_gather", 7, 1e7, LINK)
    assert collective_s("all_reduce", 7, 1e7, LINK) == pytest.approx(halves, rel=1e-12)


def test_what_is_no_link_or_collective_is_refused() -> None:
    with pytest.raises(FieldError, match="two rows"):
        Link(table=((1.0, 1.0),))
    with pytest.raises(FieldError, match="rising"):
        Link(table=((2.0, 1.0), (1.0, 1.0)))
    with pytest.raises(FieldError, match="above 0"):
        Link(table=((1.0, 0.0), (2.0, 1.0)))
    with pytest.raises(FieldError, match="more than 1e9 s"):
        Link(table=((1.0, 1e-9), (1.5, 1.0))).seconds(1e18)
    with pytest.raises(FieldError, match="two ranks, not 3"):
        collective_s("send", 3, 1.0, LINK)
    with pytest.raises(FieldError, match="no tree"):
        collective_s("all_gather", 3, 1.0, LINK, "tree")
