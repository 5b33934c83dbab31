"""SQLite exports of Nsight Systems: the documented tables, with work of two kernels."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cdmpp.errors import DataError
from cdmpp.simulate.traces import is_trace, read_trace, replay_trace

THREAD = (77 << 24) | 78
TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT);
CREATE TABLE ThreadNames (nameId INT, priority INT, globalTid INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
    (start INT, end INT, eventClass INT, globalTid INT, correlationId INT, nameId INT, returnValue INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
    (start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, demangledName INT,
     shortName INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY
    (start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, bytes INT, copyKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION
    (start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, syncType INT, eventId INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT, textId INT);
"""
STRINGS = ["cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "gemm<128>(float*)", "gemm", "worker"]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A thread that launches two kernels and a copy, and synchronises; times in ns."""
    path = tmp_path / "report.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(TABLES)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(STRINGS))
        database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100-SXM4-80GB')")
        database.execute("INSERT INTO ThreadNames VALUES (4, 0, ?)", (THREAD,))
        calls = [(10, 15, 1, 0), (20, 25, 2, 0), (30, 35, 3, 0), (40, 260, 4, 1)]
        database.executemany(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, {THREAD}, ?, ?, 0)",
            [(a * 1000, b * 1000, number, name) for a, b, number, name in calls],
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, 2, 3)",
            [(20_000, 120_000, 1), (121_000, 221_000, 2)],
        )
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (222000, 252000, 0, 1, 7, 3, 4096, 2)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (40000, 260000, 0, 1, 7, 4, 3, 0)")
        database.executemany(
            f"INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, {THREAD}, NULL)",
            [(0, 270_000, 59, "step 1"), (5_000, 0, 34, "mark")],
        )
        database.commit()
    return path


def test_an_export_is_replayed(export: Path) -> None:
    assert is_trace(export)
    answer = replay_trace(export, mark=r"step \d+", speed_up=[("gemm", 2)])
    assert answer.graph.iterations == ("step 1",)
    assert answer.replayed_s == pytest.approx(270e-6) == pytest.approx(answer.measured_s)
    assert answer.what_if[0].saving_s == pytest.approx(100e-6)
    assert answer.idle[0].busy_s == pytest.approx(230e-6)
    assert {row.name for row in answer.kernels} == {"gemm<128>(float*)", "Memcpy DtoH"}


def test_device_and_thread_have_their_names(export: Path) -> None:
    trace = read_trace(export)
    assert trace.devices == {"0": "NVIDIA A100-SXM4-80GB"}
    assert list(trace.threads.values()) == ["worker"]


def test_optional_tables_may_be_missing(export: Path) -> None:
    with closing(sqlite3.connect(export)) as database:
        for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "ThreadNames", "TARGET_INFO_GPU"):
            database.execute(f"DROP TABLE {table}")
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY")
        database.commit()
    assert replay_trace(export).replayed_s == pytest.approx(250e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "no table CUPTI_ACTIVITY_KIND_KERNEL"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN streamId", "no column streamId"),
    ],
)
def test_other_databases_are_refused(export: Path, change: str, says: str) -> None:
    with closing(sqlite3.connect(export)) as database:
        database.execute(change)
        database.commit()
    with pytest.raises(DataError, match=says) as error:
        replay_trace(export)
    assert "nsys export" in error.value.hint


def test_a_damaged_database_is_refused(export: Path) -> None:
    export.write_bytes(export.read_bytes()[:5000])
    with pytest.raises(DataError, match="not a usable SQLite export"):
        replay_trace(export)


@pytest.mark.parametrize("end", ["NULL", "19000"])
def test_events_without_an_end_are_counted(export: Path, end: str) -> None:
    with closing(sqlite3.connect(export)) as database:
        database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = {end} WHERE correlationId = 1")
        database.execute("UPDATE NVTX_EVENTS SET end = NULL WHERE eventType = 59")
        database.commit()
    answer = replay_trace(export)
    assert any("without an end after their start, which count as 0 s: 2" in remark for remark in answer.graph.remarks)


def test_several_processes_in_an_export_are_refused(export: Path) -> None:
    with closing(sqlite3.connect(export)) as database:
        database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = {(99 << 24) | 1} WHERE correlationId = 2")
        database.commit()
    with pytest.raises(DataError, match=r"2 processes \(77, 99\): several ranks in one file"):
        read_trace(export)
