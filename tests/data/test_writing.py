"""Output files: regular files are replaced, links followed, streams written to, other kinds refused."""

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cdmpp.errors import ArtifactError, DataError
from cdmpp.model.artifact.folder import write_folder
from cdmpp.utils.writing import check_output, replacing


def write(path: Path, text: str = "new") -> None:
    with replacing(path) as aside:
        aside.write_text(text)


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("old")
    (tmp_path / "real" / "a").chmod(0o640)
    for name in ("a", "not-there-yet"):
        link = tmp_path / name
        link.symlink_to(Path("real") / name)
        write(link)
        assert link.is_symlink() and (tmp_path / "real" / name).read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real" / "a").stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path / "real")) == ["a", "not-there-yet"]


def test_fifos_and_devices_get_the_bytes_and_stay(tmp_path: Path) -> None:
    fifo, received = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()), daemon=True)
    reader.start()
    write(fifo)
    reader.join(60)
    assert received == ["new"] and fifo.is_fifo() and os.listdir(tmp_path) == ["fifo"]
    # A link to the device: if it were replaced, the device of this machine would not be.
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space left") as caught:
        write(tmp_path / "full")
    assert caught.value.hint == "make room on its disk"
    assert (tmp_path / "full").is_symlink() and Path("/dev/full").is_char_device()


def test_standard_output_is_written_where_it_stands(tmp_path: Path) -> None:
    # A link of its own: replacing /dev/stdout itself would harm the machine.
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    program = (
        "from cdmpp.utils.writing import replacing\nprint('before')\n"
        "with replacing('stdout') as aside:\n    aside.write_text('content\\n')\nprint('after')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "out").read_text() == "before\ncontent\nafter\n"


def test_other_kinds_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path, why in ((tmp_path, "it is a folder"), (tmp_path / "socket", "it is a socket")):
            for refused in (check_output, write):
                with pytest.raises(DataError, match=why):
                    refused(path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="symbolic links"):
        check_output(tmp_path / "loop")
    with pytest.raises(DataError, match="the folder does not exist"):
        check_output(tmp_path / "none" / "file")


def test_model_folder_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "disk" / "model"
    link.symlink_to(real)
    for content in (b"first", b"second"):
        write_folder(link, {"file": content})
        assert link.is_symlink() and (real / "file").read_bytes() == content
    assert os.listdir(tmp_path / "disk") == ["model"]
    (tmp_path / "text").write_text("kept")
    with pytest.raises(ArtifactError, match="not a folder"):
        write_folder(tmp_path / "text", {})
    assert (tmp_path / "text").read_text() == "kept"
