"""The card counts the contents of the files and adds nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdmpp.data.card import write_card
from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.split_file import make_splits, write_splits
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
