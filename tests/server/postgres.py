"""A PostgreSQL of one's own for a test, from Debian's binaries; skips and says so where there are none."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of an empty database on loopback; the server is gone afterwards."""
    pytest.importorskip("psycopg", reason="needs psycopg (pip install 'cdmpp[postgres]')")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("needs PostgreSQL's server (/usr/lib/postgresql/*/bin)")
    binaries = found[-1].parent
    as_user: list[str] = []
    user = pwd.getpwuid(os.getuid()).pw_name
    if os.getuid() == 0:
        # It refuses to run as root; Debian's package makes this user.
        if shutil.which("runuser") is None or not _exists("postgres"):
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        user, as_user = "postgres", ["runuser", "-u", "postgres", "--"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not pytest's folder: its parents are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="cdmpp-postgres-", dir="/tmp"))
    try:
        shutil.chown(folder, user)
        subprocess.run(
            [*as_user, binaries / "initdb", "-D", folder / "data", "-A", "trust", "-U", "cdmpp",
             "-E", "UTF8"],
            cwd="/", check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        server = subprocess.Popen(
            [*as_user, binaries / "postgres", "-D", folder / "data", "-k", folder, "-h", "127.0.0.1",
             "-p", str(port)],
            cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            ask = [binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
            give_up = time.monotonic() + 30
            while subprocess.run(ask, capture_output=True).returncode:
                assert server.poll() is None and time.monotonic() < give_up, "PostgreSQL did not start"
                time.sleep(0.05)
            yield f"postgresql+psycopg://cdmpp@127.0.0.1:{port}/postgres"
        finally:
            stop = [*as_user, binaries / "pg_ctl", "-D", folder / "data", "-m", "immediate", "stop"]
            subprocess.run(stop, cwd="/", check=False, capture_output=True, timeout=30)
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
