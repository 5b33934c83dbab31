"""Timelines: bars lie in their rows, texts only where they fit, marks and colours are in the legend."""

import pytest

from cdmpp.predict.requests import plot
from cdmpp.predict.requests.plot import (
    Bar,
    byte_unit,
    colours_of,
    draw_legend,
    draw_timeline,
    new_figure,
    shade,
    time_unit,
)

pytest.importorskip("matplotlib")


def test_bars_lie_in_their_rows_in_a_readable_unit() -> None:
    figure = new_figure(6, 2)
    axes = figure.subplots()
    bars = [Bar(0, 0.0, 0.002, "red"), Bar(1, 0.001, 0.003, "blue", outlined=True), Bar(7, 0.0, 1.0, "red")]
    draw_timeline(axes, bars, ["a", "b"], 0.003)
    shapes = [path.get_extents().bounds for group in axes.collections for path in group.get_paths()]
    assert shapes == [pytest.approx((0.0, -0.4, 2.0, 0.8)), pytest.approx((1.0, 0.6, 2.0, 0.8))]
    assert axes.get_xlabel() == "time (ms)"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.yaxis_inverted()


def test_a_text_is_written_where_its_bar_is_wide_enough() -> None:
    axes = new_figure(6, 2).subplots()
    draw_timeline(axes, [Bar(0, 0.0, 1.0, "red", "wide"), Bar(0, 1.0, 1.01, "red", "narrow")], ["a"], 2.0)
    assert [text.get_text() for text in axes.texts] == ["wide"]


def test_the_legend_names_colours_outline_and_marks() -> None:
    figure = new_figure(6, 2)
    draw_timeline(figure.subplots(), [Bar(0, 0.0, 1.0, "red")], ["a"], 1.0, marks={"lower bound": 0.5})
    draw_legend(figure, {"forward": "red"}, outlined="critical path")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["forward", "critical path", "lower bound"]


def test_too_many_bars_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "MAX_BARS", 1)
    axes = new_figure(6, 2).subplots()
    draw_timeline(axes, [Bar(0, 0.0, 1.0, "red"), Bar(0, 1.0, 2.0, "red")], ["a"], 2.0)
    assert sum(len(group.get_paths()) for group in axes.collections) == 1


def test_an_empty_timeline_is_drawn() -> None:
    axes = new_figure(6, 2).subplots()
    draw_timeline(axes, [], ["a"], 0.0)
    assert axes.get_xlabel() == "time (ns)"


def test_units_colours_and_shades() -> None:
    assert time_unit(0.02) == (1e3, "ms")
    assert byte_unit(2e9) == (1e-9, "GB")
    assert colours_of(["x", "comm"], {"comm": plot.BLUE}) == {"x": plot.YELLOW, "comm": plot.BLUE}
    assert shade("#ffffff", 0.5) == (0.5, 0.5, 0.5)
