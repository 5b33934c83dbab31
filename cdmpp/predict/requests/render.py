"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table, or lines of text.

    Attributes
    ----------
    header : sequence of str
        Column names; empty for lines of text.
    rows : sequence of sequences of str
        Cells; for lines of text, one cell each.
    right : sequence of int
        Columns that are aligned to the right.
    title : str
        Line above the table.
    """

    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: Sequence[int] = ()
    title: str = ""

    @classmethod
    def lines(cls, *lines: str) -> Table:
        """Lines of text; empty ones are left out."""
        return cls(rows=[(line,) for line in lines if line])

    def __str__(self) -> str:
        body = [self.header, *self.rows] if self.header else self.rows
        return "\n".join(([self.title] if self.title else []) + format_columns(body, self.right))


def format_columns(lines: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Format lines of cells as text: columns two spaces apart, as wide as their widest cell. Nothing is cut.

    Parameters
    ----------
    lines : iterable of sequences of str
        All of equal length.
    right : iterable of int
        Columns that are aligned to the right.
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
