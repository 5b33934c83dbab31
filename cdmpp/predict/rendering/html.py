"""HTML tables without scripts, style sheets or external files, and texts of their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from cdmpp.utils.units import format_latency

#: A notebook stores its tables: further rows are counted, not shown.
MAX_ROWS = 500


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    caption: str = "",
    notes: Sequence[str] = (),
) -> str:
    """An HTML table; all texts are escaped.

    Parameters
    ----------
    header : sequence of str
        Column names.
    rows : sequence of sequences of str
        Cells, as many per row as ``header`` has. At most :data:`MAX_ROWS` are shown.
    right : iterable of int
        Columns that are aligned to the right.
    caption : str
        Line above the table.
    notes : sequence of str
        Lines below the table.

    Examples
    --------
    >>> html_table(("program", "latency"), [("a<b", "1.00 µs")], right=[1]).count("&lt;")
    1
    """
    aligned = set(right)

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(_cell(text, tag, i in aligned) for i, text in enumerate(cells)) + "</tr>"

    body = [line(row, "td") for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        notes = (f"{len(rows) - MAX_ROWS:,} further rows are not shown; to_arrow() has all of them.", *notes)
    parts = ["<table>"]
    if caption:
        parts.append(f'<caption style="text-align:left">{escape(caption)}</caption>')
    parts += ["<thead>", line(header, "th"), "</thead>", "<tbody>", *body, "</tbody>", "</table>"]
    return "\n".join(["<div>", *parts, *(f"<div>{escape(note)}</div>" for note in notes), "</div>"])


def _cell(text: str, tag: str, right: bool) -> str:
    return f'<{tag} style="text-align:{"right" if right else "left"}">{escape(text)}</{tag}>'


def interval_text(lower_s: float | None, upper_s: float | None) -> str:
    """Bounds in seconds as text; empty where there are none."""
    if lower_s is None or upper_s is None:
        return ""
    return f"{format_latency(lower_s)} – {format_latency(upper_s)}"


def share_text(share: float) -> str:
    """A fraction as per cent with one decimal."""
    return f"{100 * share:.1f} %"
