"""The feature schema: its columns, and the hash by which models and features find each other."""

from __future__ import annotations

from cdmpp.features.schema import COLUMN, COLUMNS, GROUPS, LINEAR, SCHEMA_HASH, WIDTH


def test_every_column_has_one_name_and_one_place() -> None:
    assert len(set(COLUMNS)) == len(COLUMNS) == WIDTH
    assert [COLUMNS[i] for i in COLUMN.values()] == list(COLUMN)
    assert tuple(name for group in GROUPS.values() for name in group) == COLUMNS
    assert set(COLUMNS) > LINEAR


def test_the_schema_of_the_shipped_model_is_not_changed_by_accident() -> None:
    # A change here makes every trained model unreadable: raise SCHEMA_VERSION and retrain.
    assert (WIDTH, SCHEMA_HASH) == (96, "df588c4b2d06906c")


def test_flags_are_not_magnitudes() -> None:
    assert "is_init" in LINEAR
    assert "computes_int8" in LINEAR
    assert "read_2_scope_local" in LINEAR
    assert not LINEAR & {"trips", "flops", "stride", "store_buffer_bytes"}
