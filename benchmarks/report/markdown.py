"""Markdown of the report: cells, tables, and the marked parts of a file that are generated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cdmpp.errors import DataError

#: Columns of every table of errors.
ERROR_COLUMNS = ("n", "MAPE", "median", "within 10 %", "within 20 %", "Kendall tau", "80 % interval covers")

_PART = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction for people."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A plain figure for people."""
    return "-" if value is None else f"{value:.{digits}f}"


def error_cells(m: Mapping[str, Any]) -> list[str]:
    """:data:`ERROR_COLUMNS` of metrics as :func:`cdmpp.evaluation.metrics.measure` has them."""
    return [
        f"{m['n']:,}",
        f"**{percent(m['mape'])}**",
        percent(m["median_ape"]),
        percent(m["within_10"]),
        percent(m["within_20"]),
        number(m["kendall_tau"]),
        percent(m.get("coverage")),
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are aligned to the left."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("| " + " | ".join("---" if i < left else "---:" for i in range(len(header))) + " |")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def folded(summary: str, body: str) -> str:
    """A part that opens when one clicks on it."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def picture(what: str, name: str) -> str:
    """A figure beside the page."""
    return f"![{what}]({name})"


def fill(text: str, parts: Mapping[str, str]) -> str:
    """A file's text with its marked parts replaced.

    A part starts with a line ``<!-- generated:NAME -->`` and ends with a line ``<!-- end -->``; everything
    else is written by hand and stays.

    Raises
    ------
    DataError
        A marked part that nobody generates, or one that is generated for this file and has no place in it.
    """
    places = [match.group(2) for match in _PART.finditer(text)]
    unknown, absent = sorted(set(places) - set(parts)), sorted(set(parts) - set(places))
    if unknown or absent or text.count("<!-- generated:") != len(places):
        raise DataError(
            f"marked parts: nobody writes {unknown or 'none'}, no place for {absent or 'none'}, "
            f"{text.count('<!-- generated:')} starts for {len(places)} parts",
            hint="each part is <!-- generated:NAME --> ... <!-- end -->",
        )
    return _PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n\n{match[3]}", text)
