"""A temporary PostgreSQL server for tests, from Debian's binaries; tests are skipped if there are none."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.serving.process import free_port
from tests.waiting import PATIENCE_S, wait_until


class Postgres:
    """A server on the loopback address, with its data in a folder.

    Parameters
    ----------
    binaries, folder : Path
    as_user : list of str
        Prefix of commands that run as another user.
    """

    def __init__(self, binaries: Path, folder: Path, as_user: list[str]) -> None:
        self._binaries, self._folder, self._as_user = binaries, folder, as_user
        self._port = free_port()
        self.url = f"postgresql+psycopg://cdmpp@127.0.0.1:{self._port}/postgres"
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._server = subprocess.Popen(
            [
                *self._as_user,
                self._binaries / "postgres",
                "-D",
                self._folder / "data",
                "-k",
                self._folder,
                "-h",
                "127.0.0.1",
                "-p",
                str(self._port),
            ],
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ask = [self._binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(self._port)]

        def is_ready() -> bool:
            assert self._server is not None and self._server.poll() is None, "PostgreSQL did not start"
            return subprocess.run(ask, capture_output=True).returncode == 0

        wait_until(is_ready, "readiness of PostgreSQL")

    def stop(self) -> None:
        """Stop the server as a crash would: committed data are on the disk."""
        if self._server is None:
            return
        stop = [*self._as_user, self._binaries / "pg_ctl", "-D", self._folder / "data", "-m", "immediate", "stop"]
        subprocess.run(stop, cwd="/", check=False, capture_output=True, timeout=PATIENCE_S)
        self._server.wait(PATIENCE_S)
        self._server = None


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server with an empty database; it is removed afterwards."""
    pytest.importorskip("psycopg", reason="needs psycopg (pip install '.[postgres]')")
    initdb_paths = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not initdb_paths:
        pytest.skip("needs PostgreSQL's server (/usr/lib/postgresql/*/bin)")
    binaries = initdb_paths[-1].parent
    as_user: list[str] = []
    user = pwd.getpwuid(os.getuid()).pw_name
    if os.getuid() == 0:
        # PostgreSQL refuses to run as root; Debian's package creates this user.
        if shutil.which("runuser") is None or not _exists("postgres"):
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        user, as_user = "postgres", ["runuser", "-u", "postgres", "--"]
    # Not pytest's folder, whose parents are not readable for other users.
    folder = Path(tempfile.mkdtemp(prefix="cdmpp-postgres-", dir="/tmp"))
    try:
        shutil.chown(folder, user)
        subprocess.run(
            [*as_user, binaries / "initdb", "-D", folder / "data", "-A", "trust", "-U", "cdmpp", "-E", "UTF8"],
            cwd="/",
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        server = Postgres(binaries, folder, as_user)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
