"""Markdown of the reports: cells, tables, and the generated parts of a document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError
from cdmpp.utils.writing import write_text

#: Columns of every table of errors.
ERROR_COLUMNS = ("n", "MAPE", "median", "within 10 %", "within 20 %", "Kendall tau", "inside the 80 % interval")

_PART = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as text, in per cent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A number as text."""
    return "-" if value is None else f"{value:.{digits}f}"


def error_cells(m: Mapping[str, Any]) -> list[str]:
    """:data:`ERROR_COLUMNS` of metrics as :func:`cdmpp.train.evaluation.metrics.measure` has them."""
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
    """A table whose first ``left`` columns are aligned to the left; ValueError where a row has another length."""
    rows = list(rows)
    if wrong := [row for row in rows if len(row) != len(header)]:
        raise ValueError(f"{len(header)} columns, but a row of {len(wrong[0])}: {wrong[0]}")
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("| " + " | ".join("---" if i < left else "---:" for i in range(len(header))) + " |")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def folded(summary: str, body: str) -> str:
    """A collapsed section."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def picture(what: str, name: str) -> str:
    """A figure in the folder of the page; ``what`` describes it for readers who cannot see it."""
    return f"![{what}]({name})"


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Replace the generated parts of a document.

    A part starts with a line ``<!-- generated:NAME -->`` and ends with a line ``<!-- end -->``. Everything
    else is written by hand and stays.

    Raises DataError: the document marks a part that ``parts`` lacks, or lacks one of ``parts``.
    """
    places = [match.group(2) for match in _PART.finditer(text)]
    unknown, absent = sorted(set(places) - set(parts)), sorted(set(parts) - set(places))
    if unknown or absent or text.count("<!-- generated:") != len(places):
        raise DataError(
            f"the marked parts do not match: without a generator {unknown or 'none'}, missing from the document "
            f"{absent or 'none'}; {text.count('<!-- generated:')} start marks, {len(places)} complete parts",
            hint="write each part as <!-- generated:NAME --> ... <!-- end -->",
        )
    return _PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n\n{match[3]}", text)


def fill_document(path: Path, parts: Mapping[str, str]) -> None:
    """Replace the generated parts of a file (:func:`fill`)."""
    text = fill(path.read_text(encoding="utf-8"), parts)
    write_text(path, text)
