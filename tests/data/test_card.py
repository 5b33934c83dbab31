"""The card counts the contents of the files and adds nothing; records that deviate by more than a multiple of the noise
floor; docs/data.md names every public source with its file, commit and licence.
"""

import re
from pathlib import Path

import pytest

from cdmpp.data.card import write_card
from cdmpp.data.importers import IMPORTERS, SCHEDULE_IMPORTERS, Importer
from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.split_file import make_splits, write_splits
from cdmpp.data.summary import disturbed
from cdmpp.errors import DataError
from tests.data.test_folder import ONE, TWO, schedule


def cells(card: str, name: str) -> list[str]:
    """Cells of the first table row that begins with ``name``."""
    line = next(line for line in card.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def provenance(networks: str, origin: str, moment: str) -> dict[str, str]:
        return {
            "networks": networks,
            "origin": origin,
            "measured_at": moment,
            "tvm": "0.27.0",
            "threads": "1",
            "target": '{"kind": "llvm"}',
            "affinity": "1",
        }

    both, vgg = ("resnet18;vgg11", "vgg11")
    rows = [
        schedule(1, provenance=provenance(both, "default", "2026-11-02"), repeats_s=(1.0, 2.0, 3.0, 4.0, 5.0)),
        schedule(2, provenance=provenance(both, "sampled", "2026-11-01"), excluded_reason="unstable"),
        schedule(11, provenance=provenance(vgg, "sampled", "2026-11-03"), repeats_s=(1.0, 1.0, 1.0, 1.0)),
        schedule(11, TWO, provenance=provenance(vgg, "sampled", "2026-11-03")),
        schedule(12, latency_s=None, failure="stopped after\n10 s | killed", provenance=provenance(vgg, "sampled", "")),
    ]
    path = tmp_path / "my-cpu"
    path.mkdir()
    write_records(from_measurements(rows), path / "records.parquet")
    return path


def test_card_has_counts_and_text(folder: Path) -> None:
    write_records(from_measurements([schedule(1, latency_s=1.2e-3)]), folder / "repeats.parquet")
    write_splits(make_splits(load_table(folder), test_networks=["resnet18"]), folder / "splits.parquet")
    path = write_card(folder, command="cdmpp collect --out data/my-cpu", faults=["The fan was loud."], notes=["Warm."])
    card = path.read_text()
    assert path == folder / "README.md"
    assert card.startswith("# my-cpu\n\n4 measurements of 4 programs (2 tasks, 2 networks) on 2 devices.")
    assert "Measured from 2026-11-01 to 2026-11-03." in card
    assert "TVM 0.27.0." in card
    assert cells(card, "resnet18") == ["resnet18", "1", "2", "0", "2"]
    assert cells(card, "vgg11") == ["vgg11", "2", "4", "2", "4"]
    assert cells(card, "sampled") == ["sampled", "3", "3"]
    assert cells(card, "cpu-2t")[1:6] == ["Intel x86-64", "2 x 16", "2.6 GHz", "166.4 Gflop/s", "11.2 GB/s"]
    assert cells(card, "cpu-1t")[6:] == ["1", "1", '`{"kind": "llvm"}`']
    latency = next(line for line in card.splitlines() if line.startswith("| cpu-1t | 3 |"))
    # Spreads 2/3 and 0; one pair of 1.0 and 1.2 ms.
    assert re.search(r"\| 33.3 % \| 60.0 % \| 1 \| 18.2 % \| 18.2 % \|", latency)
    assert "1 failed, 1 flagged as unstable" in card
    assert r"| stopped after 10 s \| killed | 1 |" in card
    assert "| network | programs | 2 | 0 | 2 | 0 |" in card
    assert "Test networks: resnet18." in card
    assert "- The fan was loud." in card
    assert "- Warm." in card
    assert "```\ncdmpp collect --out data/my-cpu\n```" in card


def test_unknown_facts_are_omitted(folder: Path) -> None:
    card = write_card(folder).read_text()
    titles = {line for line in card.splitlines() if line.startswith("## ")}
    assert titles.isdisjoint({"## Splits", "## Known faults", "## Command", "## How it was measured"})
    assert "repeats.parquet" not in card
    latency = next(line for line in card.splitlines() if line.startswith("| cpu-2t | 1 |"))
    assert latency.endswith("- | - | - |")
    assert "nan" not in card.casefold()


def test_card_needs_a_dataset_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        write_card(folder / "records.parquet")
    with pytest.raises(DataError, match="without records"):
        write_card(tmp_path)
    (folder / "README.md").mkdir()
    with pytest.raises(DataError, match="cannot write"):
        write_card(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "records.parquet"]


def test_card_lists_known_and_unknown_devices(tmp_path: Path) -> None:
    rows = [Measurement("softmax:rows=8,cols=8", "operator", name, 1e-3) for name in ("t4", "unheard-of")]
    write_records(from_measurements(rows), tmp_path / "records.parquet")
    card = write_card(tmp_path).read_text()
    assert cells(card, "t4")[2] == "40 x 64"
    assert cells(card, "unheard-of")[1] == "no specification"
    assert "unknown_device 1" in card
    assert ONE.name not in card


def steady(number: int, latency_s: float = 1.0, spread: float = 0.0, **changes) -> Measurement:
    """A record of five repeats with this interquartile range / median."""
    low, high = latency_s * (1 - spread / 2), latency_s * (1 + spread / 2)
    return schedule(number, latency_s=latency_s, repeats_s=(low, low, latency_s, high, high), **changes)


def test_spread_and_second_measurement_are_compared_with_the_floor_of_the_device() -> None:
    records = [
        steady(1),
        steady(2, spread=0.25),  # 2.5 x the floor
        steady(3, spread=0.35),  # 3.5 x the floor
        steady(4),  # 5 x the floor the second time
        steady(5, latency_s=2.0),
        schedule(6, latency_s=None, failure="crashed"),
        steady(1, device=TWO, spread=0.015),
        steady(2, device=TWO, spread=0.25),
        schedule(7, latency_s=1.0, repeats_s=(0.5, 1.5)),  # too few repeats for a spread
    ]
    relative = 0.1

    def later(latency_s: float, share: float) -> float:
        return latency_s * (1 + share / 2) / (1 - share / 2)

    again = [
        schedule(1, latency_s=later(1.0, relative)),
        schedule(5, latency_s=later(2.0, relative)),
        schedule(4, latency_s=later(1.0, 5 * relative)),
        schedule(1, TWO, later(1.0, 0.01)),
    ]
    table, repeats = from_measurements(records), from_measurements(again)
    found = disturbed(table, repeats)
    assert [(one.row, one.key[1]) for one in found] == [(2, "cpu-1t"), (3, "cpu-1t"), (7, "cpu-2t")]
    assert [one.floor for one in found] == pytest.approx([0.1, 0.1, 0.01])
    assert found[0].spread == pytest.approx(0.35) and found[1].difference == pytest.approx(0.5)
    assert [one.row for one in disturbed(table, repeats, factor=2.0)] == [1, 2, 3, 7]


def test_an_unknown_floor_and_an_impossible_factor_are_refused() -> None:
    table = from_measurements([steady(1), steady(1, device=TWO)])
    repeats = from_measurements([schedule(1, latency_s=1.1)])
    with pytest.raises(DataError, match="no program was measured twice on cpu-2t"):
        disturbed(table, repeats)
    with pytest.raises(DataError, match="cpu-1t, cpu-2t"):
        disturbed(table, None)
    with pytest.raises(DataError, match="factor = 0"):
        disturbed(table, repeats, factor=0.0)


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
