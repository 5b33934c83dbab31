"""The feature schema: its columns, and the hash by which models and features find each other."""

from pathlib import Path

from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.schema import COLUMN, COLUMNS, GROUPS, LINEAR, SCHEMA_HASH, WIDTH
from cdmpp.programs.templates import all_classes


def test_every_column_has_one_name_and_one_place() -> None:
    assert len(set(COLUMNS)) == len(COLUMNS) == WIDTH
    assert [COLUMNS[i] for i in COLUMN.values()] == list(COLUMN)
    assert tuple(name for group in GROUPS.values() for name in group) == COLUMNS
    assert set(COLUMNS) > LINEAR


def test_the_schema_of_the_shipped_model_is_not_changed_by_accident() -> None:
    # A change here makes every trained model unreadable: raise SCHEMA_VERSION and retrain.
    assert (WIDTH, SCHEMA_HASH) == (100, "0e8cf3c4cbcd552e")


def test_flags_are_not_magnitudes() -> None:
    assert "is_init" in LINEAR
    assert "computes_int8" in LINEAR
    assert "read_2_scope_local" in LINEAR
    assert not LINEAR & {"trips", "flops", "stride", "store_buffer_bytes"}


def test_every_column_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    slots = ("store", "read_0", "read_1", "read_2")
    ranges = {"spatial_1", "spatial_2", "reduce_1"}  # inside "spatial_0 .. spatial_3"
    missing = []
    for name in (*COLUMNS, *PROGRAM_COLUMNS, *GROUPS):
        slot = next((s for s in slots if name.startswith(s + "_")), None)
        written = f"`{name}`" in text or name in slots or (name in GROUPS and f"### {name}" in text)
        if not written and name not in ranges and not (slot and f"`{name[len(slot) :]}`" in text):
            missing.append(name)
    assert not missing
    assert f"{sum(1 for _ in all_classes()):,} classes" in text
