"""docs/data.md names every public source with its file, commit and licence."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdmpp.data.importers import IMPORTERS, SCHEDULE_IMPORTERS, Importer

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
OVERVIEW = PAGE.partition("## All sources")[2].partition("\n## ")[0]


def row_of(importer: Importer) -> list[str]:
    """Cells of the overview's row of a source."""
    lines = [line for line in OVERVIEW.splitlines() if line.startswith(f"| `{importer.name}` |")]
    assert len(lines) == 1, f"{importer.name}: {len(lines)} rows in the overview"
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


@pytest.mark.parametrize("importer", [*IMPORTERS, *SCHEDULE_IMPORTERS], ids=lambda i: i.name)
def test_overview_has_file_commit_licence_rows_and_meaning(importer: Importer) -> None:
    _, file, origin, licence, rows, latency, module = row_of(importer)
    assert file == f"`{importer.file_name}`" and licence == importer.licence
    assert int(rows.replace(",", "")) > 0 and latency
    assert (Path("cdmpp/data") / module.split("`")[1]).is_file()
    for repository, commit in zip(importer.repository.split(", "), importer.commit.split(", "), strict=True):
        # "same" refers to the row above.
        assert f"{repository}) @ {commit}" in (OVERVIEW if origin.startswith("same") else origin)
