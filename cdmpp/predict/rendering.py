"""Tables as text, as HTML without scripts, style sheets or external files, and as Arrow with units of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeVar

from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.utils.units import format_latency

#: A notebook stores its tables: further rows are counted, not shown.
MAX_ROWS = 500
T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A table, or lines of text."""

    #: Column names; empty for lines of text.
    header: Sequence[str] = ()
    #: Cells; for lines of text, one cell each.
    rows: Sequence[Sequence[str]] = ()
    #: Columns that are aligned to the right.
    right: Sequence[int] = ()
    #: Line above the table.
    title: str = ""

    @classmethod
    def lines(cls, *lines: str) -> Table:
        """Lines of text; empty ones are left out."""
        return cls(rows=[(line,) for line in lines if line])

    @classmethod
    def of(cls, items: Iterable[T], columns: Mapping[str, Callable[[T], str]], right: Sequence[int] = ()) -> Table:
        """A row for each item; ``columns``: the cell of an item by column name."""
        return cls(tuple(columns), [tuple(cell(item) for cell in columns.values()) for item in items], right)

    def html(self) -> str:
        """For notebooks; lines of text become a line each."""
        if not self.header:
            return "".join(f"<div>{escape(line)}</div>" for (line,) in self.rows)
        return html_table(self.header, self.rows, right=self.right, caption=self.title)

    def __str__(self) -> str:
        body = [self.header, *self.rows] if self.header else self.rows
        return "\n".join(([self.title] if self.title else []) + format_columns(body, self.right))


def format_columns(lines: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Format lines of cells as text: columns two spaces apart, as wide as their widest cell. Nothing is cut.

    ``lines``: all of equal length. ``right``: columns that are aligned to the right.
    """
    cells = [list(map(str, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    flush = set(right)
    return [
        "  ".join(
            cell.rjust(width) if i in flush else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def render(tables: Iterable[Table]) -> str:
    """Tables as text; an empty line before and after each table that has a header."""
    text, after_table = "", False
    for table in tables:
        if table.header or table.rows:
            separator = "\n\n" if table.header or after_table else "\n"
            text, after_table = f"{text}{separator if text else ''}{table}", bool(table.header)
    return text


class Rendered:
    """An answer that prints as tables; notebooks show them as HTML."""

    def tables(self) -> list[Table]:
        """Tables of the answer, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return render(self.tables())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables())


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    caption: str = "",
    notes: Sequence[str] = (),
) -> str:
    """An HTML table of at most :data:`MAX_ROWS` rows; all texts are escaped.

    ``right``: columns that are aligned to the right. ``caption``: line above the table. ``notes``: lines below it.

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


def out_reasons(figures: Iterable[tuple[str, Any]], max_lines: int = 5) -> list[str]:
    """Lines with the distinct reasons of figures with the domain "out", each with its name; the first ``max_lines``."""
    lines = [f"{name} is out: {figure.domain_reason}" for name, figure in figures if figure.domain == "out"]
    return list(dict.fromkeys(lines))[:max_lines]


def percent(fraction: float | None) -> str:
    """0.0731 as "7.3 %"; None as "-"."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


ColumnType = Literal["string", "float64", "int64", "bool", "levels"]


@dataclass(frozen=True)
class Column:
    """A column of an Arrow table."""

    #: ``levels`` is a map of text to float64, for quantiles.
    type: ColumnType
    #: One per row; None becomes null.
    values: Sequence[Any]
    #: Stored as ``unit`` in the metadata of the field; empty for none.
    unit: str = ""


def arrow_table(columns: Mapping[str, Column]) -> Any:
    """A ``pyarrow.Table`` of columns of equal length.

    Raises MissingDependencyError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingDependencyError("an Arrow table needs pyarrow", hint=install_hint("plan")) from None
    types = {"levels": pa.map_(pa.string(), pa.float64())}
    fields, arrays = [], []
    for name, column in columns.items():
        kind = types.get(column.type) or pa.type_for_alias(column.type)
        fields.append(pa.field(name, kind, metadata={"unit": column.unit} if column.unit else None))
        arrays.append(pa.array(column.values, type=kind))
    return pa.table(arrays, schema=pa.schema(fields))
